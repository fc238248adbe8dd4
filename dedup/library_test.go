package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// begin begins a transaction of a service's.
func (f *fixture) begin() pgx.Tx {
	f.t.Helper()
	tx, err := f.pool.Begin(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// claim claims one id in a transaction.
func (f *fixture) claim(tx pgx.Tx, id string, wait time.Duration) (dedup.Claimed, error) {
	claims, err := f.Store.Claim(context.WithoutCancel(f.t.Context()), tx, []string{id}, dedup.ClaimOptions{Wait: wait})
	if err != nil {
		return dedup.Claimed{}, err
	}
	return claims[0], nil
}

// mustClaim claims a new id with a result.
func (f *fixture) mustClaim(tx pgx.Tx, id, result string) {
	f.t.Helper()
	c, err := f.claim(tx, id, 0)
	if err != nil || !c.IsNew {
		f.t.Fatalf("claim %s: %+v, %v", id, c, err)
	}
	if err := c.SetResult(f.t.Context(), tx, []byte(result)); err != nil {
		f.t.Fatal(err)
	}
}

func timeouts(t *testing.T, tx pgx.Tx) (all []string) {
	t.Helper()
	var lock, statement, idle string
	if err := tx.QueryRow(t.Context(), `SELECT current_setting('lock_timeout'), current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout')`).Scan(&lock, &statement, &idle); err != nil {
		t.Fatal(err)
	}
	return []string{lock, statement, idle}
}

// An id in flight is told at once, and the transaction that asked goes on as it was.
func TestAnIDInFlight(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	holder, asker := f.begin(), f.begin()
	f.mustClaim(holder, "a", "first")
	if _, err := asker.Exec(t.Context(), `SET LOCAL lock_timeout = '1234ms'; INSERT INTO public.rows (id) VALUES ('before')`); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	claims, err := f.Store.Claim(t.Context(), asker, []string{"b", "a", "c"}, dedup.ClaimOptions{})
	if took := time.Since(began); !errors.Is(err, dedup.ErrInFlight) || claims != nil || took > time.Second {
		t.Fatalf("%+v, %v after %v", claims, err, took)
	}
	if got := timeouts(t, asker); got[0] != "1234ms" {
		t.Errorf("lock_timeout is %s", got[0])
	}
	// Nothing was claimed: all of it is free for others, and for this one.
	other := f.begin()
	if c, err := f.claim(other, "b", 0); err != nil || !c.IsNew {
		t.Errorf("b: %+v, %v", c, err)
	}
	if err := other.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.mustClaim(asker, "c", "mine")
	if _, err := asker.Exec(t.Context(), `INSERT INTO public.rows (id) VALUES ('after')`); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(asker.Commit(t.Context()), holder.Commit(t.Context())); err != nil {
		t.Fatal(err)
	}
	f.wantLanded("before", "after")
	f.wantResult("a", "first")
	f.wantResult("c", "mine")
	if c := f.claimOnce("b"); !c.IsNew {
		t.Errorf("b: %+v", c)
	}
}

// Whoever waits learns what became of the holder: it commits, rolls back, or its connection
// is ended. Exactly one of those who wait then has the id.
func TestWaitingForAnIDInFlight(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(f *fixture, holder pgx.Tx) error{
		"commits":    func(f *fixture, holder pgx.Tx) error { return holder.Commit(f.t.Context()) },
		"rolls back": func(f *fixture, holder pgx.Tx) error { return holder.Rollback(f.t.Context()) },
		"is killed": func(f *fixture, holder pgx.Tx) error {
			_, err := f.pool.Exec(f.t.Context(), `SELECT pg_terminate_backend($1)`, holder.Conn().PgConn().PID())
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			holder := f.begin()
			f.mustClaim(holder, "a", "holder")
			const waiters = 3
			var all sync.WaitGroup
			var mu sync.Mutex
			told := map[string]int{}
			for n := range waiters {
				pool := f.db.Pool(t)
				all.Go(func() {
					result := fmt.Sprint("waiter ", n)
					err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
						c, err := f.claim(tx, "a", 10*time.Second)
						if err != nil {
							return err
						}
						if !c.IsNew {
							result = string(c.Result)
							return nil
						}
						return c.SetResult(t.Context(), tx, []byte(result))
					})
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					told[result]++
				})
			}
			for began := time.Now(); f.rowCount(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) < waiters; time.Sleep(5 * time.Millisecond) {
				if time.Since(began) > 8*time.Second {
					t.Fatal("they don't wait")
				}
			}
			if err := end(f, holder); err != nil {
				t.Fatal(err)
			}
			all.Wait()
			// All are told one thing: the holder's result if it has committed, else that of the
			// waiter that won.
			who := slices.Collect(maps.Keys(told))
			if len(who) != 1 || (who[0] == "holder") != (name == "commits") {
				t.Errorf("they are told %v", told)
			}
			f.wantResult("a", who[0])
		})
	}
}

