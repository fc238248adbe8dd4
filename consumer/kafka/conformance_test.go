package kafka

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
)

func TestConformance(t *testing.T) { // alone: it asks what goroutines are left
	b := realBroker(t)
	const partitions = 4
	consumertest.Run(t, consumertest.Config{
		Patience: time.Minute,
		Features: consumertest.Features{
			Partitions: partitions,
			Ordered:    true, Resumes: true, Elastic: true,
			Keys: true, NilValues: true, BinaryHeaders: true,
		},
		Open: func(t *testing.T) consumertest.Subscription {
			topic, group := newName("conformance"), newName("group")
			if err := b.CreateTopic(t.Context(), topic, partitions, map[string]string{"max.message.bytes": "33554432"}); err != nil {
				t.Fatal(err)
			}
			return consumertest.Subscription{
				Source: func(t *testing.T) consumer.Source {
					s, err := New(Config{
						Name: "kafka", Brokers: []string{b.Addr()}, Topics: []string{topic}, Group: group,
						SessionTimeout: 6 * time.Second,
					})
					if err != nil {
						t.Fatal(err)
					}
					return s
				},
				Produce: func(t *testing.T, records []consumertest.Record) { produce(t, b.Addr(), topic, records) },
				Acked: func(t *testing.T) int {
					offsets, err := b.Committed(t.Context(), group, topic)
					if err != nil {
						t.Fatal(err)
					}
					sum := int64(0)
					for _, offset := range offsets {
						sum += offset
					}
					return int(sum)
				},
			}
		},
	})
}

func produce(t *testing.T, addr, topic string, records []consumertest.Record) {
	t.Helper()
	// A record batch is fetched whole and decompressed, whatever was asked for: with
	// small and plain ones, the byte budget holds.
	batch := 128 << 10
	for _, r := range records {
		batch = max(batch, len(r.Key)+len(r.Value)+1024)
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.DefaultProduceTopic(topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchMaxBytes(int32(batch)),
		kgo.ProducerBatchCompression(kgo.NoCompression()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var all []*kgo.Record
	for _, r := range records {
		k := &kgo.Record{Partition: int32(r.Partition), Key: r.Key, Value: r.Value}
		for _, h := range r.Headers {
			k.Headers = append(k.Headers, kgo.RecordHeader{Key: h.Key, Value: h.Value})
		}
		all = append(all, k)
	}
	if err := client.ProduceSync(t.Context(), all...).FirstErr(); err != nil {
		t.Fatal(err)
	}
}
