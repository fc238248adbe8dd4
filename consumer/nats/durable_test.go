package nats

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/internal/policy"
)

func TestDurableCreated(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 70)
	w := r.start(func(c *Config) { c.Subjects = []string{"orders.1", "orders.2"} })
	r.wait(20)
	w.untilReady()
	c := r.durable().Config
	if c.AckPolicy != jetstream.AckExplicitPolicy || c.MaxDeliver != -1 || c.AckWait != 10*time.Second || c.MaxAckPending < 100_000 || c.DeliverPolicy != jetstream.DeliverAllPolicy {
		t.Errorf("%+v", c)
	}
	if !reflect.DeepEqual(c.FilterSubjects, []string{"orders.1", "orders.2"}) {
		t.Errorf("filter %v", c.FilterSubjects)
	}
	w.stop()
	// Another filter is a change of the same durable, from its position on.
	w = r.start(func(c *Config) { c.Subjects = []string{"orders.3"} })
	w.untilReady()
	r.publish(70, 70)
	r.wait(30)
	w.mustLog("filter is changed")
}

func TestStartLatest(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 50)
	latest := func(c *Config) { c.Start = policy.QueueLatest }
	w := r.start(latest)
	w.untilReady()
	r.publish(50, 10)
	r.wait(10)
	w.stop()
	r.publish(60, 10) // while nobody reads: the durable keeps its place
	r.start(latest)
	r.wait(20)
	if n := len(r.store.Effects()); n != 20 {
		t.Errorf("%d effects", n)
	}
}

// What loses messages is amended, and logged.
func TestDurableAmended(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	_, err := r.stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 5, BackOff: []time.Duration{time.Second, 2 * time.Second},
		MaxAckPending: 10, HeadersOnly: true, FilterSubject: "orders.>", MaxRequestBatch: 5, InactiveThreshold: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	if got := string(r.store.Effects()[0].Message.Value); got != "value" {
		t.Errorf("value %q", got)
	}
	w.mustLog("dropped messages", "redelivery backoff", "headers only", "filter is changed", "deleted when nobody reads")
	if c := r.durable().Config; c.MaxDeliver != -1 || len(c.BackOff) != 0 || c.MaxAckPending < 100_000 || c.AckWait != 10*time.Second || c.HeadersOnly || c.InactiveThreshold != 0 {
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
			r := newRig(t, jetstream.StreamConfig{Retention: c.retention})
			c.durable.Durable = "dedupd"
			var err error
			switch {
			case c.durable.DeliverSubject != "":
				_, err = r.stream.CreateOrUpdatePushConsumer(t.Context(), c.durable)
			case c.start == "":
				_, err = r.stream.CreateConsumer(t.Context(), c.durable)
			}
			r.check(err)
			w := newWorker(r.store, r.source(func(n *Config) { n.Start = c.start }), prometheus.NewRegistry())
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
	r := newRig(t, jetstream.StreamConfig{ConsumerLimits: jetstream.StreamConsumerLimits{MaxAckPending: 50}})
	r.publish(0, 500)
	w := r.start(nil)
	r.wait(500)
	w.mustLog("limits the pending acks")
	w.stop()
	r.start(nil).untilReady() // it exists now
}

// A stream may give all durables a time after which they are deleted.
func TestStreamDeletesIdleDurables(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{ConsumerLimits: jetstream.StreamConsumerLimits{InactiveThreshold: time.Hour}})
	w := r.start(nil)
	w.untilReady()
	w.mustLog("the stream has its durables deleted")
}
