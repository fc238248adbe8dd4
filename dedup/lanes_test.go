package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// If nothing comes to a lane, only its heartbeat shows that its row isn't as its owner
// left it.
func TestAQuietLaneLearnsThatItIsGone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	gone := func(all ...*ownedLane) (names []string) {
		t.Helper()
		var told []lane.Heartbeat
		for _, l := range all {
			told = append(told, lane.Heartbeat{Lane: l.Lane, Epoch: l.Epoch, Next: l.at, Checkpoint: l.Checkpoint})
		}
		lanes, err := f.Store.Heartbeat(t.Context(), told)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lanes {
			names = append(names, l.Name)
		}
		slices.Sort(names)
		return names
	}
	want := func(got []string, names ...string) {
		t.Helper()
		if !slices.Equal(got, names) {
			t.Errorf("%q are gone, want %q", got, names)
		}
	}
	still, stolen, missing, back, moved := f.acquire("kafka", "still"), f.acquire("kafka", "stolen"), f.acquire("kafka", "missing"), f.acquire("kafka", "back"), f.acquire("kafka", "moved")
	q := f.acquireQueue("nats")
	all := []*ownedLane{still, stolen, missing, back, moved, q}
	for _, l := range all {
		f.handle(l.batch(l.Name+"-a", l.Name+"-b"))
	}
	want(gone(all...))

	f.acquire("kafka", "stolen")
	f.exec(`DELETE FROM dedupd.lanes WHERE lane = 'missing'`)
	f.exec(`UPDATE dedupd.lanes SET next_position = 1 WHERE lane = 'back'`)
	as := moved.at
	f.handle(moved.batch("c")) // between the heartbeat and its arrival
	moved.at = as
	want(gone(all...), "back", "missing", "stolen")
	if err := f.confirm(q, true); err != nil {
		t.Fatal(err)
	}
	want(gone(still, q))
	f.exec(`UPDATE dedupd.lanes SET checkpoint = 0 WHERE lane = 'queue'`)
	want(gone(still, q), "queue")
	if again := f.reacquire(q); !again.Rewound {
		t.Error("the queue was acquired anew, and not rewound")
	}
	q.Checkpoint = lane.Checkpoint{Instance: "another"}
	want(gone(still, q), "queue")
}

// An in-flight transaction of the lane holds the row, and changes nothing before it
// commits.
func TestAQuietLaneIsNotGoneWhileItsRowIsLocked(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `UPDATE dedupd.lanes SET next_position = next_position + 1, epoch = epoch + 1`); err != nil {
		t.Fatal(err)
	}
	if !f.caughtUp(l) {
		t.Error("it is gone by what may never be committed")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if f.caughtUp(l) {
		t.Error("it isn't gone, though another has it")
	}
}

// An older copy of the database is put under a worker whose lane is quiet: what was lost
// is read again from the row's position.
func TestAQuietLaneGoesBackWithTheDatabase(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	restore := f.backup()
	lost := l.batch("b", "c")
	f.handle(lost)
	restore()
	var asReported bool
	f.again(func() error {
		gone, err := f.Store.Heartbeat(t.Context(), []lane.Heartbeat{{Lane: l.Lane, Epoch: l.Epoch, Next: l.at, Checkpoint: l.Checkpoint}})
		asReported = len(gone) == 0
		return err
	})
	if asReported {
		t.Fatal("the lane is as reported, though its last batch is lost")
	}
	again := f.acquire("kafka", "orders/0")
	f.handle(again.batchAt(again.Next, "b", "c"))
	f.wantOnce("a", "b", "c")
}

