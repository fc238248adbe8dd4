package dedup_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// hold hands a batch over that holds its lane.
func (f *fixture) hold(b lane.Batch) *lane.HoldError {
	f.t.Helper()
	err := f.Handle(f.t.Context(), []lane.Batch{b})
	var held *lane.HoldError
	if !errors.As(err, &held) || held.Lane != b.Lane {
		f.t.Fatalf("got %v, want the lane %s to be held", err, b.Lane)
	}
	return held
}

// Whatever holds a lane at a message, what comes before it lands, and is counted once,
// however often the lane is tried again.
func TestWhatComesBeforeAHoldLands(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		strategy policy.Strategy
		hold     func(f *fixture)
		ids      []string
		mend     func(f *fixture)
		want     books
	}{
		"the sink's": {
			hold: func(f *fixture) { f.Sink = holding{f.sink} }, ids: []string{"a", "a", "b", "=v", "c=hold", "d"},
			mend: func(f *fixture) { f.Sink = f.sink }, want: books{applied: 4, resent: 1, dead: 1},
		},
		"the sink's, by position": {
			strategy: policy.StrategyPosition,
			hold:     func(f *fixture) { f.Sink = holding{f.sink} }, ids: []string{"a", "a", "b", "=v", "c=hold", "d"},
			mend: func(f *fixture) { f.Sink = f.sink }, want: books{applied: 5, dead: 1},
		},
		"the sink's, by sequence": {
			strategy: policy.StrategySequence,
			hold:     func(f *fixture) { f.Sink = holding{f.sink} }, ids: []string{"a/1", "b/1", "b/1", "a/3", "a/4=hold", "b/2"},
			mend: func(f *fixture) { f.Sink = f.sink }, want: books{applied: 5, resent: 1},
		},
		"a conflict": {
			hold: func(f *fixture) { f.OnConflict = policy.ConflictStop }, ids: []string{"a", "a", "b", "c", "a=2", "d"},
			mend: func(f *fixture) { f.OnConflict = policy.ConflictDeadLetter }, want: books{applied: 4, resent: 1, conflicts: 1},
		},
		"no id": {
			hold: func(f *fixture) { f.Missing = policy.MissingStop }, ids: []string{"a", "a", "b", "c", "", "d"},
			mend: func(f *fixture) { f.Missing = policy.MissingPosition }, want: books{applied: 5, resent: 1},
		},
		"no id, by position": {
			strategy: policy.StrategyPosition,
			hold:     func(f *fixture) { f.Missing = policy.MissingStop }, ids: []string{"a", "a", "b", "c", "", "d"},
			mend: func(f *fixture) { f.Missing = policy.MissingDeadLetter }, want: books{applied: 5, dead: 1},
		},
		"a gap": {
			strategy: policy.StrategySequence,
			hold:     func(f *fixture) { f.Sequence.Gaps = policy.SequenceGapStop }, ids: []string{"a/1", "a/2", "b/7", "a/2", "a/4", "a/5"},
			mend: func(f *fixture) { f.Sequence.Gaps = policy.SequenceGapAllow }, want: books{applied: 5, resent: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, ids := bySequence(t, policy.SequenceGapAllow), func(l *ownedLane) lane.Batch { return l.numbered(c.ids...) }
			if f.Strategy = cmp.Or(c.strategy, policy.StrategyClaim); c.strategy != policy.StrategySequence {
				ids = func(l *ownedLane) lane.Batch { return l.batch(c.ids...) }
			}
			c.hold(f)
			l := f.acquire("kafka", "orders/0")
			b := ids(l)
			for try := range 3 {
				held := f.hold(b)
				if !strings.Contains(held.Summary, "position 4") || held.Landed != (try == 0) {
					t.Errorf("try %d: the hold is %+v", try, held)
				}
				if n := f.rowCount(`SELECT next_position FROM dedupd.lanes`); n != 4 {
					t.Fatalf("try %d: the lane is at %d", try, n)
				}
				if n := f.metric("dedupd_messages_total"); n != 4 {
					t.Fatalf("try %d: %v messages were counted, want 4", try, n)
				}
			}
			c.mend(f)
			f.handle(b)
			c.want.next = 6
			f.wantBooks(l, c.want)
			if n := f.metric("dedupd_messages_total"); n != 6 {
				t.Errorf("%v messages were counted, want 6", n)
			}
		})
	}
}

