package dedup_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func wantFenced(t *testing.T, err error, lanes ...*ownedLane) {
	t.Helper()
	var fenced *lane.FencedError
	if !errors.As(err, &fenced) {
		t.Fatalf("got %v, want a fence", err)
	}
	if len(fenced.Lanes) != len(lanes) {
		t.Fatalf("fenced %v, want %d lanes", fenced.Lanes, len(lanes))
	}
	for i, l := range lanes {
		if fenced.Lanes[i] != l.Lane {
			t.Errorf("fenced %v, want %v", fenced.Lanes[i], l.Lane)
		}
	}
}

func TestAnOldOwnerWritesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	zombie, neighbour := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(zombie.batch("a"))

	owner := f.acquire("kafka", "orders/0")
	if owner.Next != 1 || owner.Epoch <= zombie.Epoch {
		t.Fatalf("the next owner starts at %d under epoch %d after %d", owner.Next, owner.Epoch, zombie.Epoch)
	}
	err := f.Handle(t.Context(), []lane.Batch{zombie.batch("b", "x"), neighbour.batch("c")})
	wantFenced(t, err, zombie)
	f.wantLanded("a")
	f.handle(owner.batch("b"))
	f.wantLanded("a", "b")
	f.wantBooks(owner, books{applied: 2, next: 2})
}

func TestABatchOutOfStepWritesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b"))
	wantFenced(t, f.Handle(t.Context(), []lane.Batch{l.batchAt(5, "c")}), l)
	f.wantLanded("a", "b")
	// The database went back, as after a failover that lost commits.
	if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET next_position = 0`); err != nil {
		t.Fatal(err)
	}
	wantFenced(t, f.Handle(t.Context(), []lane.Batch{l.batch("c")}), l)
	f.wantLanded("a", "b")
}

func TestStartRule(t *testing.T) {
	t.Parallel()
	l := message.Lane{Source: "kafka", Name: "orders/0"}
	acquire := lane.Acquire{Lane: l, Ordered: true, GroupGeneration: 3, Start: 7, Committed: -1, HonourReset: true}
	for name, c := range map[string]struct {
		row    string // what the lane's row is set to
		change func(*lane.Acquire)
		want   lane.Assignment
		err    error
	}{
		"no row":             {"", nil, lane.Assignment{Next: 7, BrokerPosition: -1}, nil},
		"row":                {"next_position = 20", nil, lane.Assignment{Next: 20, BrokerPosition: -1}, nil},
		"broker's copy lags": {"next_position = 20, broker_position = 10", func(t *lane.Acquire) { t.Committed = 15 }, lane.Assignment{Next: 20, BrokerPosition: 15}, nil},
		"broker is ahead":    {"next_position = 20, broker_position = 10", func(t *lane.Acquire) { t.Committed = 25 }, lane.Assignment{Next: 20, BrokerPosition: 10, Rewound: true}, nil},
		"group was reset":    {"next_position = 20, broker_position = 10", func(t *lane.Acquire) { t.Committed = 5 }, lane.Assignment{Next: 5, BrokerPosition: 5, Reset: true}, nil},
		"reset is ignored":   {"next_position = 20, broker_position = 10", func(t *lane.Acquire) { t.Committed, t.HonourReset = 5, false }, lane.Assignment{Next: 20, BrokerPosition: 10}, nil},
		"a worker wrote it": {"next_position = 20, broker_position = 10", func(t *lane.Acquire) {
			t.Committed, t.OffsetMetadata = 5, `dedupd:{"scope":"test","source":"kafka","start":0,"epoch":1}`
		}, lane.Assignment{Next: 20, BrokerPosition: 10, Outdated: true}, nil},
		"another scope's worker wrote it": {"next_position = 20, broker_position = 10", func(t *lane.Acquire) {
			t.Committed, t.OffsetMetadata = 5, `dedupd:{"scope":"another","source":"kafka","start":0,"epoch":1}`
		}, lane.Assignment{Next: 20, BrokerPosition: 10, Outdated: true, GroupOf: "another"}, nil},
		"no row, and another scope's worker wrote it": {"", func(t *lane.Acquire) {
			t.Committed, t.Start, t.OffsetMetadata = 5, 5, `dedupd:{"scope":"another","source":"kafka","start":0,"epoch":1}`
		}, lane.Assignment{Next: 5, BrokerPosition: -1, GroupOf: "another"}, nil},
		"never confirmed":           {"next_position = 20", func(t *lane.Acquire) { t.Committed = 5 }, lane.Assignment{Next: 20, BrokerPosition: 5}, nil},
		"no start":                  {"", func(t *lane.Acquire) { t.Start = -1 }, lane.Assignment{}, lane.ErrNoStart},
		"no start but a row":        {"next_position = 20", func(t *lane.Acquire) { t.Start = -1 }, lane.Assignment{Next: 20, BrokerPosition: -1}, nil},
		"late owner":                {"group_generation = 4, updated_at = now() - interval '1 minute'", nil, lane.Assignment{}, lane.ErrStale},
		"group generations restart": {"group_generation = 4, acquired_at = now() - interval '1 minute', updated_at = now() - interval '1 minute'", nil, lane.Assignment{Next: 7, BrokerPosition: -1}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			if c.row != "" {
				if _, err := f.Store.Acquire(t.Context(), acquire); err != nil {
					t.Fatal(err)
				}
				if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET `+c.row); err != nil {
					t.Fatal(err)
				}
			}
			asked := acquire
			if c.change != nil {
				c.change(&asked)
			}
			got, err := f.Store.Acquire(t.Context(), asked)
			if !errors.Is(err, c.err) {
				t.Fatalf("got %v, want %v", err, c.err)
			}
			got.Epoch, got.StreamID, got.Checkpoint, got.OffsetMetadata = 0, "", lane.Checkpoint{}, ""
			if c.err == nil {
				c.want.Cut, c.want.Reached = -1, c.want.Next
			}
			if c.want.Reset {
				c.want.Reached = 20
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			if c.want.Reset {
				again, err := f.Store.Acquire(t.Context(), asked)
				if err != nil || again.Reset || again.Next != c.want.Next {
					t.Errorf("the same reset was seen twice: %+v, %v", again, err)
				}
			}
		})
	}
}

