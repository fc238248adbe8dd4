package consumer_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func TestErrors(t *testing.T) {
	bubble(t, "a transient error: one lane backs off, alone", aTransientError)
	bubble(t, "a hold", aHold)
	bubble(t, "a hold at the next message", aHoldAtTheNextMessage)
	bubble(t, "a held lane includes what has come since", aHeldLaneIncludesWhatHasComeSince)
	bubble(t, "fenced", fenced)
	bubble(t, "an error that names no lane of the group does not spin", anErrorThatNamesNoLane)
	bubble(t, "a transaction has its deadline", aTransactionHasItsDeadline)
}

func aTransientError(t *testing.T) {
	r := newRig(t, 3, writers(1))
	r.failLane("0", errTransient)
	r.offerTogether()
	time.Sleep(time.Second)
	if n := len(r.store.Effects()); n != 6 {
		t.Errorf("%d effects while lane 0 fails, want those of lanes 1 and 2", n)
	}
	// The others have work all the time, and the writer is busy with it.
	r.store.Delay(50 * time.Millisecond)
	for range 3000 {
		r.lanes[1].mustOffer(1)
		time.Sleep(20 * time.Millisecond)
	}
	r.store.Heal()
	time.Sleep(time.Second)
	if n := len(r.store.Effects()); n != 3006 {
		t.Errorf("%d effects while lane 0 fails", n)
	}
	r.mu.Lock()
	for i, g := range r.groups {
		if i > 1 && len(g) > 1 && holds(g, "0") {
			t.Errorf("group %d has a neighbour of lane 0", i)
		}
	}
	r.mu.Unlock()
	if n := r.tries("0"); n < 12 || n > 60 {
		t.Errorf("%d tries in a minute", n)
	}
	if failing := (*consumer.FailingError)(nil); !errors.As(r.Ready(), &failing) || failing.Lane != r.lanes[0].name || failing.For < 50*time.Second {
		t.Errorf("Ready: %v, want it to tell of the lane that has failed for a minute", r.Ready())
	}
	r.setHandle(nil)
	time.Sleep(6 * time.Second)
	if n := len(r.store.Effects()); n != 3011 || r.Ready() != nil {
		t.Errorf("%d effects, Ready: %v", n, r.Ready())
	}
	r.stop()
}

// A lane that goes on and is held at the next message doesn't wait as long as one that is
// held for hours.
func aHoldAtTheNextMessage(t *testing.T) {
	r := newRig(t, 3, writers(1))
	r.failLane("0", &lane.HoldError{Lane: r.lanes[0].name, Err: errors.New("not yet"), Landed: true})
	r.offerTogether()
	time.Sleep(time.Minute)
	if n := r.tries("0"); n < 300 {
		t.Errorf("%d tries in a minute", n)
	}
	r.setHandle(nil)
	time.Sleep(time.Second)
	if n := len(r.store.Effects()); n != 11 || r.Ready() != nil {
		t.Errorf("%d effects, Ready: %v", n, r.Ready())
	}
	r.stop()
}

func aHold(t *testing.T) {
	r := newRig(t, 3, writers(1))
	mend := &lane.HoldError{Lane: r.lanes[0].name, Err: errors.New("no such table")}
	r.failLane("0", mend)
	r.offerTogether()
	time.Sleep(10 * time.Minute)
	if n := len(r.store.Effects()); n != 6 {
		t.Errorf("%d effects while lane 0 is held", n)
	}
	if n := r.tries("0"); n < 10 || n > 80 {
		t.Errorf("%d tries in ten minutes", n)
	}
	if err := r.Ready(); !errors.Is(err, mend) {
		t.Errorf("Ready: %v", err)
	}
	if held := (*consumer.HeldError)(nil); !errors.As(r.Ready(), &held) || held.Lane != r.lanes[0].name {
		t.Errorf("Ready: %v, want it to name the lane", r.Ready())
	}
	if n := r.metric("dedupd_lanes_held"); n != 1 {
		t.Errorf("%v lanes held", n)
	}
	r.setHandle(nil)
	time.Sleep(31 * time.Second)
	if n := len(r.store.Effects()); n != 11 || r.Ready() != nil {
		t.Errorf("%d effects, Ready: %v", n, r.Ready())
	}
	r.stop()
}

