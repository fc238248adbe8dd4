package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/e2e/shape"
)

// models say, by shape, what a faultless worker does with a message that has landed: to the
// table, and what it books (0: written). Shapes without one insert each message into
// public.effects.
var models = map[string]func(rows map[string]shape.Row, m *modelled) int{
	"insert": func(rows map[string]shape.Row, m *modelled) int {
		if rows[m.ID] != nil {
			return alreadyPresent
		}
		rows[m.ID] = shape.Row{"id": m.ID, "by": "worker", "lane": m.lane, "position": m.position}
		return 0
	},
	"versioned": func(rows map[string]shape.Row, m *modelled) int {
		var at int64
		if row := rows[m.ID]; row != nil {
			_, _ = fmt.Sscan(row["version"], &at)
		}
		if m.Version <= at {
			return stale
		}
		rows[m.ID] = shape.Row{"id": m.ID, "version": fmt.Sprint(m.Version), "by": "worker", "lane": m.lane, "position": m.position}
		return 0
	},
	"update": func(rows map[string]shape.Row, m *modelled) int {
		row := rows[m.ID]
		if row["version"] != fmt.Sprint(m.From) {
			return rejected
		}
		rows[m.ID] = shape.Row{
			"id": m.ID, "version": fmt.Sprint(m.From + 1), "lane": m.lane, "position": m.position,
			"path": row["path"] + " " + m.lane + "@" + m.position,
		}
		return 0
	},
	"statement": func(rows map[string]shape.Row, m *modelled) int {
		var cents int
		_, _ = fmt.Sscan(rows[m.ID]["cents"], &cents)
		if cents < 10 {
			return rejected
		}
		rows[m.ID]["cents"] = fmt.Sprint(cents - 10)
		return 0
	},
	"parts": func(rows map[string]shape.Row, m *modelled) int {
		row := shape.Row{"id": m.ID, "a": "none", "b": "0", "c": "0", "touched": "0"}
		if before := rows[m.ID]; before != nil {
			row = maps.Clone(before)
		}
		row["lane"], row["position"] = m.lane, m.position
		switch a := string(m.A); {
		case a == "null":
			delete(row, "a")
		case a != "":
			row["a"] = strings.Trim(a, `"`)
		}
		if m.B != nil {
			row["b"] = fmt.Sprint(*m.B)
		}
		if m.C != nil {
			row["c"] = fmt.Sprint(*m.C)
		}
		rows[m.ID] = row
		return 0
	},
	"list": func(rows map[string]shape.Row, m *modelled) int {
		add := func(part string) {
			rows[m.id+part] = shape.Row{"id": m.id, "part": part, "lane": m.lane, "position": m.position}
		}
		if m.Type == "created" || m.Type == "changed" {
			add("now")
		}
		if m.Type == "changed" || m.Type == "removed" {
			add("log")
		}
		return 0
	},
	"upsert": func(rows map[string]shape.Row, m *modelled) int {
		rows[m.ID] = shape.Row{"id": m.ID, "state": m.State, "lane": m.lane, "position": m.position}
		return 0
	},
	"append": func(rows map[string]shape.Row, m *modelled) int {
		version := 0
		for _, row := range rows {
			if row["stream"] != m.Stream {
				continue
			}
			if row["op"] == m.id {
				return alreadyPresent
			}
			var at int
			_, _ = fmt.Sscan(row["version"], &at)
			version = max(version, at)
		}
		if m.Expected != nil && *m.Expected != version {
			return rejected
		}
		rows[m.id] = shape.Row{"id": m.id, "stream": m.Stream, "version": fmt.Sprint(version + 1), "op": m.id, "lane": m.lane, "position": m.position}
		return 0
	},
	"history": func(rows map[string]shape.Row, m *modelled) int {
		var ids []string
		if row := rows[m.ID]; row != nil {
			_ = json.Unmarshal([]byte(row["history"]), &ids)
		}
		if slices.Contains(ids, m.id) {
			return alreadyPresent
		}
		ids = append(ids, m.id)
		text, _ := json.Marshal(ids[max(0, len(ids)-40):])
		rows[m.ID] = shape.Row{"id": m.ID, "state": m.State, "history": string(text), "lane": m.lane, "position": m.position}
		return 0
	},
}

