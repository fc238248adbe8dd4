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
func (s *Sink) reportsPresent(t *target) bool {
	return s.mode == ModeInsert && len(s.key) > 0 && (t.kind == "r" || t.kind == "p") && t.plain && !t.fills
}

// presentSQL is a keyed insert that returns how many rows it has added, and which messages
// found a row with their key: one that was there, or that an earlier message of the batch
// has added. A NULL in the key is found nowhere.
func (s *Sink) presentSQL(t *target, set *columns.Set, exprs []string, unchanged int) string {
	n := len(exprs)
	names, casts, all, key, match, null := make([]string, n), make([]string, n), make([]string, n), []string(nil), []string(nil), []string(nil)
	for i, c := range set.Columns() {
		col := fmt.Sprintf("v%d", i+1)
		names[i], casts[i], all[i] = quote(c.Name), exprs[i]+" AS "+col, col
		if slices.Contains(s.key, c.Name) {
			key = append(key, col)
			match = append(match, fmt.Sprintf("p.%s = b.%s", quote(c.Name), col))
			null = append(null, "b."+col+" IS NOT NULL")
		}
	}
	returned := make([]string, len(s.key))
	for i, k := range s.key {
		returned[i] = "t." + quote(k)
	}
	by := strings.Join(key, ", ")
	conflict := make([]string, len(s.key))
	for i, k := range s.key {
		conflict[i] = quote(k)
	}
	return fmt.Sprintf(`WITH b AS MATERIALIZED (SELECT u.ord, %s FROM %s WHERE (%s) = $%d),
p AS (INSERT INTO %s AS t (%s) SELECT %s FROM b ORDER BY %s, ord ON CONFLICT (%s) DO NOTHING RETURNING %s)
SELECT (SELECT pg_catalog.count(*) FROM p), coalesce((SELECT pg_catalog.array_agg(b.ord ORDER BY b.ord)
  FROM (SELECT b.*, pg_catalog.row_number() OVER (PARTITION BY %s ORDER BY ord) AS nth FROM b) AS b
 WHERE %s AND (b.nth > 1 OR NOT EXISTS (SELECT FROM p WHERE %s))), '{}')`,
		strings.Join(casts, ", "), set.From(), shapeFrom(unchanged), unchanged+3,
		s.sql(), strings.Join(names, ", "), strings.Join(all, ", "), by, strings.Join(conflict, ", "), strings.Join(returned, ", "),
		by, strings.Join(null, " AND "), strings.Join(match, " AND "))
}

// compareSQL tells which of some messages ($1 after the batch's parameters) have the row
// that they would have written. Columns filled by "now" aren't compared.
func (s *Sink) compareSQL(t *target, set *columns.Set, ords int) string {
	var same []string
	for i, c := range set.Columns() {
		if c.Field.Kind == message.FieldNow {
			continue
		}
		cast := byText(t.attribute(c.Name).typ)
		op := " IS NOT DISTINCT FROM "
		if slices.Contains(s.key, c.Name) {
			op = " = " // which the index serves
		}
		same = append(same, fmt.Sprintf("t.%s%s%s(%s)%[2]s", quote(c.Name), cast, op, s.comparedExpr(t, set, i)))
	}
	return fmt.Sprintf(`SELECT coalesce(pg_catalog.array_agg(u.ord), '{}') FROM %s WHERE u.ord = ANY ($%d::pg_catalog.int8[]) AND EXISTS (SELECT FROM %s AS t WHERE %s)%s`,
		set.From(), ords, s.sql(), strings.Join(same, " AND "), set.Constants())
}

// byText is a cast to text for types without an equality, or with one that asks for
// something else: json, xml, what may hold them, and geometric types.
func byText(t columns.Type) string {
	const json, xml = 114, 142
	if t.OID == json || t.OID == xml || t.Element == json || t.Element == xml || t.Category == 'C' || t.Category == 'G' {
		return "::pg_catalog.text"
	}
	return ""
}

// settlePresent says of the batch's messages which found their row there, or returns an
// error that names those to be dead-lettered.
func (s *Sink) settlePresent(ctx context.Context, tx sinks.Tx, p *plan, batch *sinks.Batch, values *columns.Values, present []int64) error {
	var same []int64
	if s.onPresent == policy.PresentCompare && len(present) > 0 {
		var b pgx.Batch
		b.Queue("SET LOCAL enable_seqscan = off") // see queueStale
		b.Queue(p.compare, append(values.Args(), present)...).QueryRow(func(row pgx.Row) error { return row.Scan(&same) })
		b.Queue("SET LOCAL enable_seqscan = DEFAULT")
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
	}
	var refused []error
	for _, ord := range present {
		switch i := int(ord - 1); {
		case s.onPresent == policy.PresentDeadLetter:
			refused = append(refused, sinks.PermanentAt(i, errors.New("a row with this key is in the table already, and sink.table.on_present is dead_letter")))
		case s.onPresent == policy.PresentCompare && !slices.Contains(same, ord):
			refused = append(refused, sinks.PermanentAt(i, errors.New("a row with this key is in the table already, with other values, and sink.table.on_present is compare")))
		default:
			batch.Outcome(i, sinks.AlreadyPresent)
		}
	}
	return errors.Join(refused...)
}
