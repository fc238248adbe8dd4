package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/natstest"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/sinks"
	_ "github.com/dedupd/dedupd/sinks/table"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// retaining is a source whose broker keeps messages for some time.
type retaining struct {
	consumer.Source
	name string
	kept []consumer.TopicRetention
	err  error
}

func (k retaining) Name() string { return k.name }

func (k retaining) BrokerRetention(context.Context) ([]consumer.TopicRetention, error) {
	return k.kept, k.err
}

func TestWarnOfShortWindow(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	sources := []consumer.Source{
		retaining{name: "short", kept: []consumer.TopicRetention{{Name: "a", For: day}, {Name: "b", For: 7 * day}}},
		retaining{name: "long", kept: []consumer.TopicRetention{{Name: "c", For: 30 * day}, {Name: "d"}}},
		retaining{name: "half", kept: []consumer.TopicRetention{{Name: "e", For: 8 * day}}, err: errors.New("no such topic")},
		struct{ consumer.Source }{}, // doesn't say
	}
	var log bytes.Buffer
	warnOfShortWindow(t.Context(), 7*day, sources, slog.New(slog.NewTextHandler(&log, nil)))
	for _, want := range []string{
		"level=WARN msg=\"the broker keeps messages longer than retention.window: .*\" name=long:c kept=720h0m0s window=168h0m0s\n",
		"level=INFO msg=\"the broker keeps messages without a time limit: .*\" name=long:d window=168h0m0s\n",
		"level=WARN .* name=half:e kept=192h0m0s",
		"level=INFO msg=\"the broker doesn't say how long it keeps messages, .*\" source=half error=\"no such topic\"\n",
	} {
		if !regexp.MustCompile(want).MatchString(log.String()) {
			t.Errorf("nothing like %q in\n%s", want, log.String())
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 4 {
		t.Errorf("%d lines, want 4:\n%s", n, log.String())
	}
}

// TestTheEndDoesNotWaitForADeadDatabase has a database that never answers.
func TestTheEndDoesNotWaitForADeadDatabase(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		stop() // as at the end of every run
		var log bytes.Buffer
		start := time.Now()
		flushLast(ctx, func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}, slog.New(slog.NewTextHandler(&log, nil)))
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("it took %s, want 2s", took)
		}
		if !strings.Contains(log.String(), "the last ages of duplicates are not counted") {
			t.Errorf("not logged: %s", log.String())
		}
	})
}

// rig is a configuration and the database that it names.
type rig struct {
	text  string
	cfg   *config.Config
	pool  *pgxpool.Pool
	store *dedup.Store
}

func newRig(t *testing.T, sources string) *rig {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a database")
	}
	text := fmt.Sprintf(`
scope: orders
sources: [%s]
database: {url: %q, migrate: true}
sink: {table: {name: public.orders, columns: {id: id}}}
http: {listen: "127.0.0.1:0"}
`, sources, pgtest.New(t).URL)
	r := &rig{text: text}
	r.cfg = r.parse(t)
	pool, store, err := OpenDatabase(t.Context(), r.cfg, 3, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r.pool, r.store = pool, store
	r.exec(t, `CREATE TABLE public.orders (id text PRIMARY KEY)`)
	if _, err := store.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) parse(t *testing.T) *config.Config {
	t.Helper()
	cfg, _, err := config.Parse("test.yaml", []byte(r.text), config.Options{Sinks: &sinks.Default})
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// begin runs a worker, with its own configuration, until ctx ends.
func (r *rig) begin(ctx context.Context, t *testing.T, log slog.Handler) (ended <-chan error) {
	t.Helper()
	a := &App{Config: r.parse(t), Sinks: &sinks.Default, Logger: slog.New(log)}
	end := make(chan error, 1)
	go func() {
		_, err := a.Run(ctx)
		end <- err
	}()
	return end
}

func (r *rig) exec(t *testing.T, sql string) {
	t.Helper()
	if _, err := r.pool.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// await waits until a query returns a number other than 0.
func (r *rig) await(t *testing.T, sql string) (n int) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); n == 0; time.Sleep(10 * time.Millisecond) {
		if err := r.pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n == 0 && time.Now().After(deadline) {
			t.Fatalf("still 0: %s", sql)
		}
	}
	return n
}

const noSource = `{kafka: {brokers: "localhost:1", topics: [t]}}`

// TestAPassOfACommandLoadsNoFilters seals a generation and builds its filter for the
// workers.
func TestAPassOfACommandLoadsNoFilters(t *testing.T) {
	t.Parallel()
	r := newRig(t, noSource)
	r.exec(t, `INSERT INTO dedupd.claims_orders_1 (key) SELECT gen_random_uuid() FROM generate_series(1, 1000)`)
	report, err := Retain(t.Context(), r.cfg, r.store, slog.New(slog.DiscardHandler), true)
	if err != nil || report.Sealed != 1 || report.Filtered != 1000 {
		t.Fatalf("%+v, %v", report, err)
	}
	if n := r.store.Generations().FilterBytes(); n != 0 {
		t.Errorf("%d bytes of filters were loaded", n)
	}
}

