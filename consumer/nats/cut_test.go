package nats_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
)

const lostItsEnd = "stream ORDERS has lost its end from position "

// A server whose disk is replaced has the stream and its durable as they were
// configured, and none of the messages. It gives the same sequences to others then, and
// a durable that begins at a sequence passes over them.
func TestTheStreamLosesItsEnd(t *testing.T) {
	t.Parallel()
	for name, running := range map[string]bool{"under a worker": true, "while nobody reads": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			in := func(o *server.Options) { o.StoreDir = folder }
			s := startServer(t, in)
			js := connect(t, s)
			createStream(t, js, jetstream.StreamConfig{})
			publish(t, js, 0, 100)
			store := consumertest.NewStore()
			r := start(t, newSource(t, s), store)
			wait(t, store, 100)
			if !running {
				r.stop()
			}
			at := port(s)
			s.Shutdown()
			s.WaitForShutdown()
			if err := os.RemoveAll(filepath.Join(folder, "jetstream", "$G", "streams", "ORDERS", "msgs")); err != nil {
				t.Fatal(err)
			}
			s = startServer(t, in, func(o *server.Options) { o.Port = at })
			js = connect(t, s)
			publish(t, js, 100, 50)
			if !running {
				r = start(t, newSource(t, s), store)
			}
			eventuallyWithin(t, "the queue to be held", time.Minute, func() bool { return r.Ready() != nil && r.log.has(lostItsEnd) })
			r.stop()

			// It is still known when the stream has more than was read.
			publish(t, js, 150, 100)
			r = start(t, newSource(t, s), store)
			eventually(t, "the queue to be held", func() bool { return r.Ready() != nil && r.log.has(lostItsEnd) })
			r.stop()

			// As the reason says.
			stream, err := js.Stream(t.Context(), "ORDERS")
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
				t.Fatal(err)
			}
			store.Lose(queue)
			start(t, newSource(t, s), store)
			wait(t, store, 150) // what the stream has
		})
	}
}

// A stream that was made anew is read from its start, and what it discards unread is
// missed, though another stream's lane had come further.
func TestAStreamMadeAnewDiscardsUnread(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	r.stop()
	if err := js.DeleteStream(t.Context(), "ORDERS"); err != nil {
		t.Fatal(err)
	}
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 100, 20)
	r = start(t, newSource(t, s), store)
	wait(t, store, 120)
	r.stop()
	publish(t, js, 120, 20)
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(31)); err != nil {
		t.Fatal(err)
	}
	r = start(t, newSource(t, s), store)
	r.heldFor(21, 30)
}
