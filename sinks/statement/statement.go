// Package statement is the sink that runs the operator's own SQL over a batch of messages.
//
// The SQL is one statement. It reads a relation named batch, which has a row for each
// message and a column ord that counts them in lane order. dedupd puts the definition of
// batch in front of the statement and the messages into parameters: nothing of a message
// ever becomes SQL.
//
// With expect: returned, the statement returns the ord of each message that it has applied.
// The others found the target in another state than they expect: they are rejected. See turns.go.
package statement

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// Sink runs one statement. It may be used by many goroutines.
type Sink struct {
	sql   parsed
	cols  []columns.Column // without their types
	types []string         // as the operator named them
	// returns: the statement returns the ord of the messages that it has applied.
	returns    bool
	key        []int // indexes of columns
	onMismatch policy.Mismatch
	current    atomic.Pointer[plan]
}

// plan is the statement with its columns' types known. Immutable.
type plan struct {
	set *columns.Set
	sql string
	// With expect: returned, keys are the key's columns, and turns tells the turn of each message.
	keys  *columns.Set
	turns string
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
	if err := s.prepareTurns(ctx, tx, p); err != nil {
		return nil, fmt.Errorf("sink.statement.key: %w", err)
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
