package kafka

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/policy"
)

// Two members share the lanes; one leaves, and the other reads all of them.
// Nothing is lost on the way, and the group's offsets never run ahead of what
// was made durable.
func TestMembersShareAndLeave(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		const partitions = 4
		r := newRig(t, b, partitions, nil)
		c := r.client()
		watch := r.watchNeverAhead()
		first := r.start(nil)
		for p := range int32(partitions) {
			r.fill(c, p, 500)
		}
		second := r.start(nil)
		for p := range int32(partitions) {
			r.fill(c, p, 500)
		}
		r.until("both have lanes", func() bool {
			return first.worker.Ready() == nil && second.worker.Ready() == nil && r.log.count("lanes=2") >= 2
		})
		begun := time.Now()
		second.stop()
		if d := time.Since(begun); d > 2*time.Second {
			t.Errorf("an idle member took %s to leave", d)
		}
		for p := range int32(partitions) {
			r.fill(c, p, 500)
		}
		for p := range partitions {
			r.untilNext(p, 1500)
			r.untilCommitted(int32(p), 1500)
		}
		first.stop()
		watch()
		if n := len(r.store.Effects()); n != partitions*1500 {
			t.Errorf("%d effects, want %d", n, partitions*1500)
		}
		if handled, duplicates, _ := r.store.Counts(); duplicates != 0 {
			t.Errorf("%d of %d messages were handled twice, though no lane was lost", duplicates, handled)
		}
	})
}

// watchNeverAhead samples the group's offsets until its result is called.
func (r *rig) watchNeverAhead() (end func()) {
	quit := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			// The order matters: the store only ever moves up.
			offsets, _ := r.broker.Committed(r.ctx, r.group, r.topic)
			for p, offset := range offsets {
				if next := r.next(int(p)); offset > max(next, 0) {
					r.Errorf("the group's offset of %d is %d, durable is only %d", p, offset, next)
				}
			}
			select {
			case <-quit:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	return func() { close(quit); watching.Wait() }
}

// A batch that is in flight while the group rebalances is finished and
// committed before the lane is released, so that the next owner goes on after it.
func TestRebalanceWaitsForWhatIsInHand(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 2, nil)
		c := r.client()
		long := func(c *Config) { c.SessionTimeout = 10 * time.Second }
		first := r.start(long)
		first.untilReady()
		release := r.store.Hold()
		r.fill(c, 0, 10)
		r.fill(c, 1, 10)
		r.until("both batches are in hand", func() bool { _, _, calls := r.store.Counts(); return calls > 0 })
		time.Sleep(100 * time.Millisecond)
		second := r.start(long)
		time.Sleep(time.Second)
		if n := r.log.count("lanes assigned"); n != 1 {
			t.Errorf("%d generations while the batch was in hand", n)
		}
		release()
		r.untilNext(0, 10)
		r.untilNext(1, 10)
		r.until("both have lanes", func() bool { return r.log.count("lanes=1") >= 2 })
		second.untilReady()
		if _, duplicates, _ := r.store.Counts(); duplicates != 0 {
			t.Errorf("%d messages were handled twice", duplicates)
		}
		if n := len(r.store.Effects()); n != 20 {
			t.Errorf("%d effects", n)
		}
	})
}

// A batch that outlasts the drain budget is cut off; the lane goes on at the database's
// position.
func TestRebalanceCutsOffWhatHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t, fake(t), 1, nil)
	c := r.client()
	first := r.start(nil) // a budget of one second
	first.untilReady()
	release := r.store.Hold()
	defer release()
	r.fill(c, 0, 10)
	r.until("the batch is in hand", func() bool { _, _, calls := r.store.Counts(); return calls > 0 })
	begun := time.Now()
	second := r.start(nil)
	r.until("the second has joined", func() bool { return r.log.count("lanes assigned") >= 3 })
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("the rebalance took %s", d)
	}
	if len(r.store.Effects()) != 0 {
		t.Error("the batch that was cut off had an effect")
	}
	release()
	r.untilNext(0, 10)
	first.stop()
	second.stop()
	if _, duplicates, _ := r.store.Counts(); duplicates != 0 {
		t.Errorf("%d messages were handled twice", duplicates)
	}
}

