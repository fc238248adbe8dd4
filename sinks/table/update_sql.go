package table

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// writer makes the statements: see updateWriter.
func (m *update) writer(t *target, p *plan) writer {
	var cols []columns.Column
	arrays, keeps := false, false
	for i, c := range p.set.Columns() {
		if i >= len(m.cols) || slices.Contains(m.key, c.Name) {
			cols = append(cols, c)
		}
		arrays, keeps = arrays || p.set.Row(i) != "", keeps || c.Keeps
	}
	w := &updateWriter{m: m, p: p, explains: m.onMismatch != policy.MismatchIgnore, keeps: keeps, places: t.kind == "r" && t.mayRead && arrays}
	w.compared, _ = columns.NewSet(cols) // which p.set has, so there is no error
	none, _ := w.compared.Encode(nil)

	e := m.exprsOf(t, w.compared, len(m.key))
	place := "NULL::pg_catalog.tid"
	if w.places {
		place = "t.ctid"
	}
	old := func(where string) string {
		return fmt.Sprintf("LEFT JOIN LATERAL (SELECT true AS found, %s AS place, %s FROM %s AS t WHERE %s%s FOR NO KEY UPDATE) AS old ON true",
			place, strings.Join(e.found, ", "), m.rows(t), where, e.match)
	}
	differs := "(old.found IS NULL OR NOT (" + e.holds + "))"
	states, first := "", "NULL::pg_catalog.json"
	if w.explains {
		states = "pg_catalog.json_agg(pg_catalog.json_build_array(b.ord::pg_catalog.text, old.found::pg_catalog.text, " + strings.Join(e.shown, ", ") + "))"
		first = states + " FILTER (WHERE b.turn = 1 AND " + differs + ")"
	}
	messages := fmt.Sprintf("SELECT u.ord, %s, %s FROM %s", strings.Join(e.keys, ", "), strings.Join(e.expected, ", "), w.compared.From())
	w.lock = fmt.Sprintf(`SELECT pg_catalog.count(*), pg_catalog.array_agg(b.ord) FILTER (WHERE old.found), pg_catalog.array_agg(old.place) FILTER (WHERE old.found),
       pg_catalog.array_agg(b.ord) FILTER (WHERE b.turn > 1), pg_catalog.array_agg(b.turn) FILTER (WHERE b.turn > 1), pg_catalog.array_agg(b.first) FILTER (WHERE b.turn > 1), %s
  FROM (SELECT m.*, pg_catalog.row_number() OVER w AS turn, pg_catalog.first_value(ord) OVER w AS first
          FROM (%s WHERE %s) AS m WINDOW w AS (PARTITION BY %s ORDER BY ord) ORDER BY %[4]s, ord) AS b %s`,
		first, messages, unchangedAfter(len(none.Args())), strings.Join(e.names, ", "), old("b.turn = 1 AND "))
	w.states = fmt.Sprintf("SELECT %s FROM (%s) AS b %s WHERE %s", states, messages, old(""), differs)
	w.there = fmt.Sprintf("SELECT EXISTS (SELECT FROM (%s) AS b WHERE EXISTS (SELECT FROM %s AS t WHERE %s))", messages, m.rows(t), e.match)

	e = m.exprsOf(t, p.set, len(m.cols))
	for _, by := range []updateBy{{}, {absent: true}, {place: true}, {place: true, absent: true}} {
		more, with, match := w.arrays(by), []string{"u.ord"}, e.match
		for _, a := range more {
			with = append(with, "u."+a.Name)
		}
		with = append(with, e.expected...)
		if with = append(with, e.values...); by.place {
			match = "t.ctid OPERATOR(pg_catalog.=) b.place"
		} else {
			with = append(with, e.keys...)
		}
		w.update[by.index()] = fmt.Sprintf(`WITH done AS (UPDATE %s AS t SET %s FROM (SELECT %s FROM %s) AS b WHERE %s AND %s%s RETURNING b.ord)
SELECT pg_catalog.array_agg(ord) FROM done`, m.rows(t), e.sets(by.absent), strings.Join(with, ", "), p.set.From(more...), match, e.still, p.set.Constants())
	}
	return w
}

// updateExprs are the parts of an update's statements. In them b is a message, t its row and
// old what has been read of the row.
type updateExprs struct {
	keys, names []string // of the message, as k1 and so on
	match       string   // the row is the message's
	expected    []string // of the message, as e1 and so on
	found       []string // of the row, as x1 and so on
	holds       string   // what has been read of the row is as expected
	still       string   // the row is as expected
	shown       []string // both states, as texts
	values      []string // of the message, as v1 and so on
	set         []setColumn
}

// setColumn is a column to which a value is written.
type setColumn struct {
	index int // in the set
	name  string
	keeps bool
}

// sets writes the values. Those that are absent leave their columns as they are.
func (e *updateExprs) sets(absent bool) string {
	all := make([]string, len(e.set))
	for i, c := range e.set {
		value := fmt.Sprintf("b.v%d", i+1)
		if absent && c.keeps {
			value = fmt.Sprintf("CASE WHEN %s THEN t.%s ELSE %s END", columns.IsAbsent("b.absent", c.index), c.name, value)
		}
		all[i] = c.name + " = " + value
	}
	return strings.Join(all, ", ")
}

