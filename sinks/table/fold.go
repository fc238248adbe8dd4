package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// foldWriter upserts messages that lack places of some columns. It asks the server which
// messages are of the same row and which rows are there, makes one row of those messages,
// column by column, and writes these in a second round trip.
//
// Like any upsert it adds rows and locks those that are there in one pass in the order of the
// keys, by INSERT ... ON CONFLICT. To lock the rows first and add others then would deadlock
// with an upsert of whole messages. That INSERT overwrites nothing; it proposes for a row that
// is there what the row will be, since Postgres checks that before it looks for a conflict. An
// UPDATE then writes each row's own columns. All rows are locked by then. So if somebody else
// has added some since the look, those are updated, too. If somebody has deleted one, its old
// values are gone, and the transaction is tried again.
//
// A new row has the defaults of its absent columns, which an INSERT takes only of columns that
// it doesn't name. So a pass is several INSERTs, each of the keys that follow each other and
// lack the same.
type foldWriter struct {
	m    *upsert
	t    *target
	p    *plan
	keys *columns.Set // the key's columns
	lock string       // a kept column
	// look tells the row of each message, by its place in the order of the keys, and the
	// places of those that are there. It locks nothing. read makes the server read values that
	// are overwritten. update writes rows that are there.
	look, read, update string
}

func (m *upsert) foldWriter(t *target, p *plan) *foldWriter {
	w := &foldWriter{m: m, t: t, p: p}
	var keys []columns.Column
	for _, c := range p.set.Columns() {
		if slices.Contains(m.key, c.Name) {
			keys = append(keys, c)
		} else if c.Keeps {
			w.lock = quote(c.Name)
		}
	}
	w.keys, _ = columns.NewSet(keys) // p.set has them, so they are right
	w.look, w.update = w.lookSQL(), w.updateSQL()
	w.read = fmt.Sprintf("WITH b AS MATERIALIZED (SELECT %s FROM %s) SELECT pg_catalog.count(*) FROM b", strings.Join(w.casts(), ", "), p.set.From())
	return w
}

func (w *foldWriter) lookSQL() string {
	var cols, key, names, row, values []string
	for i, c := range w.keys.Columns() {
		name := fmt.Sprintf("k%d", i+1)
		names = append(names, name)
		key = append(key, w.m.comparedExpr(w.t, w.keys, i)+" AS "+name)
		cols, row, values = append(cols, c.Name), append(row, "t."+quote(c.Name)), append(values, "d."+name)
	}
	by := strings.Join(names, ", ")
	if apart := w.m.nullsApart(w.t, w.keys); apart != "" {
		key, by = append(key, apart+" AS apart"), by+", apart"
	}
	params := len(w.keyArgs(nil))
	return fmt.Sprintf(`WITH b AS MATERIALIZED (SELECT u.ord, %s FROM %s WHERE %s%s),
g AS MATERIALIZED (SELECT b.*, pg_catalog.dense_rank() OVER (ORDER BY %s)::pg_catalog.int4 AS place FROM b)
SELECT (SELECT coalesce(pg_catalog.array_agg(g.place ORDER BY g.ord), '{}') FROM g),
       (SELECT coalesce(pg_catalog.array_agg(d.place), '{}') FROM (SELECT DISTINCT ON (place) * FROM g ORDER BY place) AS d
         CROSS JOIN LATERAL (SELECT FROM %s AS t WHERE %s LIMIT 1) AS o)`,
		strings.Join(key, ", "), w.keys.From(), unchangedAfter(params), w.keys.Constants(), by, w.m.rows(w.t), w.t.matchesAll(cols, row, values))
}

// keyArgs are the values of look's parameters, but for those of unchangedAfter.
func (w *foldWriter) keyArgs(values *columns.Values) []any {
	if values == nil {
		values, _ = w.p.set.Encode(nil)
	}
	return values.Of(w.keys).Args()
}

// casts are the values of a row, as c1 and so on.
func (w *foldWriter) casts() []string {
	casts := w.m.exprs(w.t, w.p)
	for i := range casts {
		casts[i] += fmt.Sprintf(" AS c%d", i+1)
	}
	return casts
}

// masks is the parameter after the values': what is absent of each row. known is the next
// one: which rows were there.
func (w *foldWriter) masks() columns.Array {
	return columns.Array{Name: "absent", Type: "pg_catalog.bytea", Param: w.p.params + 1}
}

func (w *foldWriter) known() columns.Array {
	return columns.Array{Name: "known", Type: "pg_catalog.bool", Param: w.p.params + 2}
}

