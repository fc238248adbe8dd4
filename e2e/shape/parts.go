package shape

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
)

// Parts upserts rows of which each message says only a part, beside an application that adds
// rows and counts in column c of each third one, of which no message says anything. A key's
// messages come by one lane.
var Parts = &Shape{
	Name: "parts", Ordered: true, Retries: true,
	Worker: `id: {from: header:message-id}
sink:
  table:
    name: public.target
    mode: upsert
    key: [id]
    columns: {id: json:id, a: json:a, b: json:b, c: json:c, lane: lane, position: position}
`,
	Table: `CREATE TABLE public.target (id text PRIMARY KEY, a text DEFAULT 'none', b bigint NOT NULL DEFAULT 0, c bigint NOT NULL DEFAULT 0,
	touched bigint NOT NULL DEFAULT 0, lane text, position bigint)`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				row := 50*(n/2000) + noise(n)%50
				parts := []string{fmt.Sprintf(`"id": "row-%d"`, row)}
				switch kind := noise(n + 1); {
				case kind%10 < 4:
					parts = append(parts, fmt.Sprintf(`"a": "%d"`, n))
				case kind%10 == 4:
					parts = append(parts, `"a": null`)
				}
				if noise(n+2)%10 < 4 {
					parts = append(parts, fmt.Sprintf(`"b": %d`, n))
				}
				if row%touchedRows != 0 && noise(n+3)%10 < 4 {
					parts = append(parts, fmt.Sprintf(`"c": %d`, n))
				}
				return Message{ID: fmt.Sprint("id-", n), Partition: row % partitions, Value: []byte("{" + strings.Join(parts, ", ") + "}")}
			})
		}
	},
	Beside: func(rng *rand.Rand, n int) string {
		row := 50*(n/2000) + rng.IntN(50)
		return fmt.Sprintf(`INSERT INTO public.target AS t (id, c, touched) VALUES ('row-%d', 1, 1)
			ON CONFLICT (id) DO UPDATE SET c = t.c + 1, touched = t.touched + 1, lane = NULL, position = NULL`, row-row%touchedRows)
	},
	Demand: demandParts,
}

// touchedRows: the application has every such row.
const touchedRows = 3

// demandParts: each column of each row has the last value that a message of its key said, in
// lane order, or its default. What only the application writes is what it has counted.
func demandParts(r *Run) {
	type part struct {
		ID   string
		A    json.RawMessage
		B, C *int64
	}
	rows, want := r.rowsByID(), map[string]Row{}
	last := map[string]int{} // messages
	landings := int64(0)
	landed(r, func(i int, p part) {
		landings++
		if before, ok := last[p.ID]; ok && r.Messages[before].Lane != r.Messages[i].Lane {
			r.wrongOf(i, "%s comes by two lanes, and has no order", p.ID)
		}
		last[p.ID] = i
		row := want[p.ID]
		if row == nil {
			row = Row{"a": "none", "b": "0", "c": "0"}
			want[p.ID] = row
		}
		switch a := string(p.A); {
		case a == "null":
			delete(row, "a")
		case a != "":
			row["a"] = strings.Trim(a, `"`)
		}
		if p.B != nil {
			row["b"] = fmt.Sprint(*p.B)
		}
		if p.C != nil {
			row["c"] = fmt.Sprint(*p.C)
		}
	})
	for id, i := range last {
		row := rows[id]
		if row == nil {
			r.wrongOf(i, "%s has landed, and has no row", id)
			continue
		}
		w := want[id]
		if row["touched"] != "0" {
			w["c"] = row["touched"]
		}
		for _, column := range []string{"a", "b", "c"} {
			if row[column] != w[column] {
				r.wrongOf(i, "%s ended with %s %q, want %q", id, column, row[column], w[column])
			}
		}
		if row["lane"] != "" && r.messageOf(row) != i {
			r.wrongOf(i, "the row of %s is by %s %s", id, row["lane"], row["position"])
		}
	}
	for id, row := range rows {
		if _, ok := last[id]; !ok && row["touched"] != row["c"] {
			r.wrong("there is a row of %s, of which nothing has landed", id)
		}
	}
	r.booked(Books{Written: landings})
}
