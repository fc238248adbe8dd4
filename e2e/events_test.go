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
	"github.com/twmb/franz-go/pkg/kgo"
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
func TestEventStore(t *testing.T) {
	const scope, partitions, streams, each = "e2e-events", 4, 60, 150
	db := newDatabase(t)
	db.exec(eventsTable)
	tp := newTopic(t, scope, partitions)
	rng := dice(t)
	var records []*kgo.Record
	shared := func(stream int) bool { return stream%3 == 0 }
	add := func(stream int, operation, expected string) {
		records = append(records, &kgo.Record{
			Partition: int32(stream % partitions), Value: fmt.Appendf(nil, `{"stream": "stream-%d", "expected": %s}`, stream, expected),
			Headers: []kgo.RecordHeader{{Key: idHeader, Value: []byte(operation)}},
		})
	}
	sentAgain, wrong := int64(0), int64(0)
	for n := range each {
		for stream := range streams {
			from := n
			if rng.IntN(5) == 0 { // no answer came: its last ones again
				from = max(0, n-rng.IntN(10))
			}
			for k := from; k <= n; k++ {
				expected := fmt.Sprint(k)
				if shared(stream) {
					expected = "null"
				}
				add(stream, fmt.Sprintf("stream-%d/%05d", stream, k), expected)
			}
			sentAgain += int64(n - from)
			if !shared(stream) && n > 0 && rng.IntN(20) == 0 { // somebody who hasn't seen the last event
				add(stream, fmt.Sprintf("late-%d/%d", stream, n), fmt.Sprint(rng.IntN(n)))
				wrong++
			}
		}
	}
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
id: {from: header:message-id}
dedup: {strategy: position}
sink:
  table: {name: public.events, mode: append, stream: stream, version: version, operation: operation, event_id: id, expected: "json:expected", on_mismatch: ignore, columns: {stream: "json:stream", data: value}}
`, scope, tp.broker.Addr(), tp.name, db.url))
	stop := appendOutside(t, db, rng, func(own *rand.Rand) string { return fmt.Sprint("stream-", 3*own.IntN(streams/3)) })
	landUnderKills(t, tp, db, config, records, "public.landed", streams*each)
	outside := stop()

	checkStreams(t, db)
	if bad := one[int](db, `SELECT count(*) FROM public.events WHERE operation LIKE 'stream-%' AND split_part(stream, '-', 2)::int % 3 <> 0 AND version <> split_part(operation, '/', 2)::int + 1`); bad != 0 {
		t.Errorf("%d events aren't at the version that was expected", bad)
	}
	if n := one[int64](db, `SELECT count(*) FROM public.events WHERE operation LIKE 'application/%'`); n != outside || n == 0 {
		t.Errorf("%d events of the application, want %d", n, outside)
	}
	_, sum := db.settledBooks(scope)
	written, present, rejected := one[int64](db, `SELECT sum(written)::bigint FROM dedupd.books`), one[int64](db, `SELECT sum(already_present)::bigint FROM dedupd.books`), one[int64](db, `SELECT sum(rejected)::bigint FROM dedupd.books`)
	if sum.Applied != int64(len(records)) || written != streams*each || present != sentAgain || rejected != wrong {
		t.Errorf("the books say %+v: %d written, %d present, %d rejected; want %d, %d and %d", sum, written, present, rejected, streams*each, sentAgain, wrong)
	}
}

// checkStreams checks that each stream's events have all numbers from 1 on, and those of a
// producer its order.
func checkStreams(t *testing.T, db *database) {
	t.Helper()
	if bad := one[int](db, `SELECT count(*) FROM (SELECT stream FROM public.events GROUP BY stream HAVING min(version) <> 1 OR max(version) <> count(*)) s`); bad != 0 {
		t.Errorf("%d streams lack a number", bad)
	}
	if bad := one[int](db, `SELECT count(*) FROM (SELECT operation, lag(operation) OVER (PARTITION BY stream, split_part(operation, '/', 1) ORDER BY version) AS before FROM public.landed) s WHERE operation <= before`); bad != 0 {
		t.Errorf("%d events are out of order", bad)
	}
}

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
func TestHistoryInTheRow(t *testing.T) {
	const scope, partitions, rows, states, size = "e2e-history", 4, 40, 250, 30
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.accounts (id text PRIMARY KEY, n int, visits int NOT NULL DEFAULT 0, last_messages text[]);
		CREATE TABLE public.relapses (id text, n int);
		CREATE FUNCTION public.watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.n < OLD.n OR NEW.n = OLD.n AND NEW.last_messages IS DISTINCT FROM OLD.last_messages THEN INSERT INTO public.relapses VALUES (NEW.id, NEW.n); END IF;
			RETURN NULL; END $$;
		CREATE TRIGGER watch AFTER UPDATE ON public.accounts FOR EACH ROW EXECUTE FUNCTION public.watch()`)
	tp := newTopic(t, scope, partitions)
	rng := dice(t)
	var records []*kgo.Record
	add := func(row, n int) {
		records = append(records, &kgo.Record{
			Partition: int32(row % partitions), Value: fmt.Appendf(nil, `{"id": "account-%d", "n": %d}`, row, n),
			Headers: []kgo.RecordHeader{{Key: idHeader, Value: fmt.Appendf(nil, "account-%d/%d", row, n)}},
		})
	}
	sentAgain := int64(0)
	for n := range states {
		for row := range rows {
			add(row, n)
			for rng.IntN(3) == 0 {
				add(row, max(0, n-rng.IntN(size)))
				sentAgain++
			}
		}
	}
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
id: {from: header:message-id}
dedup: {strategy: position}
sink:
  table: {name: public.accounts, mode: upsert, key: [id], absent: null, history: {column: last_messages, size: %d}, columns: {id: "json:id", n: "json:n"}}
