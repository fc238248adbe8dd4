package shape

import (
	"fmt"
	"math/rand/v2"
)

// Versioned lands versions in any order, by any lane, beside an application that changes
// rows and checks versions, too.
var Versioned = &Shape{
	Name: "versioned",
	// Rows that are there are locked first, the others added after that. One that somebody adds
	// in between is locked out of turn, and may be newer than those to be written.
	Retries: true,
	Worker: `id: {from: header:message-id}
sink:
  table:
    name: public.target
    mode: versioned
    key: [id]
    version: version
    columns: {id: json:id, version: json:version, by: "const:worker", lane: lane, position: position}
`,
	Table: `CREATE TABLE public.target (id text PRIMARY KEY, version bigint NOT NULL, by text NOT NULL, lane text, position bigint)`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				// Versions rise, roughly; no two of a row are the same.
				return Message{ID: fmt.Sprint("id-", n), Partition: noise(n) % partitions, Value: fmt.Appendf(nil, `{"id": %q, "version": %d}`, account(n, noise(n+1)), versionOf(n))}
			})
		}
	},
	Beside: func(rng *rand.Rand, n int) string {
		id := account(n, rng.Int())
		if rng.IntN(2) == 0 { // it was here first
			return fmt.Sprintf(`INSERT INTO public.target VALUES ('%s', 1, 'application') ON CONFLICT (id) DO NOTHING`, account(n+400, rng.Int()))
		}
		return fmt.Sprintf(`UPDATE public.target SET version = version + 7, by = 'application', lane = NULL, position = NULL WHERE id = '%s'`, id)
	},
	Demand: demandHighest,
}

// account is one of some twenty rows that messages are about at the time of the nth.
func account(n, which int) string { return fmt.Sprintf("account-%d", 20*(n/400)+which%20) }

func versionOf(n int) int64 { return int64(n+noise(n)%60)*1000 + int64(n%100)*10 }

// demandHighest: each row has the highest version that was sent or, by the application, a
// higher one.
func demandHighest(r *Run) {
	rows := r.rowsByID()
	type version struct {
		ID      string
		Version int64
	}
	highest := map[string]int{} // messages
	versions := map[int]int64{} // of those
	landings, applied := int64(0), int64(0)
	landed(r, func(i int, value version) {
		landings++
		if best, ok := highest[value.ID]; !ok || value.Version > versions[best] {
			highest[value.ID], versions[i] = i, value.Version
		}
	})
	for id, i := range highest {
		row, want := rows[id], versions[i]
		var got int64
		_, _ = fmt.Sscan(row["version"], &got)
		switch byWorker := row["by"] == "worker"; {
		case row == nil:
			r.wrongOf(i, "%s has landed, and has no row", id)
		case got < want || byWorker && got != want:
			r.wrongOf(i, "%s ended with version %d, want %d", id, got, want)
		case byWorker && r.messageOf(row) != i:
			r.wrongOf(i, "the row of %s has this version by %s %s", id, row["lane"], row["position"])
		}
	}
	for id, row := range rows {
		if row["by"] == "worker" {
			applied++
			if _, ok := highest[id]; !ok {
				r.wrong("the row of %s is by a worker, and nothing of it has landed", id)
			}
		}
	}
	if b := r.Books; b.Written+b.Stale != landings || b.AlreadyPresent != 0 || b.Rejected != 0 || b.Written < applied {
		r.wrong("the books say %+v of %d messages that have landed, of which %d rows are left", b, landings, applied)
	}
}
