package dedup

import (
	"context"
	"errors"
	"net"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// reaction is what an error asks for.
type reaction int

const (
	// retry: it ends by itself. The same messages are tried again.
	retry reaction = iota
	// fence: a lane isn't ours, or isn't where the batch starts.
	fence
	// reload: the catalog has changed; read it and try again at once.
	reload
	// isolate: a message is at fault. Find it, and dead-letter it.
	isolate
	// hold: somebody has to change something. Nothing is skipped meanwhile.
	hold
)

// The SQLSTATEs that dedupd's own functions raise.
const (
	stateFenced  = "DD001"
	stateCatalog = "DD002"
	// DD003, a sink that ended its transaction, needs no case of its own: it holds.
)

// react is the one place where errors get their meaning. What nobody has thought
// of holds the lane: it is never acknowledged, and never skipped.
func react(err error) reaction {
	var held *message.HoldError
	if errors.As(err, &held) {
		return hold
	}
	var unknown *commitError
	if errors.As(err, &unknown) {
		return retry // whatever it says: what became of it is seen then
	}
	if _, ok := sinks.AsPermanent(err); ok {
		return isolate
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return reactToState(pg.Code)
	}
	var (
		connect *pgconn.ConnectError
		network net.Error
	)
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return retry // we ended it ourselves, or it took too long
	case errors.As(err, &connect), errors.As(err, &network), pgconn.SafeToRetry(err), isLostConnection(err):
		return retry
	}
	return hold
}

func reactToState(code string) reaction {
	switch code {
	case stateFenced:
		return fence
	case stateCatalog:
		return reload
	case "54000", // program_limit_exceeded: an index row too large, and such
		"54001": // statement_too_complex: JSON nested beyond the server's stack
		return isolate
	case "55P03", // lock_not_available: lock_timeout passed
		"55006",                                     // object_in_use: the object is being changed
		"57014",                                     // query_canceled: statement_timeout passed
		"57P01", "57P02", "57P03", "57P04", "57P05", // the server goes down, comes up, or ended an idle session
		"25P03", // idle_in_transaction_session_timeout
		"25P04", // transaction_timeout
		"25006", // read_only_sql_transaction: we still talk to a former primary
		"XX000": // internal_error: seen when a table is dropped while it is planned
		return retry
	case "42P01": // undefined_table: the claims' or the sink's; the caller tells which
		return reload
	}
	switch code[:min(2, len(code))] {
	case "08", // connection exception
		"40", // serialization failure, deadlock: a user's trigger may lock in another order than ours
		"53", // no disk, memory or connections
		"58": // system error: an I/O error
		return retry
	case "21", // cardinality violation: two rows of one batch hit the same target row
		"22", // data exception
		"23": // integrity constraint violation
		return isolate
	}
	return hold
}

// isLostConnection tells apart what pgx reports as plain errors when a
// connection ends in mid-sentence.
func isLostConnection(err error) bool {
	return errors.Is(err, net.ErrClosed) || pgconn.Timeout(err) || errors.Is(err, errConnection)
}

// errConnection marks errors of a round trip that left the connection closed:
// whatever they say, the connection is what failed.
var errConnection = errors.New("the connection to the database was lost")

// sqlstate is an error's code; empty where Postgres has not spoken.
func sqlstate(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// retryReason is the metric label of a transient error: an SQLSTATE class or
// "network". Never free text.
func retryReason(err error) string {
	switch code := sqlstate(err); {
	case code == "40P01":
		return "deadlock"
	case code == "55P03":
		return "lock_timeout"
	case code == stateCatalog, code == "42P01":
		return "catalog"
	case code != "":
		return "sqlstate_" + code[:min(2, len(code))]
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "network"
}
