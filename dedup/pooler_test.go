package dedup_test

import (
	"errors"
	"slices"
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

// newPooledFixture is a scope behind a pooler.
func newPooledFixture(t *testing.T) (*fixture, *pgxpool.Pool) {
	t.Helper()
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
	return f, pool
}

// TestBehindATransactionPooler lives a scope's whole life where each transaction
// meets another connection and nothing may be prepared.
func TestBehindATransactionPooler(t *testing.T) {
	t.Parallel()
	f, pool := newPooledFixture(t)
	var lanes []*ownedLane
	for _, name := range []string{"orders/0", "orders/1", "orders/2", "orders/3"} {
		lanes = append(lanes, f.acquire("kafka", name))
	}
	f.writeGenerations(lanes)
	f.workOnDeadLetters(lanes[0])
	f.mendFilter()
	f.expireAll(lanes)
	if _, err := f.Store.Status(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := f.Store.DuplicateAges(t.Context(), time.Hour*48); err != nil {
		t.Error(err)
	}
	f.claimAsLibrary(pool)
	// What may have ended a process; its lane holds up expiry until it is caught up.
	queue := f.acquireQueue("nats")
	if err := f.Handle(t.Context(), []lane.Batch{delivered(queue.batch("often"), 9)}); err != nil {
		t.Error("a message that was delivered often: ", err)
	}
	if err := f.Store.Release(t.Context(), lanes[0].Lane, lanes[0].Epoch); err != nil {
		t.Error(err)
	}
}

// writeGenerations fills three generations from four lanes at a time, all with the same
// old ids.
func (f *fixture) writeGenerations(lanes []*ownedLane) {
	f.t.Helper()
	old := ids("old-", 1000)
	for round := range 3 {
		var writers sync.WaitGroup
		for i, l := range lanes {
			b := l.batch(append(ids("new-"+string(rune('a'+round))+string(rune('a'+i)), 300), old...)...)
			writers.Go(func() {
				if err := f.Handle(f.t.Context(), []lane.Batch{b}); err != nil {
					f.t.Errorf("round %d, lane %d: %v", round, i, err)
				}
			})
		}
		writers.Wait()
		f.rotate()
		f.buildFilters()
		f.loadFilters()
		if f.Store.Generations().FiltersBehind() {
			f.t.Error("filters were not loaded")
		}
		for _, l := range lanes {
			f.caughtUp(l)
		}
		if err := f.FlushAges(f.t.Context()); err != nil {
			f.t.Error(err)
		}
	}
	if n := len(f.landed()); n != 3*4*300+1000 {
		f.t.Errorf("%d rows landed, want %d", n, 3*4*300+1000)
	}
}

func (f *fixture) workOnDeadLetters(l *ownedLane) {
	f.t.Helper()
	f.handle(l.batch("p=check", "q=check"))
	f.replayAll("dead", "dead")
	f.mend()
	f.replay(f.deadLetters()[0].ID)
	if gone, err := f.Store.DiscardDeadLetters(f.t.Context(), "ann@host", []int64{f.deadLetters()[0].ID}, nil); err != nil || len(gone) != 1 {
		f.t.Errorf("discard: %v, %v", gone, err)
	}
	f.wantDead()
}

// mendFilter breaks a filter, which is built again.
func (f *fixture) mendFilter() {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), `UPDATE dedupd.filters SET checksum = checksum + 1 WHERE chunk = 1`); err != nil {
		f.t.Fatal(err)
	}
	f.Store.Generations().Forget("the test")
	f.loadFilters()
	f.buildFilters()
	f.loadFilters()
	if f.Store.Generations().FiltersBehind() {
		f.t.Error("a broken filter was not built again")
	}
}

// expireAll expires the three generations and drops them.
func (f *fixture) expireAll(lanes []*ownedLane) {
	f.t.Helper()
	f.passTime(25 * time.Hour)
	for _, l := range lanes {
		f.caughtUp(l)
	}
	g := f.Store.Generations()
	if n, led, err := g.Expire(f.t.Context(), 24*time.Hour, 48*time.Hour); err != nil || !led || n != 3 {
		f.t.Errorf("expire: %d, led %v, %v", n, led, err)
	}
	if led, err := g.Drop(f.t.Context(), 1); err != nil || !led {
		f.t.Errorf("drop: led %v, %v", led, err)
	}
	if dropped, led, err := g.Sweep(f.t.Context()); err != nil || !led || len(dropped) != 0 {
		f.t.Errorf("sweep: %v, led %v, %v", dropped, led, err)
	}
	if _, _, err := f.Store.ExpireDeadLetters(f.t.Context(), time.Hour); err != nil {
		f.t.Error(err)
	}
}

// claimAsLibrary claims in a transaction of its own, twice. The catalog has changed since
// the store last saw it, which the first one notices. The second one gets its result.
func (f *fixture) claimAsLibrary(pool *pgxpool.Pool) {
	f.t.Helper()
	for try, want := range []string{"", "result"} {
		err := pgx.BeginFunc(f.t.Context(), pool, func(tx pgx.Tx) error {
			claims, err := f.Store.Claim(f.t.Context(), tx, []string{"old-1", "library"}, dedup.ClaimOptions{Wait: time.Second})
			if err != nil {
				return err
			}
			if isNew := try == 0; claims[0].IsNew != isNew || claims[1].IsNew != isNew || string(claims[1].Result) != want {
				f.t.Errorf("try %d of the library's claims: %+v", try, claims)
			}
			if try > 0 {
				return nil
			}
			return claims[1].SetResult(f.t.Context(), tx, []byte("result"))
		})
		if err != nil {
			f.t.Errorf("try %d of the library's claims: %v", try, err)
		}
	}
	begin := func() pgx.Tx {
		f.t.Helper()
		tx, err := pool.Begin(f.t.Context())
		if err != nil {
			f.t.Fatal(err)
		}
		return tx
	}
	holder, asker := begin(), begin()
	f.mustClaim(holder, "held", "holder")
	if _, err := f.claim(asker, "held", 0); !errors.Is(err, dedup.ErrInFlight) {
		f.t.Errorf("an id in flight: %v", err)
	}
	time.AfterFunc(100*time.Millisecond, func() { _ = holder.Rollback(f.t.Context()) })
	if c, err := f.claim(asker, "held", 10*time.Second); err != nil || !c.IsNew {
		f.t.Errorf("an id that was in flight: new %v, %v", c.IsNew, err)
	}
	if err := asker.Commit(f.t.Context()); err != nil {
		f.t.Error(err)
	}
	// Nobody else's transaction has these time-outs.
	for range 6 {
		tx := begin()
		if got := timeouts(f.t, tx); slices.Contains(got, "20s") {
			f.t.Errorf("another transaction has the time-outs %q", got)
		}
		if err := tx.Rollback(f.t.Context()); err != nil {
			f.t.Error(err)
		}
	}
}
