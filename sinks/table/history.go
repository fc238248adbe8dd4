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
	return &rememberingWriter{m, p, m.rememberSQL(t, p)}
}

// rememberingWriter writes by one statement, which says which messages their rows remember.
type rememberingWriter struct {
	m   *remembering
	p   *plan
	sql string
}

func (w *rememberingWriter) statements(values *columns.Values) []query {
	return []query{{w.sql, w.p.args(values)}}
}

// queue lets the planner use the key's index: see versionedWriter.queue.
func (w *rememberingWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	var remembered []int64
	var due, written int64
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.sql, w.p.args(values)...).QueryRow(func(row pgx.Row) error { return row.Scan(&s.rows, &due, &written, &remembered) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	s.settle = func(_ context.Context, _ sinks.Tx, batch *sinks.Batch) error {
		if due != written {
			return w.m.mismatch(due, written)
		}
		w.m.mismatches.Store(0)
		for _, ord := range remembered {
			batch.Outcome(int(ord-1), sinks.AlreadyPresent)
		}
		return nil
	}
	return s
}

// rememberSQL locks the rows of a batch's keys, in the order of the keys, and leaves out the
// messages that their rows remember, or that came before in the batch. The last of the others
// overwrites the row, and the ids of all of them go to the end of its history.
//
// Nobody can change a row between the look and the write. But a row that wasn't there may be
// added, by a worker that has some of the same messages. So the write, which has the row
// locked, looks once more, and leaves the row alone if it remembers one of them. Then fewer
// rows are written than were due, and the transaction is tried again.
func (m *remembering) rememberSQL(t *target, p *plan) string {
	exprs := m.exprs(t, p)
	casts, all, key, match := make([]string, len(exprs)), make([]string, len(exprs)), []string(nil), []string(nil)
	for i, name := range p.names {
		col := fmt.Sprintf("v%d", i+1)
		casts[i], all[i] = exprs[i]+" AS "+col, "r."+col
		if slices.Contains(m.key, name) {
			key = append(key, col)
			match = append(match, t.matches(name, "t."+quote(name), "d."+col))
		}
	}
	k, history, collate := m.keyed(t, p), quote(m.Column), ""
	if t.attribute(m.Column).typ.Element == pgtype.TextOID {
		collate = ` COLLATE pg_catalog."C"` // ids are equal if their bytes are
	}
	remembers := fmt.Sprintf("coalesce(t.%s, '{}')%s", history, collate)
	overwrite := fmt.Sprintf("%s = %s", history, m.last(fmt.Sprintf("coalesce(t.%s, '{}') OPERATOR(pg_catalog.||) EXCLUDED.%[1]s", history)))
	if set, ok := strings.CutPrefix(k.overwrite, " DO UPDATE SET "); ok {
		overwrite = set + ", " + overwrite
	}
	return fmt.Sprintf(`WITH b AS MATERIALIZED (
  SELECT u.*, pg_catalog.dense_rank() OVER (ORDER BY %[1]s) AS n FROM (SELECT u.ord, %[2]s, %[3]s%[4]s AS op FROM %[5]s WHERE %[6]s) AS u
), old AS MATERIALIZED (
  SELECT d.n, o.history FROM (SELECT DISTINCT ON (n) n, %[1]s FROM b ORDER BY n) AS d
   CROSS JOIN LATERAL (SELECT t.%[7]s AS history FROM %[8]s AS t WHERE %[9]s FOR NO KEY UPDATE) AS o
), r AS MATERIALIZED (
  SELECT b.*, b.ord > pg_catalog.min(b.ord) OVER (PARTITION BY b.n, b.op) OR coalesce(b.op%[4]s OPERATOR(pg_catalog.=) ANY (o.history), false) AS remembered
    FROM b LEFT JOIN old AS o USING (n)
), h AS MATERIALIZED (
  SELECT pg_catalog.max(ord) AS ord, pg_catalog.array_agg(op ORDER BY ord) AS ops FROM r WHERE NOT remembered GROUP BY n
), i AS (
  INSERT INTO %[10]s AS t (%[11]s, %[7]s) SELECT %[12]s, %[13]s FROM h JOIN r USING (ord) ORDER BY r.n
  %[14]s DO UPDATE SET %[15]s WHERE NOT (%[16]s OPERATOR(pg_catalog.&&) EXCLUDED.%[7]s) RETURNING 1
)
SELECT (SELECT pg_catalog.count(*) FROM b), (SELECT pg_catalog.count(*) FROM h), (SELECT pg_catalog.count(*) FROM i),
       (SELECT coalesce(pg_catalog.array_agg(ord ORDER BY ord), '{}') FROM r WHERE remembered)`,
		strings.Join(key, ", "), strings.Join(casts, ", "), p.set.Expr(len(p.names)), collate, p.set.From(), p.unchanged,
		history, m.rows(t), strings.Join(match, " AND "),
		m.sql(), strings.Join(quoted(p.names), ", "), strings.Join(all, ", "), m.last("h.ops"),
		k.conflict, overwrite, remembers)
}

// last are the elements of an array that the history has room for.
func (m *remembering) last(array string) string {
	return fmt.Sprintf("(%s)[greatest(pg_catalog.array_upper(%[1]s, 1) - %d, pg_catalog.array_lower(%[1]s, 1)):]", array, m.Size-1)
}
