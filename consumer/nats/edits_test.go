package nats

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// No message is applied without its payload, though the server delivers them so from
// one moment to the next.
func TestSetToHeadersOnlyWhileItIsRead(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	w := r.start(nil)
	r.publish(0, 10)
	r.wait(10)
	r.allAcknowledged(10)
	r.alter(func(c *jetstream.ConsumerConfig) { c.HeadersOnly = true })
	r.publish(10, 10)
	r.wait(20)
	for _, e := range r.store.Effects() {
		if string(e.Message.Value) != "value" {
			t.Errorf("%s has the value %q", e.ID, e.Message.Value)
		}
	}
	w.mustLog("headers only")
}

// What a filter of somebody else's passes over is read once the filter is ours again,
// also when nobody has read meanwhile.
func TestTheFilterIsChangedByHand(t *testing.T) {
	t.Parallel()
	for name, running := range map[string]bool{"while it is read": true, "while nobody reads": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			w := r.start(nil)
			r.publish(0, 14)
			r.wait(14)
			r.allAcknowledged(14)
			if !running {
				w.stop()
			}
			r.alter(func(c *jetstream.ConsumerConfig) { c.FilterSubject = "orders.1" })
			r.publish(14, 70)
			if !running { // somebody tries what it does
				r.pass(10, jetstream.Msg.Nak)
				w = r.start(nil)
			}
			r.wait(84)
			w.mustLog("changed the durable consumer's filter")
			if c := r.durable().Config; c.FilterSubject != "" || len(c.FilterSubjects) > 0 {
				t.Errorf("%+v", c)
			}
		})
	}
}

// A durable that somebody pauses looks like one that has nothing to deliver: the source
// isn't ready, the log and doctor tell why, and it goes on by itself.
func TestDurableIsPaused(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	source := r.source()
	w := r.startSource(source)
	r.publish(0, 10)
	r.wait(10)
	r.allAcknowledged(10)
	_, err := r.stream.PauseConsumer(t.Context(), "dedupd", time.Now().Add(time.Hour))
	r.check(err)
	r.publish(10, 10)
	r.until("unreadiness", func() bool { return w.worker.Ready() != nil })
	if err := w.worker.Ready(); !strings.Contains(err.Error(), "nats consumer resume ORDERS dedupd") || !w.log.has("somebody has paused durable dedupd until") {
		t.Errorf("it says %v", err)
	}
	description, err := source.Describe(t.Context())
	if err != nil || description.Paused == nil {
		t.Errorf("the description says %v, %v", description.Paused, err)
	}
	_, err = r.stream.ResumeConsumer(t.Context(), "dedupd")
	r.check(err)
	r.wait(20)
	r.until("readiness", func() bool { return w.worker.Ready() == nil })
	if description, err := source.Describe(t.Context()); err != nil || description.Paused != nil {
		t.Errorf("the description says %v, %v", description.Paused, err)
	}
}

// A limit of deliveries has the server pass over what it has delivered so often. What it
// has passed over is read once the limit is off again.
func TestALimitOfDeliveriesIsSetByHand(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	w := r.start(nil)
	r.publish(0, 14)
	r.wait(14)
	r.allAcknowledged(14)
	w.stop()
	r.alter(func(c *jetstream.ConsumerConfig) { c.MaxDeliver = 1 })
	r.publish(14, 10)
	for _, want := range []int{10, 0} { // it looks at what is to come again when somebody asks for it
		if came := r.pass(10, jetstream.Msg.Nak); came != want {
			t.Fatalf("%d messages came, want %d", came, want)
		}
	}
	r.publish(24, 60)
	w = r.start(nil)
	r.wait(84)
	w.mustLog("limit of deliveries")
	if c := r.durable().Config; c.MaxDeliver != -1 {
		t.Errorf("%+v", c)
	}
}

// A stream with WorkQueue retention keeps what a durable has passed over, and has no
// position to set it back to: the durable is made anew, and delivers what is left.
func TestADurableOfAWorkQueuePassesOver(t *testing.T) {
	t.Parallel()
	for name, by := range map[string]struct {
		change func(*jetstream.ConsumerConfig)
		logged string
	}{
		"by a limit of deliveries": {func(c *jetstream.ConsumerConfig) { c.MaxDeliver = 1 }, "limit of deliveries"},
		"by a filter":              {func(c *jetstream.ConsumerConfig) { c.FilterSubject = "orders.1" }, "filter"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy})
			w := r.start(nil)
			r.publish(0, 14)
			r.wait(14)
			r.allAcknowledged(14)
			w.stop()
			r.alter(by.change)
			r.publish(14, 14)
			for range 2 { // the server looks at all that is to come again when somebody asks for it
				r.pass(14, jetstream.Msg.Nak)
			}
			w = r.start(nil)
			r.publish(28, 14)
			r.readAll(42)
			w.mustLog("changed the durable consumer's " + by.logged)
			if c := r.durable().Config; c.MaxDeliver != -1 || c.FilterSubject != "" || len(c.FilterSubjects) > 0 {
				t.Errorf("%+v", c)
			}
		})
	}
}
