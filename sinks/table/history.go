package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// History has the keys under sink.table.history.
type History struct {
	// Column is of type text[] or uuid[]. It holds the ids of the row's last messages, the
	// oldest first.
	Column string `yaml:"column"`
	// Size is how many ids a row keeps.
	Size int `yaml:"size"`
}

// mostHistory is the longest history: each write of a row writes it anew.
const mostHistory = 1000

// remembering is an upsert whose rows remember their last messages. A message that its row
// remembers changes nothing.
type remembering struct {
	*upsert
	History
}

func newRemembering(u *upsert, c Config) (mode, error) {
	h := c.History
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf("history."+format, args...)) }
	if _, filled := c.Columns[h.Column]; h.Column == "" {
		fail("column: name the column that holds the ids of a row's last messages, of type text[] or uuid[]")
	} else if filled {
		fail("column: dedupd fills column %q itself; leave it out of columns", h.Column)
	}
	if h.Size < 1 || h.Size > mostHistory {
		fail("size: %d is not from 1 to %d", h.Size, mostHistory)
	}
	if u.absent == policy.AbsentKeep {
		errs = append(errs, errors.New("absent: with history, a message overwrites the whole row, so a column whose place it doesn't have is NULL; set absent: null"))
	}
	return &remembering{upsert: u, History: h}, errors.Join(errs...)
}

func (m *remembering) fillsItself() []string { return []string{m.Column} }

func (m *remembering) access(column string) access {
	if column == m.Column {
		return access{inserts: true, updates: true, selects: true}
	}
	return m.upsert.access(column)
}

func (m *remembering) check(t *target) error {
	if t.kind != "r" && t.kind != "p" || !t.plain {
		return errors.New("history: it needs a table whose rows can be seen and locked: no view, no rules, no row security")
	}
	var errs []error
	if a := t.attribute(m.Column); a != nil && a.typ.Element != pgtype.TextOID && a.typ.Element != pgtype.UUIDOID {
		errs = append(errs, fmt.Errorf("history.column: column %q is of type %s; make it text[], or uuid[] if all ids are UUIDs", m.Column, a.typ.Name))
	}
	for _, k := range m.key {
		if a := t.attribute(k); a != nil && !a.notNull {
			errs = append(errs, fmt.Errorf("history: column %q of the key may be NULL, and rows with a NULL there are never found again; run: ALTER TABLE %s ALTER %s SET NOT NULL", k, m.sql(), quote(k)))
		}
	}
	return errors.Join(errs...)
}

// reads adds the message's id as the history's elements have it.
func (m *remembering) reads(t *target) []columns.Column {
	typ := columns.Type{Cast: "pg_catalog.text", Name: "text", OID: pgtype.TextOID, Category: 'S'}
	if t.attribute(m.Column).typ.Element == pgtype.UUIDOID {
		typ = columns.Type{Cast: "pg_catalog.uuid", Name: "uuid", OID: pgtype.UUIDOID, Category: 'U'}
	}
	return []columns.Column{{Name: m.Column, Field: message.Field{Kind: message.FieldID}, Type: typ}}
}

func (m *remembering) writer(t *target, p *plan) writer {
	return &rememberingWriter{m, p, m.rememberSQL(t, p, false), m.rememberSQL(t, p, true)}
}

// rememberingWriter adds rows and locks those that are there in one pass in the order of the
// keys, like any upsert: two workers that locked what is there first, and added the others
// afterwards, would deadlock. The first statement overwrites a row only if that remembers none
// of its messages. Then the rows are locked, and the second one can look which messages the
// others remember.
type rememberingWriter struct {
	m           *remembering
	p           *plan
	first, rest string
}

func (w *rememberingWriter) statements(values *columns.Values) []query {
	return []query{{w.first, w.p.args(values)}, {w.rest, w.p.args(values)}}
}

func (w *rememberingWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	var rest, remembered []int64 // messages, from 1
	var due, written int64
	b.Queue(w.first, w.p.args(values)...).QueryRow(func(row pgx.Row) error { return row.Scan(&s.rows, &due, &written, &remembered, &rest) })
	s.settle = func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
		for _, i := range indexesOf(remembered) {
			batch.Outcome(i, sinks.AlreadyPresent)
		}
		if len(rest) == 0 {
			return nil
		}
		return w.writeRest(ctx, tx, batch, values, indexesOf(rest))
	}
	return s
}

