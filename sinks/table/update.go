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
	return &update{s, on, c.AcceptReordering}, errors.Join(append(errs, err)...)
}

func (m *update) overwrites() bool { return true }

func (m *update) access(column string) access {
	isKey := slices.Contains(m.key, column)
	return access{updates: !isKey, selects: isKey}
}

// needsOrder is an error unless a message changes what it expects: then an older one no longer
// finds the row as it expects once a newer one was there.
func (m *update) needsOrder() error {
	if m.acceptReordering || slices.ContainsFunc(m.expected, func(e columns.Column) bool {
		return slices.ContainsFunc(m.cols, func(c columns.Column) bool { return c.Name == e.Name && c.Field != e.Field })
	}) {
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

// writer makes three statements. The first one locks the rows, in the order of their keys, so
// that two workers can't deadlock, and numbers the messages of each row. The second one tells
// which messages of a turn don't find their row as they expect, for the reasons of dead
// letters; the first one does so for the first turn. The third one is a turn's update.
func (m *update) writer(t *target, p *plan) writer {
	e := m.exprsOf(t, p)
	states, first, explains := "", "NULL::pg_catalog.json", m.onMismatch != policy.MismatchIgnore
	if explains {
		states = "pg_catalog.json_agg(pg_catalog.json_build_array(b.ord::pg_catalog.text, old.found::pg_catalog.text, " + strings.Join(e.shown, ", ") + "))"
		first = states + " FILTER (WHERE old.found IS NULL OR b.turn = 1 AND NOT (" + e.holds + "))"
	}
	messages := fmt.Sprintf("SELECT u.ord, %s, %s FROM %s", strings.Join(e.keys, ", "), strings.Join(e.expected, ", "), p.set.From())
	old := fmt.Sprintf("CROSS JOIN LATERAL (SELECT true AS found, %s FROM %s AS t WHERE %s FOR NO KEY UPDATE) AS old",
		strings.Join(e.found, ", "), m.rows(t), e.match)
	return &updateWriter{
		m: m, p: p, explains: explains,
		lock: fmt.Sprintf(`WITH m AS MATERIALIZED (
  %s WHERE %s%s
), b AS MATERIALIZED (
  SELECT m.*, pg_catalog.dense_rank() OVER (ORDER BY %s) AS place,
         pg_catalog.row_number() OVER (PARTITION BY %[4]s ORDER BY ord) AS turn
    FROM m
), old AS MATERIALIZED (
  SELECT b.place, old.* FROM (SELECT * FROM b WHERE turn = 1 ORDER BY place) AS b %[5]s
)
SELECT pg_catalog.count(*),
       coalesce(pg_catalog.array_agg(b.ord ORDER BY b.ord) FILTER (WHERE b.turn > 1), '{}'),
       coalesce(pg_catalog.array_agg(CASE WHEN old.found THEN b.turn ELSE 0 END ORDER BY b.ord) FILTER (WHERE b.turn > 1), '{}'),
       %[6]s
  FROM b LEFT JOIN old USING (place)`,
			messages, p.unchanged, p.set.Constants(), strings.Join(e.names, ", "), old, first),
		states: fmt.Sprintf("SELECT %s FROM (%s WHERE true%s) AS b %s WHERE NOT (%s)", states, messages, p.set.Constants(), old, e.holds),
		update: fmt.Sprintf("UPDATE %s AS t SET %s FROM (SELECT u.ord, %s FROM %s) AS b WHERE %s AND %s RETURNING b.ord",
			m.rows(t), strings.Join(e.sets, ", "), strings.Join(slices.Concat(e.keys, e.expected, e.values), ", "), p.set.From(), e.match, e.still),
	}
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
	sets        []string
}

func (m *update) exprsOf(t *target, p *plan) (e updateExprs) {
	var match, holds, still []string
	for i, c := range p.set.Columns() {
		name := quote(c.Name)
		switch expr := m.comparedExpr(t, p.set, i); {
		case i >= len(m.cols):
			n := i - len(m.cols) + 1
			old, want := fmt.Sprintf("x%d", n), fmt.Sprintf("e%d", n)
			e.expected = append(e.expected, expr+" AS "+want)
			e.found = append(e.found, "t."+name+" AS "+old)
			e.shown = append(e.shown, shownSQL("b."+want), shownSQL("old."+old))
			holds = append(holds, t.same(c.Name, "old."+old, "b."+want))
			still = append(still, t.same(c.Name, "t."+name, "b."+want))
		case slices.Contains(m.key, c.Name):
			k := fmt.Sprintf("k%d", len(e.names)+1)
			e.keys, e.names = append(e.keys, expr+" AS "+k), append(e.names, k)
			match = append(match, t.matches(c.Name, "t."+name, "b."+k))
		default:
			v := fmt.Sprintf("v%d", len(e.values)+1)
			e.values = append(e.values, p.set.Expr(i)+" AS "+v)
			e.sets = append(e.sets, fmt.Sprintf("%s = b.%s", name, v))
		}
	}
	e.match, e.holds, e.still = strings.Join(match, " AND "), strings.Join(holds, " AND "), strings.Join(still, " AND ")
	return e
}

// mostShown is how many characters of a value a reason shows.
const mostShown = 60

func shownSQL(expr string) string {
	return fmt.Sprintf("pg_catalog.left(%s::pg_catalog.text, %d)", expr, mostShown+1)
}

// updateWriter has the statements: see update.writer.
type updateWriter struct {
	m                    *update
	p                    *plan
	lock, states, update string
	explains             bool // both states are read
}

func (w *updateWriter) statements(values *columns.Values) []query {
	all := []query{{w.lock, w.p.args(values)}, {w.states, values.Args()}, {w.update, values.Args()}}
	if !w.explains {
		all = slices.Delete(all, 1, 2)
	}
	return all
}

// queue locks the rows and finds out whose turn is when. The planner uses an index there: it
// would estimate that a small table is best read whole, and keep that plan while the table
// grows.
func (w *updateWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	var found lockedRows
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.lock, w.p.args(values)...).QueryRow(func(row pgx.Row) error {
		err := row.Scan(&s.rows, &found.later, &found.turns, &found.states)
		found.messages = s.rows
		return err
	})
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	s.settle = func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
		return w.takeTurns(ctx, tx, batch, values, &found)
	}
	return s
}

