package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/internal/pgtest"
)

// plainRecords are messages with an id each, spread over the partitions.
func plainRecords(from, to, partitions int) (records []*kgo.Record) {
	for i := from; i < to; i++ {
		records = append(records, &kgo.Record{
			Partition: int32(i % partitions), Value: fmt.Appendf(nil, "message %d", i),
			Headers: []kgo.RecordHeader{{Key: idHeader, Value: fmt.Appendf(nil, "message-%d", i)}},
		})
	}
	return records
}

// padded makes each value 1 KB longer.
func padded(records []*kgo.Record) []*kgo.Record {
	for _, r := range records {
		r.Value = append(r.Value, strings.Repeat(" ", 1000)...)
	}
	return records
}

// Two scopes in one process, each with its own table, strategy and group: what kills one
// kills the other, and each lands every message once.
func TestSeveralScopesInOneProcess(t *testing.T) {
	const partitions, messages = 4, 20_000
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.by_claim (id text NOT NULL, value text NOT NULL)`)
	db.exec(`CREATE TABLE public.by_position (lane text NOT NULL, position bigint NOT NULL)`)
	tp := newTopic(t, "e2e-pipelines", partitions)
	config := configFile(t, fmt.Sprintf(`sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
pipelines:
  - scope: e2e-claims
    sink: {table: {name: public.by_claim, columns: {id: id, value: value}}}
  - scope: e2e-positions
    dedup: {strategy: position}
    sink: {table: {name: public.by_position, columns: {lane: lane, position: position}}}
`, tp.broker.Addr(), tp.name, db.url))
	landUnderKills(t, tp, db, config, plainRecords(0, messages, partitions), "public.by_claim", messages, "e2e-claims", "e2e-positions")

	if n := one[int](db, `SELECT count(DISTINCT id) FROM public.by_claim`); n != messages {
		t.Errorf("%d of %d ids have landed", n, messages)
	}
	for _, column := range []string{"count(*)", "count(DISTINCT (lane, position))"} {
		if n := one[int](db, `SELECT `+column+` FROM public.by_position`); n != messages {
			t.Errorf("by position, %s is %d, want %d", column, n, messages)
		}
	}
	for _, scope := range []string{"e2e-claims", "e2e-positions"} {
		if _, sum := db.settledBooks(scope); sum.Applied != messages || sum.Fetched != messages {
			t.Errorf("the books of %s say %+v", scope, sum)
		}
	}

	// One port for both: the series have the scope, what is the process's hasn't.
	w := newWorker(t, "worker", config)
	w.start()
	w.probe("/readyz", 200, 20*time.Second)
	if err := tp.produce(plainRecords(messages, messages+100, partitions)...); err != nil {
		t.Fatal(err)
	}
	db.awaitRows("public.by_claim", messages+100, 20*time.Second)
	db.awaitRows("public.by_position", messages+100, 20*time.Second)
	for _, scope := range []string{"e2e-claims", "e2e-positions"} {
		name := fmt.Sprintf(`dedupd_messages_total{outcome="applied",scope=%q,source="kafka"}`, scope)
		await(t, name, 10*time.Second, func() error {
			if series, _ := w.metrics(); series[name] != 100 {
				return fmt.Errorf("it is %g", series[name])
			}
			return nil
		})
	}
	if series, _ := w.metrics(); !has(series, "go_goroutines") || !has(series, `dedupd_inflight_bytes{scope="e2e-claims"}`) {
		t.Error("the process's series has a scope, or a scope's has none")
	}
	w.drain(drainLimit)

	for command, want := range map[string]string{
		"stats -c " + config + " --scope e2e-positions": "scope e2e-positions",
		"doctor -c " + config:                           "scope e2e-claims: table can be written to",
	} {
		if r := runCommand(t, command); r.code != 0 || !strings.Contains(r.stdout, want) {
			t.Errorf("%s: exit code %d:\n%s%s", command, r.code, r.stdout, r.stderr)
		}
	}
	if r := runCommand(t, "stats -c "+config); r.code != 2 || !strings.Contains(r.stderr, "--scope e2e-claims, --scope e2e-positions") {
		t.Errorf("stats without a scope: exit code %d:\n%s", r.code, r.stderr)
	}
}

func runCommand(t *testing.T, line string) result {
	t.Helper()
	return command(t, nil, strings.Fields(line)...)
}

func has(series map[string]float64, name string) bool {
	_, ok := series[name]
	return ok
}

// A scope that can't start ends the process, and the error names it.
func TestAScopeThatCantStart(t *testing.T) {
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.there (id text NOT NULL)`)
	tp := newTopic(t, "e2e-no-start", 1)
	config := configFile(t, fmt.Sprintf(`sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
pipelines:
  - scope: e2e-good
    sink: {table: {name: public.there, columns: {id: id}}}
  - scope: e2e-bad
    sink: {table: {name: public.nowhere, columns: {id: id}}}
`, tp.broker.Addr(), tp.name, db.url))
	r := command(t, nil, "run", "-c", config)
	if r.code != 3 || !strings.Contains(r.stderr, "dedupd: scope e2e-bad: ") || !strings.Contains(r.stderr, "nowhere") {
		t.Errorf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
}

