package table

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/internal/nearest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
	"github.com/dedupd/dedupd/sinks/internal/mismatch"
)

// update changes the row of a message's key if the row is as the message expects, and adds
// none. Several messages of one row in a batch take their turns: statement k takes the k-th
// message of each row, since one statement can't update a row twice, and each must find the
// row as the one before has left it.
type update struct {
	*Sink
	onMismatch       policy.Mismatch
	absent           policy.Absent
	acceptReordering bool
}

func newUpdate(s *Sink, c Config) (mode, error) {
	errs := []error{c.needsKey()}
	if len(c.Expect) == 0 {
		errs = append(errs, errors.New("expect: mode update needs what a row must be like to take a message, such as {status: const:pending}"))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Expect)) {
		switch col, err := placed("expect", name, c.Expect[name]); {
		case err != nil:
			errs = append(errs, err)
		case slices.Contains(c.Key, name):
			errs = append(errs, fmt.Errorf("expect.%s: it is part of the key, by which the row is found", name))
		case col.Field.Kind == message.FieldNow:
			errs = append(errs, fmt.Errorf("expect.%s: no row holds the time of a later transaction; expect another place", name))
		default:
			s.expected = append(s.expected, col)
		}
	}
	if len(c.Columns) > 0 && len(c.Columns) == len(c.Key) {
		errs = append(errs, errors.New("columns: they have nothing but the key, so no row would be changed"))
	}
	on, err := choice("on_mismatch", c.OnMismatch, policy.MismatchDeadLetter)
	absent, bad := choice("absent", c.Absent, policy.AbsentKeep)
	return &update{s, on, absent, c.AcceptReordering}, errors.Join(append(errs, err, bad)...)
}

func (m *update) overwrites() bool { return true }

func (m *update) keeps(c columns.Column) bool {
	return m.absent == policy.AbsentKeep && !slices.Contains(m.key, c.Name) && mayKeep(c)
}

func (m *update) access(column string) access {
	isKey := slices.Contains(m.key, column)
	return access{updates: !isKey, selects: isKey}
}

// undoes is false if a message changes what it expects: then an older one no longer finds the
// row as it expects once a newer one was there.
func (m *update) undoes() bool {
	return !slices.ContainsFunc(m.expected, func(e columns.Column) bool {
		return slices.ContainsFunc(m.cols, func(c columns.Column) bool { return c.Name == e.Name && c.Field != e.Field })
	})
}

func (m *update) needsOrder() error {
	if m.acceptReordering || !m.undoes() {
		return nil
	}
	return errors.New("expect: no message changes what it expects, and a NATS queue has no order: an older message would overwrite a newer one; " +
		"expect a column that each message changes, such as a version or a status, or set accept_reordering: true if that may be")
}

func (m *update) check(t *target) error {
	var errs []error
	var noSelect []string
	for _, e := range m.expected {
		switch a := t.attribute(e.Name); {
		case a == nil:
			hint := "the columns are " + strings.Join(t.names(), ", ")
			if name := nearest.Name(e.Name, t.names()); name != "" {
				hint = fmt.Sprintf("did you mean %q?", name)
			}
			errs = append(errs, fmt.Errorf("expect: it has no column %q; %s", e.Name, hint))
		case !a.maySelect:
			noSelect = append(noSelect, quote(e.Name))
		}
	}
	if len(noSelect) > 0 {
		errs = append(errs, fmt.Errorf("expect: this role lacks a privilege; run: GRANT SELECT (%s) ON %s TO <role>", strings.Join(noSelect, ", "), m.sql()))
	}
	return errors.Join(errs...)
}

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

// lockedRows is what the first statement has found. Messages are numbers from 1.
type lockedRows struct {
	messages int64
	found    []int64 // the first messages of the rows that are there
	places   []pgtype.TID
	// later are the messages that aren't the first of their row, with their turns and the first
	// message of the row.
	later, turns, firsts []int64
	states               []byte
}

// turnsOf are the messages of each turn, by their indexes in a batch of n. Those of rows that
// aren't there have none but the first.
func (l *lockedRows) turnsOf(n int) (all [][]int, without []int) {
	isFound, isLater := make([]bool, n), make([]bool, n)
	for _, ord := range l.found {
		isFound[ord-1] = true
	}
	all = [][]int{make([]int, 0, n)}
	for i, ord := range l.later {
		isLater[ord-1] = true
		turn := int(l.turns[i])
		if !isFound[l.firsts[i]-1] {
			without = append(without, int(ord-1))
			continue
		}
		for len(all) < turn {
			all = append(all, nil)
		}
		all[turn-1] = append(all[turn-1], int(ord-1))
	}
	for i := range n {
		if !isLater[i] {
			all[0] = append(all[0], i)
		}
	}
	return all, without
}

// placesOf are the places of the rows of the first turn.
func (l *lockedRows) placesOf(n int, turn []int) []pgtype.TID {
	all, some := make([]pgtype.TID, n), make([]pgtype.TID, len(turn))
	for i, ord := range l.found {
		all[ord-1] = l.places[i]
	}
	for i, at := range turn {
		some[i] = all[at]
	}
	return some
}

// mostTurns is how many turns are sent at once.
const mostTurns = 256