// Positions of a log that was created anew mean other messages, and so do ids made of
// them.
func TestALogCreatedAnewHoldsItsLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := message.Lane{Source: "kafka", Name: "orders/0"}
	acquire := func(log string) (lane.Assignment, error) {
		return f.Store.Acquire(t.Context(), lane.Acquire{Lane: l, Ordered: true, LogID: log, Committed: -1})
	}
	must := func(log string, next int64) string {
		t.Helper()
		assigned, err := acquire(log)
		if err != nil || assigned.Next != next {
			t.Fatalf("got %+v, %v, want position %d", assigned, err, next)
		}
		return assigned.StreamID
	}
	setPosition := func(to int64) {
		t.Helper()
		if _, err := f.Store.SetPosition(t.Context(), "ann@host", l.Source, l.Name, to, true); err != nil {
			t.Fatal(err)
		}
	}
	unknown := must("", 0) // the brokers are older than ids
	if known := must("first", 0); known != unknown {
		t.Errorf("that the brokers tell ids now changes the lane's stream id from %s to %s", unknown, known)
	}
	if again := must("", 0); again != unknown {
		t.Errorf("a broker that reports none changes it to %s", again)
	}
	setPosition(7)
	if same := must("first", 7); same != unknown {
		t.Errorf("a position set in the same log changes it to %s", same)
	}
	for range 2 {
		_, err := acquire("second")
		wantHold(t, err, "created anew", "second", "first", "dedupd lanes set-position kafka orders/0 0")
	}
	must("first", 7) // as one of several brokers may still report
	setPosition(0)
	if second := must("second", 0); second == unknown {
		t.Errorf("positions of the new log make ids under %s", second)
	}
	_, err := acquire("first")
	wantHold(t, err, "created anew")
}

func TestQueueBatchesShareOneRow(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	q := f.acquireQueue("nats")
	f.handle(q.batchAt(5, "a", "b"), q.batchAt(1, "c", "b"))
	f.wantBooks(q, books{applied: 3, resent: 1, next: 7})
	f.handle(q.batchAt(3, "d"))
	f.wantBooks(q, books{applied: 4, resent: 1, next: 7})
}

// cutter dials connections that are lost in the moment of COMMIT.
type cutter struct {
	armed  atomic.Int32 // 1: before it reaches the server, 2: after
	landed atomic.Int32
	lost   atomic.Int32
}

type cutConn struct {
	net.Conn
	c      *cutter
	dead   atomic.Bool
	answer atomic.Bool // the next thing to be read is the answer to lose
}

var errCut = errors.New("cut by the test")

func (c *cutConn) Write(b []byte) (int, error) {
	if c.dead.Load() {
		return 0, errCut
	}
	// The last round trip: lanes move, then COMMIT. (Preparing the statements names them
	// one at a time.)
	if !bytes.Contains(b, []byte("dedupd_advance")) || !bytes.Contains(b, []byte("dedupd_commit")) {
		return c.Conn.Write(b)
	}
	switch c.c.armed.Swap(0) {
	case 1:
		c.c.lost.Add(1)
		c.dead.Store(true)
		_ = c.Conn.Close()
		return len(b), nil // as a kernel would: accepted, then lost
	case 2:
		c.answer.Store(true)
	}
	return c.Conn.Write(b)
}

