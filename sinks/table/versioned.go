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

// writer writes the first message of each row, and then the highest version among the rest, the
// first of several: see versionedWriter.
func (m *versioned) writer(t *target, p *plan) writer {
	k, version := m.keyed(t, p), quote(m.version)
	sql := m.insertSQL(t, p, rowsSQL{
		distinct: "DISTINCT ON (" + k.apart + ") ",
		order:    " ORDER BY " + k.apart + ", u.ord",
		conflict: k.conflict + k.overwrite + " WHERE " + m.newer(t, "EXCLUDED."+version, "t."+version),
	})
	var cols []columns.Column
	for _, c := range p.set.Columns() {
		if c.Name == m.version || slices.Contains(m.key, c.Name) {
			cols = append(cols, c)
		}
	}
	compared, _ := columns.NewSet(cols) // p.set has them, so they are right
	return &versionedWriter{m, p, compared, m.firstsSQL(t, p, sql), m.staleSQL(t, compared), sql}
}

// versionedWriter adds rows and locks those that are there in one pass in the order of the
// keys, like any upsert: two workers that locked what is there first, and added the others
// afterwards, would deadlock. What the first statement returns is written. All rows of the
// batch are locked by then, so what the second one finds of the rest holds.
type versionedWriter struct {
	m        *versioned
	p        *plan
	compared *columns.Set // the key's columns and the version
	// firsts writes the first message of each row if it is newer, and returns how many it has
	// written, and all messages but those. look tells of these which are stale, and which are
	// to be written. write writes them.
	firsts, look, write string
}

func (w *versionedWriter) statements(values *columns.Values) []query {
	return []query{{w.firsts, w.firstsArgs(values)}, {w.look, values.Of(w.compared).Args()}, {w.write, w.p.args(values)}}
}

func (w *versionedWriter) firstsArgs(values *columns.Values) []any {
	return append(w.p.args(values), int64(values.Len()))
}

func (w *versionedWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	var rest []int64 // the messages, from 1
	b.Queue(w.firsts, w.firstsArgs(values)...).QueryRow(func(row pgx.Row) error {
		err := row.Scan(&s.rows, &rest)
		s.rows += int64(len(rest))
		return err
	})
	s.settle = func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
		if len(rest) == 0 {
			return nil
		}
		return w.writeRest(ctx, tx, batch, values, indexesOf(rest))
	}
	return s
}

// writeRest writes the rest of a batch. The planner uses an index to look at the rows: it would
// estimate that a small table is best read whole, and keep that plan while the table grows.
func (w *versionedWriter) writeRest(ctx context.Context, tx sinks.Tx, batch *sinks.Batch, values *columns.Values, rest []int) error {
	values = values.Rows(rest)
	var stale, due []int64 // of the rest, from 1
	var b pgx.Batch
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.look, values.Of(w.compared).Args()...).QueryRow(func(row pgx.Row) error { return row.Scan(&stale, &due) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if len(due) > 0 {
		written, err := tx.Exec(ctx, w.write, w.p.args(values.Rows(indexesOf(due)))...)
		if err != nil {
			return err
		}
		if written.RowsAffected() != int64(len(due)) {
			return w.m.keptAway(ctx, tx, w.p)
		}
	}
	var refused []error
	for _, i := range indexesOf(stale) {
		if at := rest[i]; w.m.onStale == policy.StaleDeadLetter {
			refused = append(refused, sinks.PermanentAt(at, errStale))
		} else {
			batch.Outcome(at, sinks.Stale)
		}
	}
	return errors.Join(refused...)
}

// indexesOf makes indexes of the numbers that statements give to messages, from 1.
func indexesOf(ords []int64) []int {
	all := make([]int, len(ords))
	for i, ord := range ords {
		all[i] = int(ord - 1)
	}
	return all
}

// newer is the condition for a version to be above another.
func (m *versioned) newer(t *target, version, than string) string {
	return fmt.Sprintf("coalesce(%s, %s IS NULL AND %s IS NOT NULL)", t.above(m.version, version, than), than, version)
}

// firstsSQL returns how many rows it has written. If those aren't all messages, it returns
// the others: those that weren't the first of their row, and those whose row it left as it
// was. A row that is written comes before its messages, with 0 for ord.
func (m *versioned) firstsSQL(t *target, p *plan, insert string) string {
	var key, names []string
	for i, c := range p.set.Columns() {
		if slices.Contains(m.key, c.Name) {
			name := fmt.Sprintf("k%d", len(key)+1)
			key, names = append(key, m.comparedExpr(t, p.set, i)+" AS "+name), append(names, name)
		}
	}
	found := p.unchanged
	if apart := m.nullsApart(t, p.set); apart != "" {
		found += " AND " + apart + " IS NULL" // the others have a row of their own each
	}
	by := strings.Join(names, ", ")
	return fmt.Sprintf(`WITH i AS (%s RETURNING %s)
SELECT (SELECT pg_catalog.count(*) FROM i), CASE WHEN (SELECT pg_catalog.count(*) FROM i) < $%d::pg_catalog.int8 THEN (
  SELECT pg_catalog.array_agg(ord ORDER BY ord)
    FROM (SELECT ord, pg_catalog.lag(ord) OVER (PARTITION BY %[4]s ORDER BY ord) AS before
            FROM (SELECT u.ord, %[5]s FROM %[6]s WHERE %[7]s UNION ALL SELECT 0, %[4]s FROM i) AS a) AS a
   WHERE ord > 0 AND before IS DISTINCT FROM 0) END`,
		insert, m.returned(t, p, names), p.params+5, by, strings.Join(key, ", "), p.set.From(), found)
}

// staleSQL tells which messages are stale: at or below their row's version, or that of an
// earlier message; and the highest of each row, the first of several, if it isn't. No message
// has a row of its own for a NULL in its key: firsts has added those. The table's lock keeps
// its columns as they were then.
func (m *versioned) staleSQL(t *target, set *columns.Set) string {
	var cols, key, names, row, values []string
	version := ""
	for i, c := range set.Columns() {
		expr := m.comparedExpr(t, set, i)
		if c.Name == m.version {
			version = expr
			continue
		}
		name := fmt.Sprintf("k%d", len(key)+1)
		key, names = append(key, expr+" AS "+name), append(names, name)
		cols, row, values = append(cols, c.Name), append(row, "t."+quote(c.Name)), append(values, "r."+name)
	}
	return fmt.Sprintf(`WITH b AS MATERIALIZED (SELECT u.ord, %s, %s AS version FROM %s WHERE true%s),
r AS (SELECT b.*, pg_catalog.min(ord) OVER w AS first, pg_catalog.row_number() OVER w AS nth
        FROM b WINDOW w AS (PARTITION BY %s ORDER BY version DESC NULLS LAST, ord))
SELECT pg_catalog.array_agg(r.ord ORDER BY r.ord) FILTER (WHERE r.ord <> r.first OR o.known AND NOT %[6]s),
       pg_catalog.array_agg(r.ord) FILTER (WHERE r.nth = 1 AND (o.known IS NULL OR %[6]s))
  FROM r LEFT JOIN LATERAL (SELECT true AS known, t.%[7]s AS version FROM %[8]s AS t WHERE %[9]s LIMIT 1) AS o ON true`,
		strings.Join(key, ", "), version, set.From(), set.Constants(),
		strings.Join(names, ", "), m.newer(t, "r.version", "o.version"), quote(m.version), m.rows(t), t.matchesAll(cols, row, values))
}

var errStale = errors.New("its version isn't above that of its row, and sink.table.on_stale is dead_letter")
