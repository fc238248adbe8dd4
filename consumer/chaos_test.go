package consumer_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Two workers over one broker, while everything goes wrong that may: each id has
// one effect, none is missing, each worker's books balance, no lane is reported as
// caught up that isn't, and the broker never hears of a position beyond the
// store's.
func TestChaos(t *testing.T) {
	const partitions, total = 6, 20_000
	broker, store := consumertest.NewBroker(partitions), consumertest.NewStore()
	ends := &knownEnds{Lanes: store, t: t, end: make(map[message.Lane]int64)}
	for i := range total {
		id := fmt.Sprintf("m%06d", i)
		m := message.Message{Topic: "t", Value: []byte(id), Headers: []message.Header{{Key: consumertest.IDHeader, Value: []byte(id)}}}
		ends.produce(broker, i%partitions, m)
		if i%10 == 0 {
			ends.produce(broker, i%partitions, m) // sent twice
		}
	}
	workers := []*chaosWorker{startChaosWorker(t, broker, store, ends), startChaosWorker(t, broker, store, ends)}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for len(store.Effects()) < total && ctx.Err() == nil {
		goWrong(broker, store)
		time.Sleep(rand.N(10 * time.Millisecond))
	}
	for ends.told.Load() == 0 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if ends.told.Load() == 0 {
		t.Error("no lane was reported as caught up")
	}
	for _, w := range workers {
		w.stop()
	}
	if n := len(store.Effects()); n != total {
		t.Errorf("%d effects of %d", n, total)
	}
	for _, v := range store.Violations() {
		t.Error("contract broken: ", v)
	}
}

func chaosLane(partition int) message.Lane {
	return message.Lane{Source: "chaos", Name: strconv.Itoa(partition)}
}

// goWrong has one thing go wrong.
func goWrong(broker *consumertest.Broker, store *consumertest.Store) {
	switch lanes := store.Lanes(); rand.N(6) {
	case 0:
		store.FailBefore(2, errTransient)
	case 1:
		store.FailAfter(2, errTransient)
	case 2:
		broker.Rebalance()
	case 3:
		if len(lanes) > 0 {
			store.Steal(lanes[rand.N(len(lanes))])
		}
	case 4:
		store.FailBefore(1, &lane.HoldError{Err: errTransient})
	case 5:
		store.Delay(rand.N(3 * time.Millisecond))
	}
}

type chaosWorker struct {
	t        *testing.T
	budget   *consumer.Budget
	registry *prometheus.Registry
	handled  *counting
	cancel   context.CancelFunc
	done     chan error
}

func startChaosWorker(t *testing.T, broker *consumertest.Broker, store *consumertest.Store, lanes consumer.Lanes) *chaosWorker {
	w := &chaosWorker{t: t, budget: consumer.NewBudget(1 << 20), registry: prometheus.NewRegistry(), handled: &counting{store: store}, done: make(chan error, 1)}
	// The source commits in the worker's callback, so what comes here comes at once.
	beyond := func(partition int, position int64, commit func() error) error {
		lane := chaosLane(partition)
		if row, _ := store.Row(lane); position > row.Next {
			t.Errorf("lane %s is committed to the broker at %d; the store has it at %d", lane, position, row.Next)
		}
		return commit()
	}
	worker := &consumer.Worker{
		Handler: w.handled, Lanes: lanes, Sources: []consumer.Source{broker.Intercepted("chaos", beyond)},
		Writers: 3, MaxMessages: 50, MaxBytes: 1 << 18, Budget: w.budget, Drain: time.Second, HeartbeatInterval: time.Millisecond,
		Logger: quiet(), Metrics: consumer.NewMetrics(w.registry, w.budget),
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	go func() { w.done <- worker.Run(ctx) }()
	return w
}

// stop ends it, and compares its books.
func (w *chaosWorker) stop() {
	w.t.Helper()
	w.cancel()
	if err := <-w.done; err != nil {
		w.t.Error(err)
	}
	if n := w.budget.Used(); n != 0 {
		w.t.Errorf("the budget holds %d bytes", n)
	}
	fetched, abandoned := sum(w.t, w.registry, "dedupd_messages_fetched_total"), sum(w.t, w.registry, "dedupd_messages_abandoned_total")
	if handled := w.handled.told.Load(); fetched != float64(handled)+abandoned {
		w.t.Errorf("fetched %v, handled %d, abandoned %v", fetched, handled, abandoned)
	}
}

// knownEnds checks the heartbeats of lanes to which nothing more comes.
type knownEnds struct {
	consumer.Lanes
	t    *testing.T
	end  map[message.Lane]int64
	told atomic.Int64
}

func (k *knownEnds) produce(broker *consumertest.Broker, partition int, m message.Message) {
	broker.Produce(partition, m)
	k.end[chaosLane(partition)]++
}

func (k *knownEnds) Heartbeat(ctx context.Context, lanes []lane.Heartbeat) ([]message.Lane, error) {
	for _, c := range lanes {
		if c.Next != k.end[c.Lane] {
			k.t.Errorf("lane %s is reported as caught up at %d of %d", c.Lane, c.Next, k.end[c.Lane])
		}
		k.told.Add(1)
	}
	return k.Lanes.Heartbeat(ctx, lanes)
}

// counting counts the messages of the hand-overs that were answered by nil.
type counting struct {
	store *consumertest.Store
	told  atomic.Int64
}

func (c *counting) Handle(ctx context.Context, group []lane.Batch) error {
	err := c.store.Handle(ctx, group)
	if err == nil {
		for _, b := range group {
			c.told.Add(int64(len(b.Messages)))
		}
	}
	return err
}
