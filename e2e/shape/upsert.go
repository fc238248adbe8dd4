package shape

import (
	"fmt"
	"math/rand/v2"
)

// Upsert keeps the latest state of each key. A key's messages come by one lane.
var Upsert = &Shape{
	Name: "upsert", Ordered: true,
	Worker: `id: {from: header:message-id}
sink:
  table:
    name: public.target
    mode: upsert
    key: [id]
    columns: {id: json:id, state: json:state, lane: lane, position: position}
`,
	Table: `CREATE TABLE public.target (id text PRIMARY KEY, state text, lane text, position bigint)`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				row := 50*(n/2000) + noise(n)%50
				return Message{ID: fmt.Sprint("id-", n), Partition: row % partitions, Value: fmt.Appendf(nil, `{"id": "row-%d", "state": "%d"}`, row, n)}
			})
		}
	},
	Demand: demandLatest,
}

// demandLatest: each row is what the last message of its key, in lane order, has made it.
func demandLatest(r *Run) {
	rows := r.rowsByID()
	type state struct{ ID, State string }
	last := map[string]int{} // messages
	states := map[string]string{}
	landings := int64(0)
	landed(r, func(i int, value state) {
		landings++
		if before, ok := last[value.ID]; ok && r.Messages[before].Lane != r.Messages[i].Lane {
			r.wrongOf(i, "%s comes by two lanes, and has no order", value.ID)
		}
		last[value.ID], states[value.ID] = i, value.State
	})
	for id, i := range last {
		switch row := rows[id]; {
		case row == nil:
			r.wrongOf(i, "%s has landed, and has no row", id)
		case row["state"] != states[id]:
			r.wrongOf(i, "%s ended in state %s, want %s", id, row["state"], states[id])
		case r.messageOf(row) != i:
			r.wrongOf(i, "the row of %s is by %s %s", id, row["lane"], row["position"])
		}
	}
	for id := range rows {
		if _, ok := last[id]; !ok {
			r.wrong("there is a row of %s, of which nothing has landed", id)
		}
	}
	r.booked(Books{Written: landings})
}
