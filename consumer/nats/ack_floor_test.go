package nats_test

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// A worker that starts and finds the durable gone has never seen where it was.
// The database has: start is for a lane that nobody has read.
func TestDurableMissingAtStart(t *testing.T) {
	t.Parallel()
	for _, from := range []policy.QueueStart{policy.QueueEarliest, policy.QueueLatest} {
		t.Run(string(from), func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{})
			store := consumertest.NewStore()
			source := func() *nats.Source { return newSource(t, s, func(c *nats.Config) { c.Start = from }) }
			r := start(t, source(), store)
			r.ready()
			publish(t, js, 0, 1000)
			_, sure := acknowledged(t, js, store)
			r.stop()
			if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
				t.Fatal(err)
			}
			publish(t, js, 1500, 100)
			for range 3 {
				start(t, source(), store)
			}
			wait(t, store, 1600)
			if handled, _, _ := store.Counts(); handled > 1600+1501-int(sure) {
				t.Errorf("%d messages were handed over, of which those from %d on were to come again", handled, sure)
			}
		})
	}
}

// Nor does one count that somebody has made in its place, to begin at the end.
func TestDurableMadeAnewAtTheEnd(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 1000)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	_, sure := acknowledged(t, js, store)
	r.stop()
	if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 1500, 100)
	if _, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverNewPolicy}); err != nil {
		t.Fatal(err)
	}
	r = start(t, newSource(t, s), store)
	wait(t, store, 1600)
	if handled, _, _ := store.Counts(); handled > 1600+1501-int(sure) {
		t.Errorf("%d messages were handed over, of which those from %d on were to come again", handled, sure)
	}
	if !r.log.has("would skip messages") {
		t.Error("nothing was logged")
	}
}

// What the stream has deleted by its limits doesn't keep the rest from being read.
func TestARewindBelowTheStream(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(61)); err != nil {
		t.Fatal(err)
	}
	if err := nats.Rewind(t.Context(), js, stream, nats.Config{Name: "edge", Stream: "ORDERS", Durable: "dedupd"}, 51); err != nil {
		t.Fatal(err)
	}
	if info := durable(t, js); info.AckFloor.Stream != 60 || info.NumPending != 40 {
		t.Errorf("the durable is at %+v", info)
	}
}

// readBefore has somebody else acknowledge the stream's first hundred messages.
func readBefore(t *testing.T, js jetstream.JetStream, stream jetstream.Stream) {
	t.Helper()
	publish(t, js, 0, 100)
	c, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		t.Fatal(err)
	}
	before, err := c.Fetch(100)
	if err != nil {
		t.Fatal(err)
	}
	for msg := range before.Messages() {
		if err := msg.DoubleAck(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// read waits until the server has nothing left, and wants so many effects.
func read(t *testing.T, js jetstream.JetStream, store *consumertest.Store, want int) {
	t.Helper()
	wait(t, store, want)
	eventually(t, "the server to have nothing left", func() bool {
		c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
		return err == nil && c.CachedInfo().NumPending == 0 && c.CachedInfo().NumAckPending == 0
	})
	if n := len(store.Effects()); n != want {
		t.Errorf("%d effects, want %d", n, want)
	}
}

// A failover before the first commit: what was there before the worker isn't read.
func TestAFailoverBeforeTheFirstCommit(t *testing.T) {
	t.Parallel()
	for name, latest := range map[string]bool{"the durable of others": false, "start at the latest": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{})
			if latest {
				publish(t, js, 0, 100)
			} else {
				readBefore(t, js, stream)
			}
			store := consumertest.NewStore()
			r := start(t, newSource(t, s, func(c *nats.Config) {
				if latest {
					c.Start = policy.QueueLatest
				}
			}), store)
			r.ready()
			store.FailOver()
			publish(t, js, 100, 10)
			read(t, js, store, 10)
		})
	}
}

// A failover that takes the lane's row, too. The durable's floor tells of commits
// that are lost; this worker knows where they began.
func TestTheRowIsLost(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]bool{"for this worker to make again": false, "and another worker has made it again": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			readBefore(t, js, createStream(t, js, jetstream.StreamConfig{}))
			store := consumertest.NewStore()
			r := start(t, newSource(t, s), store)
			r.ready()
			publish(t, js, 100, 50)
			read(t, js, store, 50)
			queue := message.Lane{Source: "edge", Name: "queue"}
			row, _ := store.Row(queue)
			store.Lose(queue)
			if again {
				if _, err := store.Acquire(t.Context(), lane.Acquire{Lane: queue, LogID: row.StreamID, Committed: 151}); err != nil {
					t.Fatal(err)
				}
			}
			publish(t, js, 150, 10)
			read(t, js, store, 60)
			if !r.log.has("lacks commits") {
				t.Error("nothing was logged")
			}
		})
	}
}
