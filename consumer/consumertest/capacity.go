package consumertest

import (
	"bytes"
	"fmt"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/message"
)

func testBudget(f *fixture) {
	const limit, each, n = 1 << 20, 20_000, 300
	f.large(n, each)
	f.store.Delay(2 * time.Millisecond)
	r := f.start(func(w *consumer.Worker) {
		*w.Budget = *consumer.NewBudget(limit)
		w.MaxBytes = limit / 4
	})
	for len(f.store.Effects()) < n {
		// What is asked for is known only roughly before it comes.
		if used := r.worker.Budget.Used(); used > 2*limit {
			f.Fatalf("%d bytes are held, of a budget of %d", used, limit)
		}
		if f.ctx.Err() != nil {
			f.Fatalf("%d of %d records had their effect", len(f.store.Effects()), n)
		}
		time.Sleep(time.Millisecond)
	}
	f.stop(r)
}

func testHuge(f *fixture) {
	const n, each = 3, 900_000
	f.large(n, each)
	r := f.start(func(w *consumer.Worker) {
		*w.Budget = *consumer.NewBudget(each / 3)
		w.MaxBytes = each / 4
	})
	if err := f.store.WaitEffects(f.ctx, n); err != nil {
		f.Fatalf("%d of %d records had their effect", len(f.store.Effects()), n)
	}
	f.stop(r)
}

func (f *fixture) large(n, each int) {
	f.Helper()
	records := make([]Record, n)
	for i := range records {
		records[i] = Record{
			Partition: i % f.Features.Partitions,
			Value:     bytes.Repeat([]byte{byte(i)}, each),
			Headers:   []message.Header{{Key: IDHeader, Value: fmt.Appendf(nil, "m%07d", i)}},
		}
	}
	f.sub.Produce(f.T, records)
}

func testMembers(f *fixture) {
	f.store.Delay(2 * time.Millisecond)
	f.produce(f.Messages)
	first, second := f.start(), f.start()
	f.eventually("some effects", func() bool { return len(f.store.Effects()) > f.Messages/10 })
	f.stop(first)
	f.produce(f.Messages / 2)
	third := f.start()
	f.all()
	f.acked()
	f.stop(second)
	f.produce(10)
	f.all()
	f.acked()
	f.stop(third)
}

func testFenced(f *fixture) {
	f.produce(f.Messages / 4)
	r := f.start()
	f.all()
	for range 3 {
		for _, lane := range f.store.Lanes() {
			f.store.Steal(lane)
		}
		f.produce(f.Messages / 4)
		f.all()
	}
	f.acked()
	f.stop(r)
}

func testRewind(f *fixture) {
	f.produce(f.Messages)
	r := f.start()
	f.all()
	f.acked()
	// A failover under a worker at work: its next batch doesn't fit.
	back := func() {
		for _, lane := range f.store.Lanes() {
			row, _ := f.store.Row(lane)
			f.store.Rewind(lane, row.Next/2)
		}
		if len(f.store.Effects()) >= f.produced {
			f.Fatal("the store has lost nothing")
		}
	}
	back()
	f.produce(f.Messages / 10)
	f.all()
	f.acked()
	f.stop(r)
	// And one between two runs.
	back()
	r = f.start(func(w *consumer.Worker) { w.HeartbeatInterval = 50 * time.Millisecond })
	f.all()
	f.acked()
	// And one that no batch tells of, since nothing more comes.
	back()
	f.all()
	f.acked()
	f.stop(r)
}