// exprsOf makes them of a set's columns, of which the first ones are those that are filled.
func (m *update) exprsOf(t *target, set *columns.Set, filled int) (e updateExprs) {
	var key, row, values, holds, still []string
	for i, c := range set.Columns() {
		name := quote(c.Name)
		switch expr := m.comparedExpr(t, set, i); {
		case i >= filled:
			n := i - filled + 1
			old, want := fmt.Sprintf("x%d", n), fmt.Sprintf("e%d", n)
			e.expected = append(e.expected, expr+" AS "+want)
			e.found = append(e.found, "t."+name+" AS "+old)
			e.shown = append(e.shown, shownSQL("b."+want), shownSQL("old."+old))
			holds = append(holds, t.same(c.Name, "old."+old, "b."+want))
			still = append(still, t.same(c.Name, "t."+name, "b."+want))
		case slices.Contains(m.key, c.Name):
			k := fmt.Sprintf("k%d", len(e.names)+1)
			e.keys, e.names = append(e.keys, expr+" AS "+k), append(e.names, k)
			key, row, values = append(key, c.Name), append(row, "t."+name), append(values, "b."+k)
		default:
			e.values = append(e.values, fmt.Sprintf("%s AS v%d", set.Expr(i), len(e.values)+1))
			e.set = append(e.set, setColumn{i, name, c.Keeps})
		}
	}
	e.match, e.holds, e.still = t.matchesAll(key, row, values), strings.Join(holds, " AND "), strings.Join(still, " AND ")
	return e
}

// mostShown is how many characters of a value a reason shows.
const mostShown = 60

func shownSQL(expr string) string {
	return fmt.Sprintf("pg_catalog.left(%s::pg_catalog.text, %d)", expr, mostShown+1)
}

// updateWriter makes statements of three kinds.
//
// The first one locks the rows, in the order of their keys, so that two workers can't deadlock.
// It numbers the messages of each row, and tells which of the first ones don't find their row
// as they expect, for the reasons of dead letters. A later one's statement does so for another
// turn. An update is that of a turn. That of the first turn finds the rows by their places,
// which can't change while they are locked; that is cheaper than by their keys, and needs no
// plan that depends on the table's size.
type updateWriter struct {
	m *update
	p *plan
	// compared are the columns of the key, then those that are expected.
	compared     *columns.Set
	lock, states string
	there        string    // whether any of some messages has a row
	update       [4]string // by updateBy.index
	explains     bool      // both states are read
	places       bool      // rows are found by them: not those of views or partitions
	keeps        bool      // what is absent may leave columns as they are
}

// updateBy is a kind of update.
type updateBy struct{ place, absent bool }

func (by updateBy) index() (i int) {
	if by.place {
		i = 1
	}
	if by.absent {
		i += 2
	}
	return i
}

// arrays are the parameters after those of the values.
func (w *updateWriter) arrays(by updateBy) (all []columns.Array) {
	if by.place {
		all = append(all, columns.Array{Name: "place", Type: "pg_catalog.tid", Param: w.p.params + 1})
	}
	if by.absent {
		all = append(all, columns.Array{Name: "absent", Type: "pg_catalog.bytea", Param: w.p.params + 1 + len(all)})
	}
	return all
}

// updating is the update of some messages, whose rows have these places; nil: unknown.
func (w *updateWriter) updating(values *columns.Values, places []pgtype.TID) query {
	by := updateBy{places != nil, values.HasAbsent()}
	q := query{w.update[by.index()], values.Args()}
	if by.place {
		q.args = append(q.args, places)
	}
	if by.absent {
		q.args = append(q.args, values.Masks())
	}
	return q
}

func (w *updateWriter) statements(values *columns.Values) []query {
	compared := values.Of(w.compared)
	all := []query{{w.lock, w.p.args(compared)}, {w.there, compared.Args()}}
	if w.explains {
		all = append(all, query{w.states, compared.Args()})
	}
	if w.keeps {
		all = append(all, query{w.update[updateBy{absent: true}.index()], append(values.Args(), values.Masks())})
	}
	if w.places {
		all = append(all, w.updating(values, []pgtype.TID{}))
	}
	return append(all, w.updating(values, nil))
}

// queue locks the rows and finds out whose turn is when. The planner uses an index there: it
// would estimate that a small table is best read whole, and keep that plan while the table
// grows.
func (w *updateWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	var l lockedRows
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.lock, w.p.args(values.Of(w.compared))...).QueryRow(func(row pgx.Row) error {
		err := row.Scan(&s.rows, &l.found, &l.places, &l.later, &l.turns, &l.firsts, &l.states)
		l.messages = s.rows
		return err
	})
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	s.settle = func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
		return w.takeTurns(ctx, tx, batch, values, &l)
	}
	return s
}
