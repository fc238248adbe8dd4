package kafka

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/message"
)

// Every codec, as a producer in Go writes it and as the broker, in Java, does: they
// frame snappy differently.
func TestCodecs(t *testing.T) {
	t.Parallel()
	b := realBroker(t)
	codecs := map[string]kgo.CompressionCodec{
		"uncompressed": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	var records []*kgo.Record
	start := time.Now().Truncate(time.Millisecond).Add(-time.Hour) // what is older than a topic's retention is gone at once
	for i := range 500 {
		records = append(records, &kgo.Record{
			Key: fmt.Append(nil, i), Value: bytes.Repeat([]byte{byte(i)}, i*7), Timestamp: start.Add(time.Duration(i) * time.Millisecond),
			Headers: []kgo.RecordHeader{{Key: "h", Value: fmt.Append(nil, -i)}, {Key: "none"}},
		})
	}
	for name, codec := range codecs {
		for by, topic := range map[string]map[string]string{"producer": {"compression.type": "producer"}, "broker": {"compression.type": name}} {
			t.Run(name+" by the "+by, func(t *testing.T) {
				r := newRig(t, b, 1, topic)
				c := r.client(kgo.ProducerBatchCompression(codec))
				if by == "broker" {
					c = r.client(kgo.ProducerBatchCompression(kgo.NoCompression()))
				}
				r.check(c.ProduceSync(r.ctx, copies(records)...).FirstErr())
				var got []message.Message
				for len(got) < len(records) {
					got = append(got, r.fetch(int64(len(got))).messages...)
				}
				var want []message.Message
				for i, k := range records {
					m := message.Message{
						Topic: r.topic, Key: k.Key, Value: k.Value, Time: k.Timestamp.UTC(),
						Position: message.Position{Lane: r.lane(0), Offset: int64(i)},
					}
					for _, h := range k.Headers {
						m.Headers = append(m.Headers, message.Header(h))
					}
					want = append(want, m)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Error(diff)
				}
			})
		}
	}
}

// In a topic with LogAppendTime, each message has the broker's time.
func TestLogAppendTime(t *testing.T) {
	t.Parallel()
	r := newRig(t, realBroker(t), 1, map[string]string{"message.timestamp.type": "LogAppendTime"})
	old := time.Now().Add(-time.Hour)
	r.check(r.client().ProduceSync(r.ctx, &kgo.Record{Timestamp: old}, &kgo.Record{Timestamp: old.Add(time.Minute)}).FirstErr())
	for _, m := range r.fetch(0).messages {
		if age := time.Since(m.Time); age < 0 || age > time.Minute {
			t.Errorf("a message that came now is said to be of %s", m.Time)
		}
	}
}

func copies(records []*kgo.Record) []*kgo.Record {
	var all []*kgo.Record
	for _, r := range records {
		c := *r
		all = append(all, &c)
	}
	return all
}

// fetch returns what one fetch from a position on brings, once the topic has a leader.
func (r *rig) fetch(position int64) records {
	r.Helper()
	c := Config{Name: "main", Brokers: []string{r.broker.Addr()}, Topics: []string{r.topic}, Group: r.group}
	c.setDefaults()
	cluster := newCluster(&c, nil)
	defer cluster.close()
	d := decoder{lane: r.lane(0), topic: r.topic, readCommitted: true, limit: c.MaxInflatedBytes}
	var got records
	r.until("the partition was fetched", func() bool {
		f, _, err := cluster.fetch(r.ctx, &wanted{topic: r.topic, position: position, epoch: -1, maxBytes: c.FetchBytes}, nil)
		if err != nil {
			r.Log(err)
			return false
		}
		got, err = d.decode(f, position, nil)
		r.check(err)
		return true
	})
	return got
}
