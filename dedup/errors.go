package dedup

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/sinks"
)

// reaction is what an error asks for.
type reaction int

const (
	// retry: it passes by itself. The same messages are tried again.
	retry reaction = iota + 1
	// fence: we don't own a lane any more, or it isn't where the batch starts.
	fence
	// reload: the catalog has changed; read it and try again at once.
	reload
	// isolate: a message is at fault. Find it, and dead-letter it.
	isolate
	// doubt: a message is at fault, or the table with its triggers, policies and grants;
	// the error doesn't say which. Find the message, and dead-letter it once another of
	// its lane was written.
	doubt
	// internal: the server met something unexpected. That usually passes; if it doesn't,
	// it is doubt.
	internal
	// hold: somebody has to change something. Nothing is skipped meanwhile.
	hold
)

// react is the one place where an error becomes a reaction. What nobody has thought
// of holds the lane: it is never acknowledged, and never skipped.
func react(err error) reaction {
	var held *lane.HoldError
	if errors.As(err, &held) {
		return hold
	}
	var unknown *commitError
	if errors.As(err, &unknown) {
		return retry // whatever it says: the next try finds out what became of it
	}
	if _, ok := sinks.AsPermanent(err); ok {
		return isolate
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		var own *ownError
		return reactToState(pg.Code, errors.As(err, &own))
	}
	var (
		connect *pgconn.ConnectError
		network net.Error
	)
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return retry // we ended it ourselves, or it took too long
	case errors.As(err, &connect), errors.As(err, &network), pgconn.SafeToRetry(err), pgconn.Timeout(err):
		return retry
	case errors.Is(err, net.ErrClosed), errors.Is(err, errConnection): // it ended in the middle of a message
		return retry
	}
	return hold
}

// reactToState looks a SQLSTATE up. own says that a statement of dedupd's own met it:
// then no message's data is at fault.
func reactToState(code string, own bool) reaction {
	means := func(m sqlstate.Meaning) bool { return sqlstate.Means(code, m) }
	switch {
	case code == sqlstate.Fenced:
		return fence
	case code == sqlstate.CatalogChanged, own && code == sqlstate.UndefinedTable: // claims, dropped since the catalog was read
		return reload
	case means(sqlstate.Transient):
		return retry
	case means(sqlstate.Internal):
		return internal
	case own:
		return hold
	case means(sqlstate.Data):
		return isolate
	case means(sqlstate.Unclear):
		return doubt
	}
	return hold
}

// held turns an error into one that the worker understands. What the sink knows of the
// database may be out of date then.
func (p *Processor) held(err error) error {
	var held *lane.HoldError
	if errors.As(err, &held) {
		return held
	}
	var sink *sinkError
	if errors.As(err, &sink) {
		p.sinkStale.Store(true)
	}
	return holdFor(err)
}

// holdFor holds a lane for an error, with a hint where the error's own words give none.
func holdFor(err error) *lane.HoldError {
	hint := PoolerHint(err)
	if hint == "" {
		return &lane.HoldError{Err: err}
	}
	return &lane.HoldError{Err: fmt.Errorf("%w (%s)", err, hint), Summary: hint}
}

// holdUnlessPassing holds the lanes for an error of dedupd's own look-ups that doesn't
// pass by itself.
func holdUnlessPassing(err error) error {
	if react(err) == retry {
		return err
	}
	return holdFor(err)
}

// PoolerHint says what to do about an error that shows a pooler that is set up wrongly,
// or that the configuration doesn't name; it is empty for others.
func PoolerHint(err error) string {
	switch code := sqlstate.Of(err); {
	case !sqlstate.Means(code, sqlstate.Pooler):
		return ""
	case code == sqlstate.ProtocolViolation:
		return "see what the pooler's log says; its pool_mode must be session, or transaction with database.pooler: pgbouncer_transaction"
	}
	return "a pooler gives each transaction another connection: set database.pooler: pgbouncer_transaction"
}

// errConnection marks an error of a round trip that left the connection closed: whatever
// it says, the connection failed.
var errConnection = errors.New("the connection to the database was lost")

// retryReason is the metric label of a transient error: an SQLSTATE class or
// "network". Never free text.
func retryReason(err error) string {
	switch code := sqlstate.Of(err); {
	case code == sqlstate.Deadlock:
		return "deadlock"
	case code == sqlstate.LockNotAvailable:
		return "lock_timeout"
	case code == sqlstate.CatalogChanged, code == sqlstate.UndefinedTable:
		return "catalog"
	case code != "":
		return "sqlstate_" + sqlstate.Class(code)
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "network"
}
