// Package sqlstate has one table of what Postgres' error codes mean to dedupd. Callers decide
// what to do about a meaning. Errors are never matched by text, which depends on the server's
// version and language.
package sqlstate

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// Codes that have a name here because somebody compares with them.
const (
	ProtocolViolation     = "08P01"
	UniqueViolation       = "23505"
	SequenceExhausted     = "2200H"
	UndefinedSchema       = "3F000"
	SerializationFailure  = "40001"
	Deadlock              = "40P01"
	InsufficientPrivilege = "42501"
	UndefinedTable        = "42P01"
	LockNotAvailable      = "55P03"
	QueryCanceled         = "57014"

	Fenced         = "DD001" // raised by advance(): the lane isn't ours, or isn't where the batch starts
	CatalogChanged = "DD002" // raised by enter(): the transaction was built for another catalog
	// DD003 (a sink ended its transaction) and DD005 (the isolation level isn't READ
	// COMMITTED) need no name: somebody has to change something.
)

// Meaning is what a code says. A code may have several, or none that we know.
type Meaning uint

const (
	// Transient passes by itself.
	Transient Meaning = 1 << iota
	// Data blames a message's data.
	Data
	// Unclear blames a message's data, or the table with its triggers, policies and
	// grants; the code doesn't say which.
	Unclear
	// Internal says that the server met something unexpected. That usually passes.
	Internal
	// Setup says that the server is missing or isn't as it must be: no connection, no
	// rights, no schema.
	Setup
	// Outside says that the statement itself isn't at fault: something around it is.
	Outside
	// Outdated says that the server may not understand a statement that it understood
	// before: a type is gone, or the column's has no cast from what it was.
	Outdated
	// Unreadable says that the server couldn't read a value.
	Unreadable
	// Pooler says that a pooler is set up wrongly, or isn't in the configuration.
	Pooler
)

// meanings has codes, and classes for the codes that it lacks.
var meanings = map[string]Meaning{
	"08":                  Transient | Setup | Outside,          // connection exception
	ProtocolViolation:     Transient | Setup | Outside | Pooler, // also PgBouncer's, for everything it refuses
	"09":                  Unclear,                              // triggered_action_exception, raised by hand
	"0A000":               Unclear,                              // feature_not_supported: a numeric NaN as an integer, or a plan that is out of date
	"20":                  Unclear,                              // case_not_found: a CASE of a trigger that lacks this value
	"21":                  Data,                                 // cardinality violation: two rows of one batch hit the same target row
	"22":                  Data | Unreadable,                    // data exception
	"23":                  Data,                                 // integrity constraint violation
	"25006":               Transient | Setup,                    // read_only_sql_transaction: we still talk to a former primary
	"25P03":               Transient | Outside,                  // idle_in_transaction_session_timeout
	"25P04":               Transient | Outside,                  // transaction_timeout
	"26000":               Pooler,                               // invalid_sql_statement_name: prepared on another connection
	"28":                  Setup,                                // invalid authorization: role, password, pg_hba.conf
	"2F":                  Unclear,                              // a function's own exception
	"38":                  Unclear,                              // the same, of one that isn't written in SQL
	"39":                  Unclear,                              // a call of such a function
	"3D":                  Setup,                                // no such database
	"3F":                  Setup,                                // no such schema
	UndefinedSchema:       Unclear | Setup,                      // a regnamespace, or a dropped schema
	"40":                  Transient | Outside,                  // serialization failure, deadlock: a user's trigger may lock in another order than ours
	InsufficientPrivilege: Unclear | Setup | Outside,            // row security, or a missing grant
	"42601":               Unclear,                              // syntax_error: a tsquery, jsonpath or ltree, or SQL within a function
	"42602":               Unclear,                              // invalid_name: a regclass
	"42703":               Setup,                                // undefined_column
	"42704":               Unclear | Outdated,                   // undefined_object: a regtype or regconfig, or a dropped type
	"42725":               Unclear,                              // ambiguous_function: a regproc
	"42804":               Outdated,                             // datatype_mismatch: the column has another type now
	"42883":               Unclear | Setup | Outdated,           // undefined_function: a regproc, or a dropped function
	UndefinedTable:        Unclear | Setup,                      // a regclass, or the sink's table
	"42P05":               Pooler,                               // duplicate_prepared_statement: the connection was another's before
	"44000":               Unclear,                              // with_check_option_violation: of a view that takes other rows
	"45":                  Unclear,                              // what people raise who come from other databases
	"53":                  Transient | Setup | Outside,          // no disk, memory or connections
	"54000":               Data,                                 // program_limit_exceeded: an index row too large, and such
	"54001":               Data,                                 // statement_too_complex: JSON nested beyond the server's stack
	"55":                  Outside,                              // an object isn't in the state that is needed
	"55006":               Transient | Outside,                  // object_in_use: the object is being changed
	LockNotAvailable:      Transient | Outside,                  // lock_timeout has passed
	"57":                  Outside,                              // an operator's intervention
	QueryCanceled:         Transient | Outside,                  // statement_timeout has passed
	"57P01":               Transient | Setup | Outside,          // the server shuts down,
	"57P02":               Transient | Setup | Outside,          // has crashed,
	"57P03":               Transient | Setup | Outside,          // comes up,
	"57P04":               Transient | Setup | Outside,          // drops the database,
	"57P05":               Transient | Setup | Outside,          // or has ended an idle session
	"58":                  Transient | Outside,                  // system error: an I/O error
	"HV":                  Unclear | Outside,                    // a foreign data wrapper's
	"P0":                  Unclear,                              // RAISE, ASSERT or STRICT in a trigger: of this row, or of every row
	"XX":                  Outside,                              // internal error: corrupted data, as a rule
	"XX000":               Internal | Outside,                   // of PostGIS for bad geometry; of the server when a table is dropped while it is planned
}

// Of returns an error's code; empty: the error isn't the server's.
func Of(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// Class returns a code's first two characters. The code may be shorter.
func Class(code string) string { return code[:min(2, len(code))] }

// Means reports whether a code has a meaning, or one of several.
func Means(code string, m Meaning) bool {
	have, ok := meanings[code]
	if !ok {
		have = meanings[Class(code)]
	}
	return have&m != 0
}
