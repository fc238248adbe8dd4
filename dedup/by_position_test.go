package dedup_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func byPosition(t *testing.T) *fixture {
	t.Helper()
	t.Parallel()
	f := newFixture(t)
	f.Strategy = policy.StrategyPosition
	return f
}

func (f *fixture) rowCount(sql string) (n int) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), sql).Scan(&n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

// What the producer sends twice is applied twice, and nothing is claimed.
func TestByPositionNothingIsClaimed(t *testing.T) {
	f := byPosition(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b", "a"))
	f.handle(l.batch("a", ""))
	f.wantLanded("a", "b", "a", "a")
	f.wantBooks(l, books{applied: 4, dead: 1, next: 5})
	f.wantDead("no_id@4")
	if n := f.rowCount(`SELECT count(*) FROM dedupd.claims`); n != 0 {
		t.Errorf("%d claims", n)
	}
}

// A batch that two workers have is applied by one of them.
func TestByPositionEachPositionIsAppliedOnce(t *testing.T) {
	f := byPosition(t)
	l := f.acquire("kafka", "orders/0")
	b := l.batchAt(0, "a", "b")
	f.handle(b)
	f.handle(b) // as after a commit whose answer was lost: the row says that it landed
	zombie := l.batchAt(2, "c")
	owner := f.acquire("kafka", "orders/0")
	if err := f.Handle(t.Context(), []lane.Batch{zombie}); err == nil {
		t.Error("a fenced worker's batch was applied")
	}
	f.handle(owner.batchAt(2, "c"))
	f.wantLanded("a", "b", "c")
}

// A commit whose answer was lost: the sink isn't asked again, which would judge rows that are
// as the batch has left them.
func TestByPositionTheSinkDoesNotSeeWhatHasLanded(t *testing.T) {
	f := byPosition(t)
	l := f.acquire("kafka", "orders/0")
	b := l.batchAt(0, "a", "b")
	f.handle(b)
	f.Sink = sinkFunc(func(context.Context, sinks.Tx, []message.Message) error {
		return sinks.HoldAt(0, errors.New("the row isn't as expected any more"))
	})
	f.handle(b)
	f.wantLanded("a", "b")
	f.wantBooks(l, books{applied: 2, next: 2})
}

// Poison is found alone, and its dead letter is known by its place: the same id may come
// again, and so may the same place of another stream.
func TestByPositionDeadLettersAreReplayedOnce(t *testing.T) {
	f := byPosition(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b=check", "c", "b=check"))
	f.wantBooks(l, books{applied: 2, dead: 2, next: 4})
	f.mend()
	results := make(chan dedup.Replayed)
	all := f.deadLetters()
	for _, d := range all {
		for range 3 {
			go func() {
				r, err := f.Replay(t.Context(), "ann@host", d.ID)
				if err != nil {
					r.Outcome = err.Error()
				}
				results <- r
			}()
		}
	}
	got := make(map[string]int)
	for range 3 * len(all) {
		got[(<-results).Outcome]++
	}
	if got[dedup.ReplayApplied] != 2 || got[dedup.ReplayGone] != 4 {
		t.Errorf("three replays of each of two dead letters: %v", got)
	}
	f.wantBooks(l, books{applied: 4, next: 4})
	if n := f.rowCount(`SELECT count(*) FROM public.rows WHERE id = 'b'`); n != 2 {
		t.Errorf("%d rows of the dead letters, want 2", n)
	}
}

func TestByPositionAQueueIsRefused(t *testing.T) {
	f := byPosition(t)
	q := f.acquireQueue("nats")
	err := f.Handle(t.Context(), []lane.Batch{q.batchAt(1, "a")})
	var held *lane.HoldError
	if !errors.As(err, &held) || !strings.Contains(err.Error(), "no order") {
		t.Errorf("the error is %v", err)
	}
	f.wantLanded()
}

func TestGoingBackByPositionNeedsReapply(t *testing.T) {
	f := byPosition(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b"))
	if _, err := f.Store.SetPosition(t.Context(), "ann@host", "kafka", "orders/0", 1, false); !errors.Is(err, dedup.ErrReapplies) {
		t.Errorf("the error is %v", err)
	}
	f.wantBooks(l, books{applied: 2, next: 2})
	if _, err := f.Store.SetPosition(t.Context(), "ann@host", "kafka", "orders/0", 3, false); err != nil {
		t.Error(err)
	}
	if _, err := f.Store.SetPosition(t.Context(), "ann@host", "kafka", "orders/0", 1, true); err != nil {
		t.Error(err)
	}
}
