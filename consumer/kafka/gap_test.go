package kafka

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/policy"
)

// Data that the broker deleted before it was read stops the lane, loudly, until
// somebody decides.
func TestGapStopsTheLane(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 2, nil)
		c := r.client()
		r.fill(c, 0, 10)
		r.fill(c, 1, 10)
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 3))
		r.check(b.DeleteRecords(r.ctx, r.topic, 0, 6))
		w := r.start(nil)
		r.untilNext(1, 10) // the other lane goes on
		r.until("the log tells of the gap", func() bool { return r.log.count("data is lost") > 0 })
		if err := w.worker.Ready(); err == nil || !strings.Contains(err.Error(), "data is lost") {
			t.Errorf("readiness says %v of a lane that can't be read", err)
		}
		if n := r.next(0); n != 3 {
			t.Errorf("the lane moved to %d", n)
		}
		time.Sleep(holdPause + time.Second)
		if n := r.log.count("data is lost"); n != 1 {
			t.Errorf("told %d times of the same gap", n)
		}
	})
}

func TestGapIsSkippedOnDemand(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		r.fill(r.client(), 0, 10)
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 3))
		r.check(b.DeleteRecords(r.ctx, r.topic, 0, 6))
		w := r.start(func(c *Config) { c.OnGap = policy.GapSkip })
		r.untilNext(0, 10)
		w.untilReady()
		if got := fmt.Sprint(r.offsets()); got != "[6 7 8 9]" {
			t.Errorf("got %s", got)
		}
		if n := r.log.count("skipped=3"); n != 1 {
			t.Errorf("told %d times", n)
		}
		if n, err := testutil.GatherAndCount(w.registry, "dedupd_positions_skipped_total"); err != nil || n != 1 {
			t.Errorf("%d series count the skipped positions, %v", n, err)
		}
	})
}

// A gap with nothing after it moves the lane as well.
func TestGapUpToTheEnd(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		r.fill(c, 0, 10)
		r.check(b.DeleteRecords(r.ctx, r.topic, 0, 10))
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 3))
		r.start(func(c *Config) { c.OnGap = policy.GapSkip })
		r.untilNext(0, 10)
		r.fill(c, 0, 1)
		r.untilNext(0, 11)
	})
}

// Retention overtakes a lane that is being read: its fetches get out of range.
func TestGapWhileRunning(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		for _, onGap := range []policy.Gap{policy.GapStop, policy.GapSkip} {
			t.Run(string(onGap), func(t *testing.T) {
				r := newRig(t, b, 1, nil)
				c := r.client()
				release := r.store.Hold()
				r.fill(c, 0, 1)
				w := r.start(func(c *Config) { c.OnGap = onGap; c.FetchBytes = 2000 },
					func(w *consumer.Worker) { w.MaxMessages = 10 })
				w.untilReady()
				r.fill(c, 0, 500)
				r.fill(c, 0, 500)
				r.fill(c, 0, 500)
				r.check(b.DeleteRecords(r.ctx, r.topic, 0, 1400))
				release()
				if onGap == policy.GapSkip {
					r.untilNext(0, 1501)
					w.untilReady()
					return
				}
				r.until("the log tells of the gap", func() bool { return r.log.count("data is lost") > 0 })
				if w.worker.Ready() == nil {
					t.Error("ready with a lane that can't be read")
				}
			})
		}
	})
}

// A partition ends below the lane's position: reading from there would skip messages,
// from the beginning repeat them. The lane stays held when the partition has grown past
// the position, in another worker too.
func TestPositionBeyondTheEnd(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		r.fill(c, 0, 5)
		r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 8))
		w := r.start(nil)
		r.until("the log tells", func() bool { return r.log.count("was cut at position 5") > 0 })
		if w.worker.Ready() == nil {
			t.Error("ready with a lane that can't be read")
		}
		r.fill(c, 0, 5)
		time.Sleep(holdPause + time.Second)
		if n, m := r.log.count("was cut at position 5"), r.log.count("was cut at"); n != 1 || m != 1 {
			t.Errorf("told %d times that the partition was cut at 5, %d times that it was cut anywhere", n, m)
		}
		w.stop()
		w = r.start(nil)
		r.until("the lane is held again", func() bool { return r.log.count("was cut at position 5") == 2 })
		if err := w.worker.Ready(); err == nil || len(r.store.Effects()) != 0 {
			t.Errorf("ready: %v, %d messages were read", err, len(r.store.Effects()))
		}
		was, _ := r.store.Row(r.lane(0))
		r.store.SetPosition(r.lane(0), 5)
		r.untilNext(0, 10)
		w.untilReady()
		if got := fmt.Sprint(r.offsets()); got != "[5 6 7 8 9]" {
			t.Errorf("got %s", got)
		}
		if now, _ := r.store.Row(r.lane(0)); now.StreamID == was.StreamID {
			t.Error("ids made of positions would be those of other messages")
		}
	})
}