// Read loses the answer to COMMIT: that it came shows that COMMIT is done. It is lost
// here and not in Write, since the driver reads beside a Write that takes long.
func (c *cutConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	// Whatever is read before COMMIT was sent has been answered before.
	if n > 0 && c.answer.Swap(false) {
		c.c.landed.Add(1)
		c.dead.Store(true)
		_ = c.Conn.Close()
		return 0, errCut
	}
	return n, err
}

// TestLostAnswerToCommit cuts the connection before and after COMMIT reached the
// server. Whichever it was, every message lands once and is counted once.
func TestLostAnswerToCommit(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	cut := &cutter{}
	config, err := pgxpool.ParseConfig(f.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 2
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &cutConn{Conn: conn, c: cut}, nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "test", Owner: "cut"})
	if err != nil {
		t.Fatal(err)
	}
	f.Processor.Store = store
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	const rounds = 60
	var want []string
	for i := range rounds {
		a, b := fmt.Sprint("a", i), fmt.Sprint("b", i)
		want = append(want, a, b)
		cut.armed.Store(int32(rand.N(3)))
		f.handle(l.batch(a, a), other.batch(b, a))
	}
	if cut.landed.Load() < rounds/10 || cut.lost.Load() < rounds/10 {
		t.Fatalf("%d commits landed and %d did not: too few of a kind to prove anything", cut.landed.Load(), cut.lost.Load())
	}
	f.wantLanded(want...)
	f.wantBooks(l, books{applied: int64(rounds), resent: int64(rounds), next: int64(2 * rounds)})
	f.wantBooks(other, books{applied: int64(rounds), resent: int64(rounds), next: int64(2 * rounds)})
	if got := f.metric("dedupd_messages_total"); got != 4*rounds {
		t.Errorf("the metrics count %v messages, want %d", got, 4*rounds)
	}
}

