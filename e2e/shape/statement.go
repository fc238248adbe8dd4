package shape

import (
	"fmt"
	"math/rand/v2"
)

// Statement withdraws from accounts what is there, beside an application that withdraws, too.
// The statement returns which withdrawals it has made; the others are rejected.
var Statement = &Shape{
	Name: "statement",
	Worker: `id: {from: header:message-id}
sink:
  statement:
    expect: returned
    key: [account]
    on_mismatch: ignore
    columns: {account: "json:id::text"}
    sql: |
      WITH locked AS MATERIALIZED (
        SELECT FROM public.target WHERE id IN (SELECT account FROM batch) ORDER BY id FOR NO KEY UPDATE
      )
      UPDATE public.target AS a SET cents = a.cents - 10 FROM batch
       WHERE a.id = batch.account AND a.cents >= 10 AND (SELECT count(*) FROM locked) > 0
      RETURNING batch.ord
`,
	Table: `CREATE TABLE public.target (id text PRIMARY KEY, cents bigint NOT NULL, application bigint NOT NULL DEFAULT 0);
INSERT INTO public.target SELECT 'account-' || i, 150 FROM generate_series(0, 9999) i`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				return Message{ID: fmt.Sprint("id-", n), Partition: noise(n) % partitions, Value: fmt.Appendf(nil, `{"id": %q}`, account(n, noise(n+1)))}
			})
		}
	},
	Beside: func(rng *rand.Rand, n int) string {
		return fmt.Sprintf(`UPDATE public.target SET cents = cents - 1, application = application + 1 WHERE id = '%s' AND cents > 0`, account(n, rng.Int()))
	},
	Demand: demandBalances,
}

// demandBalances: no account is overdrawn, each withdrawal that was made is booked as
// written, and none was rejected for which there was enough.
func demandBalances(r *Run) {
	rows := r.rowsByID()
	asked := map[string]int64{}
	landings, made := int64(0), int64(0)
	landed(r, func(_ int, value struct{ ID string }) {
		asked[value.ID]++
		landings++
	})
	for id, row := range rows {
		var cents, application int64
		_, _ = fmt.Sscan(row["cents"], &cents)
		_, _ = fmt.Sscan(row["application"], &application)
		gone := 150 - cents - application
		n := gone / 10
		made += n
		switch {
		case cents < 0 || gone < 0 || gone%10 != 0 || n > asked[id]:
			r.wrong("%s has %d of 150 cents, of which an application took %d, after %d withdrawals of 10", id, cents, application, asked[id])
		case n < asked[id] && cents >= 10:
			r.wrong("%s has %d cents, enough for another withdrawal of 10, and only %d of %d were made", id, cents, n, asked[id])
		}
	}
	r.booked(Books{Written: made, Rejected: landings - made})
}