// writeRest writes the messages of the rows that the first statement left as they were. The
// planner uses an index to look at them: see versionedWriter.writeRest.
func (w *rememberingWriter) writeRest(ctx context.Context, tx sinks.Tx, batch *sinks.Batch, values *columns.Values, rest []int) error {
	var all, due, written int64
	var remembered, none []int64
	var b pgx.Batch
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.rest, w.p.args(values.Rows(rest))...).QueryRow(func(row pgx.Row) error { return row.Scan(&all, &due, &written, &remembered, &none) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if due != written {
		return w.m.keptAway(ctx, tx, w.p)
	}
	for _, i := range indexesOf(remembered) {
		batch.Outcome(rest[i], sinks.AlreadyPresent)
	}
	return nil
}

// rememberSQL leaves out the messages that came before in the batch. The last of a row's
// others overwrites the row, and the ids of all of them go to the end of its history. It
// returns the numbers of messages, of rows due and of those written, the messages left out,
// and those of the rows that it left as they were.
//
// If it looks, it also leaves out the messages that their rows remember. Else it leaves a row
// as it was, but locked, if that remembers one of its messages, or if EXCLUDED may not have the
// ids of all of them.
func (m *remembering) rememberSQL(t *target, p *plan, looks bool) string {
	exprs := m.exprs(t, p)
	casts, all, key, names, match := make([]string, len(exprs)), make([]string, len(exprs)), []string(nil), []string(nil), []string(nil)
	for i, name := range p.names {
		col := fmt.Sprintf("v%d", i+1)
		casts[i], all[i] = exprs[i]+" AS "+col, "r."+col
		if slices.Contains(m.key, name) {
			key, names = append(key, col), append(names, fmt.Sprintf("k%d", len(key)+1))
			match = append(match, t.matches(name, "t."+quote(name), "d."+col))
		}
	}
	k, by, history, collate := m.keyed(t, p), strings.Join(key, ", "), quote(m.Column), ""
	if t.attribute(m.Column).typ.Element == pgtype.TextOID {
		collate = ` COLLATE pg_catalog."C"` // ids are equal if their bytes are
	}
	remembers := fmt.Sprintf("coalesce(t.%s, '{}')%s", history, collate)
	overwrite := fmt.Sprintf("%s = %s", history, m.last(fmt.Sprintf("coalesce(t.%s, '{}') OPERATOR(pg_catalog.||) EXCLUDED.%[1]s", history)))
	if set, ok := strings.CutPrefix(k.overwrite, " DO UPDATE SET "); ok {
		overwrite = set + ", " + overwrite
	}
	look, from, known, rest := "", "b", "", "NULL::pg_catalog.int8[]"
	if looks {
		look = fmt.Sprintf(`), old AS MATERIALIZED (
  SELECT d.n, o.history FROM (SELECT DISTINCT ON (n) n, %s FROM b ORDER BY n) AS d
   CROSS JOIN LATERAL (SELECT t.%s AS history FROM %s AS t WHERE %s) AS o
`, by, history, m.rows(t), strings.Join(match, " AND "))
		from = "b LEFT JOIN old AS o USING (n)"
		known = fmt.Sprintf(" OR coalesce(b.op%s OPERATOR(pg_catalog.=) ANY (o.history), false)", collate)
	} else {
		overwrite += fmt.Sprintf(" WHERE pg_catalog.cardinality(EXCLUDED.%s) < %d AND NOT (%s OPERATOR(pg_catalog.&&) EXCLUDED.%[1]s)", history, m.Size, remembers)
		rest = fmt.Sprintf(`CASE WHEN (SELECT pg_catalog.count(*) FROM i) < (SELECT pg_catalog.count(*) FROM h) THEN (%s) END`, unwrittenSQL(by, strings.Join(names, ", ")))
	}
	return fmt.Sprintf(`WITH b AS MATERIALIZED (
  SELECT u.*, pg_catalog.dense_rank() OVER (ORDER BY %[1]s) AS n FROM (SELECT u.ord, %[2]s, %[3]s%[4]s AS op FROM %[5]s WHERE %[6]s) AS u
%[8]s), r AS MATERIALIZED (
  SELECT b.*, b.ord > pg_catalog.min(b.ord) OVER (PARTITION BY b.n, b.op)%[7]s AS remembered FROM %[18]s
), h AS (
  SELECT pg_catalog.max(ord) AS ord, pg_catalog.array_agg(op ORDER BY ord) AS ops FROM r WHERE NOT remembered GROUP BY n
), i AS (
  INSERT INTO %[9]s AS t (%[10]s, %[11]s) SELECT %[12]s, %[13]s FROM h JOIN r USING (ord) ORDER BY r.n
  %[14]s DO UPDATE SET %[15]s RETURNING %[16]s
)
SELECT (SELECT pg_catalog.count(*) FROM b), (SELECT pg_catalog.count(*) FROM h), (SELECT pg_catalog.count(*) FROM i),
       (SELECT coalesce(pg_catalog.array_agg(ord ORDER BY ord), '{}') FROM r WHERE remembered), %[17]s`,
		by, strings.Join(casts, ", "), p.set.Expr(len(p.names)), collate, p.set.From(), p.unchanged,
		known, look, m.sql(), strings.Join(quoted(p.names), ", "), history, strings.Join(all, ", "), m.last("h.ops"),
		k.conflict, overwrite, m.returned(t, p, names), rest, from)
}

// unwrittenSQL are the messages of b whose row isn't in i. A row that is comes before its
// messages, with 0 for ord.
func unwrittenSQL(key, returned string) string {
	return fmt.Sprintf(`
  SELECT pg_catalog.array_agg(ord ORDER BY ord)
    FROM (SELECT ord, pg_catalog.min(ord) OVER (PARTITION BY %s) AS least FROM (SELECT ord, %[1]s FROM b UNION ALL SELECT 0, %s FROM i) AS a) AS a
   WHERE ord > 0 AND least > 0`, key, returned)
}

// last are the elements of an array that the history has room for.
func (m *remembering) last(array string) string {
	return fmt.Sprintf("(%s)[greatest(pg_catalog.array_upper(%[1]s, 1) - %d, pg_catalog.array_lower(%[1]s, 1)):]", array, m.Size-1)
}
