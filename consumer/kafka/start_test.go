package kafka

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
)

func TestStartLatest(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		r.put(c, 0, "old")
		w := r.start(func(c *Config) { c.Start = policy.StartLatest })
		w.untilReady()
		r.put(c, 0, "new")
		r.untilNext(0, 2)
		if got := r.values(); len(got) != 1 || got[0] != "new" {
			t.Errorf("got %q", got)
		}
	})
}

// StartLatest leaves out nothing of a partition that is added later, whether or not a
// worker runs then.
func TestStartLatestOfAddedPartitions(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 3, nil)
		c := r.client()
		latest := func(c *Config) { c.Start = policy.StartLatest }
		for p := range int32(3) {
			r.put(c, p, "old")
		}
		first, second := r.start(latest), r.start(latest)
		first.untilReady()
		second.untilReady()
		r.until("all lanes were acquired", func() bool { return len(r.store.Lanes()) == 3 })
		first.stop()
		second.stop()
		r.check(b.AddPartitions(r.ctx, r.topic, 4))
		r.put(r.client(), 3, "while nobody reads")
		w := r.start(latest)
		r.untilNext(3, 1)
		w.untilReady()
		r.check(b.AddPartitions(r.ctx, r.topic, 5))
		r.put(r.client(), 4, "while somebody does")
		r.untilNext(4, 1)
		w.untilReady()
		r.put(r.client(), 0, "new")
		r.untilNext(0, 2)
		if diff := cmp.Diff([]string{"while nobody reads", "while somebody does", "new"}, r.values()); diff != "" {
			t.Error(diff)
		}
	})
}

// Without a position anywhere, start: group waits for somebody to set one.
func TestStartGroup(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		r.put(c, 0, "one", "two")
		w := r.start(func(c *Config) { c.Start = policy.StartGroup })
		r.until("the log tells", func() bool { return r.log.count("start is group") > 0 })
		if w.worker.Ready() == nil || len(r.store.Effects()) != 0 {
			t.Error("reading without a start")
		}
		w.stop()
		r.newStore()
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 1))
		w = r.start(func(c *Config) { c.Start = policy.StartGroup })
		r.untilNext(0, 2)
		w.untilReady()
		if got := r.values(); len(got) != 1 || got[0] != "two" {
			t.Errorf("got %q", got)
		}
	})
}

// Topics and partitions that are added after the start are found.
func TestTopicsAppearAndGrow(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		other := newName("later")
		w := r.start(func(c *Config) { c.Topics = append(c.Topics, other) })
		// The topic that exists is read meanwhile.
		r.fill(r.client(), 0, 10)
		r.untilNext(0, 10)
		if err := w.worker.Ready(); err == nil || !strings.Contains(err.Error(), other) || !errors.Is(err, errNoTopic) {
			t.Errorf("without its topic /readyz says %v", err)
		}
		if n := r.log.count(other); n != 1 {
			t.Errorf("the log tells %d times of the missing topic", n)
		}
		r.check(b.CreateTopic(r.ctx, other, 2, nil))
		r.until("lanes of both", func() bool { return r.log.count("lanes=3") == 1 })
		w.untilReady()
		r.check(b.AddPartitions(r.ctx, r.topic, 3))
		r.until("more lanes", func() bool { return r.log.count("lanes=5") == 1 })
		w.untilReady()
		r.fill(r.client(), 2, 10)
		r.untilNext(2, 10)
	})
}

// Without a single topic the worker doesn't join, and /readyz says what is missing.
func TestAllTopicsAreMissing(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := rigOn(t, b, newName("later"))
		w := r.start(nil)
		r.until("/readyz says so", func() bool { return errors.Is(w.worker.Ready(), errNoTopic) })
		r.check(b.CreateTopic(r.ctx, r.topic, 1, nil))
		r.fill(r.client(), 0, 10)
		r.untilNext(0, 10)
		w.untilReady()
	})
}

