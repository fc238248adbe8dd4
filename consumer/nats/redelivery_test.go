package nats

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
)

// What a worker had in hand when it was killed comes again after the ack wait,
// and until then the queue isn't caught up.
func TestRedeliveryAfterAckWait(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	r.createDurable(jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, AckWait: 3 * time.Second, MaxDeliver: -1})
	r.pass(40, func(jetstream.Msg) error { return nil }) // by the one that is killed
	begun := time.Now()
	w := r.start(func(c *Config) { c.AckWait = 3 * time.Second }, func(w *consumer.Worker) { w.UntilIdle = 200 * time.Millisecond })
	r.wait(60)
	if d := time.Since(begun); d > 2*time.Second {
		t.Errorf("the first 60 took %s", d)
	}
	r.wait(100)
	w.stop()
}

// A transaction may take longer than the ack wait, and what waits behind it even
// more so: the server is asked for more time, and delivers nothing twice.
func TestMoreTime(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 300)
	release := r.store.Hold()
	r.start(func(c *Config) { c.AckWait = time.Second }, func(w *consumer.Worker) { w.MaxMessages = 100 })
	r.until("a hand-over", func() bool { _, _, calls := r.store.Counts(); return calls > 0 })
	time.Sleep(4 * time.Second)
	release()
	r.wait(300)
	if n := r.durable().Delivered.Consumer; n != 300 {
		t.Errorf("300 messages were delivered %d times while a transaction took four ack waits", n)
	}
}

// A worker that stops gives back what it has not committed, at once.
func TestStopGivesBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 1000)
	release := r.store.Hold()
	w := r.start(nil, func(w *consumer.Worker) { w.Drain, w.MaxMessages = 100*time.Millisecond, 100 })
	r.until("a hand-over", func() bool { _, _, calls := r.store.Counts(); return calls > 0 })
	w.stop()
	release()
	begun := time.Now()
	r.start(nil)
	r.wait(1000)
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("the next worker got everything after %s: the ack wait is 10 s", d)
	}
}

// A database that is away for long: no storm of redeliveries, and no loss.
func TestKeepFor(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 500)
	r.store.FailBefore(1_000_000, context.DeadlineExceeded)
	r.start(func(c *Config) { c.AckWait = 2 * time.Second })
	time.Sleep(5 * time.Second)
	if n := r.durable().Delivered.Consumer; n > 500*6 {
		t.Errorf("500 messages were delivered %d times in 5 s, with an ack wait of 2 s", n)
	}
	r.store.Heal()
	r.wait(500)
}