func aHeldLaneIncludesWhatHasComeSince(t *testing.T) {
	r := newRig(t, 1, func(w *consumer.Worker) { w.MaxMessages = 10 })
	// The first message is refused until another one is beside it.
	r.setHandle(func(ctx context.Context, group []lane.Batch) error {
		if b := group[0]; b.From == 0 && len(b.Messages) == 1 {
			return &lane.HoldError{Lane: b.Lane, Err: errors.New("whose fault is it?")}
		}
		return r.store.Handle(ctx, group)
	})
	r.lanes[0].mustOffer(1)
	time.Sleep(time.Minute)
	r.lanes[0].mustOffer(2)
	r.lanes[0].mustOffer(3)
	time.Sleep(31 * time.Second)
	if n := len(r.store.Effects()); n != 6 || r.Ready() != nil {
		t.Fatalf("%d effects, Ready: %v", n, r.Ready())
	}
	r.lanes[0].wantOutcome([]int{0, 1, 3}, nil)
	// But no more than a batch may have.
	refuse := func(_ context.Context, group []lane.Batch) error {
		return &lane.HoldError{Lane: group[0].Lane, Err: errors.New("all of it")}
	}
	r.setHandle(refuse)
	r.lanes[0].mustOffer(8)
	synctest.Wait()
	r.lanes[0].mustOffer(3)
	time.Sleep(time.Minute)
	if sizes := r.sizes(); slices.Max(sizes) > 10 {
		t.Errorf("groups of %v", sizes)
	}
	r.setHandle(nil)
	time.Sleep(31 * time.Second)
	if n := len(r.store.Effects()); n != 17 {
		t.Errorf("%d effects", n)
	}
	r.stop()
}

func fenced(t *testing.T) {
	r := newRig(t, 3, writers(1))
	r.store.Steal(r.lanes[0].name)
	r.offerTogether()
	synctest.Wait()
	select {
	case <-r.lanes[0].Lost():
	default:
		t.Error("the lane isn't lost")
	}
	if _, abandoned := r.lanes[0].outcome(); !reflect.DeepEqual(abandoned, []int{0}) {
		t.Errorf("abandoned %v", abandoned)
	}
	if err := r.lanes[0].offer(1); !errors.Is(err, consumer.ErrClosed) {
		t.Errorf("Offer to a lost lane: %v", err)
	}
	if n := len(r.store.Effects()); n != 6 {
		t.Errorf("%d effects", n)
	}
	if n := r.metric("dedupd_fenced_total"); n != 1 {
		t.Errorf("fenced_total %v", n)
	}
	r.lanes[0].Close(t.Context())
	r.stop()
}

func anErrorThatNamesNoLane(t *testing.T) {
	r := newRig(t, 1)
	for _, err := range []error{&lane.FencedError{}, &lane.HoldError{Lane: message.Lane{Name: "stranger"}, Err: errTransient}} {
		before := len(r.sizes())
		r.failLane("0", err)
		r.lanes[0].mustOffer(1)
		time.Sleep(10 * time.Second)
		if n := len(r.sizes()) - before; n > 30 {
			t.Errorf("%T: %d tries in 10 s", err, n)
		}
		r.setHandle(nil)
		time.Sleep(6 * time.Second)
	}
	r.stop()
}

func aTransactionHasItsDeadline(t *testing.T) {
	r := newRig(t, 1)
	release := r.store.Hold()
	r.lanes[0].mustOffer(1)
	time.Sleep(consumer.TransactionTimeout + time.Second)
	if n := len(r.sizes()); n != 2 {
		t.Errorf("%d tries after a deadline and a second", n)
	}
	if err := r.Alive(); err != nil {
		t.Error(err)
	}
	release()
	r.stop()
}
