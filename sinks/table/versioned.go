package table

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// A row of mode versioned takes a message if its version is above the row's, as the
// version's type compares. NULL is the lowest version: else a row that has it would be
// stale for ever.

// newer is the condition for a version to be above another.
func newer(version, than string) string {
	return fmt.Sprintf("coalesce(%s > %s, %[2]s IS NULL AND %[1]s IS NOT NULL)", version, than)
}

// staleSQL locks the rows of a batch's keys, in the order of the keys, and tells which
// messages are stale: at or below their row's version, or that of an earlier message of the
// batch. It also tells how many rows there are to write. What it finds holds until the
// transaction ends, but for keys without a row, which somebody else may add.
//
// The statement that writes compares versions once more, and keeps the highest of each key.
func (s *Sink) staleSQL(t *target, set *columns.Set, unchanged int) string {
	var key, names, match []string
	version := ""
	for i, c := range set.Columns() {
		switch expr := s.comparedExpr(t, set, i); {
		case c.Name == s.version:
			version = expr
		case slices.Contains(s.key, c.Name):
			name := fmt.Sprintf("k%d", len(key)+1)
			key = append(key, expr+" AS "+name)
			names = append(names, name)
			match = append(match, fmt.Sprintf("t.%s = d.%s", quote(c.Name), name))
		}
	}
	by := strings.Join(names, ", ")
	partition := by
	apart := s.nullsApart(t, set)
	if apart != "" {
		partition += ", apart"
	} else {
		apart = "NULL::pg_catalog.int8"
	}
	return fmt.Sprintf(`WITH b AS MATERIALIZED (
  SELECT u.ord, %s, %s AS version, %s AS apart FROM %s WHERE (%s) = $%d%s
), r AS (
  SELECT b.*, pg_catalog.min(ord) OVER (PARTITION BY %[8]s ORDER BY version DESC NULLS LAST) AS first,
         pg_catalog.row_number() OVER (PARTITION BY %[8]s ORDER BY version DESC NULLS LAST, ord) AS nth
    FROM b
), old AS MATERIALIZED (
  SELECT d.*, o.version FROM (SELECT DISTINCT %[9]s FROM b ORDER BY %[9]s) AS d
   CROSS JOIN LATERAL (SELECT t.%[10]s AS version FROM %[11]s AS t WHERE %[12]s FOR NO KEY UPDATE) AS o
)
SELECT coalesce(pg_catalog.array_agg(r.ord ORDER BY r.ord) FILTER (WHERE r.ord <> r.first OR known AND NOT %[13]s), '{}'),
       pg_catalog.count(*) FILTER (WHERE r.nth = 1 AND (NOT known OR %[13]s))
  FROM r LEFT JOIN (SELECT *, true AS is_known FROM old) AS o USING (%[9]s)
 CROSS JOIN LATERAL (SELECT coalesce(o.is_known, false) AS known) AS k`,
		strings.Join(key, ", "), version, apart, set.From(), shapeFrom(unchanged), unchanged+3, set.Constants(),
		partition, by, quote(s.version), s.sql(), strings.Join(match, " AND "), newer("r.version", "o.version"))
}

// comparedExpr is column i of a row as an index or a version compares it.
func (s *Sink) comparedExpr(t *target, set *columns.Set, i int) string {
	expr := set.Expr(i)
	if c := t.attribute(set.Columns()[i].Name).collation; c != "" {
		expr += " COLLATE " + c
	}
	return expr
}

// staleness is what staleSQL has found.
type staleness struct {
	ords []int64 // of the stale messages, from 1
	rows int64   // to write
}

// queueStale asks for it, in the batch that writes. The planner would estimate that a small
// table is best read whole, and keep that plan while the table grows.
func (s *Sink) queueStale(b *pgx.Batch, p *plan, values *columns.Values, found *staleness) {
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(p.stale, s.args(p, values)...).QueryRow(func(row pgx.Row) error { return row.Scan(&found.ords, &found.rows) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
}

// mostMismatches is how often in a row somebody else may seem to have added a row.
const mostMismatches = 10

// settleStale says of the batch's messages which are stale, or returns an error that names
// those to be dead-lettered.
func (s *Sink) settleStale(p *plan, batch *sinks.Batch, found staleness, written int64) error {
	if p.counts && written != found.rows {
		// What is stale by now may be another message. The next try sees the row. What
		// happens again and again is no coincidence.
		if s.mismatches.Add(1) > mostMismatches {
			return fmt.Errorf("%d rows were to be written, and the server wrote %d: a trigger keeps rows from being written, or the key's columns compare in another way than their unique index", found.rows, written)
		}
		return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: sqlstate.SerializationFailure, Message: "somebody else has added a row with a key of this batch meanwhile"}
	}
	s.mismatches.Store(0)
	var refused []error
	for _, ord := range found.ords {
		if s.onStale == policy.StaleDeadLetter {
			refused = append(refused, sinks.PermanentAt(int(ord-1), errStale))
			continue
		}
		batch.Outcome(int(ord-1), sinks.Stale)
	}
	return errors.Join(refused...)
}

var errStale = errors.New("its version isn't above that of its row, and sink.table.on_stale is dead_letter")
