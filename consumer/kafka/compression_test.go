package kafka

import (
	"context"
	"errors"
	"maps"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// brief handles batches without keeping what they hold.
type brief struct{ consumer.Handler }

func (h brief) Handle(ctx context.Context, batches []lane.Batch) error {
	short := make([]lane.Batch, len(batches))
	for i, b := range batches {
		short[i] = b
		short[i].Messages = append([]message.Message(nil), b.Messages...)
		for j := range short[i].Messages {
			short[i].Messages[j].Key, short[i].Messages[j].Value, short[i].Messages[j].Headers = nil, nil, nil
		}
	}
	return h.Handler.Handle(ctx, short)
}

// putLarge produces a record batch of n records, each a mebibyte of zeros.
func (r *rig) putLarge(codec kgo.CompressionCodec, partition int32, n int) {
	r.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers(r.broker.Addr()), kgo.DefaultProduceTopic(r.topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(codec),
		kgo.ProducerBatchMaxBytes(99<<20), kgo.ProducerLinger(500*time.Millisecond))
	r.check(err)
	defer c.Close()
	value := make([]byte, 1<<20)
	records := make([]*kgo.Record, n)
	for i := range records {
		records[i] = &kgo.Record{Partition: partition, Value: value}
	}
	r.check(c.ProduceSync(r.ctx, records...).FirstErr())
}

var largeMessages = map[string]string{"max.message.bytes": "16777216"}

// peaks are the largest values seen.
type peaks struct {
	budget int64
	heap   uint64
}

// watchMemory samples a worker's budget and the process's heap until its result is
// called.
func (w *work) watchMemory() (end func() peaks) {
	var all peaks
	quit := make(chan struct{})
	var watching sync.WaitGroup
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	watching.Go(func() {
		for {
			metrics.Read(sample)
			all.heap = max(all.heap, sample[0].Value.Uint64())
			all.budget = max(all.budget, w.worker.Budget.Used())
			select {
			case <-quit:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	return func() peaks { close(quit); watching.Wait(); return all }
}

func withBudget(bytes int64) func(*consumer.Worker) {
	return func(w *consumer.Worker) {
		w.Budget = consumer.NewBudget(bytes)
		w.Handler = brief{w.Handler}
	}
}

var producerCodecs = map[string]kgo.CompressionCodec{
	"gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

// A few bytes at the broker become 240 MiB in memory, on four lanes at once. The budget
// holds, and so does the heap. Not parallel, since the heap is the process's.
func TestLargeBatchesKeepToTheBudget(t *testing.T) {
	const mib, lanes, each = 1 << 20, 4, 60
	// As the program does, so that garbage doesn't count.
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(192 * mib))
	for name, codec := range producerCodecs {
		for kind, budget := range map[string]int64{"one fits": 96 * mib, "none fits": 32 * mib} {
			if kind == "none fits" && name != "zstd" && name != "lz4" {
				continue // it is no matter of the codec
			}
			t.Run(name+", "+kind, func(t *testing.T) {
				r := newRig(t, realBroker(t), lanes, largeMessages)
				for p := range int32(lanes) {
					r.putLarge(codec, p, each)
				}
				runtime.GC()
				w := r.start(nil, withBudget(budget))
				end := w.watchMemory()
				for p := range lanes {
					r.untilNext(p, each)
				}
				w.stop()
				got := end()
				t.Logf("budget %d MiB, heap %d MiB at most", got.budget/mib, got.heap/mib)
				if most := max(budget, each*mib) + 8*mib; got.budget > most {
					t.Errorf("%d MiB of the budget were used, of %d", got.budget/mib, most/mib)
				}
				if got.budget < each*mib {
					t.Errorf("the budget only saw %d bytes", got.budget)
				}
				if got.heap > 300*mib {
					t.Errorf("the heap grew to %d MiB", got.heap/mib)
				}
				if n := len(r.store.Effects()); n != lanes*each {
					t.Errorf("%d effects", n)
				}
			})
		}
	}
}

// Brokers send a record batch whole, whatever was asked for. However many lanes have
// large ones, no more of them are read at a time than there is room for. Not parallel,
// since the heap is the process's.
func TestLargeAnswersKeepToTheBudget(t *testing.T) {
	const mib, lanes, each = 1 << 20, 16, 14
	defer debug.SetGCPercent(debug.SetGCPercent(10)) // what isn't needed hardly counts
	r := newRig(t, realBroker(t), lanes, largeMessages)
	for p := range int32(lanes) {
		r.putLarge(kgo.NoCompression(), p, each)
	}
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	w := r.start(nil, withBudget(16*mib))
	end := w.watchMemory()
	for p := range lanes {
		r.untilNext(p, each)
	}
	w.stop()
	got := end()
	grown := (int64(got.heap) - int64(before.HeapAlloc)) / mib
	t.Logf("budget %d MiB, heap %d MiB at most, %d MiB more than before", got.budget/mib, got.heap/mib, grown)
	if got.budget > 24*mib {
		t.Errorf("%d MiB of the budget were used, of 16", got.budget/mib)
	}
	if grown > 100 {
		t.Errorf("the heap has grown by %d MiB", grown)
	}
}

// Lanes that each need much of a small budget wait for each other, and none for ever.
func TestLanesShareASmallBudget(t *testing.T) {
	t.Parallel()
	const lanes, batches, each = 6, 3, 8
	codecs := maps.Clone(producerCodecs)
	codecs["uncompressed"] = kgo.NoCompression()
	for name, codec := range codecs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, fake(t), lanes, largeMessages)
			for p := range int32(lanes) {
				for range batches {
					r.putLarge(codec, p, each)
				}
			}
			w := r.start(nil, withBudget(12<<20))
			for p := range lanes {
				r.untilNext(p, batches*each)
			}
			w.untilReady()
		})
	}
}

// A batch larger than the limit holds its lane; the error names the batch and the
// remedy. Other lanes go on, and so does this one with a higher limit.
func TestABatchBeyondTheLimitHoldsItsLane(t *testing.T) {
	t.Parallel()
	for name, codec := range producerCodecs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, fake(t), 2, largeMessages)
			c := r.client()
			r.put(c, 0, "before")
			r.putLarge(codec, 0, 20)
			r.put(c, 0, "behind")
			limit := func(mib int64) func(*Config) { return func(c *Config) { c.MaxInflatedBytes = mib << 20 } }
			w := r.start(limit(16), withBudget(64<<20))
			var hold *lane.HoldError
			r.until("/readyz says so", func() bool { return errors.As(w.worker.Ready(), &hold) })
			if hold.Lane != r.lane(0) {
				t.Errorf("lane %v is held", hold.Lane)
			}
			for _, part := range []string{"positions 1 to 20", "batch.max_inflated_bytes is 16.0MiB", "dedupd lanes set-position main " + r.lane(0).Name + " 21"} {
				if !strings.Contains(hold.Error(), part) {
					t.Errorf("no %q in: %v", part, hold)
				}
			}
			r.until("the metric tells", func() bool { return w.metric("dedupd_lanes_held") == 1 })
			r.untilNext(0, 1)
			r.put(c, 1, "other")
			r.untilNext(1, 1)
			if n := r.log.count("lane held"); n != 1 {
				t.Errorf("the log tells %d times", n)
			}
			w.stop()
			w = r.start(limit(32), withBudget(64<<20))
			r.untilNext(0, 22)
			w.untilReady()
		})
	}
}

// A fetch that found nothing reserves no memory for what an earlier one decompressed to.
func TestIdleLanesReserveLittle(t *testing.T) {
	t.Parallel()
	const lanes = 20
	r := newRig(t, fake(t), lanes, largeMessages)
	for p := range int32(lanes) {
		r.putLarge(kgo.ZstdCompression(), p, 4)
	}
	w := r.start(nil, withBudget(64<<20))
	for p := range lanes {
		r.untilNext(p, 4)
	}
	for deadline := time.Now().Add(10 * time.Second); w.worker.Budget.Used() > lanes*idleFetchBytes; {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are set aside by %d lanes that have nothing to read", w.worker.Budget.Used(), lanes)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
