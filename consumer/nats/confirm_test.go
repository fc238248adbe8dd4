package nats_test

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
	"github.com/dedupd/dedupd/consumer/nats"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

var edgeQueue = message.Lane{Source: "edge", Name: "queue"}

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

// allAcknowledged waits until everything up to a message is acknowledged.
func allAcknowledged(t *testing.T, js jetstream.JetStream, last uint64) {
	t.Helper()
	eventually(t, "all to be acknowledged", func() bool {
		c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
		return err == nil && c.CachedInfo().AckFloor.Stream == last
	})
}

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
			s := startServer(t)
			js := connect(t, s)
			createStream(t, js, jetstream.StreamConfig{})
			store := consumertest.NewStore()
			putBack := store.Copy()
			var all []*running
			run := func() {
				for range c.workers {
					all = append(all, start(t, newSource(t, s), store, frequent))
				}
			}
			run()
			publish(t, js, 0, 500)
			wait(t, store, 500)
			allAcknowledged(t, js, 500)
			if !c.row {
				putBack = store.Copy()
			}
			publish(t, js, 500, 500)
			wait(t, store, 1000)
			allAcknowledged(t, js, 1000)
			if c.stopped {
				for _, r := range all {
					r.stop()
				}
			}
			putBack()
			want := 1000
			if !c.quiet {
				publish(t, js, 1000, 100)
				want = 1100
			}
			if c.stopped {
				run()
			}
			wait(t, store, want)
			allAcknowledged(t, js, uint64(want))
			if row, _ := store.Row(edgeQueue); row.Checkpoint == 0 {
				t.Errorf("the row is %+v", row)
			}
		})
	}
}

// A database that was started again has lost nothing, and nothing comes again but what
// was on its way to be acknowledged.
func TestARestartRewindsNothing(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 500)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 500)
	allAcknowledged(t, js, 500)
	created := durable(t, js).Created
	store.FailOver()
	publish(t, js, 500, 100)
	wait(t, store, 600)
	allAcknowledged(t, js, 600)
	if r.log.has("lacks commits") || !durable(t, js).Created.Equal(created) {
		t.Error("the queue was rewound")
	}
	if handled, _, _ := store.Counts(); handled > 700 {
		t.Errorf("%d were handed over, of 600", handled)
	}
}

// Nothing is acknowledged before the database has confirmed it and the durable tells.
func TestNothingIsAcknowledgedUnconfirmed(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	store := &between{Store: consumertest.NewStore()}
	asked, answer := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(asked) })
	store.before = func(lane.Confirm) { once(); <-answer }
	var later sync.Once
	store.after = func(c lane.Confirm, confirmed lane.Confirmation) {
		if !c.Raise {
			return
		}
		later.Do(func() {
			if info := durable(t, js); info.NumAckPending != 100 || info.Config.Metadata["dedupd"] == confirmed.OffsetMetadata {
				t.Errorf("the durable already tells of %q, and waits for %d", info.Config.Metadata["dedupd"], info.NumAckPending)
			}
		})
	}
	start(t, newSource(t, s, func(c *nats.Config) { c.AckWait = 4 * time.Second }), store.Store, store.asks)
	wait(t, store.Store, 100)
	<-asked
	time.Sleep(6 * time.Second) // more than the ack wait
	if info := durable(t, js); info.NumAckPending != 100 || info.Delivered.Consumer != 100 {
		t.Errorf("%d wait for their acknowledgement after %d deliveries, want 100 each", info.NumAckPending, info.Delivered.Consumer)
	}
	close(answer)
	allAcknowledged(t, js, 100)
	if info := durable(t, js); info.Config.Metadata["dedupd"] == "" {
		t.Error("the durable tells nothing")
	}
}

// The database is replaced right after it confirmed, and another worker has brought the
// copy as far before the durable is written. Nothing but that the database is asked once
// more tells that what waits is lost.
func TestTheDatabaseIsReplacedWhileItConfirms(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	store := &between{Store: consumertest.NewStore()}
	r := start(t, newSource(t, s), store.Store, store.asks)
	r.ready()
	putBack := store.Copy()
	var once sync.Once
	store.mu.Lock()
	store.after = func(c lane.Confirm, _ lane.Confirmation) {
		if !c.Raise {
			return
		}
		once.Do(func() {
			putBack()
			got, err := store.Acquire(t.Context(), lane.Acquire{Lane: edgeQueue, LogID: row(t, store.Store).StreamID, Committed: 1, OffsetMetadata: c.OffsetMetadata})
			if err == nil {
				_, err = store.Store.Confirm(t.Context(), lane.Confirm{Lane: edgeQueue, Epoch: got.Epoch, Checkpoint: got.Checkpoint, OffsetMetadata: c.OffsetMetadata, Raise: true})
			}
			if err != nil || got.Rewound {
				t.Errorf("acquired by another: %+v, %v", got, err)
			}
		})
	}
	store.mu.Unlock()
	publish(t, js, 0, 100)
	eventually(t, "the copy to be put back", func() bool { h, _, _ := store.Counts(); return h > 100 })
	wait(t, store.Store, 100)
	allAcknowledged(t, js, 100)
}

func row(t *testing.T, store *consumertest.Store) consumertest.Row {
	t.Helper()
	row, ok := store.Row(edgeQueue)
	if !ok {
		t.Fatal("the queue has no row")
	}
	return row
}

// Two workers may write at a time, and the lower checkpoint last; or somebody edits the
// durable. It comes right, also where nothing is left to be acknowledged.
func TestAnOlderCheckpointIsMended(t *testing.T) {
	t.Parallel()
	for name, instead := range map[string]string{"an older one": "", "nothing": "-"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{})
			store := consumertest.NewStore()
			start(t, newSource(t, s), store).ready()
			older := durable(t, js).Config
			publish(t, js, 0, 100)
			wait(t, store, 100)
			allAcknowledged(t, js, 100)
			now := durable(t, js).Config
			if now.Metadata["dedupd"] == older.Metadata["dedupd"] {
				t.Fatal("the checkpoint has not risen")
			}
			if instead == "-" {
				delete(older.Metadata, "dedupd")
			}
			if _, err := stream.UpdateConsumer(t.Context(), older); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the checkpoint to be mended", func() bool {
				return durable(t, js).Config.Metadata["dedupd"] == now.Metadata["dedupd"]
			})
		})
	}
}

// A server that allows few messages to be outstanding isn't held up by those that wait
// for their acknowledgement.
func TestFewMayBeOutstanding(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 200)
	store := &between{Store: consumertest.NewStore()}
	var confirmed atomic.Int64
	store.after = func(c lane.Confirm, _ lane.Confirmation) {
		if c.Raise {
			confirmed.Add(1)
		}
	}
	begun := time.Now()
	start(t, newSource(t, s, func(c *nats.Config) { c.MaxAckPending = 4 }), store.Store, store.asks)
	wait(t, store.Store, 200)
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
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{})
			err := nats.Rewind(t.Context(), js, &forgetful{stream, c.times}, nats.Config{Name: "edge", Stream: "ORDERS", Durable: "dedupd"}, 1)
			switch {
			case !c.fatal:
				if err != nil || durable(t, js).Config.Metadata["dedupd"] != "metadata" {
					t.Errorf("got %v, %+v", err, durable(t, js).Config.Metadata)
				}
			case err == nil || !strings.Contains(err.Error(), "2.10") || errors.Is(err, context.DeadlineExceeded):
				t.Errorf("got %v", err)
			}
		})
	}
}
