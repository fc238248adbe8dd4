package statement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
	"github.com/dedupd/dedupd/sinks/internal/mismatch"
)

// A statement sees the target as it was before, and changes a row once. Of several messages of
// a row it would take any one, and judge each as if the others weren't there: what is applied
// would depend on how messages are batched. So those of one key take turns: the statement runs
// over the first message of each key, then over the second ones, and so on. The first turn has
// all keys, so what a later one locks is locked already.

// prepareTurns makes the query for the turns of messages.
func (s *Sink) prepareTurns(ctx context.Context, tx sinks.Tx, p *plan) (err error) {
	if !s.returns {
		return nil
	}
	cols, names := make([]columns.Column, len(s.key)), make([]string, len(s.key))
	for i, at := range s.key {
		cols[i] = p.set.Columns()[at]
		names[i] = pgx.Identifier{cols[i].Name}.Sanitize()
	}
	if p.keys, err = columns.NewSet(cols); err != nil {
		return err
	}
	p.turns = fmt.Sprintf("WITH %s SELECT coalesce(pg_catalog.array_agg(t.turn ORDER BY t.ord), '{}') FROM (SELECT ord, pg_catalog.row_number() OVER (PARTITION BY %s ORDER BY ord) AS turn FROM batch) AS t",
		batch(p.keys), strings.Join(names, ", "))
	none, err := p.keys.Encode(nil)
	if err == nil {
		_, err = tx.Exec(ctx, "EXPLAIN "+p.turns, none.Args()...)
	}
	return err
}

// turnsOf are the messages of each turn, by their indexes.
func (p *plan) turnsOf(ctx context.Context, tx sinks.Tx, values *columns.Values) (all [][]int, err error) {
	var numbers []int
	if err := tx.QueryRow(ctx, p.turns, values.Of(p.keys).Args()...).Scan(&numbers); err != nil {
		return nil, err
	}
	all = make([][]int, slices.Max(numbers))
	for i, number := range numbers {
		all[number-1] = append(all[number-1], i)
	}
	return all, nil
}

// mostTurns is how many turns are sent at once.
const mostTurns = 256

// run runs the statement, turn by turn, and settles the messages whose ord it doesn't return.
func (s *Sink) run(ctx context.Context, tx sinks.Tx, p *plan, batch *sinks.Batch, values *columns.Values) error {
	applied := make([]bool, len(batch.Messages()))
	turns, err := p.turnsOf(ctx, tx, values)
	if err != nil {
		return err
	}
	for some := range slices.Chunk(turns, mostTurns) {
		var b pgx.Batch
		for _, turn := range some {
			own := values
			if len(turn) < len(applied) {
				own = values.Rows(turn)
			}
			b.Queue(p.sql, own.Args()...).Query(func(rows pgx.Rows) error { return readOrds(rows, turn, applied) })
		}
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
	}
	var refused []error
	for i, yes := range applied {
		if !yes {
			refused = append(refused, mismatch.Settle(batch, i, s.onMismatch, fmt.Errorf("the statement didn't return its ord, so it isn't as the target expects, and sink.statement.on_mismatch is %s", s.onMismatch)))
		}
	}
	return errors.Join(refused...)
}

// readOrds reads the ords that the statement returns of a turn, and notes whose they are. An
// ord may be there more than once.
func readOrds(rows pgx.Rows, turn []int, applied []bool) error {
	defer rows.Close()
	n := len(turn)
	var into []any // nil: not read
	var ord *int64
	for rows.Next() {
		if into == nil {
			fields := rows.FieldDescriptions()
			at := slices.IndexFunc(fields, func(f pgconn.FieldDescription) bool { return f.Name == ordinal })
			if at < 0 {
				return errors.New("it returns no column ord")
			}
			into = make([]any, len(fields))
			into[at] = &ord
		}
		switch err := rows.Scan(into...); {
		case err != nil:
			return fmt.Errorf("the column ord: %w", err)
		case ord == nil:
			return errors.New("it returned an ord that is NULL; each row that it returns must say which message it applied")
		case *ord < 1 || *ord > int64(n):
			return fmt.Errorf("it returned ord %d of a batch of %d messages, whose ord is from 1 to %[2]d", *ord, n)
		}
		applied[turn[*ord-1]] = true
	}
	return rows.Err()
}
