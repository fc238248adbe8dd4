package consumer_test

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Lanes that are held don't keep the others from the memory that all share: they give
// it back when somebody waits for it, stay held meanwhile, and go on where they stood
// once they are mended.
func TestHeldLanesDontStarveTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const partitions, each = 4, 200
		broker, store := consumertest.NewBroker(partitions), consumertest.NewStore()
		produce := func(partition int) {
			for n := range each {
				id := strconv.Itoa(partition) + "/" + strconv.Itoa(n)
				broker.Produce(partition, message.Message{Topic: "t", Value: make([]byte, 100), Headers: []message.Header{{Key: consumertest.IDHeader, Value: []byte(id)}}})
			}
		}
		var mended atomic.Bool
		budget, registry := consumer.NewBudget(8<<10), prometheus.NewRegistry()
		w := &consumer.Worker{
			Handler: handlerFunc(func(ctx context.Context, group []lane.Batch) error {
				for _, b := range group {
					if b.Lane.Name != "0" && !mended.Load() {
						return &lane.HoldError{Lane: b.Lane, Err: errors.New("no such table")}
					}
				}
				return store.Handle(ctx, group)
			}),
			Lanes: store, Sources: []consumer.Source{broker.Source("test")}, Writers: 2, MaxMessages: 10, MaxBytes: 4 << 10, Budget: budget,
			Drain: time.Second, Logger: quiet(), Metrics: consumer.NewMetrics(registry, budget),
		}
		for p := 1; p < partitions; p++ {
			produce(p)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		produce(0)
		for n := 0; n < each; {
			time.Sleep(time.Minute)
			was := n
			if n = len(store.Effects()); n == was {
				t.Fatalf("%d of %d messages of the lane that isn't held had their effect, and none in a minute", n, each)
			}
			if held := (*consumer.HeldError)(nil); !errors.As(w.Ready(), &held) {
				t.Errorf("Ready: %v", w.Ready())
			}
			if n := sum(t, registry, "dedupd_lanes_held"); n != partitions-1 {
				t.Errorf("%v lanes are held", n)
			}
		}
		mended.Store(true)
		time.Sleep(10 * time.Minute)
		if n := len(store.Effects()); n != partitions*each {
			t.Errorf("%d effects of %d", n, partitions*each)
		}
		if err := w.Ready(); err != nil {
			t.Errorf("Ready: %v", err)
		}
		if n := sum(t, registry, "dedupd_lanes_held"); n != 0 {
			t.Errorf("%v lanes are held", n)
		}
		cancel()
		if err := <-done; err != nil || budget.Used() != 0 {
			t.Errorf("Run: %v; %d bytes are held", err, budget.Used())
		}
		for _, v := range store.Violations() {
			t.Error("contract broken: ", v)
		}
	})
}

// A worker whose transactions all fail, with more lanes and larger batches than memory,
// takes nothing of what the other worker of the process reads with.
func TestAWorkerThatCantWriteDoesntStarveTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lanes, each = 100, 50
		stores, budgets := [2]*consumertest.Store{}, consumer.NewBudgets(64<<10, 2)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 2)
		start := func(i, partitions, size int, fail error) {
			broker, store := consumertest.NewBroker(partitions), consumertest.NewStore()
			stores[i] = store
			for n := range each {
				for p := range partitions {
					id := strconv.Itoa(p) + "/" + strconv.Itoa(n)
					broker.Produce(p, message.Message{Topic: "t", Value: make([]byte, size), Headers: []message.Header{{Key: consumertest.IDHeader, Value: []byte(id)}}})
				}
			}
			w := &consumer.Worker{
				Handler: handlerFunc(func(ctx context.Context, group []lane.Batch) error {
					if fail != nil {
						return fail
					}
					time.Sleep(10 * time.Millisecond)
					return store.Handle(ctx, group)
				}),
				Lanes: store, Sources: []consumer.Source{broker.Source("test")}, Writers: 2, MaxMessages: 10, MaxBytes: 8 << 10, Budget: budgets[i],
				Drain: time.Second, Logger: quiet(), Metrics: consumer.NewMetrics(prometheus.NewRegistry(), budgets[i]),
			}
			go func() { done <- w.Run(ctx) }()
		}
		start(0, lanes, 4<<10, errTransient)
		time.Sleep(time.Minute)
		synctest.Wait()
		if budgets[0].Used() == 0 {
			t.Error("the worker that can't write holds nothing")
		}
		start(1, 4, 1<<10, nil)
		time.Sleep(10 * time.Second)
		if n := len(stores[1].Effects()); n != 4*each {
			t.Errorf("%d messages of %d had their effect", n, 4*each)
		}
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error("Run: ", err)
			}
		}
		if a, b := budgets[0].Used(), budgets[1].Used(); a+b != 0 {
			t.Errorf("%d and %d bytes are held", a, b)
		}
	})
}

