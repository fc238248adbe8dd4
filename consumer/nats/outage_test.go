package nats

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/policy"
)

func TestConsumerDeleted(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	w := r.start(func(c *Config) { c.Start = policy.QueueLatest })
	w.untilReady()
	r.publish(0, 1000)
	r.wait(1000)
	r.allAcknowledged(1000)
	time.Sleep(2500 * time.Millisecond) // it is asked for every two seconds
	r.deleteDurable()
	r.publish(1000, 1000)
	r.wait(2000)
	w.mustLog("consumer is gone")
	if handled, _, _ := r.store.Counts(); handled > 2100 {
		t.Errorf("%d messages were read for 2000: not from where it was", handled)
	}
}

func TestStreamCreatedAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	w := r.start(func(c *Config) { c.Start = policy.QueueLatest })
	w.untilReady()
	r.publish(0, 100)
	r.wait(100)
	before, _ := r.store.Row(edgeQueue)
	r.check(r.js.DeleteStream(t.Context(), "ORDERS"))
	r.until("unreadiness", func() bool { return w.worker.Ready() != nil })
	r.createStream(jetstream.StreamConfig{})
	r.publish(100, 100)
	r.wait(200)
	after, _ := r.store.Row(edgeQueue)
	if before.StreamID == after.StreamID {
		t.Errorf("the stream id is still %s", after.StreamID)
	}
}

func TestServerRestart(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	r := newRig(t, jetstream.StreamConfig{}, storedIn(folder))
	r.publish(0, 5000)
	r.store.Delay(5 * time.Millisecond)
	w := r.start(func(c *Config) { c.AckWait = 3 * time.Second }, func(w *consumer.Worker) { w.MaxMessages = 100 })
	r.wait(1000)
	stopServer(r.server)
	r.until("unreadiness", func() bool { return w.worker.Ready() != nil })
	time.Sleep(time.Second)
	r.restart(storedIn(folder))
	w.untilReady()
	r.readAll(5000)
}

// A server that comes back empty, as one with its store in memory does.
func TestServerLosesEverything(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	stopServer(r.server)
	r.restart()
	r.createStream(jetstream.StreamConfig{})
	r.publish(100, 50)
	r.wait(150)
	w.untilReady()
}

// Nobody has to start things in the right order.
func TestEverythingMissingAtStart(t *testing.T) {
	t.Parallel()
	r := rigOn(t, startServer(t))
	stopServer(r.server)
	w := r.start(nil)
	r.until("a warning", func() bool { return w.log.has("trying again") })
	if w.worker.Ready() == nil {
		t.Error("ready without a server")
	}
	r.restart()
	r.until("a warning", func() bool { return w.log.has("stream not found") })
	if w.worker.Ready() == nil {
		t.Error("ready without a stream")
	}
	r.createStream(jetstream.StreamConfig{})
	r.publish(0, 10)
	r.wait(10)
	w.untilReady()
}
