package dedup_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// delivered marks messages of a queue as delivered so many times.
func delivered(b lane.Batch, times int) lane.Batch {
	for i := range b.Messages {
		b.Messages[i].Deliveries = times
	}
	return b
}

// Whoever puts such a pooler between and doesn't configure it is told what is missing.
func TestAPoolerThatIsNotConfigured(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"26000", "42P05"} {
		f := newFixture(t)
		f.sink.fail = func(*message.Message) error {
			return &pgconn.PgError{Severity: "ERROR", Code: code, Message: "prepared statement \"dedupd_begin\""}
		}
		err := f.Handle(t.Context(), []lane.Batch{f.acquire("kafka", "orders/0").batch("a")})
		wantHold(t, err, code, "database.pooler: pgbouncer_transaction")
		if hold := (*lane.HoldError)(nil); errors.As(err, &hold) && !strings.Contains(hold.Summary, "database.pooler") {
			t.Errorf("/readyz would say %q", hold.Summary)
		}
	}
}

// TestBehindATransactionPooler lives a scope's whole life where each transaction
// meets another connection and nothing may be prepared.
func TestBehindATransactionPooler(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	config, err := pgxpool.ParseConfig(pgtest.NewPooler(t, f.db.URL, 3))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if f.Store, err = dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "test", Owner: "pooled", TransactionPooler: true, FilterMemory: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := f.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Store.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Store.Generations().ChunkClaims = 300
	var lanes []*ownedLane
	for _, name := range []string{"orders/0", "orders/1", "orders/2", "orders/3"} {
		lanes = append(lanes, f.acquire("kafka", name))
	}
	old := ids("old-", 1000)
	for round := range 3 {
		var writers sync.WaitGroup
		for i, l := range lanes {
			b := l.batch(append(ids("new-"+string(rune('a'+round))+string(rune('a'+i)), 300), old...)...)
			writers.Go(func() {
				if err := f.Handle(t.Context(), []lane.Batch{b}); err != nil {
					t.Errorf("round %d, lane %d: %v", round, i, err)
				}
			})
		}
		writers.Wait()
		f.rotate()
		f.buildFilters()
		f.loadFilters()
		if f.Store.Generations().FiltersBehind() {
			t.Error("filters were not loaded")
		}
		for _, l := range lanes {
			f.caughtUp(l)
		}
		if err := f.FlushAges(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if n := len(f.landed()); n != 3*4*300+1000 {
		t.Errorf("%d rows landed, want %d", n, 3*4*300+1000)
	}
	f.handle(lanes[0].batch("p=check", "q=check"))
	f.replayAll("dead", "dead")
	f.mend()
	f.replay(f.deadLetters()[0].ID)
	if gone, err := f.Store.DiscardDeadLetters(t.Context(), "ann@host", []int64{f.deadLetters()[0].ID}, nil); err != nil || len(gone) != 1 {
		t.Errorf("discard: %v, %v", gone, err)
	}
	f.wantDead()
	if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.filters SET checksum = checksum + 1 WHERE chunk = 1`); err != nil {
		t.Fatal(err)
	}
	f.Store.Generations().Forget("the test")
	f.loadFilters()
	f.buildFilters()
	f.loadFilters()
	if f.Store.Generations().FiltersBehind() {
		t.Error("a broken filter was not built again")
	}
	f.passTime(25 * time.Hour)
	for _, l := range lanes {
		f.caughtUp(l)
	}
	if n, led, err := f.Store.Generations().Expire(t.Context(), 24*time.Hour, 48*time.Hour); err != nil || !led || n != 3 {
		t.Errorf("expire: %d, led %v, %v", n, led, err)
	}
	if led, err := f.Store.Generations().Drop(t.Context(), 1); err != nil || !led {
		t.Errorf("drop: led %v, %v", led, err)
	}
	if dropped, led, err := f.Store.Generations().Sweep(t.Context()); err != nil || !led || len(dropped) != 0 {
		t.Errorf("sweep: %v, led %v, %v", dropped, led, err)
	}
	if _, _, err := f.Store.ExpireDeadLetters(t.Context(), time.Hour); err != nil {
		t.Error(err)
	}
	if _, err := f.Store.Status(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := f.Store.DuplicateAges(t.Context(), time.Hour*48); err != nil {
		t.Error(err)
	}
	// The catalog has changed since the store last saw it: the first try is refused.
	for try := range 2 {
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			isNew, err := f.Store.Claim(t.Context(), tx, []string{"old-1", "library"})
			if err == nil && (!isNew[0] || !isNew[1]) {
				t.Errorf("claims of the library: %v", isNew)
			}
			return err
		})
		if refused := err != nil && strings.Contains(err.Error(), "DD002"); refused != (try == 0) || err != nil && !refused {
			t.Errorf("try %d of the library's claims: %v", try, err)
		}
	}
	// What may have ended a process; its lane holds up expiry until it is caught up.
	queue := f.acquireQueue("nats")
	if err := f.Handle(t.Context(), []lane.Batch{delivered(queue.batch("often"), 9)}); err != nil {
		t.Error("a message that was delivered often: ", err)
	}
	if err := f.Store.Release(t.Context(), lanes[0].Lane, lanes[0].Epoch); err != nil {
		t.Error(err)
	}
}
