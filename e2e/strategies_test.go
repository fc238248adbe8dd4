package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// strategyKills is how many workers each of these tests kills while messages arrive.
const strategyKills = 20

// landUnderKills lands records by two workers, one of which is killed again and again,
// until the table has the rows.
func landUnderKills(t *testing.T, tp *topic, db *database, config string, records []*kgo.Record, table string, rows int64) {
	t.Helper()
	produced := make(chan error, 1)
	f := newFleet(t, dice(t), 2, config)
	go func() {
		for len(records) > 0 {
			n := min(len(records), 200)
			if err := tp.produce(records[:n]...); err != nil {
				produced <- err
				return
			}
			records = records[n:]
			time.Sleep(20 * time.Millisecond)
		}
		produced <- nil
	}()
	for n := range strategyKills {
		f.pause(100*time.Millisecond, 500*time.Millisecond)
		what, _, _ := f.killOne(n + 1)
		t.Log(what)
	}
	if err := <-produced; err != nil {
		t.Fatal(err)
	}
	db.awaitRows(table, rows, time.Minute)
	f.end()
	if r := command(t, nil, "run", "-c", config, "--until-idle", "500ms"); r.code != 0 { // what is behind the last row
		t.Fatalf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
}

// A high-water mark per producer: whatever producers send again, brokers deliver again and
// workers die of, each number of a producer lands once, in its order.
func TestHighWaterMarkPerProducer(t *testing.T) {
	const scope, partitions, producers, each = "e2e-marks", 4, 40, 600
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.steps (n bigint GENERATED ALWAYS AS IDENTITY, producer text NOT NULL, seq bigint NOT NULL)`)
	tp := newTopic(t, scope, partitions)
	rng := dice(t)
	var records []*kgo.Record
	sent := 0
	for seq := 1; seq <= each; seq++ {
		for p := range producers {
			from := seq
			if rng.IntN(5) == 0 { // it didn't get an answer, and sends its last ones again
				from = max(1, seq-rng.IntN(10))
			}
			for s := from; s <= seq; s++ {
				records = append(records, &kgo.Record{Partition: int32(p % partitions), Headers: []kgo.RecordHeader{
					{Key: "client-id", Value: fmt.Appendf(nil, "producer-%d", p)}, {Key: "client-seq", Value: strconv.AppendInt(nil, int64(s), 10)},
				}})
				sent++
			}
		}
	}
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
dedup: {strategy: sequence}
sink:
  table: {name: public.steps, columns: {producer: "header:client-id", seq: "header:client-seq"}}
`, scope, tp.broker.Addr(), tp.name, db.url))
	landUnderKills(t, tp, db, config, records, "public.steps", producers*each)

	if bad := one[int](db, `SELECT count(*) FROM (SELECT producer FROM public.steps GROUP BY producer HAVING count(*) <> $1 OR min(seq) <> 1 OR max(seq) <> $1 OR count(DISTINCT seq) <> $1) s`, each); bad != 0 {
		t.Errorf("%d producers have a number twice or not at all", bad)
	}
	if bad := one[int](db, `SELECT count(*) FROM (SELECT seq, lag(seq) OVER (PARTITION BY producer ORDER BY n) AS before FROM public.steps) s WHERE seq <= before`); bad != 0 {
		t.Errorf("%d rows are out of their producer's order", bad)
	}
	if n := one[int](db, `SELECT count(*) FROM dedupd.sequences`); n != producers {
		t.Errorf("%d marks of %d producers", n, producers)
	}
	_, sum := db.settledBooks(scope)
	if sum.Applied != producers*each || sum.Resent != int64(sent-producers*each) || sum.Fetched != int64(sent) {
		t.Errorf("the books say %+v of %d sent", sum, sent)
	}
}

