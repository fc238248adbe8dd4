package nats_test

import (
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

func reading(subjects ...string) func(*nats.Config) {
	return func(c *nats.Config) { c.Subjects = subjects }
}

// change edits the durable.
func change(t *testing.T, js jetstream.JetStream, edit func(*jetstream.ConsumerConfig)) {
	t.Helper()
	c := durable(t, js).Config
	edit(&c)
	if _, err := js.UpdateConsumer(t.Context(), "ORDERS", c); err != nil {
		t.Fatal(err)
	}
}

func filterIs(t *testing.T, js jetstream.JetStream, want ...string) {
	t.Helper()
	if got := durable(t, js).Config.FilterSubjects; !slices.Equal(got, want) {
		t.Errorf("the durable's filter is %q, want %q", got, want)
	}
}

// While other subjects are rolled out, a worker of before binds again.
func TestAnOldWorkerLeavesTheNewFilter(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	store := consumertest.NewStore()
	old := start(t, newSource(t, s, reading("orders.1")), store)
	old.ready()
	young := start(t, newSource(t, s, reading("orders.1", "orders.2")), store)
	young.ready()
	eventually(t, "the old worker to follow", func() bool { return old.log.has("a worker that was started later has other subjects") })
	young.stop()
	change(t, js, func(c *jetstream.ConsumerConfig) { c.AckWait = 5 * time.Second })
	eventually(t, "the old worker to bind again", func() bool { return durable(t, js).Config.AckWait == 10*time.Second })
	filterIs(t, js, "orders.1", "orders.2")
	publish(t, js, 0, 70)
	wait(t, store, 20)

	// Also where the durable is made anew.
	if err := js.DeleteConsumer(t.Context(), "ORDERS", "dedupd"); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 70, 70)
	wait(t, store, 40)
	filterIs(t, js, "orders.1", "orders.2")
	old.stop()

	// Who takes the change back has started later than who made it.
	again := start(t, newSource(t, s, reading("orders.1", "orders.2")), store)
	again.ready()
	start(t, newSource(t, s, reading("orders.1")), store).ready()
	eventually(t, "the other worker to follow", func() bool { return again.log.has("a worker that was started later has other subjects") })
	filterIs(t, js, "orders.1")
}

// A worker that knows nothing of numbers puts its own filter back.
func TestWorkersNoticeAnotherFilter(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	store := consumertest.NewStore()
	r := start(t, newSource(t, s, reading("orders.1", "orders.2")), store)
	r.ready()
	publish(t, js, 0, 70)
	wait(t, store, 20)
	change(t, js, func(c *jetstream.ConsumerConfig) {
		c.FilterSubjects, c.Metadata["dedupd-subjects"] = []string{"orders.1"}, "orders.1"
	})
	publish(t, js, 70, 70)
	wait(t, store, 40)
	filterIs(t, js, "orders.1", "orders.2")
}