// While the database of two scopes is away, the third goes on, whatever they have read and
// can't write: with so many lanes it is more than all memory. The probe says which they are.
func TestADatabaseOfSomeScopesIsAway(t *testing.T) {
	needServices(t)
	server, err := pgtest.StartServer(pgtest.Options{Fsync: true})
	if err != nil {
		t.Fatal("Postgres: ", err, postgresAdvice)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	const partitions, before, after = 128, 1280, 64_000 // of 1 KB, far more than the budget
	away, db := createDatabase(t, server, "away"), newDatabase(t)
	for _, d := range []*database{away, db} {
		d.exec(`CREATE TABLE public.messages (id text NOT NULL, value text NOT NULL)`)
	}
	away.exec(`CREATE TABLE public.more (id text NOT NULL, value text NOT NULL)`)
	tp := newTopic(t, "e2e-some-away", partitions)
	w := newWorker(t, "worker", configFile(t, fmt.Sprintf(`sources:
  - kafka: {brokers: [%q], topics: [%s]}
batch: {inflight_bytes: 8MiB, max_bytes: 1MiB}
sink: {table: {name: public.messages, columns: {id: id, value: value}}}
pipelines:
  - scope: e2e-away
    database:
      url: %q
  - scope: e2e-away-too
    database:
      url: %q
    sink: {table: {name: public.more, columns: {id: id, value: value}}}
  - scope: e2e-here
    database:
      url: %q
`, tp.broker.Addr(), tp.name, away.url, away.url, db.url)))
	w.start()
	if err := tp.produce(plainRecords(0, before, partitions)...); err != nil {
		t.Fatal(err)
	}
	away.awaitRows("public.messages", before, 30*time.Second)
	away.awaitRows("public.more", before, 30*time.Second)
	db.awaitRows("public.messages", before, 30*time.Second)

	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	w.probe("/readyz", 503, 10*time.Second)
	for from := before; from < before+after; from += 1000 { // in record batches that fit into the budget
		if err := tp.produce(padded(plainRecords(from, min(from+1000, before+after), partitions))...); err != nil {
			t.Fatal(err)
		}
	}
	db.awaitRows("public.messages", before+after, 60*time.Second)
	if status, body := w.get("/readyz"); status != 503 || !strings.Contains(body, "scope e2e-away: ") || !strings.Contains(body, "scope e2e-away-too: ") || strings.Contains(body, "e2e-here") {
		t.Errorf("/readyz answers %d: %s", status, body)
	}
	w.probe("/livez", 200, 0)
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	w.probe("/readyz", 200, 30*time.Second)
	away.pool.Reset()
	away.awaitRows("public.messages", before+after, 60*time.Second)
	away.awaitRows("public.more", before+after, 60*time.Second)
	w.drain(drainLimit)
	for scope, d := range map[string]*database{"e2e-away": away, "e2e-away-too": away, "e2e-here": db} {
		if _, sum := d.settledBooks(scope); sum.Applied != before+after {
			t.Errorf("the books of %s say %+v", scope, sum)
		}
	}
}
