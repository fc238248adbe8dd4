package kafka

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/consumer"
	broker "github.com/dedupd/dedupd/e2e/kafka"
)

func pulsing(w *consumer.Worker) { w.Pulse = 20 * time.Millisecond }

// caughtUp is the time as of which the lane was last told to be caught up.
func (r *rig) caughtUp(partition int) time.Time {
	row, _ := r.store.Row(r.lane(partition))
	return row.CaughtUp
}

func (r *rig) untilCaughtUp(partition int, since time.Time) {
	r.Helper()
	r.until("the lane is told to be caught up", func() bool { return r.caughtUp(partition).After(since) })
}

// What an open transaction holds can't be read yet, and will come with the time
// at which it was written.
func TestAnOpenTransactionIsNotCaughtUp(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *broker.Broker) {
		r := newRig(t, b, 1, nil)
		r.start(nil, pulsing)
		r.untilCaughtUp(0, time.Now())
		c := r.transactional()
		r.check(c.BeginTransaction())
		r.put(c, 0, "one")
		written := time.Now()
		time.Sleep(2 * fetchWait)
		if at := r.caughtUp(0); at.After(written) {
			t.Errorf("told to be caught up %s after a message had come that can't be read", at.Sub(written))
		}
		r.check(c.EndTransaction(r.ctx, kgo.TryCommit))
		r.untilCaughtUp(0, time.Now())
		if got := r.values(); len(got) != 1 {
			t.Errorf("got %q", got)
		}
	})
}

// A lane whose batches waited knows only what the broker held before.
func TestCaughtUpIsAsOldAsTheFetch(t *testing.T) {
	t.Parallel()
	r := newRig(t, fake(t), 1, nil)
	r.fill(r.client(), 0, 10)
	release := r.store.Hold()
	defer release()
	r.start(nil, pulsing, func(w *consumer.Worker) { w.MaxMessages = 2 })
	r.until("a hand-over", func() bool { _, _, calls := r.store.Counts(); return calls > 0 })
	fetched := time.Now()
	time.Sleep(fetchWait / 2)
	release()
	r.untilCaughtUp(0, time.Time{}) // long before the next fetch is answered
	if at := r.caughtUp(0); at.After(fetched) {
		t.Errorf("told to be caught up %s after the broker was last asked", at.Sub(fetched))
	}
}
