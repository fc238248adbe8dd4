package shape

import (
	"fmt"
	"math/rand/v2"
)

// Insert finds rows that are there already: by hand, by an application that goes on to
// insert, or by an earlier message with another id and the same key.
var Insert = &Shape{
	Name: "insert",
	Worker: `id: {from: header:message-id}
sink:
  table:
    name: public.target
    key: [id]
    columns: {id: json:id, by: "const:worker", lane: lane, position: position}
`,
	Table: `CREATE TABLE public.target (id text PRIMARY KEY, by text NOT NULL, lane text, position bigint);
INSERT INTO public.target SELECT 'note-' || 6 * i, 'hand' FROM generate_series(0, 9999) i`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				// About two ids share a note.
				return Message{ID: fmt.Sprint("id-", n), Partition: n % partitions, Value: fmt.Appendf(nil, `{"id": "note-%d"}`, (n+noise(n)%64)/2)}
			})
		}
	},
	Beside: func(rng *rand.Rand, n int) string {
		return fmt.Sprintf(`INSERT INTO public.target VALUES ('note-%d', 'application') ON CONFLICT (id) DO NOTHING`, n/2+rng.IntN(64))
	},
	Demand: demandOneRow,
}

// demandOneRow: a row for each key, by the first of its messages on some lane; what is by
// others stays as it was, and is booked as already there.
func demandOneRow(r *Run) {
	rows := r.rowsByID()
	type noteOf struct{ lane, note string }
	first := map[noteOf]int{} // messages
	landings, notes := int64(0), map[string]bool{}
	landed(r, func(i int, value struct{ ID string }) {
		landings++
		notes[value.ID] = true
		if rows[value.ID] == nil {
			r.wrongOf(i, "%s has landed, and has no row", value.ID)
		}
		at := noteOf{r.Messages[i].Lane, value.ID}
		if _, ok := first[at]; !ok {
			first[at] = i
		}
	})
	written, byHand := int64(0), 0
	for id, row := range rows {
		switch row["by"] {
		case "hand":
			byHand++
			continue
		case "worker":
			written++
		default:
			continue
		}
		i, ok := first[noteOf{row["lane"], id}]
		switch {
		case !ok:
			r.wrong("the row of %s is by a worker, from %s, where no message has landed that has this key", id, row["lane"])
		case r.Ordered && r.messageOf(row) != i:
			r.wrongOf(i, "the row of %s is of position %s, and a message with this key landed before", id, row["position"])
		}
	}
	if byHand != 10_000 {
		r.wrong("%d rows are as they were, want %d", byHand, 10_000)
	}
	r.booked(Books{Written: written, AlreadyPresent: landings - written})
}
