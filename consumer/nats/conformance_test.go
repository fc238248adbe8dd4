package nats_test

import (
	"context"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

func TestConformance(t *testing.T) {
	for name, retention := range map[string]jetstream.RetentionPolicy{
		"limits": jetstream.LimitsPolicy, "work queue": jetstream.WorkQueuePolicy, "interest": jetstream.InterestPolicy,
	} {
		t.Run(name, func(t *testing.T) { conform(t, retention) })
	}
}

func conform(t *testing.T, retention jetstream.RetentionPolicy) {
	s := startServer(t)
	js := connect(t, s)
	// The producer's own goroutines begin with its first message.
	createStream(t, js, jetstream.StreamConfig{Name: "WARM", Subjects: []string{"warm"}})
	publishMsg(t, js, natsgo.NewMsg("warm"))
	published(t, js)
	consumertest.Run(t, consumertest.Config{
		Features: consumertest.Features{Partitions: 1, Elastic: true},
		Leaks:    serverGoroutines(),
		Open: func(t *testing.T) consumertest.Subscription {
			stream := createStream(t, js, jetstream.StreamConfig{Retention: retention})
			t.Cleanup(func() { _ = js.DeleteStream(context.Background(), "ORDERS") })
			if retention == jetstream.InterestPolicy {
				// Without a consumer such a stream keeps nothing.
				_, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy})
				if err != nil {
					t.Fatal(err)
				}
			}
			return consumertest.Subscription{
				Source: func(t *testing.T) consumer.Source {
					// Longer than the suite holds a hand-over, shorter than its patience.
					return newSource(t, s, func(c *nats.Config) { c.AckWait = 6 * time.Second })
				},
				Produce: func(t *testing.T, records []consumertest.Record) {
					for _, r := range records {
						msg := natsgo.NewMsg("orders.x")
						msg.Data = r.Value
						for _, h := range r.Headers {
							msg.Header[h.Key] = append(msg.Header[h.Key], string(h.Value))
						}
						publishMsg(t, js, msg)
					}
					published(t, js)
				},
				Acked: func(t *testing.T) int {
					c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
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