// metric is the sum over all labels.
func (f *fixture) metric(name string) (sum float64) {
	f.t.Helper()
	families, err := f.reg.Gather()
	if err != nil {
		f.t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == name {
			for _, m := range family.Metric {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// TestWorkersRaceForTheSameIDs lets several workers claim common ids at the same time,
// each on lanes of its own: each id must land once, no deadlock must surface, and all
// books must balance.
func TestWorkersRaceForTheSameIDs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const workers, rounds, perBatch, ids = 6, 40, 40, 400
	var all sync.WaitGroup
	for w := range workers {
		worker := attach(t, f.db)
		if w%2 == 0 {
			worker.CopyFrom = 1
			worker.SetCopyPause(0)
		}
		l := worker.acquire("kafka", fmt.Sprint("orders/", w))
		all.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(w)))
			for range rounds {
				names := make([]string, perBatch)
				for i := range names {
					names[i] = fmt.Sprint("id", random.IntN(ids))
				}
				if err := worker.Handle(t.Context(), []lane.Batch{l.batch(names...)}); err != nil {
					t.Errorf("worker %d: %v", w, err)
					return
				}
			}
		})
	}
	all.Wait()
	var rows, distinct, fetched int64
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT id), (SELECT sum(fetched) FROM dedupd.books) FROM public.rows`).Scan(&rows, &distinct, &fetched); err != nil {
		t.Fatal(err)
	}
	if rows != distinct || rows != ids || fetched != workers*rounds*perBatch {
		t.Errorf("%d rows of %d ids (want %d), %d messages in the books (want %d)", rows, distinct, ids, fetched, workers*rounds*perBatch)
	}
}

// TestAConcurrentDuplicateWaits holds a claim open: the concurrent duplicate must neither
// land nor count as a duplicate before the first one's transaction has ended.
func TestAConcurrentDuplicateWaits(t *testing.T) {
	t.Parallel()
	for _, commit := range []bool{true, false} {
		t.Run(fmt.Sprint("commit ", commit), func(t *testing.T) {
			bothWays(t, func(t *testing.T, f *fixture) {
				l := f.acquire("kafka", "orders/0")
				f.meetDuplicate(l, commit)
				if commit {
					f.wantLanded()
					f.wantBooks(l, books{resent: 2, next: 2})
				} else {
					f.wantLanded("a0", "b0")
				}
			})
		})
	}
}

// TestACopyGivesUpOnConcurrentDuplicates commits concurrent duplicates between a look-up
// and its copy: the copy fails, which costs a try, and then for a while there is no copy.
func TestACopyGivesUpOnConcurrentDuplicates(t *testing.T) {
	t.Parallel()
	for hold, want := range map[time.Duration]float64{time.Minute: 1, 0: 2} {
		t.Run(fmt.Sprint(hold), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.CopyFrom = 1
			f.SetCopyPause(hold)
			l := f.acquire("kafka", "orders/0")
			f.meetDuplicate(l, true)
			f.meetDuplicate(l, true)
			f.wantBooks(l, books{resent: 4, next: 4})
			if got := testutil.ToFloat64(f.Metrics.Retries("concurrent_duplicate")); got != want {
				t.Errorf("%g retries for a concurrent duplicate, want %g", got, want)
			}
		})
	}
}

// meetDuplicate hands over two ids, and more, while another transaction has just claimed
// those two, and ends that one some time after.
func (f *fixture) meetDuplicate(l *ownedLane, commit bool, more ...string) {
	t := f.t
	t.Helper()
	ids := []string{fmt.Sprint("a", l.at), fmt.Sprint("b", l.at)}
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if claims, err := f.Store.Claim(t.Context(), tx, []string{ids[0], ids[1], ids[0]}, dedup.ClaimOptions{}); err != nil || !claims[0].IsNew || !claims[1].IsNew || claims[2].IsNew {
		t.Fatalf("claim: %+v, %v", claims, err)
	}
	done := make(chan error, 1)
	b := l.batch(append(ids, more...)...)
	go func() { done <- f.Handle(t.Context(), []lane.Batch{b}) }()
	for waiting := false; !waiting; {
		select {
		case err := <-done:
			t.Fatalf("the concurrent duplicate did not wait: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
		// Not granted, and in this transaction's way.
		if err := f.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid)))`, tx.Conn().PgConn().PID()).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	if commit {
		err = tx.Commit(t.Context())
	} else {
		err = tx.Rollback(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestARotationIsNoticed changes the catalog between two transactions, as a
// rotation will: the next one must not use what it was built for.
func TestARotationIsNoticed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	if _, err := f.pool.Exec(t.Context(), `
		BEGIN;
		CREATE TABLE dedupd.claims_test_2 (PRIMARY KEY (key)) INHERITS (dedupd.claims_root);
		DELETE FROM dedupd.generations;
		INSERT INTO dedupd.generations (scope, generation, table_name, state) VALUES ('test', 2, 'claims_test_2', 'open');
		UPDATE dedupd.scopes SET catalog_epoch = catalog_epoch + 1, catalog = gen_random_uuid();
		COMMIT;`); err != nil {
		t.Fatal(err)
	}
	f.handle(l.batch("b"))
	var generation int
	if err := f.pool.QueryRow(t.Context(), `SELECT generation FROM dedupd.claims WHERE key = $1::uuid`, claimkey.Of("b").String()).Scan(&generation); err != nil {
		t.Fatal(err)
	}
	if generation != 2 {
		t.Errorf("the claim went to generation %d, want 2", generation)
	}
}

// TestManyWritersNoticeOneRotation lets writers that share a store meet the same change
// of the catalog: whoever finds that another has read it goes on.
func TestManyWritersNoticeOneRotation(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var lanes []*ownedLane
	for i := range 4 {
		lanes = append(lanes, f.acquire("kafka", fmt.Sprint("orders/", i)))
	}
	for round := range 25 {
		if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.scopes SET catalog_epoch = catalog_epoch + 1, catalog = gen_random_uuid()`); err != nil {
			t.Fatal(err)
		}
		var writers sync.WaitGroup
		for i, l := range lanes {
			b := l.batch(fmt.Sprint(round, "/", i))
			writers.Go(func() {
				if err := f.Handle(t.Context(), []lane.Batch{b}); err != nil {
					t.Errorf("round %d, writer %d: %v", round, i, err)
				}
			})
		}
		writers.Wait()
	}
}

// TestClaimsHoldTheRotationLock shows that a rotator's exclusive lock waits for
// a claim transaction that is open.
func TestClaimsHoldTheRotationLock(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := f.Store.Claim(t.Context(), tx, []string{"a"}, dedup.ClaimOptions{}); err != nil {
		t.Fatal(err)
	}
	var free bool
	try := `SELECT pg_try_advisory_lock(1684366453, id) FROM dedupd.scopes`
	if err := f.pool.QueryRow(t.Context(), try).Scan(&free); err != nil || free {
		t.Fatalf("the exclusive lock was free during a claim: %v, %v", free, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.pool.QueryRow(t.Context(), try).Scan(&free); err != nil || !free {
		t.Fatalf("the exclusive lock was not free after the claim: %v, %v", free, err)
	}
}
