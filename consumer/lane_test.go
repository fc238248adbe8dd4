package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func TestClose(t *testing.T) {
	bubble(t, "idle, twice", closeIdle)
	bubble(t, "ready but not begun", closeReady)
	for i := range 3 {
		bubble(t, fmt.Sprintf("ready as number %d of three that wait for a writer", i+1), func(t *testing.T) {
			r := newRig(t, 4, writers(1))
			release := r.store.Hold()
			r.lanes[3].mustOffer(1)
			synctest.Wait()
			for _, l := range r.lanes[:3] {
				l.mustOffer(2)
			}
			r.lanes[i].Close(t.Context())
			release()
			synctest.Wait()
			for j, l := range r.lanes[:3] {
				wantCommitted, wantAbandoned := []int{0}, []int(nil)
				if j == i {
					wantCommitted, wantAbandoned = wantAbandoned, wantCommitted
				}
				l.wantOutcome(wantCommitted, wantAbandoned)
			}
			r.stop()
		})
	}
	bubble(t, "in its transaction, which is waited for", closeWaits)
	bubble(t, "in its transaction, cut off", closeCutsOff)
	bubble(t, "waiting to be tried again", closeBetweenTries)
	bubble(t, "with an Offer that waits", closeEndsAnOffer)
	bubble(t, "with an Offer whose context ends", anOfferEndsWithItsContext)
	bubble(t, "fenced while it closes", fencedWhileItCloses)
}

func closeIdle(t *testing.T) {
	r := newRig(t, 1)
	r.lanes[0].Close(t.Context())
	r.lanes[0].Close(t.Context())
	r.stop()
}

func closeReady(t *testing.T) {
	r := newRig(t, 2, writers(1))
	release := r.store.Hold()
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	r.lanes[1].mustOffer(2)
	r.lanes[1].Close(t.Context())
	r.lanes[1].wantOutcome(nil, []int{0})
	release()
	synctest.Wait()
	if n := len(r.store.Effects()); n != 1 {
		t.Errorf("%d effects", n)
	}
	r.stop()
}

func closeWaits(t *testing.T) {
	r := newRig(t, 1)
	r.store.Delay(3 * time.Second)
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	r.lanes[0].mustOffer(1)
	r.lanes[0].Close(t.Context())
	r.lanes[0].wantOutcome([]int{0}, []int{1})
	r.stop()
}

func closeCutsOff(t *testing.T) {
	r := newRig(t, 2, writers(1))
	release := r.store.Hold()
	defer release()
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	r.lanes[1].mustOffer(1)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	begun := time.Now()
	r.lanes[0].Close(ctx)
	if d := time.Since(begun); d != 2*time.Second {
		t.Errorf("Close took %s", d)
	}
	r.lanes[0].wantOutcome(nil, []int{0})
	release()
	synctest.Wait()
	if n := len(r.store.Effects()); n != 1 {
		t.Errorf("%d effects: the neighbour goes on", n)
	}
	r.stop()
}

func closeBetweenTries(t *testing.T) {
	r := newRig(t, 1)
	r.store.FailBefore(1000, errTransient)
	r.lanes[0].mustOffer(1)
	time.Sleep(20 * time.Second)
	r.lanes[0].mustOffer(1)
	r.lanes[0].Close(t.Context())
	if _, abandoned := r.lanes[0].outcome(); len(abandoned) != 2 {
		t.Errorf("abandoned %v", abandoned)
	}
	tries := len(r.sizes())
	time.Sleep(time.Minute)
	if len(r.sizes()) != tries {
		t.Error("a closed lane is tried again")
	}
	r.stop()
}

func closeEndsAnOffer(t *testing.T) {
	r := newRig(t, 1, func(w *consumer.Worker) { w.MaxMessages = 2 })
	release := r.store.Hold()
	r.lanes[0].mustOffer(2)
	synctest.Wait()
	r.lanes[0].mustOffer(2)
	offered := make(chan error)
	go func() { offered <- r.lanes[0].offer(2) }()
	synctest.Wait()
	go r.lanes[0].Close(context.Background())
	if err := <-offered; !errors.Is(err, consumer.ErrClosed) {
		t.Errorf("Offer: %v", err)
	}
	release()
	r.stop()
}

func anOfferEndsWithItsContext(t *testing.T) {
	r := newRig(t, 1, func(w *consumer.Worker) { w.MaxMessages = 2 })
	release := r.store.Hold()
	r.lanes[0].mustOffer(2)
	synctest.Wait()
	r.lanes[0].mustOffer(2)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_ = r.Budget.Acquire(ctx, 5)
	b := lane.Batch{Lane: r.lanes[0].name, Messages: make([]message.Message, 2), Bytes: 5}
	if err := r.lanes[0].Offer(ctx, b, 4); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Offer: %v", err)
	}
	if _, abandoned := r.lanes[0].outcome(); !reflect.DeepEqual(abandoned, []int{4}) {
		t.Errorf("abandoned %v", abandoned)
	}
	release()
	r.stop()
}

func fencedWhileItCloses(t *testing.T) {
	r := newRig(t, 1)
	r.store.Delay(time.Second)
	r.store.Steal(r.lanes[0].name)
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	r.lanes[0].Close(t.Context())
	<-r.lanes[0].Lost()
	r.lanes[0].SetLag(5)
	if n := r.metric("dedupd_lag_messages"); n != 0 {
		t.Errorf("a closed lane has a lag of %v", n)
	}
	r.stop()
}

func TestDrain(t *testing.T) {
	bubble(t, "what is in flight is finished", func(t *testing.T) {
		r := newRig(t, 1)
		r.store.Delay(9 * time.Second)
		r.lanes[0].mustOffer(1)
		synctest.Wait()
		r.lanes[0].mustOffer(1)
		begun := time.Now()
		r.stop()
		if d := time.Since(begun); d != 9*time.Second {
			t.Errorf("the drain took %s", d)
		}
		r.lanes[0].wantOutcome([]int{0}, []int{1})
	})
	bubble(t, "and cut off at the end of the drain", func(t *testing.T) {
		r := newRig(t, 1)
		defer r.store.Hold()()
		r.lanes[0].mustOffer(1)
		synctest.Wait()
		begun := time.Now()
		r.stop()
		if d := time.Since(begun); d != r.Drain {
			t.Errorf("the drain took %s", d)
		}
		r.lanes[0].wantOutcome(nil, []int{0})
	})
	bubble(t, "also when the source would wait longer", func(t *testing.T) {
		r := newRig(t, 1)
		r.patient = true
		defer r.store.Hold()()
		r.lanes[0].mustOffer(1)
		synctest.Wait()
		begun := time.Now()
		r.stop()
		if d := time.Since(begun); d != r.Drain {
			t.Errorf("the drain took %s", d)
		}
	})
}
