package kafka

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// fakeMember takes commits, or fails.
type fakeMember struct {
	mu      sync.Mutex
	err     error
	refused int // a partition that it doesn't take commits of; 0: none
	commits []map[string]map[int]committed
}

func (m *fakeMember) commit(o map[string]map[int]committed, confirmed func(string, int)) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return m.err
	}
	m.commits = append(m.commits, o)
	for topic, partitions := range o {
		for p := range partitions {
			if p == m.refused && p != 0 {
				err = errors.New("may not")
				continue
			}
			confirmed(topic, p)
		}
	}
	return err
}

func (m *fakeMember) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

func (m *fakeMember) refuse(partition int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refused = partition
}

func (m *fakeMember) take() []map[string]map[int]committed {
	m.mu.Lock()
	defer m.mu.Unlock()
	defer func() { m.commits = nil }()
	return m.commits
}

func laneOf(partition int) *partitionReader {
	return &partitionReader{lane: message.Lane{Source: "kafka", Name: laneName("t", partition)}, topic: "t", partition: partition}
}

func untold(context.Context, []lane.BrokerPosition) error { return nil }

func TestCommitter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		member, failures := &fakeMember{}, 0
		c := newCommitter(member, func() { failures++ }, untold, slog.New(slog.DiscardHandler))
		a, b := c.add(laneOf(0), &lane.Assignment{OffsetMetadata: "", BrokerPosition: -1}), c.add(laneOf(1), &lane.Assignment{OffsetMetadata: "", BrokerPosition: 5})
		gone := c.add(laneOf(2), &lane.Assignment{OffsetMetadata: "", BrokerPosition: -1})
		go c.loop()
		wait := func() { time.Sleep(commitInterval); synctest.Wait() }
		expect := func(what string, want ...map[string]map[int]committed) {
			t.Helper()
			if diff := cmp.Diff(want, member.take(), cmp.AllowUnexported(committed{})); diff != "" {
				t.Error(what, diff)
			}
		}

		wait()
		expect("nothing to tell")
		c.set(a, 10)
		c.set(a, 20)
		c.set(b, 6)
		c.set(gone, 7)
		c.drop(gone)
		wait()
		expect("coalesced", map[string]map[int]committed{"t": {0: {offset: 20}, 1: {offset: 6}}})
		if a.confirmed.Load() != 20 || b.confirmed.Load() != 6 || gone.confirmed.Load() != -1 {
			t.Error("confirmed wrongly")
		}
		wait()
		expect("told already")

		member.fail(errors.New("the coordinator is away"))
		c.set(a, 30)
		wait()
		wait()
		if failures != 2 || a.confirmed.Load() != 20 {
			t.Errorf("%d failures, %d confirmed", failures, a.confirmed.Load())
		}
		member.fail(nil)
		wait()
		expect("tried again", map[string]map[int]committed{"t": {0: {offset: 30}}})

		// A position may go back, with the database.
		c.set(a, 25)
		wait()
		expect("back", map[string]map[int]committed{"t": {0: {offset: 25}}})

		// Offset metadata is committed with a position that the group has already.
		later := c.add(laneOf(3), &lane.Assignment{OffsetMetadata: "metadata", BrokerPosition: 7})
		c.set(later, 7)
		wait()
		expect("metadata", map[string]map[int]committed{"t": {3: {7, "metadata"}}})
		wait()
		expect("told already")

		// The broker refuses one lane's position and takes the others.
		member.refuse(3)
		c.set(a, 40)
		c.set(later, 8)
		wait()
		expect("both", map[string]map[int]committed{"t": {0: {offset: 40}, 3: {8, "metadata"}}})
		if failures != 3 || a.confirmed.Load() != 40 || later.confirmed.Load() != 7 {
			t.Errorf("%d failures, confirmed %d and %d", failures, a.confirmed.Load(), later.confirmed.Load())
		}
		member.refuse(0)
		wait()
		expect("what is left", map[string]map[int]committed{"t": {3: {8, "metadata"}}})

		c.set(b, 9)
		c.stop()
		expect("the last one", map[string]map[int]committed{"t": {1: {offset: 9}}})
	})
}

