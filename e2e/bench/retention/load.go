package main

import (
	"context"
	"sync"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// batchSize is the default of batch.max_messages.
const batchSize = 4000

// payload is of the size of a small order.
var payload = []byte(`{"order":{"customer":"c-204117","currency":"EUR","total":129.95,"lines":[{"sku":"A-1002","quantity":2,"price":19.95},{"sku":"B-7731","quantity":1,"price":90.05}]},"source":"web","placed_at":"2026-11-20T10:11:12Z","note":"leave it with the neighbours"}`)

// batch makes a lane's next messages.
func (l *openLane) batch(n int, id func() []byte) lane.Batch {
	b := lane.Batch{
		Lane: l.Lane, Ordered: true, StreamID: l.StreamID, Epoch: l.Epoch, From: l.at, Next: l.at + int64(n), BrokerPosition: -1,
		Messages: make([]message.Message, n),
	}
	now := time.Now()
	for i := range b.Messages {
		b.Messages[i] = message.Message{Topic: "t", Key: id(), Value: payload, Time: now, Position: message.Position{Lane: l.Lane, Offset: l.at + int64(i)}}
	}
	l.at = b.Next
	return b
}

// span is when a batch was in hand.
type span struct{ from, to time.Time }

func (s span) duration() time.Duration { return s.to.Sub(s.from) }

// apply has every lane of the arm work through its share of the messages, made
// beforehand, and gives the rate and the spans of the batches. started, if not
// nil, is closed when the messages are made.
func (a *arm) apply(ctx context.Context, messages, size int, id func() []byte, started chan struct{}) (rate float64, spans []span, err error) {
	var lanes int
	for _, w := range a.workers {
		lanes += len(w.lanes)
	}
	each := max(1, messages/size/lanes)
	type work struct {
		w       *worker
		batches []lane.Batch
	}
	var all []work
	for _, w := range a.workers {
		for _, l := range w.lanes {
			one := work{w: w}
			for range each {
				one.batches = append(one.batches, l.batch(size, id))
			}
			all = append(all, one)
		}
	}
	if started != nil {
		close(started)
	}
	var mu sync.Mutex
	var group sync.WaitGroup
	start, before := time.Now(), a.used()
	for _, one := range all {
		group.Go(func() {
			for _, batch := range one.batches {
				s := span{from: time.Now()}
				if handled := one.w.Handle(ctx, []lane.Batch{batch}); handled != nil {
					mu.Lock()
					err = handled
					mu.Unlock()
					return
				}
				s.to = time.Now()
				mu.Lock()
				spans = append(spans, s)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	a.spent = a.used().since(before)
	return float64(each*size*lanes) / took.Seconds(), spans, err
}

// fresh empties the sink, so that every run writes to the same.
func (a *arm) fresh(ctx context.Context) error {
	_, err := a.pool.Exec(ctx, `TRUNCATE public.rows; TRUNCATE dedupd.dead_letters`)
	return err
}

// probes sums a result of look-ups in sealed generations over the workers.
func (a *arm) probes(result string) (n float64) {
	for _, w := range a.workers {
		families, err := w.registry.Gather()
		if err != nil {
			continue
		}
		for _, f := range families {
			if f.GetName() != "dedupd_filter_probes_total" {
				continue
			}
			for _, m := range f.GetMetric() {
				if m.GetLabel()[0].GetValue() == result {
					n += m.GetCounter().GetValue()
				}
			}
		}
	}
	return n
}
