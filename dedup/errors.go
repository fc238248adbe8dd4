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
	unlisted reaction = iota
	// retry: it passes by itself. The same messages are tried again.
	retry
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

// The SQLSTATEs that dedupd's own functions raise.
const (
	stateFenced  = "DD001"
	stateCatalog = "DD002"
	// DD003, a sink that ended its transaction, needs no case of its own: it holds.
)

// react is the one place where errors get their meaning. What nobody has thought
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
	case errors.As(err, &connect), errors.As(err, &network), pgconn.SafeToRetry(err), isLostConnection(err):
		return retry
	}
	return hold
}

// reactToState looks a SQLSTATE up. own says that a statement of dedupd's own met it:
// then no message's data is at fault.
func reactToState(code string, own bool) reaction {
	r := stateReactions[code]
	if r == unlisted {
		r = stateReactions[code[:min(2, len(code))]]
	}
	switch {
	case r == unlisted:
		return hold
	case own && code == "42P01": // a table of claims, dropped since the catalog was read
		return reload
	case own && (r == isolate || r == doubt):
		return hold
	}
	return r
}

// stateReactions has SQLSTATEs, and classes for the SQLSTATEs that it lacks.
var stateReactions = map[string]reaction{
	stateFenced:  fence,
	stateCatalog: reload,

	"08":    retry, // connection exception
	"25P03": retry, // idle_in_transaction_session_timeout
	"25P04": retry, // transaction_timeout
	"25006": retry, // read_only_sql_transaction: we still talk to a former primary
	"40":    retry, // serialization failure, deadlock: a user's trigger may lock in another order than ours
	"53":    retry, // no disk, memory or connections
	"55P03": retry, // lock_not_available: lock_timeout passed
	"55006": retry, // object_in_use: the object is being changed
	"57014": retry, // query_canceled: statement_timeout passed
	"57P01": retry, // the server goes down,
	"57P02": retry,
	"57P03": retry, // comes up,
	"57P04": retry,
	"57P05": retry, // or ended an idle session
	"58":    retry, // system error: an I/O error

	"21":    isolate, // cardinality violation: two rows of one batch hit the same target row
	"22":    isolate, // data exception
	"23":    isolate, // integrity constraint violation
	"54000": isolate, // program_limit_exceeded: an index row too large, and such
	"54001": isolate, // statement_too_complex: JSON nested beyond the server's stack

	"P0":    doubt, // RAISE, ASSERT or STRICT in a trigger: of this row, or of every row
	"09":    doubt, // triggered_action_exception, raised by hand
	"20":    doubt, // case_not_found: a CASE of a trigger that lacks this value
	"2F":    doubt, // a function's own exception
	"38":    doubt, // the same, of one that isn't written in SQL
	"39":    doubt,
	"45":    doubt, // what people raise who come from other databases
	"HV":    doubt, // a foreign data wrapper's
	"0A000": doubt, // feature_not_supported: a numeric NaN as an integer, or a plan that is out of date
	"3F000": doubt, // invalid_schema_name: a regnamespace, or a dropped schema
	"42501": doubt, // insufficient_privilege: row security, or a missing grant
	"42601": doubt, // syntax_error: a tsquery, jsonpath or ltree, or SQL within a function
	"42602": doubt, // invalid_name: a regclass
	"42704": doubt, // undefined_object: a regtype or regconfig, or a dropped type
	"42725": doubt, // ambiguous_function: a regproc
	"42883": doubt, // undefined_function: a regproc, or a dropped function
	"42P01": doubt, // undefined_table: a regclass, or the sink's table
	"44000": doubt, // with_check_option_violation: of a view that takes other rows

	"XX000": internal, // of PostGIS for bad geometry; of the server when a table is dropped while it is planned
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
// or that the configuration doesn't name; it is empty for others. If a prepared statement
// is missing, or exists already, the transaction ran on another connection of the server.
func PoolerHint(err error) string {
	switch sqlstate.Of(err) {
	case "26000", "42P05": // invalid_sql_statement_name, duplicate_prepared_statement
		return "a pooler gives each transaction another connection: set database.pooler: pgbouncer_transaction"
	case "08P01": // PgBouncer's code for all that it refuses
		return "see what the pooler's log says; its pool_mode must be session, or transaction with database.pooler: pgbouncer_transaction"
	}
	return ""
}

// isLostConnection recognises the plain errors that pgx returns when a connection ends in
// the middle of a message.
func isLostConnection(err error) bool {
	return errors.Is(err, net.ErrClosed) || pgconn.Timeout(err) || errors.Is(err, errConnection)
}

// errConnection marks an error of a round trip that left the connection closed: whatever
// it says, the connection failed.
var errConnection = errors.New("the connection to the database was lost")

// retryReason is the metric label of a transient error: an SQLSTATE class or
// "network". Never free text.
func retryReason(err error) string {
	switch code := sqlstate.Of(err); {
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
