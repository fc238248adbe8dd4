package kafka

import (
	"bytes"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/kafkatest"
)

// Many lanes together hold little more than a few do, however much there is to fetch.
func TestManyLanesHoldLittleAhead(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		const (
			partitions, each  = 16, 6000
			writers, messages = 2, 4000
			share             = 2 * writers * messages / partitions
			size              = 400 // of a message in memory, at least
		)
		r := newRig(t, b, partitions, nil)
		c := r.client(kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.ProducerBatchMaxBytes(16<<10))
		value := bytes.Repeat([]byte{'v'}, 250)
		var records []*kgo.Record
		for i := range partitions * each {
			records = append(records, &kgo.Record{Partition: int32(i % partitions), Value: value})
		}
		r.check(c.ProduceSync(r.ctx, records...).FirstErr())
		release := r.store.Hold()
		w := r.start(nil, func(w *consumer.Worker) { w.Writers, w.MaxMessages = writers, messages })

		held, since := int64(0), time.Now()
		r.until("the lanes hold what they want", func() bool {
			if now := w.worker.Budget.Used(); now != held {
				held, since = now, time.Now()
			}
			return held > 0 && time.Since(since) > time.Second
		})
		release()
		// Each lane holds its share, has fetched as much again, and has what whole record
		// batches add; and there is a group for each writer.
		if most := int64(partitions*(2*share+500)+writers*messages) * (size + 100); held > most {
			t.Errorf("%d bytes are held, want %d at most", held, most)
		}
		if least := int64(partitions * share * size); held < least {
			t.Errorf("%d bytes are held, want %d at least: the writers would wait", held, least)
		}
		r.until("everything is written", func() bool { handled, _, _ := r.store.Counts(); return handled == partitions*each })
	})
}

func TestWhatToAskFor(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name         string
		size, growth float64
		messages     int
		bytes        int64
		want         int
	}{
		{name: "small messages, by their number", size: 400, growth: 2, messages: 1000, bytes: 8 << 20, want: 200_000},
		{name: "large ones, by their bytes", size: 10_000, growth: 1, messages: 4000, bytes: 1 << 20, want: 1 << 20},
		{name: "compressed ones, by what they become", size: 10_000, growth: 8, messages: 4000, bytes: 1 << 20, want: 128 << 10},
		{name: "no messages in what came last", growth: 1, messages: 256, bytes: 1 << 20, want: 1 << 20},
	} {
		f := &fetcher{size: test.size, growth: test.growth}
		if got := f.fitting(test.messages, test.bytes); got != test.want {
			t.Errorf("%s: %d bytes, want %d", test.name, got, test.want)
		}
	}
}