// The wait is bounded, and the holder goes on.
func TestTheWaitEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	holder, asker := f.begin(), f.begin()
	f.mustClaim(holder, "a", "first")
	began := time.Now()
	_, err := f.claim(asker, "a", 300*time.Millisecond)
	if took := time.Since(began); !errors.Is(err, dedup.ErrInFlight) || took < 300*time.Millisecond || took > 5*time.Second {
		t.Errorf("%v after %v", err, took)
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c, err := f.claim(asker, "a", 0); err != nil || c.IsNew || string(c.Result) != "first" {
		t.Errorf("%+v, %v", c, err)
	}
	for _, wait := range []time.Duration{-1, dedup.MaxWait + 1} {
		if _, err := f.claim(asker, "b", wait); err == nil || !strings.Contains(err.Error(), "must be 0 to 15s") {
			t.Errorf("a wait of %v: %v", wait, err)
		}
	}
}

// A worker that has an id in hand is in flight, too, whichever way it claims; and a duplicate
// of its message is told what the sink has given.
func TestAnIDInFlightAtAWorker(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		writing, write := make(chan struct{}), make(chan struct{})
		f.Sink = answering{f.sink}
		f.sink.fail = func(m *message.Message) error {
			if m.ID == "a" {
				close(writing)
				<-write
			}
			return nil
		}
		l := f.acquire("kafka", "orders/0")
		done := make(chan error, 1)
		b := l.batch("a=answer a", "b")
		go func() { done <- f.Handle(t.Context(), []lane.Batch{b}) }()
		<-writing
		tx := f.begin()
		if _, err := f.claim(tx, "a", 0); !errors.Is(err, dedup.ErrInFlight) {
			t.Errorf("the error is %v", err)
		}
		close(write)
		if c, err := f.claim(tx, "a", 10*time.Second); err != nil || c.IsNew || string(c.Result) != "answer a" {
			t.Errorf("%+v, %v", c, err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

// Rotations between the tries of one transaction: the id is in a sealed generation by then,
// and the catalog another.
func TestARotationBetweenTheTries(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	leader := attach(t, f.db)
	holder, asker := f.begin(), f.begin()
	f.mustClaim(holder, "a", "first")
	if _, err := f.claim(asker, "a", 0); !errors.Is(err, dedup.ErrInFlight) {
		t.Fatalf("the error is %v", err)
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		leader.rotate()
	}
	if c, err := f.claim(asker, "a", 0); err != nil || c.IsNew || string(c.Result) != "first" {
		t.Errorf("%+v, %v", c, err)
	}
	f.mustClaim(asker, "b", "second")
	if err := asker.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.wantResult("b", "second")
	if c := f.find("b").Claim; c.Generation != 4 {
		t.Errorf("b is in generation %d", c.Generation)
	}
}

// The time-outs of a caller's transaction, and of its session behind it.
func TestClaimRestoresTimeouts(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, c := range []struct{ set, want []string }{
		{nil, []string{"0", "20s", "10s"}},
		{[]string{"90s", "1h", "2min"}, []string{"90s", "20s", "10s"}},
		{[]string{"250ms", "19s", "999ms"}, []string{"250ms", "19s", "999ms"}},
	} {
		conn, err := f.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		session := timeouts(t, tx)
		for i, name := range []string{"lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"} {
			if c.set != nil {
				if _, err := tx.Exec(t.Context(), `SELECT set_config($1, $2, true)`, name, c.set[i]); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, id := range []string{"a", "b", "a"} { // new, new, and found
			if _, err := f.claim(tx, id, 0); err != nil {
				t.Fatal(err)
			}
			if got := timeouts(t, tx); !slices.Equal(got, c.want) {
				t.Errorf("set to %q: %q, want %q", c.set, got, c.want)
			}
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if tx, err = conn.Begin(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := timeouts(t, tx); !slices.Equal(got, session) {
			t.Errorf("the session has %q, and had %q", got, session)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		conn.Release()
	}
}

// A claim stands or falls with the caller's savepoints; a result is kept with the claim that
// it was meant for, or not at all.
func TestResultsOfAService(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	tx := f.begin()
	f.mustClaim(tx, "a", "first")
	again, err := f.claim(tx, "a", 0) // its own
	if err != nil || again.IsNew || string(again.Result) != "first" {
		t.Errorf("%+v, %v", again, err)
	}
	if err := again.SetResult(ctx, tx, []byte("x")); !errors.Is(err, dedup.ErrNotClaimed) {
		t.Errorf("a result for a duplicate: %v", err)
	}
	b, err := f.claim(tx, "b", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.SetResult(ctx, tx, make([]byte, sinks.MaxResult+1)); !errors.Is(err, dedup.ErrResultTooLarge) || !strings.Contains(err.Error(), "65537 bytes, and may have 65536") {
		t.Errorf("a large result: %v", err)
	}
	other := f.begin()
	if err := b.SetResult(ctx, other, []byte("x")); !errors.Is(err, dedup.ErrNotClaimed) {
		t.Errorf("a result in another transaction: %v", err)
	}
	if err := errors.Join(b.SetResult(ctx, tx, []byte("x")), b.SetResult(ctx, tx, make([]byte, sinks.MaxResult)), b.SetResult(ctx, tx, nil)); err != nil {
		t.Errorf("the last one counts: %v", err)
	}
	// Claimed, rolled back, claimed by another, which commits.
	if _, err := tx.Exec(ctx, `SAVEPOINT mine`); err != nil {
		t.Fatal(err)
	}
	c, err := f.claim(tx, "c", 0)
	if err != nil || !c.IsNew {
		t.Fatalf("%+v, %v", c, err)
	}
	if _, err := tx.Exec(ctx, `ROLLBACK TO SAVEPOINT mine`); err != nil {
		t.Fatal(err)
	}
	f.mustClaim(other, "c", "theirs")
	if err := other.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.SetResult(ctx, tx, []byte("mine")); !errors.Is(err, dedup.ErrNotClaimed) {
		t.Errorf("a result for what was rolled back: %v", err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	f.wantResult("a", "first")
	f.wantResult("c", "theirs")
	if d := f.claimOnce("b"); d.IsNew || d.Result == nil || len(d.Result) > 0 {
		t.Errorf("an empty result is %+v", d)
	}
	// Who has claimed it may not add a result in a later transaction: a duplicate may have been
	// told that there is none.
	tx = f.begin()
	e, err := f.claim(tx, "e", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	tx = f.begin()
	if err := e.SetResult(ctx, tx, []byte("late")); !errors.Is(err, dedup.ErrNotClaimed) {
		t.Errorf("a result in a later transaction: %v", err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	f.wantResult("e", "")
	// A result doesn't outlive its transaction.
	tx = f.begin()
	f.mustClaim(tx, "d", "gone")
	if err := tx.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if d := f.claimOnce("d"); !d.IsNew || d.Result != nil {
		t.Errorf("%+v", d)
	}
	f.wantResults(3)
}

// A claim is forgotten while it is looked at: the ids that were new aren't claimed either, and
// the transaction goes on.
func TestClaimOfWhatVanishes(t *testing.T) {
	t.Parallel()
	for _, ids := range [][]string{{"a", "b"}, {"b"}} {
		f := newFixture(t)
		other, forget, tx := f.begin(), f.begin(), f.begin()
		f.mustClaim(other, "b", "x")
		if err := other.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		// The look-up waits for the table of results, the claim doesn't.
		if _, err := forget.Exec(t.Context(), `LOCK TABLE dedupd.results_test_1`); err != nil {
			t.Fatal(err)
		}
		failed := make(chan error, 1)
		go func() {
			_, err := f.Store.Claim(t.Context(), tx, ids, dedup.ClaimOptions{})
			failed <- err
		}()
		f.awaitLock()
		if _, err := forget.Exec(t.Context(), `DELETE FROM dedupd.claims_test_1`); err != nil {
			t.Fatal(err)
		}
		if err := forget.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-failed; codeOf(err) != "40001" {
			t.Errorf("%q: %v", ids, err)
		}
		if c, err := f.claim(tx, "c", 0); err != nil || !c.IsNew {
			t.Errorf("%q: the next claim is %+v, %v", ids, c, err)
		} else if err := c.SetResult(t.Context(), tx, nil); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := f.rowCount(`SELECT count(*) FROM dedupd.claims_test_1`); n != 1 {
			t.Errorf("%q: %d claims are kept, want c's", ids, n)
		}
	}
}

// What isn't another claim's lock is waited for, whatever the wait: nobody is told that the
// id is in flight.
func TestOtherLocksAreNoIDInFlight(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for table, limit := range map[string]time.Duration{"claims_test_1": 400 * time.Millisecond, "claims_test_1 ": time.Hour} {
		tx, locker := f.begin(), f.begin()
		if _, err := locker.Exec(t.Context(), `LOCK TABLE dedupd.`+table); err != nil {
			t.Fatal(err)
		}
		released := make(chan error, 1)
		release := func() { released <- locker.Rollback(context.Background()) }
		if limit < time.Hour {
			time.AfterFunc(limit, release)
		}
		c, err := f.claim(tx, "a", 0)
		if limit < time.Hour && (err != nil || !c.IsNew) || limit == time.Hour && (errors.Is(err, dedup.ErrInFlight) || codeOf(err) != "55P03") {
			t.Errorf("a lock for %v: %+v, %v", limit, c, err)
		}
		// The transaction goes on.
		if _, err := tx.Exec(t.Context(), `SELECT 1`); err != nil {
			t.Error(err)
		}
		if limit == time.Hour {
			release()
		}
		if err := <-released; err != nil {
			t.Fatal(err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A pool whose connections are all in transactions that claim: nobody needs one more.
func TestClaimNeedsNoOtherConnection(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	config, err := pgxpool.ParseConfig(f.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 4
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "test"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for round := range 3 {
		if round > 0 {
			f.rotate()
		}
		var begun, all sync.WaitGroup
		begun.Add(4)
		for n := range 4 {
			all.Go(func() {
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					begun.Done()
					begun.Wait()
					claims, err := store.Claim(ctx, tx, []string{fmt.Sprint(round, "/", n)}, dedup.ClaimOptions{})
					if err == nil && !claims[0].IsNew {
						err = errors.New("it isn't new")
					}
					return err
				})
				if err != nil {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		all.Wait()
	}
}

func TestClaimInATransactionThatHasFailed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	tx := f.begin()
	if _, err := tx.Exec(t.Context(), `SELECT 1 / 0`); err == nil {
		t.Fatal("no error")
	}
	if _, err := f.claim(tx, "a", 0); err == nil || !strings.Contains(err.Error(), "the transaction has failed before") {
		t.Errorf("a transaction that has failed: %v", err)
	}
	tx = f.begin()
	c, err := f.claim(tx, "a", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.claim(tx, "b", 0); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("a transaction that has ended: %v", err)
	}
	if err := c.SetResult(t.Context(), tx, []byte("late")); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("a result after its transaction: %v", err)
	}
	f.wantResult("a", "")
}

// Services claim the same ids at the same time, some of them are killed in the middle,
// generations rotate: each id has its effect once, and everyone is told the same result.
func TestClaimsOfServicesUnderKills(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const ids, services, rotations = 150, 6, 20
	f.exec(`CREATE TABLE public.paid (n bigint GENERATED ALWAYS AS IDENTITY, id text NOT NULL)`)
	var all sync.WaitGroup
	told := make([]map[string]string, services)
	inFlight := make([]int, services)
	for s := range services {
		told[s] = map[string]string{}
		rng := rand.New(rand.NewPCG(uint64(s), 1))
		pool := attach(t, f.db).pool
		all.Go(func() {
			for i := 0; i < ids; {
				id := fmt.Sprint("id-", i)
				var result string
				err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					c, err := f.claim(tx, id, time.Duration(rng.IntN(3))*20*time.Millisecond)
					if err != nil {
						return err
					}
					if result = string(c.Result); !c.IsNew {
						return nil
					}
					if err := tx.QueryRow(t.Context(), `INSERT INTO public.paid (id) VALUES ($1) RETURNING n::text`, id).Scan(&result); err != nil {
						return err
					}
					if err := c.SetResult(t.Context(), tx, []byte(result)); err != nil {
						return err
					}
					time.Sleep(time.Duration(rng.IntN(4)) * time.Millisecond)
					switch rng.IntN(3) {
					case 0:
						return errRollback
					case 1:
						_, err = tx.Exec(t.Context(), `SELECT pg_terminate_backend(pg_backend_pid())`)
					}
					return err
				})
				switch {
				case errors.Is(err, dedup.ErrInFlight):
					inFlight[s]++
				case err == nil:
					told[s][id] = result
					i++
				case !errors.Is(err, errRollback) && codeOf(err) != "57P01":
					t.Errorf("%s: %v", id, err)
					i++
				}
			}
		})
	}
	leader := attach(t, f.db)
	for range rotations {
		leader.rotate()
		time.Sleep(20 * time.Millisecond)
	}
	all.Wait()
	if n := f.rowCount(`SELECT count(*) FROM public.paid`); n != ids {
		t.Errorf("%d effects of %d ids", n, ids)
	}
	waited := 0
	for s := range services {
		waited += inFlight[s]
		if !maps.Equal(told[s], told[0]) {
			t.Errorf("one is told %v, another %v", told[0], told[s])
		}
	}
	if bad := f.rowCount(`SELECT count(*) FROM public.paid p LEFT JOIN dedupd.results_root r ON convert_from(r.result, 'UTF8') = p.n::text WHERE r IS NULL`); bad != 0 {
		t.Errorf("%d effects lack their result", bad)
	}
	if waited == 0 {
		t.Error("no id was in flight: this was no test")
	}
}
