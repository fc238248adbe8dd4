package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// slowSink takes its time for each message, in the database.
type slowSink struct {
	sinks.Sink
	each atomic.Int64
}

func (s *slowSink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	wait := time.Duration(s.each.Load()) * time.Duration(len(msgs))
	if _, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, wait.Seconds()); err != nil {
		return err
	}
	return s.Sink.Write(ctx, tx, batch)
}

// handSlowly hands over as a worker does, again and again, with so long for each.
func (f *fixture) handSlowly(within time.Duration, tries int, batches ...lane.Batch) (err error) {
	f.t.Helper()
	for range tries {
		ctx, cancel := context.WithTimeout(f.t.Context(), within)
		err = f.Handle(ctx, slices.Clone(batches))
		cancel()
		if hold := (*lane.HoldError)(nil); err == nil || errors.As(err, &hold) {
			return err
		}
	}
	return err
}

// A batch that is too slow for one transaction is written in several, whatever size fits,
// and what landed isn't written again.
func TestABatchThatIsTooSlowIsDivided(t *testing.T) {
	t.Parallel()
	const n = 16
	for name, acquire := range map[string]func(f *fixture) *ownedLane{
		"ordered": func(f *fixture) *ownedLane { return f.acquire("kafka", "orders/0") },
		"a queue": func(f *fixture) *ownedLane { return f.acquireQueue("nats") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			s := &slowSink{Sink: f.sink}
			f.Sink = s
			f.MaxMessages = n
			f.SetSlowAfter(time.Second)
			s.each.Store(int64(400 * time.Millisecond)) // four of them fit, or two
			l := acquire(f)
			b := l.batch(ids("m", n)...)
			if err := f.handSlowly(2500*time.Millisecond, 40, b); err != nil {
				t.Fatalf("it never lands: %v", err)
			}
			f.wantLanded(ids("m", n)...)
			if most := f.SlowLimit(l.Lane); most == 0 || most > n/2 {
				t.Errorf("a transaction may have %d messages", most)
			}
			// Once they are fast again, they are whole again.
			s.each.Store(0)
			for i := range 40 {
				f.handle(l.batch(fmt.Sprint("fast", i), fmt.Sprint("quick", i)))
			}
			if most := f.SlowLimit(l.Lane); most != 0 {
				t.Errorf("a transaction may still have %d messages only", most)
			}
		})
	}
}

// A message that is too slow alone holds its lane, and says so; the others of its
// batch that come before it land.
func TestAMessageThatIsTooSlowAlone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.SetSlowAfter(time.Second)
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		if slices.ContainsFunc(msgs, func(m message.Message) bool { return m.ID == "s3cret" }) {
			if _, err := tx.Exec(ctx, `SELECT pg_sleep(60)`); err != nil {
				return err
			}
		}
		return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
	})
	l := f.acquire("kafka", "orders/0")
	err := f.handSlowly(1500*time.Millisecond, 30, l.batch("a", "b", "c", "s3cret", "d"))
	wantHold(t, err, "position 3", "alone")
	f.wantLanded("a", "b", "c")
	f.wantDead()
	var hold *lane.HoldError
	if errors.As(err, &hold); hold.Lane != l.Lane || hold.Summary == "" {
		t.Errorf("the hold is of %s: %q", hold.Lane, hold.Summary)
	}
}

// What takes long elsewhere, or is cut off early, says nothing of a batch's size.
func TestWhatDoesntSpeakOfABatchsSize(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.SetSlowAfter(time.Second)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	s := &slowSink{Sink: f.sink}
	f.Sink = s
	s.each.Store(int64(10 * time.Second))
	if f.handSlowly(300*time.Millisecond, 1, l.batchAt(0, "a", "b")) == nil {
		t.Fatal("it landed")
	}
	if f.handSlowly(1500*time.Millisecond, 1, l.batchAt(0, "a", "b"), other.batchAt(0, "c", "d")) == nil {
		t.Fatal("it landed")
	}
	s.each.Store(0)
	// The claims wait for another transaction's, and are cut off.
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Store.Claim(t.Context(), tx, []string{"a"}, dedup.ClaimOptions{}); err != nil {
		t.Fatal(err)
	}
	if f.handSlowly(1500*time.Millisecond, 1, l.batchAt(0, "a", "b")) == nil {
		t.Fatal("it landed")
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n, m := f.SlowLimit(l.Lane), f.SlowLimit(other.Lane); n != 0 || m != 0 {
		t.Errorf("transactions may have %d and %d messages only", n, m)
	}
	f.handle(l.batchAt(0, "a", "b"), other.batchAt(0, "c", "d"))
	f.wantLanded("a", "b", "c", "d")
}
