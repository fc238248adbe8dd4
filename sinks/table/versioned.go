package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// versioned is an upsert for rows with a version. A row takes a message if its version is
// above the row's, as the version's type compares. NULL is the lowest version: else a row
// that has it would be stale for ever.
type versioned struct {
	*Sink
	version string // a column's name
	onStale policy.Stale
}

func newVersioned(s *Sink, c Config) (mode, error) {
	errs := []error{c.needsKey()}
	switch {
	case c.Version == "":
		errs = append(errs, errors.New("version: mode versioned needs the column that tells which of two states is newer"))
	case slices.Contains(c.Key, c.Version):
		errs = append(errs, fmt.Errorf("version: %q is part of the key, so each version would be a row of its own", c.Version))
	case len(c.Columns) > 0 && c.Columns[c.Version] == "":
		errs = append(errs, fmt.Errorf("version: %q is not among the columns", c.Version))
	}
	onStale, err := choice("on_stale", c.OnStale, policy.StaleIgnore)
	return &versioned{Sink: s, version: c.Version, onStale: onStale}, errors.Join(append(errs, err)...)
}

func (m *versioned) overwrites() bool  { return true }
func (m *versioned) needsOrder() error { return nil }

func (m *versioned) check(t *target) error {
	if a := t.attribute(m.version); a != nil && a.isAbove == "" {
		return fmt.Errorf("version: column %q is of type %s, which has no order, so no version is above another", m.version, a.typ.Name)
	}
	return nil
}

// access has the right to read every column: Postgres asks for it of EXCLUDED.
func (m *versioned) access(column string) access {
	return access{inserts: true, updates: !slices.Contains(m.key, column), selects: true}
}

// writer keeps the highest version of each key, the first of several.
func (m *versioned) writer(t *target, p *plan) writer {
	k, version := m.keyed(t, p), quote(m.version)
	at := 1 + slices.Index(p.names, m.version)
	return &versionedWriter{m: m, p: p, stale: m.staleSQL(t, p), sql: m.insertSQL(t, p, rowsSQL{
		distinct: "DISTINCT ON (" + k.apart + ") ",
		order:    fmt.Sprintf(" ORDER BY %s, %d DESC NULLS LAST, u.ord", k.apart, at),
		conflict: k.conflict + k.overwrite + " WHERE " + m.newer(t, "EXCLUDED."+version, "t."+version),
	})}
}

// versionedWriter finds the stale messages, then writes.
type versionedWriter struct {
	m          *versioned
	p          *plan
	stale, sql string
}

func (w *versionedWriter) statements(values *columns.Values) []query {
	return []query{{w.stale, w.p.args(values)}, {w.sql, w.p.args(values)}}
}

// queue lets the planner use an index: it would estimate that a small table is best read
// whole, and keep that plan while the table grows.
func (w *versionedWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	var stale []int64 // the messages, from 1
	var rows int64    // to write
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.stale, w.p.args(values)...).QueryRow(func(row pgx.Row) error { return row.Scan(&stale, &rows) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	s := (&rowsWriter{w.p, w.sql}).queue(b, values)
	s.settle = func(_ context.Context, _ sinks.Tx, batch *sinks.Batch) error {
		if w.p.counts && s.rows != rows {
			return w.m.mismatch(rows, s.rows)
		}
		w.m.mismatches.Store(0)
		return w.m.settle(batch, stale)
	}
	return s
}

// newer is the condition for a version to be above another.
func (m *versioned) newer(t *target, version, than string) string {
	return fmt.Sprintf("coalesce(%s, %s IS NULL AND %s IS NOT NULL)", t.above(m.version, version, than), than, version)
}

// staleSQL locks the rows of a batch's keys, in the order of the keys, and tells which
// messages are stale: at or below their row's version, or that of an earlier message of the
// batch. It also tells how many rows there are to write. What it finds holds until the
// transaction ends, but for keys without a row, which somebody else may add.
//
// The statement that writes compares versions once more, and keeps the highest of each key.
func (m *versioned) staleSQL(t *target, p *plan) string {
	var key, names, match, known []string
	version := ""
	for i, c := range p.set.Columns() {
		switch expr := m.comparedExpr(t, p.set, i); {
		case c.Name == m.version:
			version = expr
		case slices.Contains(m.key, c.Name):
			name := fmt.Sprintf("k%d", len(key)+1)
			key = append(key, expr+" AS "+name)
			names = append(names, name)
			match = append(match, t.matches(c.Name, "t."+quote(c.Name), "d."+name))
			known = append(known, t.matches(c.Name, "r."+name, "o."+name))
		}
	}
	by := strings.Join(names, ", ")
	partition := by
	apart := m.nullsApart(t, p.set)
	if apart != "" {
		partition += ", apart"
	} else {
		apart = "NULL::pg_catalog.int8"
	}
	return fmt.Sprintf(`WITH b AS MATERIALIZED (
  SELECT u.ord, %s, %s AS version, %s AS apart FROM %s WHERE %s%s
), r AS (
  SELECT b.*, pg_catalog.min(ord) OVER (PARTITION BY %[7]s ORDER BY version DESC NULLS LAST) AS first,
         pg_catalog.row_number() OVER (PARTITION BY %[7]s ORDER BY version DESC NULLS LAST, ord) AS nth
    FROM b
), old AS MATERIALIZED (
  SELECT d.*, o.version FROM (SELECT DISTINCT %[8]s FROM b ORDER BY %[8]s) AS d
   CROSS JOIN LATERAL (SELECT t.%[9]s AS version FROM %[10]s AS t WHERE %[11]s FOR NO KEY UPDATE) AS o
)
SELECT coalesce(pg_catalog.array_agg(r.ord ORDER BY r.ord) FILTER (WHERE r.ord <> r.first OR known AND NOT %[12]s), '{}'),
       pg_catalog.count(*) FILTER (WHERE r.nth = 1 AND (NOT known OR %[12]s))
  FROM r LEFT JOIN (SELECT *, true AS is_known FROM old) AS o ON %[13]s
 CROSS JOIN LATERAL (SELECT coalesce(o.is_known, false) AS known) AS k`,
		strings.Join(key, ", "), version, apart, p.set.From(), p.unchanged, p.set.Constants(),
		partition, by, quote(m.version), m.rows(t), strings.Join(match, " AND "), m.newer(t, "r.version", "o.version"), strings.Join(known, " AND "))
}

// settle says of the batch's messages which are stale, or returns an error that names those
// to be dead-lettered.
func (m *versioned) settle(batch *sinks.Batch, stale []int64) error {
	var refused []error
	for _, ord := range stale {
		if m.onStale == policy.StaleDeadLetter {
			refused = append(refused, sinks.PermanentAt(int(ord-1), errStale))
			continue
		}
		batch.Outcome(int(ord-1), sinks.Stale)
	}
	return errors.Join(refused...)
}

var errStale = errors.New("its version isn't above that of its row, and sink.table.on_stale is dead_letter")