// modelled is a message as models see it: its value and its place.
type modelled struct {
	lane, position, id      string
	ID, State, Type, Stream string
	Version                 int64
	From                    int
	Expected                *int
	A                       json.RawMessage
	B, C                    *int64
}

// faultless is a run of a shape without a fault: two lanes, of which a worker takes fifty
// messages at a time.
func faultless(s *shape.Shape) *history {
	const partitions, draws, batch = 2, 1500, 50
	h := &history{scope: "test", shape: s}
	for i := range partitions {
		id, _ := h.lane("main", fmt.Sprintf("orders/%d", i))
		h.lanes[id].read, h.lanes[id].row = true, &row{ordered: true, streamID: "made"}
		h.take(uint64(1+i), id, int64(1+i), "w1", 0)
	}
	next := s.Draw(rand.New(rand.NewPCG(1, 1)), partitions)
	for range draws {
		for _, m := range next() {
			l := &h.lanes[m.Partition]
			r := record{position: l.end, sum: valueSum(m.Value), raw: rawSum([]byte("orders"), nil, m.Value, nil)}
			r.identify([]byte(m.ID), &h.texts)
			l.log, l.end = append(l.log, r), l.end+1
			h.keep(l, m.Value)
		}
	}
	w := &faultlessWorker{h: h, rows: map[string]shape.Row{}, seen: map[string]bool{}, marks: map[string]shape.Mark{}}
	for i := range 10_000 {
		switch s.Name {
		case "insert":
			id := fmt.Sprint("note-", 6*i)
			w.rows[id] = shape.Row{"id": id, "by": "hand"}
		case "update":
			id := fmt.Sprint("account-", i)
			w.rows[id] = shape.Row{"id": id, "version": "0", "path": ""}
		case "statement":
			id := fmt.Sprint("account-", i)
			w.rows[id] = shape.Row{"id": id, "cents": "150", "application": "0"}
		}
	}
	for more, xid := true, uint64(100); more; {
		more = false
		for li := range h.lanes {
			if l := &h.lanes[li]; l.row.next < l.end {
				w.land(laneID(li), min(l.row.next+batch, l.end), xid)
				more = true
				xid++
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(w.rows)) {
		h.rows = append(h.rows, tableRow{columns: w.rows[id], xmin: w.xmin(id)})
	}
	for _, producer := range slices.Sorted(maps.Keys(w.marks)) {
		h.marks = append(h.marks, w.marks[producer])
	}
	return h
}

// faultlessWorker is what it knows.
type faultlessWorker struct {
	h     *history
	rows  map[string]shape.Row
	seen  map[string]bool // ids
	marks map[string]shape.Mark
}

// xmin is the transaction of the move past a row's message.
func (w *faultlessWorker) xmin(id string) uint32 {
	if w.rows[id]["lane"] == "" {
		return 1
	}
	var position int64
	_, _ = fmt.Sscan(w.rows[id]["position"], &position)
	for i := range w.h.moves {
		m := &w.h.moves[i]
		if w.h.lanes[m.lane].name == w.rows[id]["lane"] && m.from <= position && position < m.to {
			return uint32(m.xid)
		}
	}
	return 1
}

func (w *faultlessWorker) land(id laneID, to int64, xid uint64) {
	h, l := w.h, &w.h.lanes[id]
	var delta books
	for position := l.row.next; position < to; position++ {
		r := &l.log[position]
		delta[fetched]++
		if r.identity == unwanted {
			delta[filtered]++
			continue
		}
		if w.isCopy(l, r) {
			delta[resent]++
			continue
		}
		delta[applied]++
		if h.shape.By == shape.ByID {
			h.claims = append(h.claims, claim{key: r.key, lane: id, position: position, generation: 1, xmin: uint32(xid)})
		}
		apply := models[h.shape.Name]
		if apply == nil {
			h.effects = append(h.effects, effect{number: int64(len(h.effects) + 1), key: r.key, id: r.id, lane: id, position: position, sum: r.sum, xid: xid})
			continue
		}
		m := modelled{lane: l.name, position: fmt.Sprint(position), id: h.texts.get(r.id)}
		if err := json.Unmarshal(l.values[position], &m); err != nil {
			panic(err)
		}
		if of := apply(w.rows, &m); of > 0 {
			delta[of]++
		}
	}
	h.move(xid, opUpdate, id, to, l.row.epoch, l.row.owner, delta)
}

func (w *faultlessWorker) isCopy(l *lane, r *record) bool {
	id := w.h.texts.get(r.id)
	switch w.h.shape.By {
	case shape.ByPosition:
		return false
	case shape.ByNumber:
		producer, epoch, number, _ := shape.Number(id)
		mark, known := w.marks[producer]
		if known && (epoch < mark.Epoch || epoch == mark.Epoch && number <= mark.Number) {
			return true
		}
		w.marks[producer] = shape.Mark{Producer: producer, Lane: l.name, Epoch: epoch, Number: number}
		return false
	}
	copied := w.seen[id]
	w.seen[id] = true
	return copied
}

// A shape's run without a fault is valid, and each fault is found by the invariants that it
// breaks.
func TestShapes(t *testing.T) {
	broken := map[string]bool{}
	for _, c := range brokenShapes {
		broken[c.shape.Name] = true
		h := faultless(c.shape)
		c.do(h)
		judgeShape(t, h, c.name, c.want)
	}
	for _, s := range shape.All[1:] {
		judgeShape(t, faultless(s), "faultless", "")
		if !broken[s.Name] {
			t.Errorf("shape %s: no fault of it is in this test", s.Name)
		}
	}
}

func judgeShape(t *testing.T, h *history, name, want string) {
	t.Helper()
	var flagged, why []string
	for _, f := range verdict(h, terms{settled: true}) {
		if f.count > 0 {
			flagged = append(flagged, f.invariant)
			for _, v := range f.first {
				why = append(why, f.invariant+": "+v.what)
			}
		}
	}
	if got := strings.Join(flagged, " "); got != want {
		t.Errorf("shape %s, %s: the verdict is %q, want %q\n%s", h.shape.Name, name, got, want, strings.Join(why, "\n"))
	}
}

var brokenShapes = []struct {
	shape *shape.Shape
	name  string
	do    func(h *history)
	want  string
}{
	{shape.Position, "a position is lost", func(h *history) { h.dropEffect(70) }, "I1 I8"},
	{shape.Position, "a position lands twice, by another transaction", func(h *history) {
		e := h.effects[70]
		e.number, e.xid = int64(len(h.effects)+1), h.effects[len(h.effects)-1].xid
		h.effects = append(h.effects, e)
	}, "I2 I5 I6 I8"},
	{shape.Position, "two rows change places", func(h *history) {
		h.effects[70].number, h.effects[71].number = h.effects[71].number, h.effects[70].number
		slices.SortFunc(h.effects, func(a, b effect) int { return cmp.Compare(a.number, b.number) })
	}, "I5"},
	{shape.Position, "something is claimed", func(h *history) {
		h.claims = append(h.claims, claim{key: keyOf([]byte("a")), position: 70})
	}, "I6"},
	{shape.Position, "books of rows that weren't written", func(h *history) { h.bookMore(100, 0, stale) }, "I8"},

	{shape.Sequence, "a number is lost", func(h *history) { h.dropEffect(70) }, "I1 I8"},
	{shape.Sequence, "a number lands again", func(h *history) {
		at := slices.IndexFunc(h.lanes[0].log, func(r record) bool {
			i := slices.IndexFunc(h.effects, func(e effect) bool { return e.lane == 0 && e.position == r.position })
			return i < 0
		})
		r := &h.lanes[0].log[at]
		before := slices.IndexFunc(h.effects, func(e effect) bool { return e.key == r.key })
		e := h.effects[before]
		e.number, e.position, e.sum = int64(len(h.effects)+1), r.position, r.sum
		h.effects = append(h.effects, e)
	}, "I2 I8"},
	{shape.Sequence, "a mark stays behind", func(h *history) { h.marks[3].Number-- }, "I9"},
	{shape.Sequence, "a mark is on another lane", func(h *history) { h.marks[3].Lane = "orders/7" }, "I9"},
	{shape.Sequence, "a mark is gone", func(h *history) { h.marks = h.marks[1:] }, "I9"},
	{shape.Sequence, "a mark of nobody", func(h *history) { h.marks = append(h.marks, shape.Mark{Producer: "nobody"}) }, "I9"},

	{shape.Insert, "a row is gone", func(h *history) { h.dropRow("worker") }, "I9"},
	{shape.Insert, "a row by hand is overwritten", func(h *history) {
		for i := range h.rows {
			if w := &h.rows[i]; w.columns["by"] == "hand" {
				w.columns["by"] = "worker"
				w.columns["lane"], w.columns["position"], w.xmin = "orders/0", "0", 100
				return
			}
		}
	}, "I9"},
	{shape.Insert, "a later message of the key won", func(h *history) {
		w := h.rowBy("worker")
		position := 0
		_, _ = fmt.Sscan(w.columns["position"], &position)
		w.columns["position"] = fmt.Sprint(position + 1)
	}, "I9"},
	{shape.Insert, "what was there is booked as written", func(h *history) { h.bookAs(alreadyPresent, noBook) }, "I9"},
	{shape.Insert, "a row by another transaction", func(h *history) { h.rowBy("worker").xmin = 2 }, "I6"},
	{shape.Insert, "an id is claimed and not booked", func(h *history) { h.rebook(100, 0, applied, resent) }, "I8 I9"},

	{shape.Versioned, "an older version won", func(h *history) {
		w := h.rowBy("worker")
		w.columns["version"] = "1" + w.columns["version"][:len(w.columns["version"])-1]
	}, "I9"},
	{shape.Versioned, "an application's version is below", func(h *history) {
		w := h.rowBy("worker")
		w.columns = shape.Row{"id": w.columns["id"], "version": "1", "by": "application"}
	}, "I9"},
	{shape.Versioned, "a row is gone", func(h *history) { h.dropRow("worker") }, "I9"},
	{shape.Versioned, "all is booked as stale", func(h *history) { h.bookAs(stale, applied) }, "I9"},
	{shape.Versioned, "a message that has landed isn't claimed", func(h *history) {
		h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.lane == 0 && c.position == 70 })
	}, "I1 I8 I9"},

	{shape.Update, "a step was taken twice", func(h *history) {
		c := h.stepped()
		path := strings.Fields(c["path"])
		c["path"], c["version"] = strings.Join(append(path, path[len(path)-1]), " "), fmt.Sprint(len(path)+1)
	}, "I9"},
	{shape.Update, "a step was left out", func(h *history) {
		c := h.stepped()
		path := strings.Fields(c["path"])
		c["path"], c["version"] = strings.Join(path[1:], " "), fmt.Sprint(len(path)-1)
	}, "I9"},
	{shape.Update, "a version without its step", func(h *history) { h.stepped()["version"] = "7" }, "I9"},
	{shape.Update, "a step of another row", func(h *history) {
		a, b := h.rows[0].columns, h.rows[1].columns
		a["path"], b["path"] = b["path"], a["path"]
		a["version"], b["version"] = fmt.Sprint(len(strings.Fields(a["path"]))), fmt.Sprint(len(strings.Fields(b["path"])))
	}, "I9"},
	{shape.Update, "an application's step at the wrong time", func(h *history) {
		c := h.stepped()
		c["path"] = "application" + c["path"][strings.Index(c["path"][1:], " ")+1:]
	}, "I9"},
	{shape.Update, "a row that took none of its steps", func(h *history) {
		c := h.stepped()
		c["path"], c["version"] = "", "0"
		delete(c, "lane")
		delete(c, "position")
	}, "I9"},
	{shape.Update, "all is booked as written", func(h *history) { h.bookAs(rejected, noBook) }, "I9"},
	{shape.Parts, "what a message lacks is NULL", func(h *history) { h.withColumn("a", func(c shape.Row) { delete(c, "a") }) }, "I9"},
	{shape.Parts, "an older value came last", func(h *history) { h.withColumn("b", func(c shape.Row) { c["b"] = "1" }) }, "I9"},
	{shape.Parts, "a value of the application is undone", func(h *history) {
		h.withColumn("c", func(c shape.Row) { c["touched"] = "1" })
	}, "I9"},
	{shape.Parts, "a row is gone", func(h *history) { h.rows = h.rows[1:] }, "I9"},
	{shape.Parts, "all is booked as stale", func(h *history) { h.bookMore(100, 0, stale) }, "I9"},

	{shape.List, "a row is missing in one table", func(h *history) { h.rows = h.rows[1:] }, "I9"},
	{shape.List, "a row is there twice", func(h *history) { h.rows = append(h.rows, h.rows[1]) }, "I9"},
	{shape.List, "a row is in the other table, too", func(h *history) {
		i := slices.IndexFunc(h.rows, func(w tableRow) bool { return w.columns["part"] == "now" })
		c := maps.Clone(h.rows[i].columns)
		c["part"] = "log"
		h.rows = append(h.rows, tableRow{columns: c, xmin: h.rows[i].xmin})
	}, "I9"},
	{shape.List, "one table in another transaction", func(h *history) { h.rows[1].xmin = 2 }, "I6"},
	{shape.List, "what nobody wants is claimed", func(h *history) {
		l := &h.lanes[0]
		r := &l.log[slices.IndexFunc(l.log, func(r record) bool { return r.identity == unwanted })]
		m := h.landingOf(0, r.position)
		h.claims = append(h.claims, claim{key: r.key, position: r.position, generation: 1, xmin: uint32(m.xid)})
	}, "I1 I3 I8 I9"},
	{shape.List, "what nobody wants isn't booked", func(h *history) { h.rebook(h.landingOf(0, 0).xid, 0, filtered, resent) }, "I9"},

	{shape.Statement, "a withdrawal was made twice", func(h *history) { h.withdraw(10) }, "I9"},
	{shape.Statement, "a withdrawal was lost", func(h *history) { h.withdraw(-10) }, "I9"},
	{shape.Statement, "an account is overdrawn", func(h *history) { h.withdraw(150) }, "I9"},
	{shape.Statement, "what was rejected is booked as written", func(h *history) { h.bookAs(rejected, noBook) }, "I9"},

	{shape.Append, "an event is gone", func(h *history) { h.rows = h.rows[1:] }, "I9"},
	{shape.Append, "two events change places", func(h *history) {
		a := h.moved().columns
		for i := range h.rows {
			if b := h.rows[i].columns; b["stream"] == a["stream"] && b["op"] != a["op"] {
				a["version"], b["version"] = b["version"], a["version"]
				return
			}
		}
	}, "I9"},
	{shape.Append, "an event is there twice", func(h *history) {
		c := maps.Clone(h.rows[0].columns)
		c["version"] = "1000"
		h.rows = append(h.rows, tableRow{columns: c, xmin: h.rows[0].xmin})
	}, "I9"},
	{shape.Append, "an event of another message", func(h *history) { h.rows[0].columns["op"] = "id-x" }, "I9"},
	{shape.Append, "what was rejected is booked as written", func(h *history) { h.bookAs(rejected, noBook) }, "I9"},
	{shape.Append, "a lane passes over a message", func(h *history) {
		m := h.landingOf(0, 70)
		m.to--
	}, "I1 I6 I8 I9"},

	{shape.History, "a copy was applied again", func(h *history) { h.rows[3].columns["state"] = "0" }, "I9"},
	{shape.History, "a row remembers more than it is to", func(h *history) {
		c := h.rows[3].columns
		c["history"] = `["id-x",` + c["history"][1:]
	}, "I9"},
	{shape.History, "a row forgets", func(h *history) { h.rows[3].columns["history"] = "[]" }, "I9"},
	{shape.History, "a row is gone", func(h *history) { h.rows = h.rows[1:] }, "I9"},
	{shape.History, "copies are booked as written", func(h *history) { h.bookAs(alreadyPresent, noBook) }, "I9"},

	{shape.Upsert, "an older state came last", func(h *history) { h.rows[3].columns["state"] = "0" }, "I9"},
	{shape.Upsert, "a row is gone", func(h *history) { h.rows = h.rows[1:] }, "I9"},
	{shape.Upsert, "a row of nothing", func(h *history) { h.rows = append(h.rows, tableRow{columns: shape.Row{"id": "row-x"}}) }, "I9"},
	{shape.Upsert, "a row of no lane", func(h *history) { h.rows[3].columns["lane"] = "orders/7" }, "I6 I9"},
	{shape.Upsert, "two rows of a key", func(h *history) { h.rows = append(h.rows, h.rows[3]) }, "I9"},
	{shape.Upsert, "some are booked as present", func(h *history) { h.bookMore(100, 0, alreadyPresent) }, "I9"},
}