`, scope, tp.broker.Addr(), tp.name, db.url, size))

	ctx, stop := context.WithCancel(t.Context())
	application := make(chan error, 1)
	own := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
	go func() {
		for ctx.Err() == nil {
			if _, err := db.pool.Exec(t.Context(), `INSERT INTO public.accounts AS a (id, visits) VALUES ($1, 1) ON CONFLICT (id) DO UPDATE SET visits = a.visits + 1`, fmt.Sprint("account-", own.IntN(rows))); err != nil {
				application <- err
				return
			}
			time.Sleep(time.Millisecond)
		}
		application <- nil
	}()
	db.exec(fmt.Sprintf(`CREATE VIEW public.finished AS SELECT * FROM public.accounts WHERE n = %d`, states-1))
	landUnderKills(t, tp, db, config, records, "public.finished", rows)
	stop()
	if err := <-application; err != nil {
		t.Fatal(err)
	}
	if bad := one[int](db, `SELECT count(*) FROM public.relapses`); bad != 0 {
		t.Errorf("%d writes put an older state over a newer one, or the same one again", bad)
	}
	if bad := one[int](db, `SELECT count(*) FROM public.accounts WHERE n <> $1 OR last_messages <> (SELECT array_agg(id || '/' || i ORDER BY i) FROM generate_series($1 - $2 + 1, $1) AS i)`, states-1, size); bad != 0 {
		t.Errorf("%d rows aren't at their last state, or don't remember their last messages", bad)
	}
	if n := one[int](db, `SELECT count(*) FROM dedupd.claims`); n != 0 {
		t.Errorf("%d claims", n)
	}
	_, sum := db.settledBooks(scope)
	written, present := one[int64](db, `SELECT sum(written)::bigint FROM dedupd.books`), one[int64](db, `SELECT sum(already_present)::bigint FROM dedupd.books`)
	if sum.Applied != int64(len(records)) || written != rows*states || present != sentAgain {
		t.Errorf("the books say %+v: %d written, %d present; want %d and %d", sum, written, present, rows*states, sentAgain)
	}
}
