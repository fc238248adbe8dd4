package nats

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/lane"
)

// between is a store that something happens to between a worker's questions.
type between struct {
	*consumertest.Store
	mu sync.Mutex
	// before is called before a confirmation is asked for, after once it was given.
	before func(lane.Confirm)
	after  func(lane.Confirm, lane.Confirmation)
}

func (b *between) Confirm(ctx context.Context, c lane.Confirm) (lane.Confirmation, error) {
	b.mu.Lock()
	before, after := b.before, b.after
	b.mu.Unlock()
	if before != nil {
		before(c)
	}
	confirmed, err := b.Store.Confirm(ctx, c)
	if err == nil && after != nil {
		after(c, confirmed)
	}
	return confirmed, err
}

func (b *between) asks(w *consumer.Worker) { w.Lanes = b }

// An older copy of the database lacks what was acknowledged: it comes again, to
// workers that run on, and to those that start afterwards.
func TestAnOlderCopyIsPutBack(t *testing.T) {
	t.Parallel()
	frequent := func(w *consumer.Worker) { w.HeartbeatInterval = 50 * time.Millisecond }
	for name, c := range map[string]struct {
		workers int
		stopped bool // while it is put back
		quiet   bool // nothing else comes
		row     bool // the copy is from before the queue was acquired
	}{
		"under a worker":                          {workers: 1},
		"under workers":                           {workers: 3},
		"under a quiet worker":                    {workers: 1, quiet: true},
		"while nobody runs":                       {workers: 2, stopped: true},
		"without the row, under a worker":         {workers: 1, row: true},
		"without the row, under quiet workers":    {workers: 2, row: true, quiet: true},
		"without the row, while nobody runs":      {workers: 1, row: true, stopped: true},
		"while nobody runs, and nothing comes":    {workers: 1, stopped: true, quiet: true},
		"without the row, while nobody runs, too": {workers: 2, row: true, stopped: true, quiet: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			putBack := r.store.Copy()
			var all []*work
			run := func() {
				for range c.workers {
					all = append(all, r.start(nil, frequent))
				}
			}
			run()
			r.publish(0, 500)
			r.wait(500)
			r.allAcknowledged(500)
			if !c.row {
				putBack = r.store.Copy()
			}
			r.publish(500, 500)
			r.wait(1000)
			r.allAcknowledged(1000)
			if c.stopped {
				for _, w := range all {
					w.stop()
				}
			}
			putBack()
			want := 1000
			if !c.quiet {
				r.publish(1000, 100)
				want = 1100
			}
			if c.stopped {
				run()
			}
			r.wait(want)
			r.allAcknowledged(uint64(want))
			if row, _ := r.store.Row(edgeQueue); row.Checkpoint == 0 {
				t.Errorf("the row is %+v", row)
			}
		})
	}
}

// A database that was started again has lost nothing, and nothing comes again but what
// was on its way to be acknowledged.
func TestARestartRewindsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 500)
	w := r.start(nil)
	r.wait(500)
	r.allAcknowledged(500)
	created := r.durable().Created
	r.store.FailOver()
	r.publish(500, 100)
	r.wait(600)
	r.allAcknowledged(600)
	if w.log.has("lacks commits") || !r.durable().Created.Equal(created) {
		t.Error("the queue was rewound")
	}
	if handled, _, _ := r.store.Counts(); handled > 700 {
		t.Errorf("%d were handed over, of 600", handled)
	}
}

// Nothing is acknowledged before the database has confirmed it and the durable tells.
func TestNothingIsAcknowledgedUnconfirmed(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	store := &between{Store: r.store}
	asked, answer := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(asked) })
	store.before = func(lane.Confirm) { once(); <-answer }
	var later sync.Once
	store.after = func(c lane.Confirm, confirmed lane.Confirmation) {
		if !c.Raise {
			return
		}
		later.Do(func() {
			if info := r.durable(); info.NumAckPending != 100 || info.Config.Metadata["dedupd"] == confirmed.OffsetMetadata {
				t.Errorf("the durable already tells of %q, and waits for %d", info.Config.Metadata["dedupd"], info.NumAckPending)
			}
		})
	}
	r.start(func(c *Config) { c.AckWait = 4 * time.Second }, store.asks)
	r.wait(100)
	<-asked
	time.Sleep(6 * time.Second) // more than the ack wait
	if info := r.durable(); info.NumAckPending != 100 || info.Delivered.Consumer != 100 {
		t.Errorf("%d wait for their acknowledgement after %d deliveries, want 100 each", info.NumAckPending, info.Delivered.Consumer)
	}
	close(answer)
	r.allAcknowledged(100)
	if info := r.durable(); info.Config.Metadata["dedupd"] == "" {
		t.Error("the durable tells nothing")
	}
}

