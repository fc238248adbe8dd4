package dedup_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// saying is a sink that writes what its inner one does, and says of a message what its
// value names.
type saying struct{ sinks.Sink }

func (s saying) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	for i, m := range batch.Messages() {
		switch string(m.Value) {
		case "present":
			batch.Outcome(i, sinks.AlreadyPresent)
		case "stale":
			batch.Outcome(i, sinks.Stale)
		case "rejected":
			batch.Outcome(i, sinks.Rejected)
		case "other":
			batch.Outcome(i, 7)
		}
	}
	return s.Sink.Write(ctx, tx, batch)
}

func TestSinkOutcomesAreBooked(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = saying{f.sink}
		l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
		// With a duplicate and a message without an id between them: what the sink says
		// is by its own indexes.
		f.handle(l.batch("a=stale", "b", "a=stale", "", "c=rejected", "d=present"), other.batch("e=stale", "b", "f"))
		f.wantBooks(l, books{applied: 4, alreadyPresent: 1, stale: 1, rejected: 1, resent: 1, dead: 1, next: 6})
		f.wantBooks(other, books{applied: 2, stale: 1, resent: 1, next: 3})
	})
}

// What is said while a try fails isn't booked: the messages are tried again in other
// batches.
func TestOutcomesOfAFailedTryAreForgotten(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = saying{f.sink}
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=stale", "b=check", "c=present", "d", "e=rejected"))
	f.wantBooks(l, books{applied: 4, alreadyPresent: 1, stale: 1, rejected: 1, dead: 1, next: 5})
	f.wantDead("poison@1")
}

func TestAnUnknownOutcomeHoldsTheLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = saying{f.sink}
	l := f.acquire("kafka", "orders/0")
	err := f.Handle(t.Context(), []lane.Batch{l.batch("a", "b=other")})
	var held *lane.HoldError
	if !errors.As(err, &held) || !strings.Contains(err.Error(), "outcome 7") {
		t.Errorf("the error is %v", err)
	}
	f.wantBooks(l, books{})
}

func TestAReplayBooksWhatTheSinkSays(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = saying{f.sink}
	f.sink.fail = func(*message.Message) error { return sinks.Permanent(errors.New("not now")) }
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=stale", "b"))
	f.wantBooks(l, books{dead: 2, next: 2})
	f.sink.fail = nil
	for i, want := range []string{"stale", "written"} {
		if r := f.replay(f.deadLetters()[0].ID); r.Outcome != dedup.ReplayApplied || r.SinkOutcome != want {
			t.Errorf("dead letter %d: %+v, want %s", i, r, want)
		}
	}
	f.wantBooks(l, books{applied: 2, stale: 1, next: 2})
}

// A message that the target didn't need is no proof that its table can be written: see
// doubts.
func TestAStaleMessageProvesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = saying{f.sink}
	f.sink.fail = func(m *message.Message) error {
		if string(m.Value) == "stale" {
			return nil
		}
		return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "P0001", Message: "refused"}
	}
	l := f.acquire("kafka", "orders/0")
	err := f.Handle(t.Context(), []lane.Batch{l.batch("a=stale", "b", "c=stale")})
	var held *lane.HoldError
	if !errors.As(err, &held) {
		t.Errorf("the error is %v", err)
	}
	f.wantDead()
}
