package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// TestTwoReplayAtOnce has several processes replay the same dead letters.
func TestTwoReplayAtOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const deadLetters, people = 50, 3
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(values("m", deadLetters, "check")...))
	f.mend()
	var workers []*fixture
	for range people {
		workers = append(workers, attach(t, f.db))
	}
	for _, d := range f.deadLetters() {
		var all sync.WaitGroup
		outcomes := make([]string, people)
		start := make(chan struct{})
		for i, w := range workers {
			all.Go(func() {
				<-start
				r, err := w.Replay(t.Context(), "ann@host", d.ID)
				if err != nil {
					t.Error(err)
				}
				outcomes[i] = r.Outcome
			})
		}
		close(start)
		all.Wait()
		slices.Sort(outcomes)
		if !slices.Equal(outcomes, []string{"applied", "gone", "gone"}) {
			t.Errorf("%q", outcomes)
		}
	}
	f.wantOnce(ids("m", deadLetters)...)
	f.wantBooks(l, books{applied: int64(deadLetters), next: int64(deadLetters)})
	f.wantNoDeadlocks()
	if n := f.audits(); n != deadLetters {
		t.Errorf("%d lines of audit, want %d", n, deadLetters)
	}
}

// values are ids with a value each.
func values(prefix string, n int, value string) []string {
	all := ids(prefix, n)
	for i := range all {
		all[i] += "=" + value
	}
	return all
}

