package e2e

import (
	"fmt"
	"testing"
)

// orders is the sink's table of these tests. Its id has no unique index on
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

// complaints are what is wrong, of which only the first ones are told.
type complaints struct {
	t    *testing.T
	most int
	n    int
}

func (c *complaints) add(format string, args ...any) {
	c.t.Helper()
	if c.n++; c.n <= c.most {
		c.t.Errorf(format, args...)
	}
}

func (c *complaints) end() {
	c.t.Helper()
	if c.n > c.most {
		c.t.Errorf("… and %d more of that kind", c.n-c.most)
	}
}

// audit judges the sink by the raw log of the lanes: every id once and none
// missing, no row that isn't in the log, the right copy of each id and, in
// ordered lanes, the order of the lane. It returns how many rows came by each lane.
func (db *database) audit(log map[string][]string, ordered bool) (byLane map[string]int64) {
	t := db.t
	t.Helper()
	rows, err := db.pool.Query(t.Context(), "SELECT id, lane, position, n FROM public.orders ORDER BY number")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()

	twice, missing, phantoms, order1, winners := &complaints{t: t, most: 5}, &complaints{t: t, most: 5}, &complaints{t: t, most: 5}, &complaints{t: t, most: 5}, &complaints{t: t, most: 5}
	byLane = map[string]int64{}
	last := map[string]int64{}
	where := map[string]order{}
	for rows.Next() {
		var o order
		if err := rows.Scan(&o.ID, &o.Lane, &o.Position, &o.N); err != nil {
			t.Fatal(err)
		}
		if first, ok := where[o.ID]; ok {
			twice.add("%s landed twice: from %s %d and from %s %d", o.ID, first.Lane, first.Position, o.Lane, o.Position)
		}
		where[o.ID] = o
		lane := log[o.Lane]
		if o.Position < 0 || o.Position >= int64(len(lane)) || lane[o.Position] != o.ID {
			phantoms.add("%s landed from %s %d, where the log has another message", o.ID, o.Lane, o.Position)
		}
		if id := fmt.Sprintf("order-%07d", o.N); id != o.ID {
			phantoms.add("%s landed with the payload of %s", o.ID, id)
		}
		if before, ok := last[o.Lane]; ok && ordered && o.Position <= before {
			order1.add("%s: position %d landed after %d", o.Lane, o.Position, before)
		}
		last[o.Lane] = o.Position
		byLane[o.Lane]++
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for lane, ids := range log {
		for position, id := range ids {
			o, ok := where[id]
			switch {
			case id == "": // a hole
			case !ok:
				missing.add("%s at %s %d has not landed", id, lane, position)
			// Of the copies in one lane the lowest position comes first. Among
			// lanes any may win, but then by its first copy.
			case ordered && o.Lane == lane && int64(position) < o.Position:
				winners.add("%s landed from %s %d, though a copy stands at %d", id, lane, o.Position, position)
			}
		}
	}
	for _, c := range []*complaints{twice, missing, phantoms, order1, winners} {
		c.end()
	}
	return byLane
}

// auditClaims demands that every id has exactly one claim.
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