// takeTurns updates the rows, turn by turn, and settles the messages that didn't find their
// row as they expected.
func (w *updateWriter) takeTurns(ctx context.Context, tx sinks.Tx, batch *sinks.Batch, values *columns.Values, l *lockedRows) error {
	n := len(batch.Messages())
	switch {
	case l.messages == 0:
		return errChanged
	case l.messages != int64(n):
		return fmt.Errorf("the columns of sink.table.key find more than one row for a message (%d rows for %d messages); name columns that identify a row", l.messages, n)
	}
	r := &turnResults{applied: make([]bool, n), why: make(map[int]string)}
	if err := r.read(w.m.expected, l.states, nil); err != nil {
		return err
	}
	turns, without := l.turnsOf(n)
	for first := 0; first < len(turns); first += mostTurns {
		var b pgx.Batch
		b.Queue("SET LOCAL enable_seqscan = off")
		if first > 0 || len(turns) > 1 || !w.places {
			b.Queue("SET LOCAL plan_cache_mode = force_custom_plan") // for the table as it is now
		}
		for i, turn := range turns[first:min(first+mostTurns, len(turns))] {
			some := values
			if len(turn) < n {
				some = values.Rows(turn)
			}
			var places []pgtype.TID
			if first+i == 0 && w.places {
				places = l.placesOf(n, turn)
			}
			if first+i > 0 {
				w.queueStates(&b, some, turn, r)
			}
			q := w.updating(some, places)
			b.Queue(q.sql, q.args...).QueryRow(func(row pgx.Row) error {
				var done []int64
				err := row.Scan(&done)
				for _, ord := range done {
					r.applied[turn[ord-1]] = true
				}
				return err
			})
		}
		if first+mostTurns >= len(turns) && len(without) > 0 {
			w.queueStates(&b, values.Rows(without), without, r)
		}
		b.Queue("SET LOCAL enable_seqscan = DEFAULT")
		b.Queue("SET LOCAL plan_cache_mode = DEFAULT")
		w.m.queueTargets(&b, w.p)
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
	}
	if err := w.lookAgain(ctx, tx, values, l); err != nil {
		return err
	}
	return w.settle(batch, r)
}

// lookAgain looks once more for the rows that weren't found. A row that is replaced while its
// lock is waited for isn't seen: not the old one, which is gone, nor the new one, which the
// statement's snapshot doesn't have. Nor is one that has just been added. By then the messages
// of its later turns were passed over.
func (w *updateWriter) lookAgain(ctx context.Context, tx sinks.Tx, values *columns.Values, l *lockedRows) error {
	missing := make([]int, 0, int(l.messages)-len(l.found))
	known := make([]bool, l.messages)
	for _, ord := range slices.Concat(l.found, l.later) {
		known[ord-1] = true
	}
	for i, is := range known {
		if !is {
			missing = append(missing, i)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	var there bool
	var b pgx.Batch
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.there, values.Rows(missing).Of(w.compared).Args()...).QueryRow(func(row pgx.Row) error { return row.Scan(&there) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if there {
		return meanwhile("somebody else has added or replaced a row of this batch meanwhile")
	}
	return nil
}

// queueStates finds out which messages of a turn don't find their row as they expect.
func (w *updateWriter) queueStates(b *pgx.Batch, values *columns.Values, turn []int, r *turnResults) {
	if !w.explains {
		return
	}
	b.Queue(w.states, values.Of(w.compared).Args()...).QueryRow(func(row pgx.Row) error {
		var states []byte
		return errors.Join(row.Scan(&states), r.read(w.m.expected, states, turn))
	})
}

// settle settles the messages that weren't applied.
func (w *updateWriter) settle(batch *sinks.Batch, r *turnResults) error {
	var refused []error
	for i, applied := range r.applied {
		if !applied {
			why := cmp.Or(r.why[i], "the row is as it expects, but a trigger, rule or policy of the table left it unchanged")
			refused = append(refused, mismatch.Settle(batch, i, w.m.onMismatch, fmt.Errorf("%s; sink.table.on_mismatch is %s", why, w.m.onMismatch)))
		}
	}
	return errors.Join(refused...)
}

// turnResults is what became of the messages.
type turnResults struct {
	applied []bool
	why     map[int]string // not, by their indexes
}

// read reads the states that the statements tell, of a turn; nil: of the whole batch.
func (r *turnResults) read(expected []columns.Column, states []byte, turn []int) error {
	if states == nil {
		return nil
	}
	var all [][]*string // ord, found, and for each column what is expected and what is found
	if err := json.Unmarshal(states, &all); err != nil {
		return fmt.Errorf("read the states of rows: %w", err)
	}
	for _, s := range all {
		ord, err := strconv.Atoi(*s[0])
		if err != nil {
			return fmt.Errorf("read the states of rows: %w", err)
		}
		at := ord - 1
		if turn != nil {
			at = turn[at]
		}
		want, have := make([]string, len(expected)), make([]string, len(expected))
		for i, e := range expected {
			want[i], have[i] = shown(e.Name, s[2+2*i]), shown(e.Name, s[3+2*i])
		}
		r.why[at] = "it expects " + listed(want) + "; "
		if s[1] == nil {
			r.why[at] += "there is no row with its key"
		} else {
			r.why[at] += "its row has " + listed(have)
		}
	}
	return nil
}

// shown is a column's value in a reason.
func shown(column string, value *string) string {
	if value == nil {
		return column + " = NULL"
	}
	text, more := *value, ""
	if r := []rune(text); len(r) > mostShown {
		text, more = string(r[:mostShown]), "…"
	}
	return column + " = " + strconv.Quote(text) + more
}

// mostListed is how many columns a reason lists.
const mostListed = 8

func listed(all []string) string {
	if n := len(all) - mostListed; n > 0 {
		return strings.Join(all[:mostListed], ", ") + fmt.Sprintf(" and %d more", n)
	}
	return strings.Join(all, ", ")
}
