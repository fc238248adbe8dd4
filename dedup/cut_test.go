package dedup_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dedupd/dedupd/lane"
)

// acquireAgain is the assignment of the lane's next owner.
func (f *fixture) acquireAgain(l *ownedLane) lane.Assignment {
	f.t.Helper()
	assigned, err := f.Store.Acquire(f.t.Context(), lane.Acquire{Lane: l.Lane, Ordered: true, Committed: -1})
	if err != nil {
		f.t.Fatal(err)
	}
	return assigned
}

// The leader epochs go with the position: those below it, and none if they aren't known.
func TestLeaderEpochsGoWithThePosition(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	b := l.batch("a", "b", "c")
	b.LeaderEpochs = []lane.LeaderEpoch{{Epoch: 3, From: 0}, {Epoch: 5, From: 2}, {Epoch: 6, From: 3}}
	f.handle(b)
	want := []lane.LeaderEpoch{{Epoch: 3, From: 0}, {Epoch: 5, From: 2}}
	if diff := cmp.Diff(want, f.acquireAgain(l).LeaderEpochs); diff != "" {
		t.Error(diff)
	}
	l = f.acquire("kafka", "orders/0")
	f.handle(l.batch("d"))
	if assigned := f.acquireAgain(l); assigned.LeaderEpochs != nil || assigned.Next != 4 {
		t.Errorf("of a batch without any, %v are kept", assigned.LeaderEpochs)
	}
	l = f.acquire("kafka", "orders/0")
	b = l.batch("e")
	b.LeaderEpochs = want
	f.handle(b)
	f.setPosition(l, 4)
	if assigned := f.acquireAgain(l); assigned.LeaderEpochs != nil {
		t.Errorf("of a position that was set, %v are kept", assigned.LeaderEpochs)
	}
}

// A part of a divided batch has the epoch of its own end.
func TestLeaderEpochsOfADividedBatch(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	b := l.batch("a", "b", "c", "d")
	b.LeaderEpochs = []lane.LeaderEpoch{{Epoch: 3, From: 0}, {Epoch: 5, From: 2}}
	b.Messages, b.Next = b.Messages[:2], 2
	f.handle(b)
	if diff := cmp.Diff([]lane.LeaderEpoch{{Epoch: 3, From: 0}}, f.acquireAgain(l).LeaderEpochs); diff != "" {
		t.Error(diff)
	}
}

func TestLogCut(t *testing.T) {
	t.Parallel()
	cut := func(f *fixture, l *ownedLane, at int64, follow bool) {
		t.Helper()
		if err := f.Store.ReportLogCut(t.Context(), lane.LogCut{Lane: l.Lane, Epoch: l.Epoch, At: at, Follow: follow}); err != nil {
			t.Fatal(err)
		}
	}
	begin := func(t *testing.T) (*fixture, *ownedLane) {
		f := newFixture(t)
		l := f.acquire("kafka", "orders/0")
		b := l.batch("a", "b", "c", "d")
		b.LeaderEpochs = []lane.LeaderEpoch{{Epoch: 3, From: 0}}
		b.BrokerPosition = 4
		f.handle(b)
		return f, l
	}
	t.Run("is kept until the position is set", func(t *testing.T) {
		t.Parallel()
		f, l := begin(t)
		cut(f, l, 2, false)
		first := f.acquireAgain(l)
		again := f.acquireAgain(l)
		if first.Cut != 2 || again.Cut != 2 || again.Next != 4 || again.Reached != 4 || again.StreamID != l.StreamID || len(again.LeaderEpochs) != 1 {
			t.Errorf("acquired as %+v", again)
		}
		if s := f.laneStates()["kafka orders/0"]; s.CutAt == nil || *s.CutAt != 2 {
			t.Errorf("listed as %+v", s)
		}
		f.setPosition(l, 2)
		moved := f.acquireAgain(l)
		if moved.Cut != -1 || moved.Next != 2 || moved.Reached != 2 || moved.StreamID == l.StreamID {
			t.Errorf("acquired as %+v: its positions are those of other messages", moved)
		}
		if again := f.acquireAgain(l); again.StreamID != moved.StreamID || again.Cut != -1 {
			t.Errorf("acquired as %+v after %+v", again, moved)
		}
	})
	t.Run("is followed", func(t *testing.T) {
		t.Parallel()
		f, l := begin(t)
		cut(f, l, 2, false)
		l.Assignment = f.acquireAgain(l)
		cut(f, l, 2, true)
		assigned := f.acquireAgain(l)
		if assigned.Cut != -1 || assigned.Next != 2 || assigned.BrokerPosition != -1 || assigned.StreamID == l.StreamID {
			t.Errorf("acquired as %+v", assigned)
		}
		if s := f.laneStates()["kafka orders/0"]; s.StreamTime != nil || s.CutAt != nil {
			t.Errorf("listed as %+v: claims may expire that are asked for again", s)
		}
	})
	t.Run("is reported by its owner only", func(t *testing.T) {
		t.Parallel()
		f, l := begin(t)
		f.acquireAgain(l)
		wantFenced(t, f.Store.ReportLogCut(t.Context(), lane.LogCut{Lane: l.Lane, Epoch: l.Epoch, At: 2, Follow: true}), l)
		if assigned := f.acquireAgain(l); assigned.Cut != -1 || assigned.Next != 4 {
			t.Errorf("acquired as %+v", assigned)
		}
	})
	t.Run("is over once the group was reset to below it", func(t *testing.T) {
		t.Parallel()
		for committed, held := range map[int64]bool{1: false, 2: false, 3: true} {
			f, l := begin(t)
			cut(f, l, 2, false)
			got := f.acquireCommitted(l, committed)
			if got.Next != committed || got.Reached != 4 || (got.Cut == 2) != held || (got.StreamID == l.StreamID) != held {
				t.Errorf("reset to %d, it is acquired as %+v", committed, got.Assignment)
			}
		}
	})
}
