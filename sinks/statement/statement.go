// Package statement is the sink that runs the operator's own SQL over a batch of messages.
//
// The SQL is one statement. It reads a relation named batch, which has a row for each
// message and a column ord that counts them in lane order. dedupd puts the definition of
// batch in front of the statement and the messages into parameters: nothing of a message
// ever becomes SQL.
//
// With expect: returned, the statement returns the ord of each message that it has applied.
// The others found the target in another state than they expect: they are rejected.
package statement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
	"github.com/dedupd/dedupd/sinks/internal/mismatch"
)

// Sink runs one statement. It may be used by many goroutines.
type Sink struct {
	sql   parsed
	cols  []columns.Column // without their types
	types []string         // as the operator named them
	// returns: the statement returns the ord of the messages that it has applied.
	returns    bool
	onMismatch policy.Mismatch
	current    atomic.Pointer[plan]
}

// plan is the statement with its columns' types known. Immutable.
type plan struct {
	set *columns.Set
	sql string
}

var (
	_ sinks.Sink     = (*Sink)(nil)
	_ sinks.Preparer = (*Sink)(nil)
)

// Prepare finds the types of batch's columns and makes the server check the statement: its
// names, its types, and this role's privileges. It may run during Write.
//
// EXPLAIN does all of that and runs nothing. Running the statement over no messages, in a
// savepoint, would fire triggers for each statement, take a write's locks, use up sequences,
// and call functions that may have effects even for an empty batch.
func (s *Sink) Prepare(ctx context.Context, tx sinks.Tx) error {
	_, err := s.prepare(ctx, tx)
	return err
}

func (s *Sink) prepare(ctx context.Context, tx sinks.Tx) (*plan, error) {
	types, err := columns.Resolve(ctx, tx, s.types)
	if err != nil {
		return nil, fmt.Errorf("sink.statement.columns: %w", err)
	}
	cols := make([]columns.Column, len(s.cols))
	for i := range cols {
		cols[i] = s.cols[i]
		cols[i].Type = types[i]
	}
	p := &plan{}
	if p.set, err = columns.NewSet(cols); err != nil {
		return nil, fmt.Errorf("sink.statement.columns: %w", err)
	}
	p.sql = s.sql.join(batch(p.set))
	values, err := p.set.Encode(nil)
	if err == nil {
		_, err = tx.Exec(ctx, "EXPLAIN "+p.sql, values.Args()...)
	}
	if err != nil {
		return nil, fmt.Errorf("the server refuses sink.statement.sql: %w", err)
	}
	if s.returns {
		if _, err = tx.Exec(ctx, "EXPLAIN "+s.sql.checked(batch(p.set)), values.Args()...); err != nil {
			return nil, fmt.Errorf("with expect: returned, sink.statement.sql must return the column ord of the messages that it has applied, an integer, as UPDATE ... FROM batch ... RETURNING batch.ord does: %w", err)
		}
	}
	s.current.Store(p)
	return p, nil
}

// batch is the common table expression with the messages.
func batch(set *columns.Set) string {
	var names, exprs strings.Builder
	for i, c := range set.Columns() {
		names.WriteString(pgx.Identifier{c.Name}.Sanitize() + ", ")
		exprs.WriteString(set.Expr(i) + ", ")
	}
	return "batch(" + names.String() + ordinal + ") AS (SELECT " + exprs.String() + "u.ord FROM " + set.From() + ")"
}

// Write runs the statement over the batch. Its error is PermanentAt for a message that doesn't
// fit the columns' types, else Postgres' own.
func (s *Sink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	if len(msgs) == 0 {
		return nil
	}
	p := s.current.Load()
	if p == nil {
		var err error
		if p, err = s.prepare(ctx, tx); err != nil {
			return err
		}
	}
	values, err := p.set.Encode(msgs)
	switch {
	case err != nil:
	case s.returns:
		err = s.run(ctx, tx, p, batch, values)
	default:
		_, err = tx.Exec(ctx, p.sql, values.Args()...)
	}
	if err != nil {
		return fmt.Errorf("run sink.statement.sql: %w", err)
	}
	return nil
}

// run runs the statement, and settles the messages whose ord it doesn't return.
func (s *Sink) run(ctx context.Context, tx sinks.Tx, p *plan, batch *sinks.Batch, values *columns.Values) error {
	rows, err := tx.Query(ctx, p.sql, values.Args()...)
	if err != nil {
		return err
	}
	applied, err := readOrds(rows, len(batch.Messages()))
	if err != nil {
		return err
	}
	var refused []error
	for i, yes := range applied {
		if !yes {
			refused = append(refused, mismatch.Settle(batch, i, s.onMismatch, fmt.Errorf("the statement didn't return its ord, so it isn't as the target expects, and sink.statement.on_mismatch is %s", s.onMismatch)))
		}
	}
	return errors.Join(refused...)
}

// readOrds reads the ords that the statement returns, and tells of n messages which have
// theirs among them. An ord may be there more than once.
func readOrds(rows pgx.Rows, n int) ([]bool, error) {
	defer rows.Close()
	found := make([]bool, n)
	var into []any // nil: not read
	var ord *int64
	for rows.Next() {
		if into == nil {
			fields := rows.FieldDescriptions()
			at := slices.IndexFunc(fields, func(f pgconn.FieldDescription) bool { return f.Name == ordinal })
			if at < 0 {
				return nil, errors.New("it returns no column ord")
			}
			into = make([]any, len(fields))
			into[at] = &ord
		}
		switch err := rows.Scan(into...); {
		case err != nil:
			return nil, fmt.Errorf("the column ord: %w", err)
		case ord == nil:
			return nil, errors.New("it returned an ord that is NULL; each row that it returns must say which message it applied")
		case *ord < 1 || *ord > int64(n):
			return nil, fmt.Errorf("it returned ord %d of a batch of %d messages, whose ord is from 1 to %[2]d", *ord, n)
		}
		found[*ord-1] = true
	}
	return found, rows.Err()
}
