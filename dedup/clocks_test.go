package dedup_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/dedupd/dedupd/lane"
)

// batchAsOf is a batch whose messages were sent at one time.
func (l *ownedLane) batchAsOf(at time.Time, ids ...string) lane.Batch {
	b := l.batch(ids...)
	for i := range b.Messages {
		b.Messages[i].Time = at
	}
	return b
}

// wantClock checks how far a lane's clock has come, to the minute.
func (f *fixture) wantClock(l *ownedLane, want time.Time) {
	f.t.Helper()
	var got *time.Time
	if err := f.pool.QueryRow(f.t.Context(), `SELECT stream_time FROM dedupd.books WHERE source = $1 AND lane = $2`, l.Source, l.Name).Scan(&got); err != nil {
		f.t.Fatal(err)
	}
	if got == nil || got.Sub(want).Abs() > time.Minute {
		f.t.Errorf("the clock of %s is at %v, want %s", l.Lane, got, want)
	}
}

// TestAProducersClockDoesNotMoveALanes puts messages of producers whose clocks
// are far off into a backlog.
func TestAProducersClockDoesNotMoveALanes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	start := time.Now()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batchAsOf(start, "a"))
	f.rotate()
	f.passTime(3 * expiryWindow)
	for name, year := range map[string]int{"2099": 2099, "1970": 1970} {
		b := l.batchAsOf(start.Add(time.Hour), ids(name, 21)...)
		for i := range b.Messages {
			if i%3 == 0 || i == 20 {
				b.Messages[i].Time = time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC)
			}
		}
		f.handle(b)
		f.wantClock(l, start.Add(time.Hour))
		if n := f.expire(); n != 0 {
			t.Errorf("%d generations expired by a producer's clock of %d", n, year)
		}
	}
	// Even where all are in the future, the database's clock bounds them; and none
	// goes back.
	f.handle(l.batchAsOf(start.Add(1000*expiryWindow), "b"))
	f.wantClock(l, start.Add(3*expiryWindow))
	f.handle(l.batchAsOf(time.Unix(0, 0), "c"))
	f.wantClock(l, start.Add(3*expiryWindow))
	if n := f.expire(); n != 1 {
		t.Errorf("%d generations expired though the lane had passed them, want 1", n)
	}
}

