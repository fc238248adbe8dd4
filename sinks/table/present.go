package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// reportsPresent reports whether a keyed insert can say which rows it found. It goes by what
// the insert returns. A view's keys are those of the table behind it, and a trigger may
// change a row's key or keep the row away; then every message counts as written.
func (m *insert) reportsPresent(t *target) bool {
	return len(m.key) > 0 && (t.kind == "r" || t.kind == "p") && t.plain && !t.fills
}

// presentWriter is a keyed insert that returns which messages found their row.
type presentWriter struct {
	m       *insert
	p       *plan
	compare string // with on_present compare
	sql     string
}

func (m *insert) presentWriter(t *target, p *plan) writer {
	w := &presentWriter{m: m, p: p, sql: m.presentSQL(t, p)}
	if m.onPresent == policy.PresentCompare {
		w.compare = m.compareSQL(t, p)
	}
	return w
}

func (w *presentWriter) statements(values *columns.Values) (all []query) {
	if w.compare != "" {
		all = append(all, query{w.compare, append(values.Args(), []int64{})})
	}
	return append(all, query{w.sql, w.p.args(values)})
}

func (w *presentWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	var present []int64
	b.Queue(w.sql, w.p.args(values)...).QueryRow(func(row pgx.Row) error { return row.Scan(&s.rows, &present) })
	s.settle = func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
		return w.settle(ctx, tx, batch, values, present)
	}
	return s
}

// presentSQL is a keyed insert that returns how many rows it has added, and which messages
// found a row with their key: one that was there, or that an earlier message of the batch
// has added. A NULL in the key is found nowhere, unless the index takes NULLs for equal.
//
// Messages and added rows meet in one PARTITION BY the key, for which NULLs are equal. A join
// could find NULLs by no hash: it would compare each message with each row.
func (m *insert) presentSQL(t *target, p *plan) string {
	exprs := m.exprs(t, p)
	n := len(exprs)
	names, casts, all, key, returned, null := make([]string, n), make([]string, n), make([]string, n), []string(nil), []string(nil), []string(nil)
	for i, c := range p.set.Columns() {
		col := fmt.Sprintf("v%d", i+1)
		names[i], casts[i], all[i] = quote(c.Name), exprs[i]+" AS "+col, col
		if slices.Contains(m.key, c.Name) {
			key = append(key, col)
			returned = append(returned, t.collated(c.Name, "t."+quote(c.Name))+" AS "+col)
			if a := t.attribute(c.Name); !a.notNull && !a.nullsEqual {
				null = append(null, " AND b."+col+" IS NOT NULL")
			}
		}
	}
	by := strings.Join(key, ", ")
	return fmt.Sprintf(`WITH b AS MATERIALIZED (SELECT u.ord, %s FROM %s WHERE %s),
p AS (INSERT INTO %s AS t (%s) SELECT %s FROM b ORDER BY %s, ord ON CONFLICT (%s) DO NOTHING RETURNING %s)
SELECT (SELECT pg_catalog.count(*) FROM p), coalesce((SELECT pg_catalog.array_agg(b.ord ORDER BY b.ord)
  FROM (SELECT b.*, pg_catalog.row_number() OVER w AS nth, pg_catalog.bool_or(b.ord IS NULL) OVER w AS added
          FROM (SELECT ord, %[7]s FROM b UNION ALL SELECT NULL, %[7]s FROM p) AS b
        WINDOW w AS (PARTITION BY %[7]s ORDER BY ord ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)) AS b
 WHERE b.ord IS NOT NULL%[10]s AND (b.nth > 1 OR NOT b.added)), '{}')`,
		strings.Join(casts, ", "), p.set.From(), p.unchanged,
		m.sql(), strings.Join(names, ", "), strings.Join(all, ", "), by, strings.Join(quoted(m.key), ", "), strings.Join(returned, ", "), strings.Join(null, ""))
}

// compareSQL tells which of some messages ($1 after the batch's parameters) find a row with
// their key, and which have the row that they would have written. Columns filled by "now"
// aren't compared.
func (m *insert) compareSQL(t *target, p *plan) string {
	var key, row, values []string
	same := []string{"true"}
	for i, c := range p.set.Columns() {
		col, value := "t."+quote(c.Name), m.comparedExpr(t, p.set, i)
		switch {
		case slices.Contains(m.key, c.Name):
			key, row, values = append(key, c.Name), append(row, col), append(values, value)
		case c.Field.Kind != message.FieldNow:
			same = append(same, t.same(c.Name, col, value))
		}
	}
	return fmt.Sprintf(`SELECT coalesce(pg_catalog.array_agg(u.ord), '{}'), coalesce(pg_catalog.array_agg(u.ord) FILTER (WHERE o.same), '{}')
  FROM %s CROSS JOIN LATERAL (SELECT %s AS same FROM %s AS t WHERE %s LIMIT 1) AS o WHERE u.ord = ANY ($%d::pg_catalog.int8[])%s`,
		p.set.From(), strings.Join(same, " AND "), m.rows(t), t.matchesAll(key, row, values), p.params+1, p.set.Constants())
}

// byText reports whether values compare as texts: types without an equality, or with one
// that asks for something else. These are json, xml, what may hold them, and geometric types.
func byText(t columns.Type) bool {
	const json, xml = 114, 142
	return t.OID == json || t.OID == xml || t.Element == json || t.Element == xml || t.Category == 'C' || t.Category == 'G'
}

// settle says of the batch's messages which found their row there, or returns an
// error that names those to be dead-lettered.
func (w *presentWriter) settle(ctx context.Context, tx sinks.Tx, batch *sinks.Batch, values *columns.Values, present []int64) error {
	onPresent := w.m.onPresent
	var there, same []int64
	if onPresent == policy.PresentCompare && len(present) > 0 {
		var b pgx.Batch
		b.Queue("SET LOCAL enable_seqscan = off") // see versionedWriter.queue
		b.Queue(w.compare, append(values.Args(), present)...).QueryRow(func(row pgx.Row) error { return row.Scan(&there, &same) })
		b.Queue("SET LOCAL enable_seqscan = DEFAULT")
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
		if len(there) < len(present) {
			w.m.current.CompareAndSwap(w.p, nil) // the index may be another one by now
			return meanwhile("somebody else has deleted a row with a key of this batch meanwhile")
		}
	}
	var refused []error
	for _, ord := range present {
		switch i := int(ord - 1); {
		case onPresent == policy.PresentDeadLetter:
			refused = append(refused, sinks.PermanentAt(i, errors.New("a row with this key is in the table already, and sink.table.on_present is dead_letter")))
		case onPresent == policy.PresentCompare && !slices.Contains(same, ord):
			refused = append(refused, sinks.PermanentAt(i, errors.New("a row with this key is in the table already, with other values, and sink.table.on_present is compare")))
		default:
			batch.Outcome(i, sinks.AlreadyPresent)
		}
	}
	return errors.Join(refused...)
}
