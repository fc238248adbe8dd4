package shape

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// historySize is how many messages a row remembers.
const historySize = 40

// History keeps the latest state of each key, in rows that remember their last messages:
// nothing is claimed. Producers send none again that its row has forgotten.
var History = &Shape{
	Name: "history", By: ByPosition, Ordered: true,
	Worker: fmt.Sprintf(`id: {from: header:message-id}
dedup: {strategy: position}
sink:
  table:
    name: public.target
    mode: upsert
    key: [id]
    absent: null
    history: {column: history, size: %d}
    columns: {id: json:id, state: json:state, lane: lane, position: position}
`, historySize),
	Table: `CREATE TABLE public.target (id text PRIMARY KEY, state text, history text[], touched boolean NOT NULL DEFAULT false, lane text, position bigint)`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		lately := map[int][]Message{} // by row
		n := 0
		return func() []Message {
			row := 20*(n/2000) + rng.IntN(20)
			if last := lately[row]; len(last) > 0 && rng.IntN(4) == 0 {
				m := last[rng.IntN(len(last))]
				m.Copy = 1
				return []Message{m}
			}
			m := Message{ID: fmt.Sprint("id-", n), Partition: row % partitions, Value: fmt.Appendf(nil, `{"id": "row-%d", "state": "%d"}`, row, n)}
			n++
			lately[row] = append(lately[row], m)
			lately[row] = lately[row][max(0, len(lately[row])-10):]
			return []Message{m}
		}
	},
	Beside: func(rng *rand.Rand, n int) string {
		return fmt.Sprintf(`UPDATE public.target SET touched = true WHERE id = 'row-%d'`, 20*(n/2000)+4*rng.IntN(5))
	},
	Demand: demandHistory,
}

// demandHistory: each row is as the last of its messages has made it that it didn't remember,
// and remembers the last ones, in their order.
func demandHistory(r *Run) {
	rows := r.rowsByID()
	type state struct {
		last  int // message
		state string
		ids   []string
	}
	want := map[string]*state{}
	var books Books
	landed(r, func(i int, value struct{ ID, State string }) {
		s := want[value.ID]
		if s == nil {
			s = &state{}
			want[value.ID] = s
		}
		id := r.Messages[i].ID
		if slices.Contains(s.ids, id) {
			books.AlreadyPresent++
			return
		}
		books.Written++
		s.last, s.state = i, value.State
		s.ids = append(s.ids, id)
		s.ids = s.ids[max(0, len(s.ids)-historySize):]
	})
	for id, s := range want {
		switch row := rows[id]; {
		case row == nil:
			r.wrongOf(s.last, "%s has landed, and has no row", id)
		case row["state"] != s.state || r.messageOf(row) != s.last:
			r.wrongOf(s.last, "%s ended in state %s, by %s %s; want %s", id, row["state"], row["lane"], row["position"], s.state)
		case !slices.Equal(texts(row["history"]), s.ids):
			r.wrongOf(s.last, "%s remembers %s, want %v", id, row["history"], s.ids)
		}
	}
	for id := range rows {
		if want[id] == nil {
			r.wrong("there is a row of %s, of which nothing has landed", id)
		}
	}
	r.booked(books)
}