// What the broker has confirmed since the last batch goes into the row it was confirmed
// for: one at that position or above, under that epoch.
func TestBrokerConfirmed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, queue := f.acquire("kafka", "orders/0"), f.acquireQueue("nats")
	f.handle(l.batch("a", "b", "c", "d"))
	f.handle(queue.batch("e", "f"))
	confirm := func(epoch, position int64, want string) {
		t.Helper()
		all := []lane.BrokerPosition{{Lane: l.Lane, Epoch: epoch, Position: position}, {Lane: queue.Lane, Epoch: queue.Epoch, Position: 1}}
		if err := f.Store.BrokerConfirmed(t.Context(), all); err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, s := range f.laneStates() {
			if s.BrokerPosition != nil {
				got += fmt.Sprint(s.Lane, "@", *s.BrokerPosition)
			}
		}
		if got != want {
			t.Errorf("confirmed at %d: the rows have %q, want %q", position, got, want)
		}
	}
	confirm(l.Epoch-1, 4, "")
	confirm(l.Epoch, 5, "")
	confirm(l.Epoch, 4, "orders/0@4")
	acquire := func(committed int64) lane.Assignment {
		t.Helper()
		assigned, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: l.Lane, Ordered: true, Committed: committed, HonourReset: true})
		if err != nil {
			t.Fatal(err)
		}
		return assigned
	}
	if assigned := acquire(1); !assigned.Reset || assigned.Next != 1 {
		t.Errorf("a group set back to 1 from 4: %+v", assigned)
	}
	// An owner that was killed didn't report what the broker has by then.
	l.Assignment, l.at = acquire(1), 1
	f.handle(l.batch("b", "c", "d"))
	if assigned := acquire(3); assigned.Reset || assigned.Next != 4 || assigned.BrokerPosition != 3 {
		t.Errorf("a group at 3: %+v", assigned)
	}
	if assigned := acquire(2); !assigned.Reset || assigned.Next != 2 {
		t.Errorf("a group set back to 2 from 3: %+v", assigned)
	}
}

// A batch that was read before the broker confirmed more takes nothing of that back. But
// a queue follows its durable, which may have been made anew to read again.
func TestABatchThatKnowsLessOfTheBroker(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, queue := f.acquire("kafka", "orders/0"), f.acquireQueue("nats")
	move := func(l *ownedLane, position int64, id string, want string) {
		t.Helper()
		b := l.batch(id)
		b.BrokerPosition = position
		f.handle(b)
		for _, s := range f.laneStates() {
			if got := -1; s.Source == l.Lane.Source {
				if s.BrokerPosition != nil {
					got = int(*s.BrokerPosition)
				}
				if fmt.Sprint(got) != want {
					t.Errorf("%s: a batch that knows of %d makes it %d, want %s", s.Source, position, got, want)
				}
			}
		}
	}
	move(l, -1, "a", "-1")
	if err := f.Store.BrokerConfirmed(t.Context(), []lane.BrokerPosition{{Lane: l.Lane, Epoch: l.Epoch, Position: 1}}); err != nil {
		t.Fatal(err)
	}
	move(l, 0, "b", "1")
	move(l, -1, "c", "1")
	move(l, 2, "d", "2")
	move(queue, 2, "e", "2")
	move(queue, -1, "f", "2")
	move(queue, 1, "g", "1")
	// A lane that an operator set back knows nothing of it, and an old batch doesn't
	// change that.
	old := l.batch("h")
	if _, err := f.Store.SetPosition(t.Context(), "test", l.Lane.Source, l.Lane.Name, 0, true); err != nil {
		t.Fatal(err)
	}
	old.BrokerPosition = 3
	if err := f.Handle(t.Context(), []lane.Batch{old}); !errors.As(err, new(*lane.FencedError)) {
		t.Errorf("a batch of before: %v", err)
	}
	for _, s := range f.laneStates() {
		if s.Source == l.Lane.Source && s.BrokerPosition != nil {
			t.Errorf("set back by hand, it is at %d", *s.BrokerPosition)
		}
	}
}