// TestAPassMakesLostTablesOfResults drops those of a sealed and of the open generation while
// the next one is there.
func TestAPassMakesLostTablesOfResults(t *testing.T) {
	t.Parallel()
	r := newRig(t, noSource)
	for _, rotate := range []bool{true, false} { // the second prepares the next one
		r.exec(t, `INSERT INTO dedupd.claims_orders_1 (key) VALUES (gen_random_uuid())`)
		if _, err := Retain(t.Context(), r.cfg, r.store, slog.New(slog.DiscardHandler), rotate); err != nil {
			t.Fatal(err)
		}
	}
	r.await(t, `SELECT count(*) FROM dedupd.generations WHERE state = 'next'`)
	r.exec(t, `DROP TABLE dedupd.results_orders_1, dedupd.results_orders_2`)
	if _, err := Retain(t.Context(), r.cfg, r.store, slog.New(slog.DiscardHandler), false); err != nil {
		t.Fatal(err)
	}
	r.exec(t, `SELECT FROM dedupd.results_orders_1, dedupd.results_orders_2, dedupd.results_orders_3`)
}

// TestARotationByHandWaitsForAWorker has another process run retention for a second.
func TestARotationByHandWaitsForAWorker(t *testing.T) {
	t.Parallel()
	r := newRig(t, noSource)
	r.exec(t, `INSERT INTO dedupd.claims_orders_1 (key) VALUES (gen_random_uuid())`)
	tx, err := r.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(1684366450, id) FROM dedupd.scopes`); err != nil { // "dedr"
		t.Fatal(err)
	}
	released := make(chan error, 1)
	time.AfterFunc(time.Second, func() { released <- tx.Rollback(context.Background()) })
	report, err := Retain(t.Context(), r.cfg, r.store, slog.New(slog.DiscardHandler), true)
	if err != nil || report.Sealed != 1 {
		t.Errorf("%+v, %v", report, err)
	}
	select {
	case err := <-released:
		if err != nil {
			t.Error(err)
		}
	default:
		t.Error("the lock was not waited for")
	}
}

// TestAWorkerLooksAtTheDatabasesClock sets it a year ahead: the worker keeps claims that
// are held far too long by that clock. A command is trusted to know better.
func TestAWorkerLooksAtTheDatabasesClock(t *testing.T) {
	t.Parallel()
	url, _ := natstest.Start(t)
	q := &queueRig{rig: newRig(t, fmt.Sprintf("{nats: {servers: %q, stream: ORDERS}}", url))}
	q.exec(t, `INSERT INTO dedupd.claims_orders_1 (key) VALUES (gen_random_uuid())`)
	if _, err := Retain(t.Context(), q.cfg, q.store, slog.New(slog.DiscardHandler), true); err != nil {
		t.Fatal(err)
	}
	q.exec(t, `CREATE OR REPLACE FUNCTION dedupd.clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$ SELECT pg_catalog.now() + interval '1 year' $$`)
	told := make(tellTale, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := q.begin(ctx, t, slog.NewTextHandler(told, nil))
	sealed := func() (n int) {
		if err := q.pool.QueryRow(t.Context(), `SELECT count(*) FROM dedupd.generations WHERE state = 'sealed'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	select {
	case <-told:
	case err := <-ended:
		t.Fatalf("it ended: %v", err)
	case <-time.After(30 * time.Second):
		t.Errorf("nothing about the clock is logged")
	}
	if n := sealed(); n != 1 {
		t.Errorf("%d sealed generations are left, want 1", n)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if report, err := Retain(t.Context(), q.cfg, q.store, slog.New(slog.DiscardHandler), false); err != nil || report.Expired != 1 {
		t.Errorf("by a command: %+v, %v", report, err)
	}
}

// tellTale notices in a log that the database's clock is ahead.
type tellTale chan struct{}

func (c tellTale) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("the database's clock is ahead")) {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	return len(p), nil
}

// TestTheLastAgesAreCounted ends a worker between two passes: the ages that it has seen
// since the last one must not be lost.
func TestTheLastAgesAreCounted(t *testing.T) {
	t.Parallel()
	url, js := natstest.Start(t)
	r := newRig(t, fmt.Sprintf("{nats: {servers: %q, stream: ORDERS}}", url))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := r.begin(ctx, t, slog.DiscardHandler)
	// The first pass has recorded what there was: nothing. The next one is a minute
	// away.
	r.await(t, `SELECT count(*) FROM dedupd.generations WHERE state = 'next'`)
	for _, duplicates := range []int{0, 4} {
		for _, id := range []string{"a", "b", "c", "d"} {
			if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "orders", Header: nats.Header{"message-id": {id}}}); err != nil {
				t.Fatal(err)
			}
		}
		r.await(t, fmt.Sprint(`SELECT count(*) FROM dedupd.books WHERE applied = 4 AND duplicates = `, duplicates))
	}
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if n := r.await(t, `SELECT coalesce(sum(duplicates), -1)::integer FROM dedupd.duplicate_ages`); n != 4 {
		t.Errorf("the ages of %d duplicates are counted, want 4", n)
	}
}

// TestFiltersComeOnTopOfTheMemory loads filters the way the loop does.
func TestFiltersComeOnTopOfTheMemory(t *testing.T) {
	t.Parallel()
	r := newRig(t, `{nats: {servers: "nats://127.0.0.1:1", stream: ORDERS}}`)
	counted := int64(-1)
	keeper := retentionStore{Store: r.store, Set: r.store.Generations(), limit: func(filters int64) { counted = filters }}
	if err := keeper.LoadFilters(t.Context()); err != nil {
		t.Fatal(err)
	}
	if counted != r.store.Generations().FilterBytes() {
		t.Errorf("the limit counts %d bytes, want %d", counted, r.store.Generations().FilterBytes())
	}
}
