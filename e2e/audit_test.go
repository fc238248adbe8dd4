package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// ordersTable is the sink's table of these tests. Its id has no unique index on
// purpose: one would hide the very doubles it is to show. The number of a row
// rises with every insert.
const ordersTable = `
CREATE TABLE public.orders (
    number   bigint GENERATED ALWAYS AS IDENTITY,
    id       text NOT NULL,
    lane     text NOT NULL,
    position bigint NOT NULL,
    n        bigint NOT NULL,
    payload  jsonb NOT NULL
)`

const ordersSink = `
id:
  from: header:message-id
sink:
  table:
    name: public.orders
    columns:
      id: id
      lane: lane
      position: position
      n: json:n
      payload: value
`

// order is one row of it.
type order struct {
	ID, Lane string
	Position int64
	N        int64
}

// audit judges the sink by the raw log of the lanes, and returns how many rows
// came by each lane.
func (db *database) audit(log map[string][]string, ordered bool) (byLane map[string]int64) {
	db.t.Helper()
	rows, err := db.pool.Query(db.t.Context(), "SELECT id, lane, position, n FROM public.orders ORDER BY number")
	if err != nil {
		db.t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[order])
	if err != nil {
		db.t.Fatal(err)
	}
	for kind, wrong := range verdict(all, log, ordered) {
		const most = 5
		for _, text := range wrong[:min(len(wrong), most)] {
			db.t.Errorf("%s: %s", kind, text)
		}
		if more := len(wrong) - most; more > 0 {
			db.t.Errorf("%s: and %d more", kind, more)
		}
	}
	byLane = map[string]int64{}
	for _, o := range all {
		byLane[o.Lane]++
	}
	return byLane
}

// verdict is everything that is wrong with rows, by kind, in the order in which
// they were inserted. The log has for each lane the ids by position; an empty one
// is a hole. Of lanes without order nobody expects order, nor the first copy.
func verdict(rows []order, log map[string][]string, ordered bool) map[string][]string {
	wrong := map[string][]string{}
	add := func(kind, format string, args ...any) {
		wrong[kind] = append(wrong[kind], fmt.Sprintf(format, args...))
	}
	last := map[string]int64{}
	where := make(map[string]order, len(rows))
	for _, o := range rows {
		if first, ok := where[o.ID]; ok {
			add("twice", "%s landed from %s %d and from %s %d", o.ID, first.Lane, first.Position, o.Lane, o.Position)
		} else {
			where[o.ID] = o
		}
		lane := log[o.Lane]
		if o.Position < 0 || o.Position >= int64(len(lane)) || lane[o.Position] != o.ID {
			add("phantom", "%s landed from %s %d, where the log has another message", o.ID, o.Lane, o.Position)
		}
		if id := (send{n: int32(o.N)}).id(); id != o.ID {
			add("phantom", "%s landed with the payload of %s", o.ID, id)
		}
		if before, ok := last[o.Lane]; ok && ordered && o.Position <= before {
			add("order", "%s: position %d landed after %d", o.Lane, o.Position, before)
		}
		last[o.Lane] = o.Position
	}
	for lane, ids := range log {
		for position, id := range ids {
			o, ok := where[id]
			switch {
			case id == "":
			case !ok:
				add("missing", "%s at %s %d has not landed", id, lane, position)
			// Of the copies in one lane the lowest position comes first. Among
			// lanes any may win, but then by its first copy.
			case ordered && o.Lane == lane && int64(position) < o.Position:
				add("second", "%s landed from %s %d, though a copy stands at %d", id, lane, o.Position, position)
			}
		}
	}
	return wrong
}

// A judge that finds nothing proves nothing until it has found something.
func TestVerdict(t *testing.T) {
	id := func(n int32) string { return send{n: n}.id() }
	log := map[string][]string{
		"a": {id(0), id(1), id(0), "", id(2)},
		"b": {id(2), id(3), id(3)},
	}
	row := func(n int32, lane string, position int64) order { return order{id(n), lane, position, int64(n)} }
	good := []order{row(2, "b", 0), row(0, "a", 0), row(1, "a", 1), row(3, "b", 1)}
	for _, c := range []struct {
		name      string
		rows      []order
		want      string
		unordered string
	}{
		{name: "good", rows: good},
		{name: "by the other lane", rows: []order{row(0, "a", 0), row(1, "a", 1), row(2, "a", 4), row(3, "b", 1)}},
		{name: "twice", rows: append(good[:4:4], row(2, "a", 4)), want: "twice", unordered: "twice"},
		{name: "missing", rows: good[:3], want: "missing", unordered: "missing"},
		{name: "nothing", want: "missing", unordered: "missing"},
		{name: "another position", rows: append(good[:3:3], row(3, "b", 3)), want: "phantom second", unordered: "phantom"},
		{name: "another lane", rows: append(good[:3:3], row(3, "c", 1)), want: "phantom", unordered: "phantom"},
		{name: "another payload", rows: append(good[:3:3], order{id(3), "b", 1, 7}), want: "phantom", unordered: "phantom"},
		{name: "order", rows: []order{row(1, "a", 1), row(0, "a", 0), row(2, "b", 0), row(3, "b", 1)}, want: "order"},
		{name: "the later copy", rows: append(good[:3:3], row(3, "b", 2)), want: "second"},
	} {
		for ordered, want := range map[bool]string{true: c.want, false: c.unordered} {
			kinds := slices.Sorted(maps.Keys(verdict(c.rows, log, ordered)))
			if got := strings.Join(kinds, " "); got != want {
				t.Errorf("%s, ordered %t: the verdict is %q, want %q", c.name, ordered, got, want)
			}
		}
	}
}

// rotating has the generations change every few seconds while workers die.
const rotating = `
retention: {generation: 2s, schedule: 1s, window: 30m}
`

// auditRotations makes sure that the claims stand in several generations: else
// the faults would not have met any change of them.
func (db *database) auditRotations(scope string) {
	db.t.Helper()
	if n := one[int64](db, "SELECT count(DISTINCT generation) FROM dedupd.claims WHERE scope = $1", scope); n < 3 {
		db.t.Errorf("all claims stand in %d generations, want 3 at least", n)
	}
	if n := one[int64](db, "SELECT count(*) FROM dedupd.filters WHERE last"); n == 0 {
		db.t.Error("no sealed generation has a filter")
	}
}

// auditClaims demands that every id has exactly one claim, whatever generation it
// stands in.
func (db *database) auditClaims(scope string, ids int) {
	db.t.Helper()
	claims := one[int64](db, "SELECT count(*) FROM dedupd.claims WHERE scope = $1", scope)
	keys := one[int64](db, "SELECT count(DISTINCT key) FROM dedupd.claims WHERE scope = $1", scope)
	if claims != int64(ids) || keys != int64(ids) {
		db.t.Errorf("%d claims of %d keys for %d ids", claims, keys, ids)
	}
	if n := one[int64](db, "SELECT count(*) FROM dedupd.dead_letters"); n != 0 {
		db.t.Errorf("%d dead letters, and there is no cause for any", n)
	}
}