// The remedies of docs/operations.md.
func TestPositionBeyondTheEndIsMended(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		// A lane at 8, as the database and the group know it; the partition ends at 5.
		beyond := func(t *testing.T) (*rig, *work) {
			r := newRig(t, b, 1, nil)
			r.fill(r.client(), 0, 5)
			r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 8))
			w := r.start(nil)
			r.until("the lane is held", func() bool { return r.log.count("was cut at position 5") == 1 })
			return r, w
		}
		for _, position := range []int64{5, 0} {
			t.Run(fmt.Sprint("by setting the position to ", position), func(t *testing.T) {
				r, w := beyond(t)
				r.store.SetPosition(r.lane(0), position)
				w.untilReady()
				r.fill(r.client(), 0, 2)
				r.untilNext(0, 7)
				if got := r.offsets(); len(got) != int(7-position) || got[0] != position {
					t.Errorf("got %d", got)
				}
				r.untilCommitted(0, 7)
			})
		}
		t.Run("by forgetting the lane, but not while the group has its offset", func(t *testing.T) {
			r, w := beyond(t)
			w.stop()
			r.newStore()
			w = r.start(nil)
			r.until("the lane is held again", func() bool { return r.log.count("was cut at position 5") == 2 })
			w.stop()
			r.newStore()
			r.deleteCommitted(0)
			w = r.start(nil)
			r.untilNext(0, 5)
			w.stop()
			r.newStore()
			r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, 3))
			r.start(nil)
			r.untilNext(0, 5)
			if got := fmt.Sprint(r.offsets()); got != "[3 4]" {
				t.Errorf("got %s", got)
			}
		})
	})
}

// Compaction leaves holes, and batches without their last records: the position passes
// over all of them.
func TestCompactedTopic(t *testing.T) {
	t.Parallel()
	r := newRig(t, realBroker(t), 1, map[string]string{
		"cleanup.policy": "compact", "segment.ms": "200", "segment.bytes": "1048576",
		"min.cleanable.dirty.ratio": "0.001", "min.compaction.lag.ms": "0", "delete.retention.ms": "0",
		"max.compaction.lag.ms": "200",
	})
	c := r.client()
	const rounds, keys = 20, 50
	for range rounds {
		var records []*kgo.Record
		for k := range keys {
			records = append(records, &kgo.Record{Key: fmt.Appendf(nil, "key %d", k), Value: []byte(strings.Repeat("v", 100))})
		}
		r.check(c.ProduceSync(r.ctx, records...).FirstErr())
	}
	// New segments let the old ones be cleaned.
	deadline := time.Now().Add(20 * time.Second)
	n := int64(rounds * keys)
	for {
		time.Sleep(500 * time.Millisecond)
		r.check(c.ProduceSync(r.ctx, &kgo.Record{Key: []byte("key 0"), Value: []byte("tick")}).FirstErr())
		n++
		r.group = newName("group")
		r.newStore()
		w := r.start(func(c *Config) { c.FetchBytes = 1000 })
		r.untilNext(0, n)
		w.stop()
		if got := len(r.store.Effects()); got < int(n)/2 {
			t.Logf("%d of %d positions are left", got, n)
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the broker did not compact")
		}
	}
	seen := map[string]bool{}
	for _, e := range r.store.Effects() {
		seen[string(e.Message.Key)] = true
	}
	if len(seen) != keys {
		t.Errorf("%d of %d keys were read", len(seen), keys)
	}
	// From every position, also within a hole.
	for start := int64(0); start < n; start += 37 {
		r.group = newName("group")
		r.newStore()
		r.check(r.broker.SetCommitted(r.ctx, r.group, r.topic, 0, start))
		w := r.start(func(c *Config) { c.FetchBytes = 1000 })
		r.untilNext(0, n)
		w.stop()
		for _, offset := range r.offsets() {
			if offset < start {
				t.Errorf("started at %d, got %d", start, offset)
			}
		}
	}
}
