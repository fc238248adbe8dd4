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

// A message that its sink holds its lane for holds that lane alone: the error names the
// lane, the position and the id.
func TestASinkHoldsALane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = holding{f.sink}
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	batch := other.batch("a", "b", "a", "c=hold", "d=hold")
	err := f.Handle(t.Context(), []lane.Batch{l.batch("x", "", "y"), batch})
	wantHold(t, err, "orders/1", `position 3: id "c": not yet`)
	var held *lane.HoldError
	if errors.As(err, &held); held.Lane != batch.Lane || strings.Contains(held.Summary, `"c"`) || !strings.Contains(held.Summary, "position 3") {
		t.Errorf("the hold is %+v", held)
	}
	// The worker tries the other lane again at once.
	f.wantBooks(l, books{})
	f.wantDead()
	f.wantBooks(other, books{applied: 2, resent: 1, next: 3})

	f.Sink = f.sink
	f.handle(batch)
	f.wantBooks(other, books{applied: 4, resent: 1, next: 5})
}

// A dead letter that its sink would hold the lane for stays one.
func TestAReplayThatTheSinkHolds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.sink.fail = func(*message.Message) error { return sinks.Permanent(errors.New("not now")) }
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=hold", "b"))
	f.sink.fail, f.Sink = nil, holding{f.sink}
	if r := f.replay(f.deadLetters()[0].ID); r.Outcome != dedup.ReplayDead || r.Reason != `position 0: id "a": not yet` {
		t.Errorf("%+v", r)
	}
	f.wantDead("poison@0", "poison@1")
}

// holding is a sink that holds the lane of a message with the value hold.
type holding struct{ sinks.Sink }

func (s holding) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	if err := s.Sink.Write(ctx, tx, batch); err != nil {
		return err
	}
	for i, m := range batch.Messages() {
		if string(m.Value) == "hold" {
			return sinks.HoldAt(i, errors.New("not yet"))
		}
	}
	return nil
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