// A change stream, by position: each record lands once, in its order, and nothing else is
// kept. What the producer sends twice lands twice.
func TestChangeStreamByPosition(t *testing.T) {
	const scope, partitions, messages = "e2e-changes", 4, 20_000
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.changes (n bigint GENERATED ALWAYS AS IDENTITY, lane text NOT NULL, position bigint NOT NULL, change text NOT NULL)`)
	tp := newTopic(t, scope, partitions)
	var records []*kgo.Record
	for i := range messages {
		records = append(records, &kgo.Record{Partition: int32(i % partitions), Value: fmt.Appendf(nil, "change %d", i/2)})
	}
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
dedup: {strategy: position}
sink:
  table: {name: public.changes, columns: {lane: lane, position: position, change: value}}
`, scope, tp.broker.Addr(), tp.name, db.url))
	landUnderKills(t, tp, db, config, records, "public.changes", messages)

	if bad := one[int](db, `SELECT count(*) FROM (SELECT lane FROM public.changes GROUP BY lane HAVING count(*) <> $1 OR min(position) <> 0 OR max(position) <> $1 - 1 OR count(DISTINCT position) <> $1) s`, messages/partitions); bad != 0 {
		t.Errorf("%d lanes have a position twice or not at all", bad)
	}
	if bad := one[int](db, `SELECT count(*) FROM (SELECT position, lag(position) OVER (PARTITION BY lane ORDER BY n) AS before FROM public.changes) s WHERE position <= before`); bad != 0 {
		t.Errorf("%d rows are out of order", bad)
	}
	if n := one[int](db, `SELECT count(*) FROM dedupd.claims`); n != 0 {
		t.Errorf("%d claims", n)
	}
	if _, sum := db.settledBooks(scope); sum.Applied != messages || sum.Fetched != messages {
		t.Errorf("the books say %+v", sum)
	}
}

// Natural idempotency: rows that were there before dedupd stay as they are, and are
// counted.
func TestInsertBesideExistingRows(t *testing.T) {
	const scope, partitions, messages, existing = "e2e-beside", 4, 20_000, 3000
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.notes (id text PRIMARY KEY, text text NOT NULL)`)
	db.exec(`INSERT INTO public.notes SELECT 'note-' || 6 * i, 'by hand' FROM generate_series(1, $1) i`, existing)
	tp := newTopic(t, scope, partitions)
	var records []*kgo.Record
	for i := range messages {
		records = append(records, &kgo.Record{Partition: int32(i % partitions), Value: []byte("by dedupd"), Headers: []kgo.RecordHeader{{Key: idHeader, Value: fmt.Appendf(nil, "note-%d", i+1)}}})
	}
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
id: {from: header:message-id}
sink:
  table: {name: public.notes, key: [id], columns: {id: id, text: value}}
`, scope, tp.broker.Addr(), tp.name, db.url))
	landUnderKills(t, tp, db, config, records, "public.notes", messages)

	if n := one[int](db, `SELECT count(*) FROM public.notes WHERE text = 'by hand'`); n != existing {
		t.Errorf("%d rows are as they were, want %d", n, existing)
	}
	present, written := one[int](db, `SELECT sum(already_present)::int FROM dedupd.books`), one[int](db, `SELECT sum(written)::int FROM dedupd.books`)
	if present != existing || written != messages-existing {
		t.Errorf("the books say %d already present and %d written, want %d and %d", present, written, existing, messages-existing)
	}
}

// State or version check: versions of aggregates come in any order, by two partitions and
// from an application beside the workers. Each row ends with its highest version.
func TestStateVersionCheck(t *testing.T) {
	const scope, partitions, rows, versions = "e2e-versions", 2, 50, 200
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.accounts (id text PRIMARY KEY, version bigint NOT NULL, by text NOT NULL)`)
	tp := newTopic(t, scope, partitions)
	rng := dice(t)
	var records []*kgo.Record
	for row := range rows {
		for v := range versions {
			records = append(records, &kgo.Record{
				Partition: rng.Int32N(partitions), Value: fmt.Appendf(nil, `{"id": "account-%d", "version": %d}`, row, 2*v),
				Headers: []kgo.RecordHeader{{Key: idHeader, Value: fmt.Appendf(nil, "account-%d/%d", row, v)}},
			})
		}
	}
	rng.Shuffle(len(records), func(i, j int) { records[i], records[j] = records[j], records[i] })
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
id: {from: header:message-id}
sink:
  table: {name: public.accounts, mode: versioned, key: [id], version: version, columns: {id: "json:id", version: "json:version", by: "const:dedupd"}}
`, scope, tp.broker.Addr(), tp.name, db.url))

	// The application checks versions, too: one of its own wins a row for good.
	ctx, stop := context.WithCancel(t.Context())
	application := make(chan error, 1)
	own := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
	go func() {
		for ctx.Err() == nil {
			_, err := db.pool.Exec(t.Context(), `INSERT INTO public.accounts AS a VALUES ($1, $2, 'application') ON CONFLICT (id) DO UPDATE SET version = EXCLUDED.version, by = EXCLUDED.by WHERE a.version < EXCLUDED.version`,
				fmt.Sprint("account-", own.IntN(rows)), 2*own.IntN(versions)+1)
			if err != nil {
				application <- err
				return
			}
			time.Sleep(time.Millisecond)
		}
		application <- nil
	}()
	landUnderKills(t, tp, db, config, records, "public.accounts", rows)
	stop()
	if err := <-application; err != nil {
		t.Fatal(err)
	}

	const highest = 2 * (versions - 1)
	if bad := one[int](db, `SELECT count(*) FROM public.accounts WHERE version < $1 OR by = 'dedupd' AND version <> $1`, highest); bad != 0 {
		t.Errorf("%d rows ended below their highest version", bad)
	}
	_, sum := db.settledBooks(scope)
	written, stale := one[int64](db, `SELECT sum(written)::bigint FROM dedupd.books`), one[int64](db, `SELECT sum(stale)::bigint FROM dedupd.books`)
	if sum.Applied != rows*versions || written+stale != sum.Applied || written == 0 || stale == 0 {
		t.Errorf("the books say %+v: %d written, %d stale", sum, written, stale)
	}
}

