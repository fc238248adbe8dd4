package nats

import (
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func reading(subjects ...string) func(*Config) {
	return func(c *Config) { c.Subjects = subjects }
}

func (r *rig) filterIs(want ...string) {
	r.Helper()
	if got := r.durable().Config.FilterSubjects; !slices.Equal(got, want) {
		r.Errorf("the durable's filter is %q, want %q", got, want)
	}
}

// While other subjects are rolled out, a worker of before binds again.
func TestAnOldWorkerLeavesTheNewFilter(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	old := r.start(reading("orders.1"))
	old.untilReady()
	young := r.start(reading("orders.1", "orders.2"))
	young.untilReady()
	r.until("the old worker to follow", func() bool { return old.log.has("a worker that was started later has other subjects") })
	young.stop()
	r.alter(func(c *jetstream.ConsumerConfig) { c.AckWait = 5 * time.Second })
	r.until("the old worker to bind again", func() bool { return r.durable().Config.AckWait == 10*time.Second })
	r.filterIs("orders.1", "orders.2")
	r.publish(0, 70)
	r.wait(20)

	// Also where the durable is made anew.
	r.check(r.js.DeleteConsumer(t.Context(), "ORDERS", "dedupd"))
	r.publish(70, 70)
	r.wait(40)
	r.filterIs("orders.1", "orders.2")
	old.stop()

	// Who takes the change back has started later than who made it.
	again := r.start(reading("orders.1", "orders.2"))
	again.untilReady()
	r.start(reading("orders.1")).untilReady()
	r.until("the other worker to follow", func() bool { return again.log.has("a worker that was started later has other subjects") })
	r.filterIs("orders.1")
}

// A worker that knows nothing of numbers puts its own filter back.
func TestWorkersNoticeAnotherFilter(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	w := r.start(reading("orders.1", "orders.2"))
	w.untilReady()
	r.publish(0, 70)
	r.readAll(20) // a worker that writes its checkpoint in this moment would undo the edit
	r.alter(func(c *jetstream.ConsumerConfig) {
		c.FilterSubjects, c.Metadata["dedupd-subjects"] = []string{"orders.1"}, "orders.1"
	})
	r.publish(70, 70)
	r.wait(40)
	r.filterIs("orders.1", "orders.2")
}
