package nats_test

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
	"github.com/dedupd/dedupd/internal/policy"
)

func durable(t *testing.T, js jetstream.JetStream) *jetstream.ConsumerInfo {
	t.Helper()
	c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
	if err != nil {
		t.Fatal(err)
	}
	return c.CachedInfo()
}

func TestDurableCreated(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 70)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s, func(c *nats.Config) { c.Subjects = []string{"orders.1", "orders.2"} }), store)
	wait(t, store, 20)
	r.ready()
	c := durable(t, js).Config
	if c.AckPolicy != jetstream.AckExplicitPolicy || c.MaxDeliver != -1 || c.AckWait != 10*time.Second || c.MaxAckPending < 100_000 || c.DeliverPolicy != jetstream.DeliverAllPolicy {
		t.Errorf("%+v", c)
	}
	if !reflect.DeepEqual(c.FilterSubjects, []string{"orders.1", "orders.2"}) {
		t.Errorf("filter %v", c.FilterSubjects)
	}
	r.stop()
	// Another filter is a change of the same durable, from its position on.
	r = start(t, newSource(t, s, func(c *nats.Config) { c.Subjects = []string{"orders.3"} }), store)
	r.ready()
	publish(t, js, 70, 70)
	wait(t, store, 30)
	if !r.log.has("filter is changed") {
		t.Error("nothing was logged")
	}
}

func TestStartLatest(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 50)
	store := consumertest.NewStore()
	latest := func(c *nats.Config) { c.Start = policy.QueueLatest }
	r := start(t, newSource(t, s, latest), store)
	r.ready()
	publish(t, js, 50, 10)
	wait(t, store, 10)
	r.stop()
	publish(t, js, 60, 10) // while nobody reads: the durable keeps its place
	start(t, newSource(t, s, latest), store)
	wait(t, store, 20)
	if n := len(store.Effects()); n != 20 {
		t.Errorf("%d effects", n)
	}
}

// What loses messages is amended, and logged.
func TestDurableAmended(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	_, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 5, BackOff: []time.Duration{time.Second, 2 * time.Second},
		MaxAckPending: 10, HeadersOnly: true, FilterSubject: "orders.>", MaxRequestBatch: 5, InactiveThreshold: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	if got := string(store.Effects()[0].Message.Value); got != "value" {
		t.Errorf("value %q", got)
	}
	for _, want := range []string{"dropped messages", "redelivery backoff", "headers only", "filter is changed", "deleted when nobody reads"} {
		if !r.log.has(want) {
			t.Errorf("nothing about %q was logged", want)
		}
	}
	if c := durable(t, js).Config; c.MaxDeliver != -1 || len(c.BackOff) != 0 || c.MaxAckPending < 100_000 || c.AckWait != 10*time.Second || c.HeadersOnly || c.InactiveThreshold != 0 {
		t.Errorf("%+v", c)
	}
}

// What can't be amended ends the program, with a reason.
func TestDurableRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		durable   jetstream.ConsumerConfig
		retention jetstream.RetentionPolicy
		start     policy.QueueStart
		want      string
	}{
		"ack all":         {durable: jetstream.ConsumerConfig{AckPolicy: jetstream.AckAllPolicy}, want: "acknowledges by policy"},
		"ack none":        {durable: jetstream.ConsumerConfig{AckPolicy: jetstream.AckNonePolicy}, want: "acknowledges by policy"},
		"push":            {durable: jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, DeliverSubject: "deliver"}, want: "push consumer"},
		"priority groups": {durable: jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, PriorityGroups: []string{"a"}, PriorityPolicy: jetstream.PriorityPolicyOverflow}, want: "priority groups"},
		"work queue":      {retention: jetstream.WorkQueuePolicy, start: policy.QueueLatest, want: "WorkQueue"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{Retention: c.retention})
			c.durable.Durable = "dedupd"
			var err error
			switch {
			case c.durable.DeliverSubject != "":
				_, err = stream.CreateOrUpdatePushConsumer(t.Context(), c.durable)
			case c.start == "":
				_, err = stream.CreateConsumer(t.Context(), c.durable)
			}
			if err != nil {
				t.Fatal(err)
			}
			store := consumertest.NewStore()
			budget := consumer.NewBudget(1 << 20)
			w := &consumer.Worker{
				Handler: store, Lanes: store, Sources: []consumer.Source{newSource(t, s, func(n *nats.Config) { n.Start = c.start })},
				Writers: 1, MaxMessages: 10, MaxBytes: 1 << 20, Budget: budget, Drain: time.Second,
				Logger: quiet(), Metrics: consumer.NewMetrics(prometheus.NewRegistry(), budget),
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if err := w.Run(ctx); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Run: %v, want something about %q", err, c.want)
			}
		})
	}
}

func TestStreamLimitsPendingAcks(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{ConsumerLimits: jetstream.StreamConsumerLimits{MaxAckPending: 50}})
	publish(t, js, 0, 500)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 500)
	if !r.log.has("limits the pending acks") {
		t.Error("nothing was logged")
	}
	r.stop()
	start(t, newSource(t, s), store).ready() // it exists now
}

// A stream may give all durables a time after which they are deleted.
func TestStreamDeletesIdleDurables(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{ConsumerLimits: jetstream.StreamConsumerLimits{InactiveThreshold: time.Hour}})
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	r.ready()
	if !r.log.has("the stream has its durables deleted") {
		t.Error("nothing was logged")
	}
}