// The hold is for what somebody does once the message before it is committed.
func TestAHoldThatTheMessageBeforeItEnds(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			for i, m := range msgs {
				if string(m.Value) == "v" {
					continue
				}
				var seen bool
				if err := f.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM public.rows WHERE id = $1)`, string(m.Value)).Scan(&seen); err != nil {
					return err
				}
				if !seen {
					return sinks.HoldAt(i, errors.New("nobody has seen the one before"))
				}
			}
			return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
		})
		l := f.acquire("kafka", "orders/0")
		b := l.batch("a", "b=a", "c=b")
		for i := range 2 {
			if held := f.hold(b); !held.Landed || !strings.Contains(held.Summary, fmt.Sprint("position ", i+1)) {
				t.Errorf("try %d: the hold is %+v", i, held)
			}
		}
		f.handle(b)
		f.wantLanded("a", "b", "c")
		f.wantBooks(l, books{applied: 3, next: 3})
	})
}

// A sink may name any of the messages that hold the lane. It is held at the first.
func TestAHoldBeforeAHold(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		for i := len(msgs) - 1; i >= 0; i-- {
			if string(msgs[i].Value) == "hold" {
				return sinks.HoldAt(i, errors.New("not yet"))
			}
		}
		return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
	})
	l := f.acquire("kafka", "orders/0")
	if held := f.hold(l.batch("a", "b=hold", "c", "d=hold")); !held.Landed || !strings.Contains(held.Summary, "position 1") {
		t.Errorf("the hold is %+v", held)
	}
	f.wantLanded("a")
}

// A queue has no order: all that isn't held lands, once.
func TestAHoldInAQueue(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = holding{f.sink}
	q := f.acquireQueue("nats")
	b := q.batchAt(1, "a", "b=hold", "c", "d=hold", "e")
	for try := range 3 {
		if held := f.hold(b); try > 0 && held.Landed {
			t.Errorf("try %d: the hold is %+v", try, held)
		}
		f.wantLanded("a", "c", "e")
		f.wantBooks(q, books{applied: 3, next: 6})
	}
	f.Sink = f.sink
	f.handle(b)
	f.wantBooks(q, books{applied: 5, redelivered: 3, next: 6})
}

// Each message that holds a queue costs a transaction, so there is a limit.
func TestAQueueOfHolds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	writes := 0
	f.Sink = sinkFunc(func(context.Context, sinks.Tx, []message.Message) error {
		writes++
		return sinks.HoldAt(0, errors.New("not yet"))
	})
	f.hold(f.acquireQueue("nats").batchAt(1, ids("a", 200)...))
	if writes != 65 {
		t.Errorf("the sink was asked %d times", writes)
	}
}

// What comes before a hold may itself have to be dead-lettered, or hold the lane.
func TestARefusedMessageBeforeAHold(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T) (*fixture, *ownedLane) {
		f := newFixture(t)
		f.exec(raising("P0001", "NEW.value = 'bad'") + triggerBefore)
		f.Sink = holdingFirst{f.sink}
		return f, f.acquire("kafka", "orders/0")
	}
	t.Run("with proof", func(t *testing.T) {
		t.Parallel()
		f, l := begin(t)
		if held := f.hold(l.batch("a", "b=bad", "c=check", "d=hold")); !held.Landed || !strings.Contains(held.Summary, "position 3") {
			t.Errorf("the hold is %+v", held)
		}
		f.wantDead("poison@1", "poison@2")
		f.wantBooks(l, books{applied: 1, dead: 2, next: 3})
	})
	t.Run("without proof", func(t *testing.T) {
		t.Parallel()
		f, l := begin(t)
		if held := f.hold(l.batch("a=bad", "b=hold")); held.Landed || !strings.Contains(held.Summary, "position 0") {
			t.Errorf("the hold is %+v", held)
		}
		f.wantBooks(l, books{})
	})
}

// holdingFirst looks for what it holds before it writes.
type holdingFirst struct{ sinks.Sink }

func (s holdingFirst) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	for i, m := range batch.Messages() {
		if string(m.Value) == "hold" {
			return sinks.HoldAt(i, errors.New("not yet"))
		}
	}
	return s.Sink.Write(ctx, tx, batch)
}

// The lane's clock doesn't pass the messages that stay behind: claims would expire that
// they need.
func TestAHoldKeepsTheClock(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = holding{f.sink}
	l := f.acquire("kafka", "orders/0")
	b := l.batch("a", "b=hold", "c", "d", "e")
	for i := range b.Messages {
		b.Messages[i].Time = time.Now().Add(-time.Hour)
	}
	before := time.Now().Add(-10 * time.Hour)
	b.Messages[0].Time = before
	f.hold(b)
	f.wantClock(l, before)
}

// The answer to the COMMIT of what comes before the hold is lost.
func TestALostAnswerBeforeAHold(t *testing.T) {
	t.Parallel()
	for armed, what := range map[int32]string{1: "before it landed", 2: "after it landed"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			broken, cut := f.attachBroken()
			broken.Sink = holding{broken.sink}
			l := broken.acquire("kafka", "orders/0")
			b := l.batch("a", "b", "c=hold")
			cut.armed.Store(armed)
			broken.hold(b)
			if cut.armed.Load() != 0 {
				t.Fatal("no COMMIT was lost")
			}
			broken.hold(b)
			f.wantLanded("a", "b")
			f.wantBooks(l, books{applied: 2, next: 2})
			if n := broken.metric("dedupd_messages_total"); n != 2 {
				t.Errorf("%v messages were counted", n)
			}
		})
	}
}

// A quarantined lane, and one whose transactions are small, land what comes before, too.
func TestAHoldInQuarantine(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for range 4 {
		f.acquire("kafka", "orders/0") // and crash
	}
	f = attach(t, f.db)
	f.Sink = holding{f.sink}
	l := f.acquire("kafka", "orders/0")
	b := l.batch("a", "b", "c=hold", "d")
	for range 2 {
		f.hold(b)
		f.wantLanded("a", "b")
		f.wantBooks(l, books{applied: 2, next: 2})
	}
	if n := f.rowCount(`SELECT count(*) FROM dedupd.attempts`); n != 0 {
		t.Errorf("%d attempts are on record", n)
	}
	f.Sink = f.sink
	f.handle(b)
	f.wantBooks(l, books{applied: 4, next: 4})
}