func (h *history) dropEffect(i int) { h.effects = slices.Delete(h.effects, i, i+1) }

func (h *history) rowBy(who string) *tableRow {
	return &h.rows[slices.IndexFunc(h.rows, func(w tableRow) bool { return w.columns["by"] == who })]
}

func (h *history) dropRow(who string) {
	i := slices.IndexFunc(h.rows, func(w tableRow) bool { return w.columns["by"] == who })
	h.rows = slices.Delete(h.rows, i, i+1)
}

// bookMore books one message of a transaction as something beside what it is.
func (h *history) bookMore(xid uint64, lane laneID, which int) {
	h.moveOf(xid, lane).delta[which]++
	h.lanes[lane].row.books[which]++
}

// bookAs has all books say of one count what they say of another; noBook: nothing.
func (h *history) bookAs(which, like int) {
	set := func(b *books) {
		b[which] = 0
		if like != noBook {
			b[which] = b[like]
		}
	}
	for i := range h.moves {
		set(&h.moves[i].delta)
	}
	for i := range h.lanes {
		set(&h.lanes[i].row.books)
	}
}

const noBook = -1

// stepped is the row with the most steps.
func (h *history) stepped() shape.Row {
	return slices.MaxFunc(h.rows, func(a, b tableRow) int { return cmp.Compare(len(a.columns["path"]), len(b.columns["path"])) }).columns
}

// withdraw takes cents from the first account with a withdrawal.
func (h *history) withdraw(n int) {
	for i := range h.rows {
		if c := h.rows[i].columns; c["cents"] != "150" {
			var cents int
			_, _ = fmt.Sscan(c["cents"], &cents)
			c["cents"] = fmt.Sprint(cents - n)
			return
		}
	}
}

// withColumn changes a row that has a value in a column.
func (h *history) withColumn(name string, change func(shape.Row)) {
	for i := range h.rows {
		if c := h.rows[i].columns; c[name] != "" && c[name] != "0" && c[name] != "none" {
			change(c)
			return
		}
	}
}

// moved is the first row that a message has changed.
func (h *history) moved() *tableRow {
	return &h.rows[slices.IndexFunc(h.rows, func(w tableRow) bool { return w.columns["lane"] != "" && w.columns["position"] != "0" })]
}

// landingOf is the move past a position.
func (h *history) landingOf(id laneID, position int64) *move {
	return &h.moves[slices.IndexFunc(h.moves, func(m move) bool { return m.lane == id && m.from <= position && position < m.to })]
}
