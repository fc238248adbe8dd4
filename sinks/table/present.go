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

// presentSQL asks, after a keyed insert, which messages found a row with their key: one
// that this transaction has not made, or that an earlier message of the batch has. A row
// that a trigger kept away isn't there. Each comes with whether the row is what the message
// would have written.
//
// A row's xmin is the transaction that made its version. The insert has changed no row that
// was there, so those in the table with ours are those that it made.
func (s *Sink) presentSQL(t *target, set *columns.Set) string {
	var key, match, same []string
	distinct := true // from each other, with a NULL in the key
	if index := s.keyIndex(t); index != nil {
		distinct = !index.nullsNotDistinct
	}
	for i, c := range set.Columns() {
		a, expr := t.attribute(c.Name), s.comparedExpr(t, set, i)
		switch {
		case slices.Contains(s.key, c.Name):
			key = append(key, expr)
			if distinct {
				match = append(match, fmt.Sprintf("t.%s = %s", quote(c.Name), expr))
			} else {
				match = append(match, fmt.Sprintf("t.%s IS NOT DISTINCT FROM %s", quote(c.Name), expr))
			}
		case c.Field.Kind != message.FieldNow:
			same = append(same, fmt.Sprintf("t.%s%s IS NOT DISTINCT FROM (%s)%s", quote(c.Name), byText(a.typ), expr, byText(a.typ)))
		}
	}
	row := "SELECT FROM " + s.sql() + " AS t WHERE " + strings.Join(match, " AND ")
	equal := "true"
	if s.onPresent == policy.PresentCompare && len(same) > 0 {
		equal = "EXISTS (" + row + " AND " + strings.Join(same, " AND ") + ")"
	}
	return fmt.Sprintf(`SELECT u.ord, %s FROM (SELECT u.*, pg_catalog.row_number() OVER (PARTITION BY %s ORDER BY u.ord) AS nth FROM %s) AS u
		WHERE EXISTS (%s AND (u.nth > 1 OR t.xmin <> pg_catalog.pg_current_xact_id()::pg_catalog.xid))%s ORDER BY u.ord`,
		equal, strings.Join(key, ", "), set.From(), row, set.Constants())
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
func (s *Sink) settlePresent(ctx context.Context, tx sinks.Tx, p *plan, batch *sinks.Batch, values *columns.Values) error {
	rows, err := tx.Query(ctx, p.present, values.Args()...)
	if err != nil {
		return err
	}
	var refused []error
	var ord int64
	var same bool
	_, err = pgx.ForEachRow(rows, []any{&ord, &same}, func() error {
		i := int(ord - 1)
		switch {
		case s.onPresent == policy.PresentDeadLetter:
			refused = append(refused, sinks.PermanentAt(i, errors.New("a row with this key is in the table already, and sink.table.on_present is dead_letter")))
		case !same:
			refused = append(refused, sinks.PermanentAt(i, errors.New("a row with this key is in the table already, with other values, and sink.table.on_present is compare")))
		default:
			batch.Outcome(i, sinks.AlreadyPresent)
		}
		return nil
	})
	return errors.Join(append(refused, err)...)
}