// What was fetched but isn't in a transaction is left to the next owner, also when the
// lane has progress without messages to write.
func TestNothingIsSkippedAtAStop(t *testing.T) {
	t.Parallel()
	r := newRig(t, fake(t), 1, nil)
	c := r.client()
	r.fill(c, 0, 1000)
	release := r.store.Hold()
	w := r.start(nil, func(w *consumer.Worker) { w.MaxMessages = 10; w.Writers = 1; w.Drain = time.Second })
	r.until("a batch is in hand", func() bool { _, _, calls := r.store.Counts(); return calls > 0 })
	time.Sleep(100 * time.Millisecond) // the fetcher waits with hundreds more
	go func() { time.Sleep(50 * time.Millisecond); release() }()
	w.stop()
	if n, effects := r.next(0), len(r.store.Effects()); n != int64(effects) {
		t.Fatalf("the lane stands at %d after %d effects", n, effects)
	}
	if r.next(0) == 1000 {
		t.Fatal("all was handled before the stop, so nothing could be skipped")
	}
	r.start(nil)
	r.untilNext(0, 1000)
	if n := len(r.store.Effects()); n != 1000 {
		t.Errorf("%d effects", n)
	}
}

// The broker's coordinator moves and partitions change their leaders: neither
// loses or repeats anything.
func TestBrokersChangeRoles(t *testing.T) {
	t.Parallel()
	cluster := fakeCluster(t, kfake.NumBrokers(3))
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), 4, nil)
	c := r.client()
	w := r.start(nil)
	w.untilReady()
	for range 5 {
		for p := range int32(4) {
			r.fill(c, p, 100)
		}
		cluster.ShufflePartitionLeaders()
		cluster.RehashCoordinators()
	}
	for p := range 4 {
		r.untilNext(p, 500)
		r.untilCommitted(int32(p), 500)
	}
	w.untilReady()
	if n := len(r.store.Effects()); n != 2000 {
		t.Errorf("%d effects", n)
	}
}

// A broker is killed and comes back: reading goes on without a restart.
func TestBrokerRestarts(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("runs a Kafka broker")
	}
	b := kafkatest.Own(t)
	r := newRig(t, b, 2, nil)
	r.fill(r.client(), 0, 100)
	w := r.start(nil)
	r.untilNext(0, 100)
	r.check(b.Kill())
	time.Sleep(500 * time.Millisecond)
	r.check(b.Restart())
	r.fill(r.client(), 1, 100)
	r.untilNext(1, 100)
	r.untilCommitted(1, 100)
	w.untilReady()
}

// However long a transaction takes, nothing is committed to the group before it.
func TestNothingIsCommittedBeforeItIsDurable(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		r.fill(c, 0, 10)
		r.start(nil)
		r.untilCommitted(0, 10)
		release := r.store.Hold()
		defer release()
		r.fill(c, 0, 10)
		time.Sleep(3 * commitInterval)
		if n := r.committed(0); n != 10 {
			t.Errorf("the group stands at %d, durable is 10", n)
		}
		release()
		r.untilCommitted(0, 20)
	})
}

// A lane that is acquired again within a group generation compares the database with what
// the group holds now, not with what it held when the lane was assigned: that
// would look like a reset by an operator.
func TestLaneTakenAnewIsNoReset(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 0))
		w := r.start(nil)
		for n := int64(100); n <= 300; n += 100 {
			r.fill(c, 0, 100)
			r.untilCommitted(0, n) // the next batch carries it into the row
		}
		r.store.Steal(r.lane(0))
		r.fill(c, 0, 100)
		r.untilNext(0, 400)
		r.untilCommitted(0, 400)
		w.untilReady()
		if _, duplicates, _ := r.store.Counts(); duplicates != 0 {
			t.Errorf("%d messages were read again", duplicates)
		}
	})
}

