package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	natsgo "github.com/nats-io/nats.go"

	"github.com/dedupd/dedupd/e2e/shape"
)

const eventsTable = `CREATE TABLE public.events (id uuid PRIMARY KEY, stream text NOT NULL, version int NOT NULL, operation text NOT NULL, data jsonb);
	CREATE UNIQUE INDEX ON public.events (stream, version);
	CREATE UNIQUE INDEX ON public.events (stream, operation);
	CREATE VIEW public.landed AS SELECT * FROM public.events WHERE operation NOT LIKE 'application/%'`

// appendOutside appends events to streams as an application does that knows nothing of
// dedupd: it looks, writes, and does both again if another one was faster. stop returns how
// many it has appended.
func appendOutside(t *testing.T, db *database, rng *rand.Rand, stream func(*rand.Rand) string) (stop func() int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	type result struct {
		n   int64
		err error
	}
	done := make(chan result, 1)
	own := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
	go func() {
		var r result
		for ctx.Err() == nil {
			_, err := db.pool.Exec(t.Context(), `INSERT INTO public.events SELECT gen_random_uuid(), $1::text, coalesce(max(version), 0) + 1, $2::text FROM public.events WHERE stream = $1`,
				stream(own), fmt.Sprint("application/", r.n))
			var refused *pgconn.PgError
			switch {
			case errors.As(err, &refused) && refused.Code == "23505":
				continue
			case err != nil:
				done <- result{r.n, err}
				return
			}
			r.n++
			time.Sleep(time.Millisecond)
		}
		done <- r
	}()
	return func() int64 {
		cancel()
		r := <-done
		if r.err != nil {
			t.Fatal("the application: ", r.err)
		}
		return r.n
	}
}

// Event store: commands for streams, most of which say at which version they expect theirs,
// while an application appends to the others. Producers send again what is there already, and
// the events are all that remembers it.
func TestEventStore(t *testing.T) { underKills(t, shape.Append) }

// A queue has no order, and its workers append to the same streams at the same time: each
// operation once all the same, and no number twice or missing.
func TestEventStoreFromAQueue(t *testing.T) {
	needServices(t)
	const scope, streams, messages = "e2e-queued-events", 10, 6000
	rng := dice(t)
	db := newDatabase(t)
	db.exec(eventsTable)
	st := newStream(t, "EVENTS")
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - nats: {servers: [%q], stream: %s}
database:
  url: %q
id: {from: header:message-id}
batch: {max_messages: 200}
sink:
  table: {name: public.events, mode: append, stream: stream, version: version, operation: operation, event_id: id, accept_reordering: true, columns: {stream: "json:stream", data: value}}
`, scope, st.url, st.name, db.url))
	stop := appendOutside(t, db, rng, func(own *rand.Rand) string { return fmt.Sprint("stream-", own.IntN(streams)) })
	f := newFleet(t, rng, 3, config)
	for _, w := range f.workers {
		w.mayRetry = true // all are after the same few streams
	}
	published := make(chan error, 1)
	go func() {
		for n := range messages {
			m := natsgo.NewMsg(st.name + ".0")
			m.Header.Set(idHeader, fmt.Sprint("command-", n))
			m.Data = fmt.Appendf(nil, `{"stream": "stream-%d"}`, n%streams)
			if _, err := st.js.PublishMsg(t.Context(), m); err != nil {
				published <- err
				return
			}
		}
		published <- nil
	}()
	for n := range strategyKills {
		f.pause(100*time.Millisecond, 500*time.Millisecond)
		f.killOne(n + 1)
	}
	if err := <-published; err != nil {
		t.Fatal(err)
	}
	db.awaitRows("public.landed", messages, 2*time.Minute)
	f.end()
	stop()
	if bad := one[int](db, `SELECT count(*) FROM (SELECT stream FROM public.events GROUP BY stream HAVING min(version) <> 1 OR max(version) <> count(*)) s`); bad != 0 {
		t.Errorf("%d streams lack a number", bad)
	}
	if n := one[int](db, `SELECT count(DISTINCT operation) FROM public.landed`); n != messages {
		t.Errorf("%d operations, want %d", n, messages)
	}
}

// Bounded history in the aggregate's own row: producers send again any of their last messages,
// out of order, and no row goes back to an older state. Nothing else remembers them. An
// application adds rows of its own, and writes to a column that is its own.
func TestHistoryInTheRow(t *testing.T) { underKills(t, shape.History) }