// A deleted topic keeps nobody from reading the others, also when the group rebalances
// meanwhile. It is read again when it comes back, with as many partitions or fewer.
func TestTopicsGoAndComeBack(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		other := newName("other")
		r.check(b.CreateTopic(r.ctx, other, 8, nil))
		w := r.start(func(c *Config) { c.Topics = append(c.Topics, other) })
		r.until("lanes of both", func() bool { return r.log.count("lanes=9") == 1 })
		w.untilReady()
		come := func(partitions int32) {
			t.Helper()
			r.until("the name is free", func() bool { return b.CreateTopic(r.ctx, other, partitions, nil) == nil })
		}

		r.check(b.DeleteTopic(r.ctx, other))
		r.until("the topic is missed", func() bool { return r.log.count("a topic isn't read") == 1 })
		second := r.start(nil)
		r.until("somebody has the lane that is left", func() bool { return r.log.count("lanes=1") >= 1 })
		r.fill(r.client(), 0, 10)
		r.untilNext(0, 10)
		second.stop()
		r.until("the first has it", func() bool { return r.log.count("lanes=1") >= 2 })

		come(8)
		r.until("lanes of both again", func() bool { return r.log.count("lanes=9") >= 2 })
		r.check(b.DeleteTopic(r.ctx, other))
		come(4)
		r.until("fewer lanes", func() bool { return r.log.count("lanes=5") >= 1 })
		r.check(b.AddPartitions(r.ctx, other, 6))
		r.until("more lanes", func() bool { return r.log.count("lanes=7") >= 1 })
	})
}

// More members than partitions: some have nothing, and are ready.
func TestStandby(t *testing.T) {
	t.Parallel()
	r := newRig(t, fake(t), 1, nil)
	first, second := r.start(nil), r.start(nil)
	r.until("one has no lane", func() bool { return r.log.count("lanes=0") > 0 })
	first.untilReady()
	second.untilReady()
}

func TestUntilIdleWaitsForTheEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, fake(t), 2, nil)
	r.transactions() // ends with a marker
	r.fill(r.client(), 1, 300)
	w := r.start(nil, func(w *consumer.Worker) { w.UntilIdle = 300 * time.Millisecond })
	select {
	case err := <-w.done:
		r.check(err)
	case <-r.ctx.Done():
		t.Fatal("never idle")
	}
	if r.next(0) != 17 || r.next(1) != 300 {
		t.Errorf("ended at %d and %d", r.next(0), r.next(1))
	}
	if r.committed(0) != 17 || r.committed(1) != 300 {
		t.Errorf("the group stands at %d and %d", r.committed(0), r.committed(1))
	}
}

// An operator moves the group back while nobody reads.
func TestGroupReset(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		r.put(r.client(), 0, "one", "two", "three", "four")
		w := r.start(nil)
		r.untilNext(0, 4)
		w.stop()
		if row, _ := r.store.Row(r.lane(0)); row.BrokerPosition != 4 {
			t.Errorf("the row knows of %d at the broker, want 4", row.BrokerPosition)
		}
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 1))
		w = r.start(func(c *Config) { c.OnGroupReset = policy.GroupResetIgnore })
		w.untilReady()
		r.untilCommitted(0, 4)
		w.stop()
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 1))
		r.start(nil)
		r.until("it was read again", func() bool { handled, _, _ := r.store.Counts(); return handled == 4+3 })
		r.untilCommitted(0, 4)
	})
}