// A member that ends in the middle of a rebalance leaves the group, which the library
// wouldn't do: the partitions would stand still for the session timeout. A rolling
// restart ends each pod in a rebalance, since the pod before it has just come.
func TestAMemberLeavesInTheMiddleOfARebalance(t *testing.T) {
	t.Parallel()
	const session = 30 * time.Second
	cluster := fakeCluster(t)
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), 2, nil)
	long := func(c *Config) { c.SessionTimeout = session }
	var first *work
	var member atomic.Pointer[string]
	var ending atomic.Bool
	cluster.ControlKey(int16(kmsg.SyncGroup), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		asked := req.(*kmsg.SyncGroupRequest)
		if member.CompareAndSwap(nil, &asked.MemberID) || asked.MemberID != *member.Load() || ending.Swap(true) {
			return nil, nil, false
		}
		first.cancel()
		res := asked.ResponseKind().(*kmsg.SyncGroupResponse)
		res.ErrorCode = kerr.RebalanceInProgress.Code
		return res, nil, true
	})
	first = r.start(long)
	first.untilReady()
	second := r.start(long)
	r.until("the first member ends", ending.Load)
	first.stop()
	begun := time.Now()
	c := r.client()
	r.fill(c, 0, 1)
	r.fill(c, 1, 1)
	r.untilNext(0, 1)
	r.untilNext(1, 1)
	second.untilReady()
	if d := time.Since(begun); d > session/2 {
		t.Errorf("the partitions stood still for %s", d)
	}
}

// A failover of the database may lose the lane's row itself, if it is newer than the
// replica. The group's offset metadata says where the lane began: from there all is read
// again, by a running worker and by one that starts.
func TestALaneThatTheDatabaseLostIsReadAgain(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		r.fill(c, 0, 5)
		w := r.start(func(c *Config) { c.Start = policy.StartLatest })
		w.untilReady()
		r.fill(c, 0, 10)
		r.untilNext(0, 15)
		r.untilCommitted(0, 15)
		again := func(n int64) {
			t.Helper()
			r.untilNext(0, n)
			if offsets := r.offsets(); int64(len(offsets)) != n-5 || offsets[0] != 5 {
				t.Errorf("got %d, want 5 to %d", offsets, n-1)
			}
			r.untilCommitted(0, n)
		}
		r.store.Lose(r.lane(0))
		r.fill(c, 0, 10)
		again(25)
		w.stop()
		r.store.Lose(r.lane(0))
		r.start(nil)
		again(25)
		if n := r.log.count("must have lost commits"); n != 2 {
			t.Errorf("told %d times", n)
		}
	})
}

// A member dies with a partition in hand. A job whose own partition is empty waits for the
// group to give it that one. It doesn't wait for a member that is alive and can't go on.
func TestUntilIdleReadsWhatADeadMemberLeaves(t *testing.T) {
	t.Parallel()
	for name, alive := range map[string]bool{"dead": false, "alive": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, fake(t), 2, nil)
			r.fill(r.client(), 0, 20)
			r.fill(r.client(), 1, 20)
			c := &Config{Name: "main", Brokers: []string{r.broker.Addr()}, Topics: []string{r.topic}, Group: r.group, SessionTimeout: 2 * time.Second}
			c.setDefaults()
			cluster := newCluster(c, nil)
			t.Cleanup(cluster.close)
			seen, err := cluster.lookUpTopics(r.ctx)
			r.check(err)
			other := &group{config: c, cluster: cluster, seen: seen}
			mine, err := other.join(r.ctx)
			r.check(err)
			w := r.start(func(mine *Config) { mine.SessionTimeout = c.SessionTimeout }, func(w *consumer.Worker) { w.UntilIdle = 300 * time.Millisecond })
			r.until("the worker joins", func() bool { return other.heartbeat(r.ctx, mine) != nil })
			mine, err = other.join(r.ctx)
			r.check(err)
			if len(mine.partitions[r.topic]) != 1 {
				t.Fatalf("the other member has %v", mine.partitions)
			}
			theirs := mine.partitions[r.topic][0]
			for alive && other.heartbeat(r.ctx, mine) == nil { // until the worker leaves
				time.Sleep(100 * time.Millisecond)
			}
			select {
			case err := <-w.done:
				r.check(err)
			case <-r.ctx.Done():
				t.Fatal("it doesn't end")
			}
			want := int64(20)
			if alive {
				want = -1
			}
			if r.next(1-theirs) != 20 || r.next(theirs) != want {
				t.Errorf("it ended at %d and %d, want 20 and %d", r.next(1-theirs), r.next(theirs), want)
			}
		})
	}
}
