package table

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// mode is a way to write rows, as the configuration has it. Each has a file of its own.
type mode interface {
	// access tells which privileges it needs on a column that the sink fills.
	access(column string) access
	// overwrites reports whether it changes rows that are there. A message without a value
	// would then write NULL over them.
	overwrites() bool
	// keeps reports whether a message without the column's place leaves the column as it is.
	keeps(c columns.Column) bool
	// undoes reports whether an older message that comes last undoes a newer one.
	undoes() bool
	// needsOrder is sinks.OrderSensitive's method.
	needsOrder() error
	// check says what else of the target doesn't fit.
	check(t *target) error
	// fillsItself are the columns that it fills with what no place in a message holds.
	fillsItself() []string
	// reads are columns of the plan's set that it doesn't write. They come last.
	reads(t *target) []columns.Column
	// writer makes the statements for a target, whose columns are p.set.
	writer(t *target, p *plan) writer
}

// access is a set of privileges on a column.
type access struct{ inserts, updates, selects bool }

func (a access) writes() bool { return a.inserts || a.updates }

// writer has a mode's statements for one target. It is immutable.
type writer interface {
	// statements are those for the server to check, with as many parameters as they take of
	// a batch without messages. The last one writes.
	statements(values *columns.Values) []query
	// queue adds what writes the values to a batch.
	queue(b *pgx.Batch, values *columns.Values) *sent
}

// query is a statement with its parameters.
type query struct {
	sql  string
	args []any
}

// sent is what a writer has queued.
type sent struct {
	// rows is how many were found or written, once the batch is done. If there were none, the
	// columns may have changed: see insert.
	rows int64
	// settle says of the batch's messages what became of them, or names those to be
	// dead-lettered. It may run more statements. Nil: all are written.
	settle func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error
}

// modes are the ways to make a mode, by name.
var modes = map[string]func(*Sink, Config) (mode, error){
	ModeInsert:    newInsert,
	ModeUpsert:    newUpsert,
	ModeVersioned: newVersioned,
	ModeUpdate:    newUpdate,
	ModeAppend:    newAppender,
}

const modeNames = "insert, upsert, versioned, update or append"

// newMode makes the configured mode. The error joins all that is wrong with it.
func (c Config) newMode(s *Sink) (mode, error) {
	name := c.Mode
	if name == "" {
		name = ModeInsert
	}
	build, ok := modes[name]
	if !ok {
		return nil, fmt.Errorf("mode: %q is none; use %s", c.Mode, modeNames)
	}
	m, err := build(s, c)
	errs := []error{err}
	for _, o := range []struct {
		key    string
		set    bool
		reads  bool
		reader string
	}{
		{"version", c.Version != "", name == ModeVersioned || name == ModeAppend, "mode versioned or append"},
		{"on_stale", c.OnStale != "", name == ModeVersioned, "mode versioned"},
		{"on_present", c.OnPresent != "", name == ModeInsert && len(c.Key) > 0, "mode insert with a key"},
		{"expect", len(c.Expect) > 0, name == ModeUpdate, "mode update"},
		{"absent", c.Absent != "", name == ModeUpsert || name == ModeUpdate, "mode upsert or update"},
		{"on_mismatch", c.OnMismatch != "", name == ModeUpdate || name == ModeAppend, "mode update or append"},
		{"accept_reordering", c.AcceptReordering, name == ModeUpsert || name == ModeUpdate || name == ModeAppend, "mode upsert, update or append"},
		{"stream", c.Stream != "", name == ModeAppend, "mode append"},
		{"operation", c.Operation != "", name == ModeAppend, "mode append"},
		{"event_id", c.EventID != "", name == ModeAppend, "mode append"},
		{"expected", c.Expected != "", name == ModeAppend, "mode append"},
		{"history", c.History != History{}, name == ModeUpsert, "mode upsert"},
	} {
		if o.set && !o.reads {
			errs = append(errs, fmt.Errorf("%s: only %s reads it", o.key, o.reader))
		}
	}
	return m, errors.Join(errs...)
}

// needsKey is an error for a mode that finds rows by their key, but has none.
func (c Config) needsKey() error {
	if len(c.Key) > 0 {
		return nil
	}
	return fmt.Errorf("key: mode %s needs the columns that identify a row, such as [id]", c.Mode)
}

// choice is a policy as configured, or its default. The error names its key.
func choice[P interface {
	~string
	policy.Policy
}](key string, configured, byDefault P) (P, error) {
	if configured == "" {
		return byDefault, nil
	}
	if err := policy.Check(configured); err != nil {
		return configured, fmt.Errorf("%s: %w", key, err)
	}
	return configured, nil
}