// lockedRows is what the first statement has found. Messages are numbers from 1.
type lockedRows struct {
	messages int64
	// later are the messages that aren't the first of their row, and turns their turns; 0: there
	// is no row.
	later, turns []int64
	states       []byte
}

// turns are the messages of each turn, by their indexes in a batch of n.
func (l *lockedRows) turnsOf(n int) [][]int {
	all := [][]int{nil}
	isLater := make([]bool, n)
	for i, ord := range l.later {
		isLater[ord-1] = true
		turn := int(l.turns[i])
		if turn == 0 {
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
	return all
}

// mostTurns is how many turns are sent at once.
const mostTurns = 256

// takeTurns updates the rows, turn by turn, and settles the messages that didn't find their
// row as they expected.
//
// Each update is planned for its number of messages, and for the table as it is now.
func (w *updateWriter) takeTurns(ctx context.Context, tx sinks.Tx, batch *sinks.Batch, values *columns.Values, found *lockedRows) error {
	msgs := batch.Messages()
	switch n := int64(len(msgs)); {
	case found.messages == 0:
		return errChanged
	case found.messages != n:
		return fmt.Errorf("the columns of sink.table.key find more than one row for a message (%d rows for %d messages); name columns that identify a row", found.messages, n)
	}
	r := &turnResults{applied: make([]bool, len(msgs)), why: make(map[int]string)}
	if err := r.read(w.m.expected, found.states, nil); err != nil {
		return err
	}
	turns := found.turnsOf(len(msgs))
	for first := 0; first < len(turns); first += mostTurns {
		var b pgx.Batch
		b.Queue("SET LOCAL plan_cache_mode = force_custom_plan")
		for i, turn := range turns[first:min(first+mostTurns, len(turns))] {
			some := values
			if len(turn) < len(msgs) {
				some = values.Rows(turn)
			}
			if w.explains && first+i > 0 {
				b.Queue(w.states, some.Args()...).QueryRow(func(row pgx.Row) error {
					var states []byte
					return errors.Join(row.Scan(&states), r.read(w.m.expected, states, turn))
				})
			}
			b.Queue(w.update, some.Args()...).Query(func(rows pgx.Rows) error {
				var ord int64
				_, err := pgx.ForEachRow(rows, []any{&ord}, func() error {
					r.applied[turn[ord-1]] = true
					return nil
				})
				return err
			})
		}
		b.Queue("SET LOCAL plan_cache_mode = DEFAULT")
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
	}
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