// insertSQL adds the rows of a run of keys and locks those that are there. It returns how many
// it has added, how many of those were said to be there, and how many that were said to be
// there aren't. It doesn't propose the latter: they would lack their old values, which a
// constraint may refuse.
//
// If the server can't say how many rows it adds, they are overwritten at once, with what the
// table's triggers make of the values: see runs. It then returns how many rows it has written,
// and how many of those have a key of the run.
func (w *foldWriter) insertSQL(r *run) string {
	var names, values, key, row, of, returned, found, sets []string
	old := []string{"true AS there"}
	for i, c := range w.p.set.Columns() {
		name, value := quote(c.Name), fmt.Sprintf("f.c%d", i+1)
		isKey := slices.Contains(w.m.key, c.Name)
		if isKey {
			key, row, of = append(key, c.Name), append(row, "t."+name), append(of, value)
			found = append(found, w.t.matches(c.Name, "i."+name, value))
			returned = append(returned, "t."+name)
		}
		if !isKey && !r.overwritesNot[i] {
			sets = append(sets, name+" = EXCLUDED."+name)
		}
		if c.Keeps {
			old = append(old, fmt.Sprintf("t.%s AS old%d", name, i+1))
			value = fmt.Sprintf("CASE WHEN %s THEN f.old%d ELSE %s END", columns.IsAbsent("f.absent", i), i+1, value)
		}
		if !r.omits[i] {
			names, values = append(names, name), append(values, value)
		}
	}
	conflict, known := fmt.Sprintf("UPDATE SET %s = t.%[1]s WHERE false", w.lock), "f.known AND "
	if !w.p.counts {
		known = ""
		if conflict = "NOTHING"; len(sets) > 0 {
			conflict = "UPDATE SET " + strings.Join(sets, ", ")
		}
	}
	return fmt.Sprintf(`WITH f AS MATERIALIZED (
  SELECT f.*, old.* FROM (SELECT u.ord, u.absent, u.known, %s FROM %s OFFSET 0) AS f
    LEFT JOIN LATERAL (SELECT %s FROM %s AS t WHERE f.known AND %s LIMIT 1) AS old ON true
), i AS (
  INSERT INTO %s AS t (%s) SELECT %s FROM f WHERE NOT f.known OR f.there ORDER BY f.ord
  ON CONFLICT (%s) DO %s RETURNING %s
)
SELECT pg_catalog.count(*), pg_catalog.count(f.ord), (SELECT pg_catalog.count(*) FROM f WHERE known AND there IS NULL) FROM i LEFT JOIN f ON %s%s`,
		strings.Join(w.casts(), ", "), w.p.set.From(w.masks(), w.known()),
		strings.Join(old, ", "), w.m.rows(w.t), w.t.matchesAll(key, row, of),
		w.m.sql(), strings.Join(names, ", "), strings.Join(values, ", "),
		strings.Join(quoted(w.m.key), ", "), conflict, strings.Join(returned, ", "), known, strings.Join(found, " AND "))
}

func (w *foldWriter) updateSQL() string {
	var sets, key, row, values []string
	for i, c := range w.p.set.Columns() {
		name, value := quote(c.Name), w.m.comparedExpr(w.t, w.p.set, i)
		switch {
		case slices.Contains(w.m.key, c.Name):
			key, row, values = append(key, c.Name), append(row, "t."+name), append(values, value)
		case c.Keeps:
			sets = append(sets, fmt.Sprintf("%s = CASE WHEN %s THEN t.%[1]s ELSE %[3]s END", name, columns.IsAbsent("u.absent", i), value))
		default:
			sets = append(sets, name+" = "+value)
		}
	}
	return fmt.Sprintf("UPDATE %s AS t SET %s FROM %s WHERE %s", w.m.rows(w.t), strings.Join(sets, ", "), w.p.set.From(w.masks()), w.t.matchesAll(key, row, values))
}

func (w *foldWriter) statements(values *columns.Values) []query {
	look := append(w.keyArgs(values), w.p.schema, w.p.table, w.p.names, w.p.shape)
	masked := append(values.Args(), values.Masks())
	none := make([]bool, len(w.p.names))
	insert := w.insertSQL(&run{omits: none, overwritesNot: none})
	all := []query{{w.look, look}, {w.read, values.Args()}, {insert, append(slices.Clone(masked), []bool{})}}
	if w.p.counts {
		all = append(all, query{w.update, masked})
	}
	return all
}

// queue finds out which rows the messages are of. The planner uses an index there: it would
// estimate that a small table is best read whole, and keep that plan while the table grows.
func (w *foldWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	var places, known []int32
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.look, append(w.keyArgs(values), w.p.schema, w.p.table, w.p.names, w.p.shape)...).QueryRow(func(row pgx.Row) error {
		err := row.Scan(&places, &known)
		s.rows = int64(len(places))
		return err
	})
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	s.settle = func(ctx context.Context, tx sinks.Tx, _ *sinks.Batch) error {
		if len(places) != values.Len() {
			return errChanged
		}
		return w.write(ctx, tx, values, places, known)
	}
	return s
}

