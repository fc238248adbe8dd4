package app

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
)

// summary is what the probes say about an error: what is wrong and where, and nothing
// from a message. Anybody in the cluster may be able to read it, and a sink's errors
// quote the value that didn't fit. Those are in the log and in the dead letters.
func summary(err error) string {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var parts []string
		for _, e := range joined.Unwrap() {
			parts = append(parts, summary(e))
		}
		return strings.Join(parts, "\n")
	}
	if p, ok := err.(*PipelineError); ok { //nolint:errorlint // what it wraps is told apart below
		at := "scope " + p.Scope + ": "
		return at + strings.ReplaceAll(summary(p.Err), "\n", "\n"+at)
	}
	var held *consumer.HeldError
	if errors.As(err, &held) {
		return fmt.Sprintf("lane %s is held: %s%s", held.Lane, reason(held.Err), consumer.MoreLanes(held.More, "held"))
	}
	var failing *consumer.FailingError
	if errors.As(err, &failing) {
		return fmt.Sprintf("lane %s: its transactions have failed for %s: %s%s", failing.Lane, failing.For.Round(time.Second), reason(failing.Err), consumer.MoreLanes(failing.More, "failing"))
	}
	return err.Error()
}

// reason says by names and codes why a lane is held or fails.
func reason(err error) string {
	var parts []string
	var hold *lane.HoldError
	if errors.As(err, &hold) && hold.Summary != "" {
		parts = append(parts, hold.Summary)
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		parts = append(parts, "SQLSTATE "+pg.Code)
		for _, n := range []struct{ what, name string }{
			{"schema", pg.SchemaName}, {"table", pg.TableName}, {"column", pg.ColumnName}, {"type", pg.DataTypeName}, {"constraint", pg.ConstraintName},
		} {
			if n.name != "" {
				parts = append(parts, n.what+" "+n.name)
			}
		}
	}
	if len(parts) == 0 {
		parts = append(parts, "its messages can't be written")
	}
	return strings.Join(parts, ", ") + " (the worker's log has the whole error)"
}
