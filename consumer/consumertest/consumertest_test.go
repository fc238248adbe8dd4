package consumertest_test

import (
	"strconv"
	"testing"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/message"
)

// The suite's own broker passes the suite.
func TestBroker(t *testing.T) {
	const partitions = 4
	consumertest.Run(t, consumertest.Config{
		Features: consumertest.Features{
			Partitions: partitions, Ordered: true, Resumes: true, Elastic: true, Keys: true, NilValues: true, BinaryHeaders: true,
		},
		Open: func(t *testing.T) consumertest.Subscription {
			b := consumertest.NewBroker(partitions)
			for p := range partitions {
				b.Hole(p, 3)
			}
			return consumertest.Subscription{
				Source: func(*testing.T) consumer.Source { return b.Source("memory") },
				Produce: func(_ *testing.T, records []consumertest.Record) {
					for _, r := range records {
						b.Produce(r.Partition, message.Message{
							Topic: strconv.Itoa(r.Partition), Key: r.Key, Value: r.Value, Headers: r.Headers,
						})
					}
				},
				Acked: func(*testing.T) int {
					n := 0
					for p := range partitions {
						n += max(0, int(b.Committed(p))-3)
					}
					return n
				},
			}
		},
	})
}