// laneNumbers is how many numbers of lanes were drawn so far.
func (f *fixture) laneNumbers() (n int64) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), `SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('dedupd.lanes', 'id')), 0)`).Scan(&n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

// Lanes have numbers, of which there are two thousand million: acquiring a lane that has
// one draws none.
func TestAcquiringDrawsNoNumber(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const workers, takes = 4, 10
	race := func(lanes ...lane.Acquire) {
		t.Helper()
		var all sync.WaitGroup
		for range workers {
			all.Go(func() {
				for range takes {
					for _, acquire := range lanes {
						if _, err := f.Store.Acquire(t.Context(), acquire); err != nil && !errors.Is(err, lane.ErrStale) {
							t.Error(err)
						}
					}
				}
			})
		}
		all.Wait()
	}
	lanes := []lane.Acquire{
		{Lane: message.Lane{Source: "kafka", Name: "orders/0"}, Ordered: true, Committed: -1, GroupGeneration: 2},
		{Lane: message.Lane{Source: "nats", Name: "queue"}, LogID: "stream-1", Committed: -1},
	}
	race(lanes...)
	if n := f.laneNumbers(); n > int64(workers*len(lanes)) {
		t.Errorf("%d workers drew %d numbers for %d lanes: more than one each", workers, n, len(lanes))
	}
	before := f.laneNumbers()
	late, unknown := lanes[0], lanes[0]
	late.GroupGeneration = 1 // refused
	unknown.Lane.Name, unknown.Start = "orders/1", -1
	race(append(lanes, late)...)
	if _, err := f.Store.Acquire(t.Context(), unknown); !errors.Is(err, lane.ErrNoStart) {
		t.Errorf("a lane of which nobody knows where it begins: %v, want %v", err, lane.ErrNoStart)
	}
	if n := f.laneNumbers(); n != before {
		t.Errorf("%d numbers were drawn for lanes that have one", n-before)
	}
}

// What an acquisition waits for may end in either way: the row comes or doesn't, or goes
// or stays.
func TestAcquiringWaitsForTheRow(t *testing.T) {
	t.Parallel()
	acquire := lane.Acquire{Lane: message.Lane{Source: "kafka", Name: "orders/0"}, Ordered: true, Start: 7, Committed: -1, GroupGeneration: 3}
	const insert = `INSERT INTO dedupd.lanes (scope, source, lane, ordered, stream_id, epoch, group_generation, owner, next_position)
		VALUES ('test', 'kafka', 'orders/0', true, '/6f9a3d2e-0000-4000-8000-000000000000', 1, $1, 'another', 20)`
	for name, c := range map[string]struct {
		there, stale bool // before
		sql          string
		generation   int64
		commit       bool
		next         int64
		err          error
	}{
		"another makes it":           {sql: insert, generation: 2, commit: true, next: 20},
		"another doesn't make it":    {sql: insert, generation: 2, next: 7},
		"a newer owner makes it":     {sql: insert, generation: 4, commit: true, err: lane.ErrStale},
		"it goes":                    {there: true, sql: `DELETE FROM dedupd.lanes`, commit: true, next: 7},
		"it stays":                   {there: true, sql: `DELETE FROM dedupd.lanes`, next: 20},
		"a newer owner's goes":       {there: true, stale: true, sql: `DELETE FROM dedupd.lanes`, commit: true, next: 7},
		"a newer owner's stays":      {there: true, stale: true, sql: `DELETE FROM dedupd.lanes`, err: lane.ErrStale},
		"a newer owner acquires it":  {there: true, sql: `UPDATE dedupd.lanes SET group_generation = 4, next_position = 30`, commit: true, err: lane.ErrStale},
		"the last owner moves it":    {there: true, sql: `UPDATE dedupd.lanes SET next_position = 30`, commit: true, next: 30},
		"the last owner falls short": {there: true, sql: `UPDATE dedupd.lanes SET next_position = 30`, next: 20},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			if c.there {
				generation := 2
				if c.stale {
					generation = 4
				}
				f.exec(insert, generation)
			}
			tx, err := f.pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.Background()) }()
			var args []any
			if c.generation != 0 {
				args = append(args, c.generation)
			}
			if _, err := tx.Exec(t.Context(), c.sql, args...); err != nil {
				t.Fatal(err)
			}
			var assigned lane.Assignment
			done := make(chan error, 1)
			go func() {
				var err error
				assigned, err = f.Store.Acquire(t.Context(), acquire)
				done <- err
			}()
			for !f.waitsForLock() {
				select {
				case err := <-done:
					t.Fatalf("it didn't wait: %v", err)
				case <-time.After(10 * time.Millisecond):
				}
			}
			if c.commit {
				err = tx.Commit(t.Context())
			} else {
				err = tx.Rollback(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, c.err) || assigned.Next != c.next {
				t.Errorf("the lane is at %d, %v, want %d, %v", assigned.Next, err, c.next, c.err)
			}
		})
	}
}

func TestLanesNumbersEnd(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.exec(`ALTER TABLE dedupd.lanes ALTER COLUMN id RESTART WITH 2147483647`)
	last := f.acquire("kafka", "orders/0")
	f.handle(last.batch("a"))
	_, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: message.Lane{Source: "kafka", Name: "orders/1"}, Ordered: true, Committed: -1})
	if err == nil || !strings.Contains(err.Error(), `ALTER TABLE "dedupd"."lanes" ALTER COLUMN id RESTART WITH`) {
		t.Errorf("got %v, want what to do about it", err)
	}
	last = f.acquire("kafka", "orders/0") // it has its number
	f.handle(last.batch("b"))
	f.exec(`ALTER TABLE dedupd.lanes ALTER COLUMN id RESTART WITH 1`)
	other := f.acquire("kafka", "orders/1")
	f.handle(other.batch("c"))
	f.wantLanded("a", "b", "c")
}