func (f *fixture) wantNoDeadlocks() {
	f.t.Helper()
	var n int
	if err := f.pool.QueryRow(f.t.Context(), `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&n); err != nil || n > 0 {
		f.t.Errorf("%d deadlocks, %v", n, err)
	}
}

// TestReplayBesideAResend has a worker meet the same id at the moment of its
// replay: with the claim in place, and without.
func TestReplayBesideAResend(t *testing.T) {
	t.Parallel()
	const deadLetters = 60
	f := newFixture(t)
	worker := attach(t, f.db)
	l, other := f.acquire("kafka", "orders/0"), worker.acquire("kafka", "orders/1")
	f.handle(l.batch(values("m", deadLetters, "check")...))
	f.mend()
	outcomes := map[string]int{}
	for i, d := range f.deadLetters() {
		if i%3 > 0 {
			f.forget(string(d.MessageID))
		}
		var all sync.WaitGroup
		worker.CopyFrom = i % 2 // 0: the default; 1: every group looks ahead
		all.Go(func() { worker.handle(other.batch(string(d.MessageID)+"=check", fmt.Sprint("other", i))) })
		all.Go(func() {
			time.Sleep(time.Duration(rand.N(3000)) * time.Microsecond)
			r, err := f.Replay(t.Context(), "ann@host", d.ID)
			if err != nil {
				t.Error(err)
			}
			outcomes[r.Outcome]++
		})
		all.Wait()
	}
	f.wantOnce(append(ids("m", deadLetters), ids("other", deadLetters)...)...)
	f.wantDead()
	f.wantNoDeadlocks()
	if outcomes["applied"]+outcomes["duplicate"] != deadLetters || outcomes["applied"] < deadLetters/3 || outcomes["duplicate"] == 0 {
		t.Errorf("outcomes %v", outcomes)
	}
	f.wantBooks(l, books{applied: int64(outcomes["applied"]), resent: int64(outcomes["duplicate"]), next: int64(deadLetters)})
	f.wantBooks(other, books{applied: int64(deadLetters + outcomes["duplicate"]), resent: int64(outcomes["applied"]), next: int64(2 * deadLetters)})
}

// gate is a sink that waits, within its transaction, until open is called.
type gate struct {
	sinks.Sink
	entered, opened chan struct{}
	open            func()
}

// newGate makes a gate, which opens at the latest when the test ends.
func newGate(t *testing.T, s sinks.Sink) *gate {
	g := &gate{Sink: s, entered: make(chan struct{}, 10), opened: make(chan struct{})}
	g.open = sync.OnceFunc(func() { close(g.opened) })
	t.Cleanup(g.open)
	return g
}

func (g *gate) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	g.entered <- struct{}{}
	<-g.opened
	return g.Sink.Write(ctx, tx, batch)
}

// replayHeld begins a replay whose sink waits; end lets it on and gives its
// outcome.
func (f *fixture) replayHeld(id int64) (end func() string) {
	f.t.Helper()
	g := newGate(f.t, f.sink)
	f.Sink = g
	done := make(chan dedup.Replayed, 1)
	go func() {
		r, err := f.Replay(context.Background(), "ann@host", id)
		if err != nil {
			f.t.Error(err)
		}
		done <- r
	}()
	<-g.entered
	return func() string {
		g.open()
		r := <-done
		f.Sink = f.sink
		return r.Outcome
	}
}

// TestAClaimIsNotForgottenWithinAReplay: otherwise the next copy would be applied beside
// the dead letter.
func TestAClaimIsNotForgottenWithinAReplay(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.rotate() // the claim is sealed
	f.mend()
	end := f.replayHeld(f.deadLetters()[0].ID)
	other := attach(t, f.db)
	var replayed atomic.Bool
	forgotten := make(chan error, 1)
	go func() {
		_, err := other.Store.ForgetClaim(context.Background(), "ann@host", "a")
		if !replayed.Load() {
			err = errors.Join(err, errors.New("the claim was forgotten while the replay was at work"))
		}
		forgotten <- err
	}()
	select {
	case err := <-forgotten:
		t.Error(err)
		forgotten <- nil
	case <-time.After(300 * time.Millisecond):
	}
	replayed.Store(true)
	if got := end(); got != "applied" {
		t.Errorf("replayed: %s", got)
	}
	if err := <-forgotten; err != nil {
		t.Error(err)
	}
	f.wantLanded("a")
	if f.find("a").Found {
		t.Error("the claim is still there")
	}
}

// TestAClaimThatIsForgottenBeforeAReplay waits for that, and claims the id anew.
func TestAClaimThatIsForgottenBeforeAReplay(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.rotate()
	f.mend()
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `DELETE FROM dedupd.claims_test_1`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		r, err := f.Replay(context.Background(), "ann@host", f.deadLetters()[0].ID)
		if r.Outcome != dedup.ReplayApplied {
			err = errors.Join(err, errors.New(r.Outcome))
		}
		done <- err
	}()
	f.awaitLock()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	f.wantLanded("a")
	if c := f.find("a").Claim; c == nil || c.Generation != 2 {
		t.Errorf("%+v", c)
	}
}

// TestReplayBesideRotations seals generations without end, so that claims move
// from one table to the next, and catalogs are out of date.
func TestReplayBesideRotations(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const deadLetters = 60
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(values("m", deadLetters, "check")...))
	f.mend()
	for i, id := range ids("m", deadLetters) {
		if i%2 == 0 {
			f.forget(id)
		}
	}
	keeper := attach(t, f.db)
	var all sync.WaitGroup
	end := make(chan struct{})
	var rotations atomic.Int64
	all.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
				keeper.rotate()
				rotations.Add(1)
				time.Sleep(20 * time.Millisecond) // a replay gives up after ten in a row
			}
		}
	})
	for i, d := range f.deadLetters() {
		for rotations.Load() < int64(i/5) { // otherwise none may come in between
			time.Sleep(time.Millisecond)
		}
		if r, err := f.Replay(t.Context(), "ann@host", d.ID); err != nil || r.Outcome != dedup.ReplayApplied {
			t.Errorf("%+v, %v", r, err)
		}
	}
	close(end)
	all.Wait()
	f.handle(l.batch(values("m", deadLetters, "check")...)) // all are known
	f.wantOnce(ids("m", deadLetters)...)
	f.wantBooks(l, books{applied: int64(deadLetters), resent: int64(deadLetters), next: int64(2 * deadLetters)})
}

// TestExpiryPassesAReplayOver: expiry neither waits for the dead letter nor deletes it.
func TestExpiryPassesAReplayOver(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check", "b=check", "c=check"))
	f.mend()
	end := f.replayHeld(f.deadLetters()[1].ID)
	f.passTime(time.Hour)
	keeper := attach(t, f.db)
	if n, led, err := keeper.Store.ExpireDeadLetters(t.Context(), time.Minute); n != 2 || !led || err != nil {
		t.Errorf("expired %d, %v, %v", n, led, err)
	}
	f.wantDead("poison@1")
	if got := end(); got != "applied" {
		t.Errorf("replayed: %s", got)
	}
	f.wantLanded("b")
	f.wantDead()
	f.wantBooks(l, books{applied: 1, dead: 2, next: 3})
}

// TestDeadLetteringDoesntWaitForAReplay has a worker dead-letter a message again whose
// dead letter is locked by a replay, which would have to wait for the worker's claims.
func TestDeadLetteringDoesntWaitForAReplay(t *testing.T) {
	t.Parallel()
	t.Run("conflict", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		worker := attach(t, f.db)
		q := worker.acquireQueue("nats")
		worker.handle(q.batchAt(0, "a=1", "a=2"))
		g := newGate(t, worker.sink)
		worker.Sink = g
		handled := make(chan error, 1)
		go func() { handled <- worker.Handle(context.Background(), []lane.Batch{q.batchAt(1, "a=2", "b")}) }()
		<-g.entered // it has looked at the claim, and found a conflict
		f.forget("a")
		end := f.replayHeld(f.deadLetters()[0].ID)
		g.open()
		select {
		case err := <-handled:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(4 * time.Second):
			t.Error("the worker waits for the replay")
		}
		if got := end(); got != "applied" {
			t.Errorf("replayed: %s", got)
		}
		f.wantLanded("a", "b", "a")
		f.wantDead()
		f.wantNoDeadlocks()
	})
	t.Run("poison", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		worker := attach(t, f.db)
		l := worker.acquire("kafka", "orders/0")
		worker.handle(l.batch("a=check"))
		worker.forget("a")
		worker.setPosition(l, 0)
		l = worker.acquireCommitted(l, -1)
		l.at = 0
		// The sink names the message, and waits when it is given the other one alone.
		g := newGate(t, worker.sink)
		worker.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			if len(msgs) > 1 {
				return sinks.PermanentAt(0, errors.New("no good"))
			}
			return g.Write(ctx, tx, sinks.NewBatch(msgs))
		})
		handled := make(chan error, 1)
		go func() { handled <- worker.Handle(context.Background(), []lane.Batch{l.batch("a=check", "b")}) }()
		<-g.entered // it has claimed a, and is to dead-letter it
		f.mend()
		replayed := make(chan dedup.Replayed, 1)
		go func() {
			r, err := f.Replay(context.Background(), "ann@host", f.deadLetters()[0].ID)
			if err != nil {
				t.Error(err)
			}
			replayed <- r
		}()
		f.awaitLock() // it has the dead letter, and waits for the claim
		g.open()
		if err := <-handled; err != nil {
			t.Error(err)
		}
		if r := <-replayed; r.Outcome != dedup.ReplayDuplicate {
			t.Errorf("%+v", r)
		}
		f.wantNoDeadlocks()
		f.wantDead("poison@0")
		f.replayAll("applied")
		f.wantLanded("b", "a")
	})
}
