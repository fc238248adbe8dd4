package dedup_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/dedupd/dedupd/message"
)

// Of a lane that nothing comes to, only the word that it is caught up tells that
// its row isn't as its owner left it.
func TestAQuietLaneLearnsThatItIsGone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	gone := func(all ...*lane) (names []string) {
		t.Helper()
		var told []message.CaughtUp
		for _, l := range all {
			told = append(told, message.CaughtUp{Lane: l.Lane, Epoch: l.Epoch, Next: l.at, Checkpoint: l.Checkpoint})
		}
		lanes, err := f.Store.CaughtUp(t.Context(), told)
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
	still, stolen, missing, back, moved := f.take("kafka", "still"), f.take("kafka", "stolen"), f.take("kafka", "missing"), f.take("kafka", "back"), f.take("kafka", "moved")
	q := f.takeQueue("nats")
	all := []*lane{still, stolen, missing, back, moved, q}
	for _, l := range all {
		f.handle(l.batch(l.Name+"-a", l.Name+"-b"))
	}
	want(gone(all...))

	f.take("kafka", "stolen")
	f.exec(`DELETE FROM dedupd.lanes WHERE lane = 'missing'`)
	f.exec(`UPDATE dedupd.lanes SET next_position = 1 WHERE lane = 'back'`)
	as := moved.at
	f.handle(moved.batch("c")) // between the word and its arrival
	moved.at = as
	want(gone(all...), "back", "missing", "stolen")
	if err := f.confirm(q); err != nil {
		t.Fatal(err)
	}
	want(gone(still, q))
	f.exec(`UPDATE dedupd.lanes SET checkpoint = 0 WHERE lane = 'queue'`)
	want(gone(still, q), "queue")
	if again := f.retake(q); !again.Rewound {
		t.Error("the queue was taken anew, and not rewound")
	}
	q.Checkpoint = message.Checkpoint{Instance: "another"}
	want(gone(still, q), "queue")
}

// A transaction of the lane that is under way holds the row, and changes nothing
// before it commits.
func TestAQuietLaneIsNotGoneWhileItsRowIsLocked(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
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

// An older copy of the database under a worker whose lane is quiet: what was lost is
// read again from where the row stands.
func TestAQuietLaneGoesBackWithTheDatabase(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a"))
	restore := f.backup()
	lost := l.batch("b", "c")
	f.handle(lost)
	restore()
	var asTold bool
	f.again(func() error {
		gone, err := f.Store.CaughtUp(t.Context(), []message.CaughtUp{{Lane: l.Lane, Epoch: l.Epoch, Next: l.at, Checkpoint: l.Checkpoint}})
		asTold = len(gone) == 0
		return err
	})
	if asTold {
		t.Fatal("the lane is as told, though its last batch is lost")
	}
	again := f.take("kafka", "orders/0")
	f.handle(again.batchAt(again.Next, "b", "c"))
	f.wantOnce("a", "b", "c")
}

// What the broker has confirmed since the last batch goes into the row it was
// confirmed of: one that stands there or above, under the epoch.
func TestCopied(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, queue := f.take("kafka", "orders/0"), f.takeQueue("nats")
	f.handle(l.batch("a", "b", "c", "d"))
	f.handle(queue.batch("e", "f"))
	confirm := func(epoch, position int64, want string) {
		t.Helper()
		all := []message.Copied{{Lane: l.Lane, Epoch: epoch, Position: position}, {Lane: queue.Lane, Epoch: queue.Epoch, Position: 1}}
		if err := f.Store.Copied(t.Context(), all); err != nil {
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
	take := func(committed int64) message.Taken {
		t.Helper()
		taken, err := f.Store.Take(t.Context(), message.Take{Lane: l.Lane, Ordered: true, Committed: committed, HonourReset: true})
		if err != nil {
			t.Fatal(err)
		}
		return taken
	}
	if taken := take(1); !taken.Reset || taken.Next != 1 {
		t.Errorf("a group set back to 1 from 4: %+v", taken)
	}
	// An owner that was killed told nothing of what the broker has by then.
	l.Taken, l.at = take(1), 1
	f.handle(l.batch("b", "c", "d"))
	if taken := take(3); taken.Reset || taken.Next != 4 || taken.BrokerPosition != 3 {
		t.Errorf("a group that stands at 3: %+v", taken)
	}
	if taken := take(2); !taken.Reset || taken.Next != 2 {
		t.Errorf("a group set back to 2 from 3: %+v", taken)
	}
}
