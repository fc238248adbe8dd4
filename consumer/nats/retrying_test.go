package nats_test

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
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 10)
	store := &noLanes{Store: consumertest.NewStore()}
	store.broken.Store(true)
	begun := time.Now()
	r := start(t, newSource(t, s), store.Store, func(w *consumer.Worker) { w.Lanes = store })
	eventually(t, "five tries", func() bool { return store.takes.Load() >= 5 })
	if d := time.Since(begun); d < 700*time.Millisecond { // half of 100, 200, 400 and 800 ms
		t.Errorf("five tries within %s", d)
	}
	if r.Ready() == nil {
		t.Error("ready without a lane")
	}
	if n := r.log.count("the database is away"); n != 1 {
		t.Errorf("the reason was logged %d times for %d tries", n, store.takes.Load())
	}
	store.broken.Store(false)
	wait(t, store.Store, 10)
	r.ready()
}