// write folds the messages and writes the rows.
func (w *foldWriter) write(ctx context.Context, tx sinks.Tx, values *columns.Values, places, found []int32) error {
	n := slices.Max(places)
	rows, unread := values.Fold(places, int(n), w.keys)
	isKnown := make([]bool, n)
	known := make([]int, len(found))
	for i, place := range found {
		known[i] = int(place - 1)
		isKnown[place-1] = true
	}
	var b pgx.Batch
	b.Queue("SET LOCAL enable_seqscan = off")
	if len(unread) > 0 {
		b.Queue(w.read, values.Rows(unread).Args()...)
	}
	var news []int
	var added, addedFound, gone int64
	texts := make(map[string]string) // of runs that lack the same
	for _, r := range w.runs(rows, isKnown) {
		sql, ok := texts[r.lacks]
		if !ok {
			sql = w.insertSQL(&r)
			texts[r.lacks] = sql
		}
		some := rows
		if len(r.rows) < rows.Len() {
			some = rows.Rows(r.rows)
		}
		are := make([]bool, len(r.rows))
		for i, row := range r.rows {
			if are[i] = isKnown[row]; !are[i] {
				news = append(news, row)
			}
		}
		b.Queue(sql, append(some.Args(), some.Masks(), are)...).QueryRow(func(row pgx.Row) error {
			var all, found, lost int64
			err := row.Scan(&all, &found, &lost)
			added += all
			addedFound += found
			gone += lost
			return err
		})
	}
	if w.p.counts {
		w.queueUpdate(&b, rows, known)
	}
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	w.m.queueTargets(&b, w.p)
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	switch {
	case gone > 0 || w.p.counts && addedFound > 0:
		return meanwhile("somebody else has deleted a row with a key of this batch meanwhile")
	case !w.p.counts && added != addedFound && n > 1:
		return errKeyChanges
	case w.p.counts && added < int64(len(news)):
		return w.writeAdded(ctx, tx, rows, news)
	}
	return nil
}

// writeAdded writes rows that weren't there when they were looked for, but were added since, by
// us or by somebody else. Those that are ours have these values already.
func (w *foldWriter) writeAdded(ctx context.Context, tx sinks.Tx, rows *columns.Values, news []int) error {
	var b pgx.Batch
	b.Queue("SET LOCAL enable_seqscan = off")
	w.queueUpdate(&b, rows, news)
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	return tx.SendBatch(ctx, &b).Close()
}

// queueUpdate writes rows that are there, if they have more than their key. It is planned for
// its number of rows, and for the table as it is now.
func (w *foldWriter) queueUpdate(b *pgx.Batch, rows *columns.Values, there []int) {
	var changed []int
	for _, row := range there {
		if slices.ContainsFunc(w.p.names, func(name string) bool {
			return !slices.Contains(w.m.key, name) && !rows.Absent(row, slices.Index(w.p.names, name))
		}) {
			changed = append(changed, row)
		}
	}
	if len(changed) == 0 {
		return
	}
	some := rows.Rows(changed)
	b.Queue("SET LOCAL plan_cache_mode = force_custom_plan")
	b.Queue(w.update, append(some.Args(), some.Masks())...)
	b.Queue("SET LOCAL plan_cache_mode = DEFAULT")
}

// errKeyChanges makes the caller divide the batch. Two rows may be one to the trigger, and then
// the order of the messages counts, not that of the keys.
var errKeyChanges = sinks.Permanent(errors.New("a trigger changes the key of a row, so which messages are of the same row isn't known"))

// run is a part of a batch's rows, which follow each other in the order of the keys.
type run struct {
	rows  []int
	lacks string // what the statement depends on
	// omits are the columns that the INSERT leaves out, so that they take their defaults.
	// overwritesNot are those that it doesn't overwrite.
	omits, overwritesNot []bool
}

// runs divides the rows. Those that are there go together: for them, nothing is omitted.
//
// If the server can't say how many rows an INSERT adds, as with a trigger that may change the
// key, rows that lack the same go together, and are overwritten by the INSERT.
func (w *foldWriter) runs(rows *columns.Values, isKnown []bool) (all []run) {
	cols := w.p.set.Columns()
	signature := make([]byte, 2*len(cols))
	for row, known := range isKnown {
		for i, c := range cols {
			absent := rows.Absent(row, i)
			hasDefault := w.t.kind == "v" || w.t.attribute(c.Name).hasValue
			signature[i] = flag(absent && !known && hasDefault)
			signature[len(cols)+i] = flag(absent && !w.p.counts)
		}
		if n := len(all); n > 0 && all[n-1].lacks == string(signature) {
			all[n-1].rows = append(all[n-1].rows, row)
			continue
		}
		r := run{rows: []int{row}, lacks: string(signature), omits: make([]bool, len(cols)), overwritesNot: make([]bool, len(cols))}
		for i := range cols {
			r.omits[i], r.overwritesNot[i] = signature[i] == '1', signature[len(cols)+i] == '1'
		}
		all = append(all, r)
	}
	return all
}

func flag(is bool) byte {
	if is {
		return '1'
	}
	return '0'
}
