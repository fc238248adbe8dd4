package kafka

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/policy"
)

// The log of these tests: committed, aborted, committed, aborted, each with its
// marker, then one plain record.
//
//	0 a1 a2 a3 C | 4 b1 b2 b3 A | 8 c1 c2 c3 C | 12 d1 d2 d3 A | 16 e1
func (r *rig) transactions() {
	r.Helper()
	c := r.transactional()
	for i, commit := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit, kgo.TryAbort} {
		name := string(rune('a' + i))
		r.transact(c, commit, name+"1", name+"2", name+"3")
	}
	r.put(r.client(), 0, "e1")
}

func TestOnlyCommittedRecordsAreDelivered(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		r.transactions()
		all := []string{"a1", "a2", "a3", "c1", "c2", "c3", "e1"}
		from := map[int64][]string{
			0: all, 2: all[2:], 3: all[3:], 5: all[3:], 7: all[3:], 9: all[4:], 12: all[6:], 13: all[6:], 15: all[6:], 16: all[6:], 17: nil,
		}
		for _, start := range []int64{0, 2, 3, 5, 7, 9, 12, 13, 15, 16, 17} {
			t.Run(fmt.Sprint(start), func(t *testing.T) {
				r := *r
				r.T, r.group, r.log = t, newName("group"), &logBuffer{}
				r.newStore()
				r.check(b.SetCommitted(r.ctx, r.group, r.topic, 0, start))
				w := r.start(nil)
				r.untilNext(0, 17)
				r.untilCommitted(0, 17)
				w.stop()
				if diff := cmp.Diff(from[start], r.values()); diff != "" {
					t.Error(diff)
				}
			})
		}
	})
}

func TestUncommittedRecordsOnDemand(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		r.transactions()
		r.start(func(c *Config) { c.Isolation = policy.ReadUncommitted })
		r.untilNext(0, 17)
		want := []int64{0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16} // all but the markers
		if diff := cmp.Diff(want, r.offsets()); diff != "" {
			t.Error(diff)
		}
	})
}

// What an open transaction holds up comes when it ends, in the log's order.
func TestOpenTransactionHoldsUpTheLane(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.transactional()
		r.check(c.BeginTransaction())
		r.put(c, 0, "open")
		r.put(r.client(), 0, "plain")
		w := r.start(nil)
		w.untilReady()
		if got := r.values(); len(got) != 0 {
			t.Errorf("got %q before the transaction ended", got)
		}
		r.check(c.EndTransaction(r.ctx, kgo.TryCommit))
		r.untilNext(0, 3)
		if got := r.values(); !slices.Equal(got, []string{"open", "plain"}) {
			t.Errorf("got %q", got)
		}
	})
}

// A log that ends with an aborted transaction is read to its end: the lane row and the
// group's offset reach the end, and the lag reaches zero.
func TestAbortedTailIsPassed(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		r.put(r.client(), 0, "one")
		c := r.transactional()
		r.transact(c, kgo.TryAbort, "lost", "lost")
		w := r.start(nil)
		r.untilNext(0, 4)
		r.untilCommitted(0, 4)
		w.untilReady()

		// It is handed on with the next message rather than by itself.
		_, _, calls := r.store.Counts()
		r.transact(c, kgo.TryAbort, "lost")
		r.put(r.client(), 0, "two")
		r.untilNext(0, 7)
		if _, _, now := r.store.Counts(); now > calls+2 {
			t.Errorf("%d hand-overs for one message", now-calls)
		}
		if got := r.values(); !slices.Equal(got, []string{"one", "two"}) {
			t.Errorf("got %q", got)
		}
		// Without a message to go with, it is handed on by itself.
		r.transact(c, kgo.TryAbort, "lost")
		r.untilNext(0, 9)

		// The end of the program doesn't wait for it.
		r.transact(c, kgo.TryAbort, "lost")
		r.until("the marker was read", func() bool { return w.metric("dedupd_lag_messages") == 2 || r.next(0) == 11 })
		w.stop()
		if n := r.next(0); n != 11 {
			t.Errorf("the lane was left at %d, want 11", n)
		}
	})
}
