package consumer_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
)

// stuck makes every hand-over of a lane go on, whatever becomes of its context,
// until it is let off.
func (r *rig) stuck(name string) (letOff func()) {
	free := make(chan struct{})
	r.setHandle(func(ctx context.Context, group []lane.Batch) error {
		for _, b := range group {
			if b.Lane.Name == name {
				<-free
			}
		}
		return r.store.Handle(ctx, group)
	})
	return func() { close(free) }
}

// hung waits for the end of a run whose sink hangs.
func (r *rig) hung() *consumer.HangError {
	r.t.Helper()
	err := <-r.done
	var hang *consumer.HangError
	if !errors.As(err, &hang) {
		r.t.Fatalf("Run: %v, want that the sink hangs", err)
	}
	if n := r.Budget.Used(); n != 0 {
		r.t.Errorf("the budget holds %d bytes", n)
	}
	r.ledger.check()
	return hang
}

func TestHang(t *testing.T) {
	bubble(t, "ends the run, and drains the others", hangEndsTheRun)
	bubble(t, "two at a time", hangOfTwo)
	bubble(t, "found while the worker drains", hangFoundInADrain)
	bubble(t, "found while a lane is closed, as in a rebalance", hangFoundInAClose)
	bubble(t, "as long as it is set", hangAfterItsTimeout)
}

func hangEndsTheRun(t *testing.T) {
	r := newRig(t, 2)
	letOff := r.stuck("0")
	r.lanes[0].mustOffer(3)
	synctest.Wait()
	r.lanes[0].mustOffer(1)
	begun := time.Now()
	time.Sleep(consumer.TransactionTimeout + 5*time.Second)
	if err := r.Alive(); err != nil {
		t.Error("a few seconds beyond the deadline: ", err)
	}
	// The other lane works on to the end, and its last transaction is drained.
	r.lanes[1].mustOffer(1)
	synctest.Wait()
	r.store.Delay(8 * time.Second)
	r.lanes[1].mustOffer(1)
	hang := r.hung()
	if d := time.Since(begun); d > time.Minute {
		t.Errorf("the lanes were closed after %s", d)
	}
	want := []lane.Batch{{Lane: r.lanes[0].name, Ordered: true, StreamID: "stream-1", Epoch: 1, From: 0, Next: 3, BrokerPosition: -1, Bytes: 30}}
	if !reflect.DeepEqual(hang.Batches, want) {
		t.Errorf("in flight is %+v, want %+v", hang.Batches, want)
	}
	for _, text := range []string{"the sink hangs", "lane 0 positions 0 to 2", "context", "supervisor"} {
		if !strings.Contains(hang.Error(), text) {
			t.Errorf("%q doesn't say %q", hang, text)
		}
	}
	if err := r.Alive(); !errors.Is(err, hang) {
		t.Errorf("Alive: %v", err)
	}
	r.lanes[0].wantOutcome(nil, []int{3, 0})
	if committed, _ := r.lanes[1].outcome(); !reflect.DeepEqual(committed, []int{0, 1}) {
		t.Errorf("the other lane: committed %v", committed)
	}
	if row, _ := r.store.Row(r.lanes[0].name); row.Acquired != 1 {
		t.Errorf("the lane that hangs was released as if nothing were: acquired %d times", row.Acquired)
	}
	// Whoever comes back late speaks to nobody.
	letOff()
	synctest.Wait()
	if committed, _ := r.lanes[0].outcome(); committed != nil {
		t.Errorf("the lane was closed, and hears of a commit: %v", committed)
	}
}

func hangOfTwo(t *testing.T) {
	r := newRig(t, 2)
	free := make(chan struct{})
	defer close(free)
	r.setHandle(func(context.Context, []lane.Batch) error { <-free; return nil })
	begun := time.Now()
	r.lanes[0].mustOffer(1)
	time.Sleep(20 * time.Second)
	r.lanes[1].mustOffer(1)
	hang := r.hung()
	if d := time.Since(begun); d > time.Minute {
		t.Errorf("the lanes were closed after %s", d)
	}
	if len(hang.Batches) != 1 || hang.Batches[0].Lane.Name != "0" {
		t.Errorf("the first to hang: %v", hang)
	}
}

func hangFoundInADrain(t *testing.T) {
	r := newRig(t, 1)
	defer r.stuck("0")()
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	begun := time.Now()
	r.end()
	r.hung()
	if d := time.Since(begun); d > r.Drain+6*time.Second {
		t.Errorf("the end took %s", d)
	}
}

func hangFoundInAClose(t *testing.T) {
	r := newRig(t, 2)
	defer r.stuck("0")()
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	begun := time.Now()
	r.lanes[0].Close(ctx)
	if d := time.Since(begun); d > 40*time.Second {
		t.Errorf("Close took %s", d)
	}
	r.hung()
}

func hangAfterItsTimeout(t *testing.T) {
	r := newRig(t, 1, func(w *consumer.Worker) { w.HangTimeout = 300 * time.Millisecond })
	defer r.stuck("0")()
	r.lanes[0].mustOffer(1)
	begun := time.Now()
	r.hung()
	if d := time.Since(begun); d < 300*time.Millisecond || d > 400*time.Millisecond {
		t.Errorf("ended after %s", d)
	}
}

func TestRelease(t *testing.T) {
	acquired := func(r *rig, i int) int {
		row, _ := r.store.Row(r.lanes[i].name)
		return row.Acquired
	}
	bubble(t, "a lane that didn't move", func(t *testing.T) {
		r := newRig(t, 2)
		if acquired(r, 0) != 1 {
			t.Fatalf("acquired %d times", acquired(r, 0))
		}
		r.lanes[0].Close(t.Context())
		if acquired(r, 0) != 0 || acquired(r, 1) != 1 {
			t.Errorf("%d and acquired %d times after the first was closed", acquired(r, 0), acquired(r, 1))
		}
		r.stop()
		if acquired(r, 1) != 0 {
			t.Errorf("acquired %d times after a drain", acquired(r, 1))
		}
	})
	bubble(t, "also when its transaction was cut off", func(t *testing.T) {
		r := newRig(t, 1)
		defer r.store.Hold()()
		r.lanes[0].mustOffer(1)
		synctest.Wait()
		r.stop()
		if acquired(r, 0) != 0 {
			t.Errorf("acquired %d times", acquired(r, 0))
		}
	})
	bubble(t, "not one that was lost", func(t *testing.T) {
		r := newRig(t, 1)
		r.store.Steal(r.lanes[0].name)
		r.lanes[0].mustOffer(1)
		synctest.Wait()
		before := acquired(r, 0)
		r.stop()
		if acquired(r, 0) != before {
			t.Errorf("acquired %d times, %d before", acquired(r, 0), before)
		}
	})
}