// TestAQueuesClockIsThatOfTheOldestOutstanding lands messages of a queue of which
// others hold older ones.
func TestAQueuesClockIsThatOfTheOldestOutstanding(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	start := time.Now()
	l := f.acquireQueue("nats")
	land := func(outstanding time.Time, sent time.Time, ids ...string) {
		t.Helper()
		b := l.batchAsOf(sent, ids...)
		b.OutstandingSince = outstanding
		f.handle(b)
	}
	clock := func() (at *time.Time) {
		t.Helper()
		if err := f.pool.QueryRow(t.Context(), `SELECT stream_time FROM dedupd.lanes`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	land(time.Time{}, start, "a")
	if at := clock(); at != nil {
		t.Errorf("the clock is at %s, and nothing is known of what others hold", at)
	}
	land(start, start, "b")
	f.wantClock(l, start)
	f.rotate()
	f.passTime(3 * expiryWindow)
	later := start.Add(3 * expiryWindow)
	land(start.Add(time.Hour), later, "c")
	land(time.Time{}, later, "d")
	f.wantClock(l, start.Add(time.Hour))
	// Two slots in one transaction, of which one was reported earlier.
	first, second := l.batchAsOf(later, "e"), l.batchAsOf(later, "f")
	first.OutstandingSince, second.OutstandingSince = start.Add(2*time.Hour), start.Add(3*time.Hour)
	f.handle(first, second)
	f.wantClock(l, start.Add(3*time.Hour))
	if n := f.expire(); n != 0 {
		t.Errorf("%d generations expired", n)
	}
	land(later, later, "a") // comes again, as the last one
	if n := f.expire(); n != 1 {
		t.Errorf("%d generations expired, want 1", n)
	}
	f.wantLanded("a", "b", "c", "d", "e", "f")

	// What is delivered again from a position on may be of any time.
	if _, err := f.Store.ConfirmRewind(t.Context(), l.Lane, l.Assignment, 1); err != nil {
		t.Fatal(err)
	}
	if at := clock(); at != nil {
		t.Errorf("the clock is at %s after a rewind", at)
	}
	land(start, later, "g")
	f.wantClock(l, start)
}

// TestALanesClockComesBack has the database's clock jump two years ahead and back. What
// followed it in between must not hold for two years.
func TestALanesClockComesBack(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const jump = 2 * 365 * 24 * time.Hour
	busy, quiet := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(busy.batch("a"), quiet.batch("b"))
	f.rotate()
	f.passTime(jump)
	f.caughtUp(busy)
	f.caughtUp(quiet)
	f.wantClock(busy, time.Now().Add(jump))
	f.passTime(expiryWindow + time.Hour)
	if n := f.expire(); n != 0 {
		t.Errorf("%d generations expired beside lanes of which nothing is known", n)
	}
	f.passTime(0)
	f.handle(busy.batchAsOf(time.Now().Add(-time.Hour), "c"))
	f.wantClock(busy, time.Now().Add(-time.Hour))
	f.caughtUp(quiet)
	f.wantClock(quiet, time.Now())
	// From then on it only goes ahead, as ever.
	f.handle(busy.batchAsOf(time.Now().Add(-2*time.Hour), "d"))
	f.wantClock(busy, time.Now().Add(-time.Hour))
}

// TestAResetBackStopsExpiry moves a lane back by hand: claims must not expire
// before what is read again has passed them.
func TestAResetBackStopsExpiry(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	start := time.Now()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batchAsOf(start, "a", "b"))
	f.rotate()
	f.passTime(2 * expiryWindow)
	late := l.batchAsOf(start.Add(2*expiryWindow), "c")
	late.BrokerPosition = 2
	f.handle(late)

	assigned, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: l.Lane, Ordered: true, Committed: 0, HonourReset: true})
	if err != nil || !assigned.Reset || assigned.Next != 0 {
		t.Fatalf("reset: %+v, %v", assigned, err)
	}
	l.Assignment, l.at = assigned, 0
	if n := f.expire(); n != 0 {
		t.Errorf("%d generations expired though a lane was moved back", n)
	}
	f.handle(l.batchAsOf(start, "a", "b"))
	f.wantClock(l, start)
	if n := f.expire(); n != 0 {
		t.Errorf("%d generations expired though the lane has not passed them again", n)
	}
	f.handle(l.batchAsOf(start.Add(2*expiryWindow), "c"))
	f.wantBooks(l, books{applied: 3, redelivered: 3, next: 3})
	f.wantLanded("a", "b", "c")
	if n := f.expire(); n != 1 {
		t.Errorf("%d generations expired after the lane had passed them again, want 1", n)
	}
}

// TestABatchWithoutMessagesDoesNotMoveALanesClock moves a lane over a hole in the log,
// such as transaction markers, in the middle of a backlog: it says nothing of the time.
func TestABatchWithoutMessagesDoesNotMoveALanesClock(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	start := time.Now()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batchAsOf(start, "a"))
	f.rotate()
	f.passTime(3 * expiryWindow)
	f.handle(l.batchAsOf(start.Add(time.Hour), "b"))
	hole := l.batch()
	hole.Next, l.at = l.at+3, l.at+3
	f.handle(hole)
	f.wantClock(l, start.Add(time.Hour))
	f.handle(l.batchAsOf(time.Time{}, "c")) // no timestamp
	f.wantClock(l, start.Add(time.Hour))
	if n := f.expire(); n != 0 {
		t.Errorf("%d generations expired by a batch without messages", n)
	}
	f.handle(l.batchAsOf(start.Add(2*time.Hour), "a"))
	if n := len(f.landed()); n != 3 {
		t.Errorf("%d rows landed, want 3", n)
	}
}

// TestPoisonDoesNotSpeakForItsLane finds a message of a producer whose clock is
// ahead to be poison: it is then handled alone, but its time is not the lane's.
func TestPoisonDoesNotSpeakForItsLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	start := time.Now()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batchAsOf(start, "a"))
	f.rotate()
	f.passTime(3 * expiryWindow)
	for at := range 21 {
		list := ids(fmt.Sprint("at", at, "-"), 21)
		list[at] += "=check"
		b := l.batchAsOf(start.Add(time.Hour), list...)
		b.Messages[at].Time = time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC)
		f.handle(b)
		f.wantClock(l, start.Add(time.Hour))
	}
	if n := f.expire(); n != 0 {
		t.Errorf("%d generations expired", n)
	}
}
