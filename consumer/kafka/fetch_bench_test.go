package kafka

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sys/unix"

	"github.com/dedupd/dedupd/message"

	"github.com/dedupd/dedupd/internal/kafkatest"
)

// BenchmarkFetch fetches and decodes one lane from a real broker, and drops the
// messages.
func BenchmarkFetch(b *testing.B) {
	if testing.Short() {
		b.Skip("runs a Kafka broker")
	}
	server := kafkatest.Run(b)
	for name, codec := range map[string]kgo.CompressionCodec{"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression()} {
		b.Run(name, func(b *testing.B) {
			const n = 100_000
			topic := newName("bench")
			fill(b, server, topic, n, codec)
			c := Config{Name: "main", Brokers: []string{server.Addr()}, Topics: []string{topic}, Group: "g"}
			c.setDefaults()
			cluster := newCluster(&c, nil)
			defer cluster.close()
			d := &decoder{lane: message.Lane{Source: "main", Name: laneName(topic, 0)}, topic: topic, readCommitted: true, limit: c.MaxInflatedBytes}
			b.ReportAllocs()
			before := cpuTime(b)
			for b.Loop() {
				got := 0
				for position := int64(0); position < n; {
					part, _, err := cluster.fetch(context.Background(), &wanted{topic: topic, position: position, epoch: -1, maxBytes: c.FetchBytes}, nil)
					if err != nil {
						time.Sleep(10 * time.Millisecond) // its leader isn't known yet
						continue
					}
					r, err := d.decode(part, position, nil)
					if err != nil {
						b.Fatal(err)
					}
					got += len(r.messages)
					position = r.next
				}
				if got != n {
					b.Fatal(got)
				}
			}
			b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N)/n, "cpu-ns/msg")
		})
	}
}

// cpuTime is the CPU time of this process, in user and kernel mode. The broker is another
// process and shares the cores.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func fill(b *testing.B, server *kafkatest.Broker, topic string, n int, codec kgo.CompressionCodec) {
	b.Helper()
	if err := server.CreateTopic(b.Context(), topic, 1, nil); err != nil {
		b.Fatal(err)
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(server.Addr()), kgo.DefaultProduceTopic(topic), kgo.ProducerBatchCompression(codec))
	if err != nil {
		b.Fatal(err)
	}
	defer client.Close()
	records := make([]*kgo.Record, n)
	for i := range records {
		records[i] = &kgo.Record{
			Key: []byte("0123456789abcdef"), Value: bytes.Repeat([]byte{byte(i), byte(i >> 8)}, 120),
			Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte("0123456789")}},
		}
	}
	if err := client.ProduceSync(b.Context(), records...).FirstErr(); err != nil {
		b.Fatal(err)
	}
}
