package nats

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/lane"
)

// The waits grow up to the longest, and begin anew only after a session that lasted.
func TestWaitsBetweenSessions(t *testing.T) {
	t.Parallel()
	var r retries
	for i, most := range []time.Duration{100, 200, 400, 800, 1600, 3200, 5000, 5000} {
		most *= time.Millisecond
		if wait := r.failed(time.Second); wait < most/2 || wait > most {
			t.Errorf("wait %d is %s, not between %s and %s", i+1, wait, most/2, most)
		}
	}
	if wait := r.failed(steady); wait > shortestWait {
		t.Errorf("after a session that lasted: %s", wait)
	}
}

// noLanes is a database whose lanes nobody can acquire, until it is told otherwise.
type noLanes struct {
	*consumertest.Store
	broken atomic.Bool
	takes  atomic.Int64
}

func (n *noLanes) Acquire(ctx context.Context, t lane.Acquire) (lane.Assignment, error) {
	if n.broken.Load() {
		n.takes.Add(1)
		return lane.Assignment{}, errors.New("the database is away")
	}
	return n.Store.Acquire(ctx, t)
}

// A session that can't begin is tried again in growing intervals, and the reason is
// logged once.
func TestASessionThatFailsAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 10)
	store := &noLanes{Store: r.store}
	store.broken.Store(true)
	begun := time.Now()
	w := r.start(nil, func(w *consumer.Worker) { w.Lanes = store })
	r.until("five tries", func() bool { return store.takes.Load() >= 5 })
	if d := time.Since(begun); d < 700*time.Millisecond { // half of 100, 200, 400 and 800 ms
		t.Errorf("five tries within %s", d)
	}
	if w.worker.Ready() == nil {
		t.Error("ready without a lane")
	}
	if n := w.log.count("the database is away"); n != 1 {
		t.Errorf("the reason was logged %d times for %d tries", n, store.takes.Load())
	}
	store.broken.Store(false)
	r.wait(10)
	w.untilReady()
}
