package kafka

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/policy"
)

func oftenBeating(w *consumer.Worker) { w.HeartbeatInterval = 20 * time.Millisecond }

// caughtUp is the time as of which the lane's last heartbeat was.
func (r *rig) caughtUp(partition int) time.Time {
	row, _ := r.store.Row(r.lane(partition))
	return row.Heartbeat
}

func (r *rig) untilCaughtUp(partition int, since time.Time) {
	r.Helper()
	r.until("the lane is told to be caught up", func() bool { return r.caughtUp(partition).After(since) })
}

// Messages of an open transaction can't be read yet, and will come with the time at
// which they were written.
func TestAnOpenTransactionIsNotCaughtUp(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		r.start(nil, oftenBeating)
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

// What is behind an open transaction is no lag, but a job must not end before it is
// read, or it would silently leave it out.
func TestUntilIdleWaitsForAnOpenTransaction(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		open := r.transactional()
		r.check(open.BeginTransaction())
		r.put(open, 0, "one")
		r.fill(r.client(), 0, 10)
		undecided := func(w *work) float64 { return w.metric("dedupd_open_transaction_messages") }
		w := r.start(nil, func(w *consumer.Worker) { w.UntilIdle = 300 * time.Millisecond })
		r.until("the gauge tells", func() bool { return undecided(w) == 11 })
		if lag := w.metric("dedupd_lag_messages"); lag != 0 {
			t.Errorf("the lag is %v, of what can't be read", lag)
		}
		r.until("the log tells", func() bool { return r.log.count("waiting for producers to end their open transactions") == 1 })
		select {
		case err := <-w.done:
			t.Fatalf("it ended with %v", err)
		default:
		}
		r.check(open.EndTransaction(r.ctx, kgo.TryCommit))
		select {
		case err := <-w.done:
			r.check(err)
		case <-r.ctx.Done():
			t.Fatal("it doesn't end")
		}
		if got := len(r.values()); got != 11 {
			t.Errorf("%d messages were handled, want 11", got)
		}
		if n := undecided(w); n != 0 {
			t.Errorf("the gauge tells %v of a lane that is closed", n)
		}
	})
}

// With read_uncommitted, nothing waits.
func TestUntilIdleReadsUncommitted(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		open := r.transactional()
		r.check(open.BeginTransaction())
		r.put(open, 0, "one")
		w := r.start(func(c *Config) { c.Isolation = policy.ReadUncommitted }, func(w *consumer.Worker) { w.UntilIdle = 300 * time.Millisecond })
		select {
		case err := <-w.done:
			r.check(err)
		case <-r.ctx.Done():
			t.Fatal("it doesn't end")
		}
		if got := len(r.values()); got != 1 {
			t.Errorf("%d messages were handled, want 1", got)
		}
		r.check(open.EndTransaction(r.ctx, kgo.TryCommit))
	})
}

// A lane whose batches waited only knows what the broker had before that.
func TestCaughtUpIsAsOldAsTheFetch(t *testing.T) {
	t.Parallel()
	r := newRig(t, fake(t), 1, nil)
	r.fill(r.client(), 0, 10)
	release := r.store.Hold()
	defer release()
	r.start(nil, oftenBeating, func(w *consumer.Worker) { w.MaxMessages = 2 })
	r.until("a hand-over", func() bool { _, _, calls := r.store.Counts(); return calls > 0 })
	fetched := time.Now()
	time.Sleep(fetchWait / 2)
	release()
	r.untilCaughtUp(0, time.Time{}) // long before the next fetch is answered
	if at := r.caughtUp(0); at.After(fetched) {
		t.Errorf("told to be caught up %s after the broker was last asked", at.Sub(fetched))
	}
}