// A lane that is opened again in the same group generation has one mark: the old
// mark's position must never be committed after the new mark's, since that would look
// like an operator's reset of the group.
func TestALaneOpenedAgainHasOneMark(t *testing.T) {
	t.Parallel()
	for range 20 { // the order of a map is random
		synctest.Test(t, func(t *testing.T) {
			member := &fakeMember{}
			c := newCommitter(member, func() {}, untold, slog.New(slog.DiscardHandler))
			old := c.add(laneOf(0), &lane.Assignment{OffsetMetadata: "first", BrokerPosition: -1})
			c.set(old, 100)
			go c.loop()
			time.Sleep(commitInterval)
			synctest.Wait()
			member.take()
			again := c.add(laneOf(0), &lane.Assignment{OffsetMetadata: "again", BrokerPosition: 100})
			c.set(again, 500)
			c.set(old, 120) // a straggler
			time.Sleep(5 * commitInterval)
			c.stop()
			for _, commit := range member.take() {
				if commit["t"][0] != (committed{500, "again"}) {
					t.Fatalf("the group was told %v after the lane had come to 500", commit["t"][0])
				}
			}
		})
	}
}

// silentMember never answers, like a broker that hangs.
type silentMember struct{ asked, answer chan struct{} }

func (m *silentMember) commit(map[string]map[int]committed, func(string, int)) error {
	m.asked <- struct{}{}
	<-m.answer
	return errors.New("too late")
}

// Nothing waits for the broker after COMMIT: while it never answers, lanes still set
// their positions, are opened and are released.
func TestABrokerThatNeverAnswersHoldsUpNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		member := &silentMember{make(chan struct{}, 10), make(chan struct{})}
		c := newCommitter(member, func() {}, untold, slog.New(slog.DiscardHandler))
		a := c.add(laneOf(0), &lane.Assignment{OffsetMetadata: "", BrokerPosition: -1})
		c.set(a, 1)
		go c.loop()
		<-member.asked
		begun := time.Now()
		for n := range int64(1000) {
			c.set(a, 2+n)
			b := c.add(laneOf(1), &lane.Assignment{OffsetMetadata: "", BrokerPosition: -1})
			c.set(b, n)
			c.drop(b)
		}
		if d := time.Since(begun); d != 0 {
			t.Errorf("they waited %s", d)
		}
		close(member.answer)
		c.stop()
	})
}

// The database is told what the broker has confirmed, from time to time and at the end:
// once, or again after a failure.
func TestWhatIsConfirmedIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		member := &fakeMember{}
		var mu sync.Mutex // a timer's goroutine tells
		var told [][]lane.BrokerPosition
		var failure error
		c := newCommitter(member, func() {}, func(_ context.Context, all []lane.BrokerPosition) error {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, all)
			return failure
		}, slog.New(slog.DiscardHandler))
		expect := func(what string, want ...[]lane.BrokerPosition) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if diff := cmp.Diff(want, told); diff != "" {
				t.Error(what, diff)
			}
			told = nil
		}
		fails := func(err error) {
			mu.Lock()
			defer mu.Unlock()
			failure = err
		}
		confirmed := func(partition int, epoch, position int64) lane.BrokerPosition {
			return lane.BrokerPosition{Lane: laneOf(partition).lane, Epoch: epoch, Position: position}
		}
		b, a := c.add(laneOf(1), &lane.Assignment{Epoch: 8, BrokerPosition: 5}), c.add(laneOf(0), &lane.Assignment{Epoch: 7, BrokerPosition: -1})
		known := c.add(laneOf(2), &lane.Assignment{Epoch: 9, BrokerPosition: 4})
		go c.loop()
		c.set(a, 10)
		c.set(b, 20)
		c.set(known, 4)
		time.Sleep(reportInterval - time.Second)
		expect("too soon")
		fails(errors.New("the database is away"))
		time.Sleep(2 * time.Second)
		both := []lane.BrokerPosition{confirmed(0, 7, 10), confirmed(1, 8, 20)}
		expect("a failure", both)
		fails(nil)
		time.Sleep(reportInterval)
		expect("again", both)
		time.Sleep(reportInterval)
		expect("nothing new")
		c.set(a, 11)
		c.set(b, 21)
		c.drop(b) // lost
		c.stop()
		expect("the end", []lane.BrokerPosition{confirmed(0, 7, 11)})
	})
}
