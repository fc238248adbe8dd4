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
		lane := message.Lane{Source: "chaos", Name: strconv.Itoa(i % partitions)}
		broker.Produce(i%partitions, m)
		ends.end[lane]++
		if i%10 == 0 {
			broker.Produce(i%partitions, m) // sent twice
			ends.end[lane]++
		}
	}
	// The source commits in the worker's callback, so what comes here comes at once.
	beyond := func(partition int, position int64, commit func() error) error {
		lane := message.Lane{Source: "chaos", Name: strconv.Itoa(partition)}
		if row, _ := store.Row(lane); position > row.Next {
			t.Errorf("lane %s is committed to the broker at %d; the store has it at %d", lane, position, row.Next)
		}
		return commit()
	}
	handled := [2]*counting{{store: store}, {store: store}}
	var stops []func()
	var registries []*prometheus.Registry
	for i := range 2 {
		budget, registry := consumer.NewBudget(1<<20), prometheus.NewRegistry()
		w := &consumer.Worker{
			Handler: handled[i], Lanes: ends, Sources: []consumer.Source{broker.Intercepted("chaos", beyond)},
			Writers: 3, MaxMessages: 50, MaxBytes: 1 << 18, Budget: budget, Drain: time.Second, HeartbeatInterval: time.Millisecond,
			Logger: quiet(), Metrics: consumer.NewMetrics(registry, budget),
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		stops = append(stops, func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			if n := budget.Used(); n != 0 {
				t.Errorf("the budget holds %d bytes", n)
			}
		})
		registries = append(registries, registry)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for len(store.Effects()) < total && ctx.Err() == nil {
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
		time.Sleep(rand.N(10 * time.Millisecond))
	}
	for ends.told.Load() == 0 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if ends.told.Load() == 0 {
		t.Error("no lane was reported as caught up")
	}
	for i, stop := range stops {
		stop()
		fetched, abandoned := sum(t, registries[i], "dedupd_messages_fetched_total"), sum(t, registries[i], "dedupd_messages_abandoned_total")
		if fetched != float64(handled[i].told.Load())+abandoned {
			t.Errorf("worker %d: fetched %v, handled %d, abandoned %v", i, fetched, handled[i].told.Load(), abandoned)
		}
	}
	if n := len(store.Effects()); n != total {
		t.Errorf("%d effects of %d", n, total)
	}
	for _, v := range store.Violations() {
		t.Error("contract broken: ", v)
	}
}

// knownEnds checks the heartbeats of lanes to which nothing more comes.
type knownEnds struct {
	consumer.Lanes
	t    *testing.T
	end  map[message.Lane]int64
	told atomic.Int64
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
