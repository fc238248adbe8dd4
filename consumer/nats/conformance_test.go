package nats

import (
	"context"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
)

func TestConformance(t *testing.T) {
	for name, retention := range map[string]jetstream.RetentionPolicy{
		"limits": jetstream.LimitsPolicy, "work queue": jetstream.WorkQueuePolicy, "interest": jetstream.InterestPolicy,
	} {
		t.Run(name, func(t *testing.T) { conform(t, retention) })
	}
}

func conform(t *testing.T, retention jetstream.RetentionPolicy) {
	r := rigOn(t, startServer(t))
	// The producer's own goroutines begin with its first message.
	r.createStream(jetstream.StreamConfig{Name: "WARM", Subjects: []string{"warm"}})
	r.publishAsync(natsgo.NewMsg("warm"))
	r.published()
	consumertest.Run(t, consumertest.Config{
		Features: consumertest.Features{Partitions: 1, Elastic: true},
		Leaks:    serverGoroutines(),
		Open: func(t *testing.T) consumertest.Subscription {
			r := r.with(t)
			r.createStream(jetstream.StreamConfig{Retention: retention})
			t.Cleanup(func() { _ = r.js.DeleteStream(context.Background(), "ORDERS") })
			if retention == jetstream.InterestPolicy {
				// Without a consumer such a stream keeps nothing.
				r.createDurable(jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy})
			}
			return consumertest.Subscription{
				Source: func(t *testing.T) consumer.Source {
					// Longer than the suite holds a hand-over, shorter than its patience.
					return r.with(t).source(func(c *Config) { c.AckWait = 6 * time.Second })
				},
				Produce: func(t *testing.T, records []consumertest.Record) { r.with(t).produce(records) },
				Acked: func(t *testing.T) int {
					c, err := r.with(t).consumer()
					if err != nil {
						return 0 // not created yet
					}
					info := c.CachedInfo()
					return int(info.Delivered.Stream) - info.NumAckPending
				},
			}
		},
	})
}

func (r *rig) produce(records []consumertest.Record) {
	r.Helper()
	for _, record := range records {
		msg := natsgo.NewMsg("orders.x")
		msg.Data = record.Value
		for _, h := range record.Headers {
			msg.Header[h.Key] = append(msg.Header[h.Key], string(h.Value))
		}
		r.publishAsync(msg)
	}
	r.published()
}

// serverGoroutines are what the server has for each consumer.
func serverGoroutines() []goleak.Option {
	const in = "github.com/nats-io/nats-server/v2/server."
	var all []goleak.Option
	for _, f := range []string{
		"(*consumer).loopAndGatherMsgs", "(*consumer).processInboundAcks", "(*consumer).processInboundNextMsgReqs",
		"(*consumerFileStore).flushLoop", "(*client).readLoop", "(*client).writeLoop", "(*stream).internalLoop", "(*fileStore).flushLoop",
	} {
		all = append(all, goleak.IgnoreAnyFunction(in+f))
	}
	return all
}