// The database is replaced right after it confirmed, and another worker has brought the
// copy as far before the durable is written. Nothing but that the database is asked once
// more tells that what waits is lost.
func TestTheDatabaseIsReplacedWhileItConfirms(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	store := &between{Store: r.store}
	w := r.start(nil, store.asks)
	w.untilReady()
	putBack := store.Copy()
	var once sync.Once
	store.mu.Lock()
	store.after = func(c lane.Confirm, _ lane.Confirmation) {
		if !c.Raise {
			return
		}
		once.Do(func() {
			putBack()
			got, err := store.Acquire(t.Context(), lane.Acquire{Lane: edgeQueue, LogID: r.row().StreamID, Committed: 1, OffsetMetadata: c.OffsetMetadata})
			if err == nil {
				_, err = r.store.Confirm(t.Context(), lane.Confirm{Lane: edgeQueue, Epoch: got.Epoch, Checkpoint: got.Checkpoint, OffsetMetadata: c.OffsetMetadata, Raise: true})
			}
			if err != nil || got.Rewound {
				t.Errorf("acquired by another: %+v, %v", got, err)
			}
		})
	}
	store.mu.Unlock()
	r.publish(0, 100)
	r.until("the copy to be put back", func() bool { h, _, _ := store.Counts(); return h > 100 })
	r.wait(100)
	r.allAcknowledged(100)
}

// Two workers may write at a time, and the lower checkpoint last; or somebody edits the
// durable. It comes right, also where nothing is left to be acknowledged.
func TestAnOlderCheckpointIsMended(t *testing.T) {
	t.Parallel()
	for name, instead := range map[string]string{"an older one": "", "nothing": "-"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			r.start(nil).untilReady()
			older := r.durable().Config
			r.publish(0, 100)
			r.wait(100)
			r.allAcknowledged(100)
			now := r.durable().Config
			if now.Metadata["dedupd"] == older.Metadata["dedupd"] {
				t.Fatal("the checkpoint has not risen")
			}
			if instead == "-" {
				delete(older.Metadata, "dedupd")
			}
			_, err := r.stream.UpdateConsumer(t.Context(), older)
			r.check(err)
			r.until("the checkpoint to be mended", func() bool {
				return r.durable().Config.Metadata["dedupd"] == now.Metadata["dedupd"]
			})
		})
	}
}

// A server that allows few messages to be outstanding isn't held up by those that wait
// for their acknowledgement.
func TestFewMayBeOutstanding(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 200)
	store := &between{Store: r.store}
	var confirmed atomic.Int64
	store.after = func(c lane.Confirm, _ lane.Confirmation) {
		if c.Raise {
			confirmed.Add(1)
		}
	}
	begun := time.Now()
	r.start(func(c *Config) { c.MaxAckPending = 4 }, store.asks)
	r.wait(200)
	// There are fifty of them at least, which are not to wait for half a second each.
	if d, n := time.Since(begun), confirmed.Load(); d > time.Duration(n)*250*time.Millisecond {
		t.Errorf("%d confirmations took %s", n, d)
	}
}

// forgetful is a stream on a server that keeps no metadata of consumers; or on which
// another worker amends the durable in between, so many times.
type forgetful struct {
	jetstream.Stream
	times int
}

func (f *forgetful) forget(config jetstream.ConsumerConfig) jetstream.ConsumerConfig {
	if f.times > 0 {
		f.times--
		config.Metadata = nil
	}
	return config
}

func (f *forgetful) CreateConsumer(ctx context.Context, config jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	return f.Stream.CreateConsumer(ctx, f.forget(config))
}

func (f *forgetful) UpdateConsumer(ctx context.Context, config jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	return f.Stream.UpdateConsumer(ctx, f.forget(config))
}

func TestAServerWithoutMetadata(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		times int
		fatal bool
	}{
		"it never keeps any":                            {times: 1 << 30, fatal: true},
		"a worker that comes amends the durable":        {times: 1},
		"two workers that come do, one after the other": {times: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			err := r.rewind(&forgetful{r.stream, c.times}, 1)
			switch {
			case !c.fatal:
				if err != nil || r.durable().Config.Metadata["dedupd"] != "metadata" {
					t.Errorf("got %v, %+v", err, r.durable().Config.Metadata)
				}
			case err == nil || !strings.Contains(err.Error(), "2.10") || errors.Is(err, context.DeadlineExceeded):
				t.Errorf("got %v", err)
			}
		})
	}
}
