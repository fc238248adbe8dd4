package nats

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
)

// A worker that starts and finds the durable gone has never seen where it was.
// The database has: start is for a lane that nobody has read.
func TestDurableMissingAtStart(t *testing.T) {
	t.Parallel()
	for _, from := range []policy.QueueStart{policy.QueueEarliest, policy.QueueLatest} {
		t.Run(string(from), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			start := func() *work { return r.start(func(c *Config) { c.Start = from }) }
			w := start()
			w.untilReady()
			r.publish(0, 1000)
			sure := r.acknowledge()
			w.stop()
			r.deleteDurable()
			r.publish(1500, 100)
			for range 3 {
				start()
			}
			r.wait(1600)
			if handled, _, _ := r.store.Counts(); handled > 1600+1501-int(sure) {
				t.Errorf("%d messages were handed over, of which those from %d on were to come again", handled, sure)
			}
		})
	}
}

// Nor does one count that somebody has made in its place, to begin at the end.
func TestDurableMadeAnewAtTheEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 1000)
	w := r.start(nil)
	sure := r.acknowledge()
	w.stop()
	r.deleteDurable()
	r.publish(1500, 100)
	r.createDurable(jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverNewPolicy})
	w = r.start(nil)
	r.wait(1600)
	if handled, _, _ := r.store.Counts(); handled > 1600+1501-int(sure) {
		t.Errorf("%d messages were handed over, of which those from %d on were to come again", handled, sure)
	}
	w.mustLog("would skip messages")
}

// readBefore has somebody else acknowledge the stream's first hundred messages.
func (r *rig) readBefore() {
	r.Helper()
	r.publish(0, 100)
	r.createDurable(jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy})
	for n := 0; n < 100; {
		n += r.pass(100-n, func(msg jetstream.Msg) error { return msg.DoubleAck(r.Context()) })
	}
}

// A failover before the first commit: what was there before the worker isn't read.
func TestAFailoverBeforeTheFirstCommit(t *testing.T) {
	t.Parallel()
	for name, latest := range map[string]bool{"the durable of others": false, "start at the latest": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			if latest {
				r.publish(0, 100)
			} else {
				r.readBefore()
			}
			w := r.start(func(c *Config) {
				if latest {
					c.Start = policy.QueueLatest
				}
			})
			w.untilReady()
			r.store.FailOver()
			r.publish(100, 10)
			r.readAll(10)
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
			r := newRig(t, jetstream.StreamConfig{})
			r.readBefore()
			w := r.start(nil)
			w.untilReady()
			r.publish(100, 50)
			r.readAll(50)
			id := r.row().StreamID
			r.store.Lose(edgeQueue)
			if again {
				_, err := r.store.Acquire(t.Context(), lane.Acquire{Lane: edgeQueue, LogID: id, Committed: 151})
				r.check(err)
			}
			r.publish(150, 10)
			r.readAll(60)
			w.mustLog("lacks commits")
		})
	}
}

// A durable that somebody makes anew at the stream's end is set back also when one of
// its messages was delivered before anybody looked: a pull that was meant for the
// durable before goes to it.
func TestDurableMadeAnewAndPulled(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	w.stop()
	r.publish(100, 100)
	r.deleteDurable()
	c := r.createDurable(jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverNewPolicy})
	r.publish(200, 10)
	_, err := c.Next()
	r.check(err)
	w = r.start(nil)
	r.wait(210)
	w.mustLog("would skip messages")
}