// A lane that has been evicted isn't open for a while, and held all the same:
// the probes, the metric and a job tell of it, until another worker has it.
func TestAnEvictedLaneIsHeld(t *testing.T) {
	hold := &lane.HoldError{Err: errors.New("no such table")}
	// Somebody waits for all there is, after some tries or while the first is made.
	evicted := func(t *testing.T, tries int, changes ...any) *rig {
		t.Helper()
		const all = 1 << 30
		r := newRig(t, 1, changes...)
		r.setHandle(func(context.Context, []lane.Batch) error {
			if tries == 1 {
				time.Sleep(6 * time.Second)
			}
			return hold
		})
		r.lanes[0].mustOffer(1)
		for tries > 1 && len(r.sizes()) < tries {
			time.Sleep(time.Second)
		}
		if err := r.Budget.Acquire(t.Context(), all); err != nil {
			t.Fatal(err)
		}
		r.Budget.Release(all)
		<-r.lanes[0].Lost()
		return r
	}
	bubble(t, "until another worker has it", func(t *testing.T) {
		var other *consumer.Session
		r := evicted(t, 1, func(w *consumer.Worker) {
			w.Sources = append(w.Sources, &script{"other", func(ctx context.Context, in *consumer.Session) error {
				other = in
				in.Ready(true)
				<-ctx.Done()
				return nil
			}})
		})
		other.Rebalanced() // is nothing to this one
		var held *consumer.HeldError
		if err := r.Ready(); !errors.As(err, &held) || held.Lane != r.lanes[0].name || !errors.Is(err, hold) {
			t.Errorf("Ready: %v", err)
		}
		if n := r.metric("dedupd_lanes_held"); n != 1 {
			t.Errorf("%v lanes are held", n)
		}
		r.session.Rebalanced()
		if err := r.Ready(); err != nil {
			t.Errorf("Ready: %v", err)
		}
		r.stop() // which looks at the metric
	})
	bubble(t, "and a job fails", func(t *testing.T) {
		r := evicted(t, 3, func(w *consumer.Worker) { w.UntilIdle = time.Hour })
		select {
		case err := <-r.done:
			if !errors.Is(err, hold) {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(3 * time.Hour):
			t.Error("it waits on")
			r.end()
			<-r.done
		}
	})
	bubble(t, "and a job waits for its next tries", func(t *testing.T) {
		r := evicted(t, 1, func(w *consumer.Worker) { w.UntilIdle = time.Second })
		time.Sleep(time.Minute)
		select {
		case err := <-r.done:
			t.Errorf("Run: %v, though the lane was tried once and isn't empty", err)
		default:
			r.session.Rebalanced()
			r.stop()
		}
	})
}

type handlerFunc func(ctx context.Context, group []lane.Batch) error

func (f handlerFunc) Handle(ctx context.Context, group []lane.Batch) error { return f(ctx, group) }
