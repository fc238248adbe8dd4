package shape

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
)

// List writes to two sinks in one transaction, each with its own filter. Messages that no
// sink wants claim nothing.
var List = &Shape{
	Name: "list",
	Worker: `id: {from: header:message-id}
sink:
  - table: {name: public.target_now, columns: {id: id, part: "const:now", lane: lane, position: position}}
    filter: {json:type: [created, changed]}
  - table: {name: public.target_log, columns: {id: id, part: "const:log", lane: lane, position: position}}
    filter: {json:type: {not: [created, heartbeat]}}
`,
	// Without a unique index, which would hide doubles.
	Table: `CREATE TABLE public.target (id text NOT NULL, part text NOT NULL, lane text NOT NULL, position bigint NOT NULL) PARTITION BY LIST (part);
CREATE TABLE public.target_now PARTITION OF public.target FOR VALUES IN ('now');
CREATE TABLE public.target_log PARTITION OF public.target FOR VALUES IN ('log')`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		types := []string{"created", "changed", "removed", "heartbeat"}
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				return Message{ID: fmt.Sprint("id-", n), Partition: n % partitions, Value: fmt.Appendf(nil, `{"type": %q}`, types[noise(n)%4])}
			})
		}
	},
	Filtered: func(value []byte) bool { return wantedBy(value) == [2]bool{} },
	Demand:   demandTargets,
}

// wantedBy tells which of the two sinks want a message: now and log.
func wantedBy(value []byte) [2]bool {
	var v struct{ Type string }
	_ = json.Unmarshal(value, &v) // no type then
	return [2]bool{v.Type == "created" || v.Type == "changed", v.Type != "created" && v.Type != "heartbeat"}
}

// demandTargets: each message has a row in the tables whose filters it passes, and in no other.
func demandTargets(r *Run) {
	type rowOf struct {
		message int
		part    string
	}
	count := map[rowOf]int{}
	for _, row := range r.Rows {
		i := r.messageOf(row)
		if i < 0 || r.Messages[i].ID != row["id"] {
			r.wrong("the row of %s, in %s, is of %s %s, where the log has another message", row["id"], row["part"], row["lane"], row["position"])
			continue
		}
		count[rowOf{i, row["part"]}]++
	}
	var books Books
	for i, m := range r.Messages {
		wanted := wantedBy(m.Value)
		if wanted == [2]bool{} {
			books.Filtered++
		}
		if m.Landed {
			books.Written++
		}
		for at, part := range []string{"now", "log"} {
			want := 0
			if m.Landed && wanted[at] {
				want = 1
			}
			if n := count[rowOf{i, part}]; n != want {
				r.wrongOf(i, "it has %d rows in %s, want %d", n, part, want)
			}
		}
	}
	if !r.Ordered { // a queue brings some again, and nothing tells that they were filtered before
		books.Filtered = max(books.Filtered, r.Books.Filtered)
	}
	r.booked(books)
}