// The configuration changes the group's name and later changes it back: the group has its
// old offsets. Nobody has reset it, and following it would read again what may be older
// than the claims.
func TestAGroupThatIsComeBackTo(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		read := func(group string, next int64) {
			t.Helper()
			r.group = group
			w := r.start(nil)
			r.untilNext(0, next)
			r.untilCommitted(0, next)
			w.stop()
		}
		first, second := r.group, newName("group")
		r.put(c, 0, "one", "two")
		read(first, 2)
		r.put(c, 0, "three", "four")
		read(second, 4)
		read(first, 4)
		if handled, _, _ := r.store.Counts(); handled != 4 {
			t.Errorf("%d messages were read, want each of 4 once", handled)
		}
		if n := r.log.count("a worker wrote it"); n != 1 {
			t.Errorf("the log tells %d times of an offset that isn't followed, want once", n)
		}
		// What a person sets still counts.
		r.check(b.SetCommitted(r.ctx, first, r.topic, 0, 1))
		r.start(nil)
		r.until("it was read again", func() bool { handled, _, _ := r.store.Counts(); return handled == 4+3 })
	})
}

// acquisitions records what lanes are acquired with.
type acquisitions struct {
	consumer.Lanes
	mu  sync.Mutex
	all []lane.Acquire
}

func (r *acquisitions) Acquire(ctx context.Context, a lane.Acquire) (lane.Assignment, error) {
	r.mu.Lock()
	r.all = append(r.all, a)
	r.mu.Unlock()
	return r.Lanes.Acquire(ctx, a)
}

// Acquire gets everything that decides where a lane begins: one that the database doesn't
// know begins at Start.
func TestAcquireSaysWhereToStart(t *testing.T) {
	t.Parallel()
	r := newRig(t, fake(t), 3, nil)
	r.fill(r.client(), 1, 10)
	r.check(r.broker.DeleteRecords(r.ctx, r.topic, 1, 4))
	r.fill(r.client(), 2, 10)
	r.check(r.broker.SetCommitted(r.ctx, r.group, r.topic, 2, 7))
	lanes := &acquisitions{Lanes: r.store}
	w := r.start(nil, func(w *consumer.Worker) { w.Lanes = lanes })
	w.untilReady()
	lanes.mu.Lock()
	defer lanes.mu.Unlock()
	slices.SortFunc(lanes.all, func(a, b lane.Acquire) int { return a.Lane.Compare(b.Lane) })
	of := func(n int) *lane.Partition { return &lane.Partition{Topic: r.topic, Number: n, Of: 3, Added: -1} }
	want := []lane.Acquire{
		{Lane: r.lane(0), Ordered: true, Committed: -1, Start: 0, Partition: of(0), HonourReset: true},
		{Lane: r.lane(1), Ordered: true, Committed: -1, Start: 4, Partition: of(1), HonourReset: true},
		{Lane: r.lane(2), Ordered: true, Committed: 7, Start: 7, Partition: of(2), HonourReset: true},
	}
	for i := range lanes.all {
		if lanes.all[i].GroupGeneration <= 0 {
			t.Error("no group generation")
		}
		if len(lanes.all[i].LogID) != 22 {
			t.Errorf("the topic's id is %q", lanes.all[i].LogID)
		}
		lanes.all[i].GroupGeneration, lanes.all[i].LogID = 0, ""
	}
	if diff := cmp.Diff(want, lanes.all); diff != "" {
		t.Error(diff)
	}
}

// The partitions that were divided are compared with those there are now: a topic may
// have been created anew, with fewer partitions, before its id was asked for.
func TestOtherPartitionsThanWereDivided(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		now         int
		more, fewer bool
	}{
		"as many":     {now: 8},
		"more":        {now: 9, more: true},
		"fewer":       {now: 4, fewer: true},
		"it vanished": {now: 0},
	} {
		t.Run(name, func(t *testing.T) {
			g := &groupGeneration{run: &run{config: &Config{Topics: []string{"t"}}}, assignment: &assignment{divided: map[string]int{"t": 8}}}
			more, fewer := g.comparePartitions(topics{partitions: map[string]int{"t": test.now}})
			if more != test.more || fewer != test.fewer {
				t.Errorf("more: %t, fewer: %t", more, fewer)
			}
		})
	}
}
