package nats

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
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
			r := newRig(t, jetstream.StreamConfig{})
			r.publish(0, 100)
			w := r.start(nil)
			r.wait(100)
			if !running {
				w.stop()
			}
			r.lose(messagesOfStream)
			r.publish(100, 50)
			if !running {
				w = r.start(nil)
			}
			r.untilWithin("the queue to be held", time.Minute, func() bool { return w.worker.Ready() != nil && w.log.has(lostItsEnd) })
			w.stop()

			// It is still known when the stream has more than was read.
			r.publish(150, 100)
			w = r.start(nil)
			w.untilHeld(lostItsEnd)
			w.stop()

			// As the reason says.
			r.deleteDurable()
			r.store.Lose(edgeQueue)
			r.start(nil)
			r.wait(150) // what the stream has
		})
	}
}

// A stream that was made anew is read from its start, and what it discards unread is
// missed, though another stream's lane had come further.
func TestAStreamMadeAnewDiscardsUnread(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	w.stop()
	r.check(r.js.DeleteStream(t.Context(), "ORDERS"))
	r.createStream(jetstream.StreamConfig{})
	r.publish(100, 20)
	w = r.start(nil)
	r.wait(120)
	w.stop()
	r.publish(120, 20)
	r.purge(31)
	w = r.start(nil)
	w.heldFor(21, 30)
}