// One operation, several targets: each message lands once in every table whose filter it
// passes, in one transaction, and what no table wants is counted and claims nothing.
func TestOneOperationSeveralTargets(t *testing.T) {
	const scope, partitions, messages = "e2e-targets", 4, 20_000
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.orders_now (id text NOT NULL, type text NOT NULL, txn xid8 NOT NULL DEFAULT pg_current_xact_id())`)
	db.exec(`CREATE TABLE public.orders_log (id text NOT NULL, type text NOT NULL, txn xid8 NOT NULL DEFAULT pg_current_xact_id())`)
	tp := newTopic(t, scope, partitions)
	rng := dice(t)
	types := []string{"created", "changed", "removed", "heartbeat"} // the first table's, both's, the second's, nobody's
	var records []*kgo.Record
	sent := make(map[string]int64) // by type, copies included
	for i := range messages {
		kind := types[i%len(types)]
		for range 1 + max(0, rng.IntN(5)-3) { // some are sent again, at once or by another partition
			sent[kind]++
			records = append(records, &kgo.Record{
				Partition: rng.Int32N(partitions), Value: fmt.Appendf(nil, `{"type": %q, "n": %d}`, kind, i),
				Headers: []kgo.RecordHeader{{Key: idHeader, Value: fmt.Appendf(nil, "message-%d", i)}},
			})
		}
	}
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
id: {from: header:message-id}
sink:
  - table: {name: public.orders_now, columns: {id: id, type: "json:type"}}
    filter: {json:type: [created, changed]}
  - table: {name: public.orders_log, columns: {id: id, type: "json:type"}}
    filter: {json:type: {not: [created, heartbeat]}}
`, scope, tp.broker.Addr(), tp.name, db.url))
	landUnderKills(t, tp, db, config, records, "public.orders_now", messages/2)

	const each = messages / 4
	for _, c := range []struct{ table, first, second string }{{"orders_now", "created", "changed"}, {"orders_log", "changed", "removed"}} {
		for _, kind := range []string{c.first, c.second} {
			if n := one[int](db, `SELECT count(DISTINCT id) FROM public.`+c.table+` WHERE type = $1`, kind); n != each {
				t.Errorf("%s has %d of %d that are %s", c.table, n, each, kind)
			}
		}
		if n := one[int](db, `SELECT count(*) FROM public.`+c.table); n != 2*each {
			t.Errorf("%s has %d rows, want %d", c.table, n, 2*each)
		}
	}
	if n := one[int](db, `SELECT count(*) FROM public.orders_now a JOIN public.orders_log b USING (id) WHERE a.txn <> b.txn`); n != 0 {
		t.Errorf("%d messages were written in two transactions", n)
	}
	if n := one[int](db, `SELECT count(*) FROM dedupd.claims`); n != 3*each {
		t.Errorf("%d claims of %d ids that somebody wants", n, 3*each)
	}
	_, sum := db.settledBooks(scope)
	copies := sent["created"] + sent["changed"] + sent["removed"] - 3*each
	if sum.Applied != 3*each || sum.Resent != copies || sum.Filtered != sent["heartbeat"] || sum.Fetched != int64(len(records)) {
		t.Errorf("the books say %+v; sent were %v", sum, sent)
	}
}
