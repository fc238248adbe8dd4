package dedup_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const days = 24 * time.Hour

func (f *fixture) flushAges() {
	f.t.Helper()
	if err := f.FlushAges(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
}

// wantAges compares duplicates by the upper bounds of their ages, in seconds.
func (f *fixture) wantAges(since time.Duration, want map[int64]int64) {
	f.t.Helper()
	buckets, err := f.Store.DuplicateAges(f.t.Context(), since)
	if err != nil {
		f.t.Fatal(err)
	}
	got := make(map[int64]int64)
	last := int64(-1)
	for _, b := range buckets {
		got[b.UpToSeconds] = b.Duplicates
		if b.UpToSeconds <= last {
			f.t.Errorf("the bucket up to %d comes after the one up to %d", b.UpToSeconds, last)
		}
		last = b.UpToSeconds
	}
	if !maps.Equal(got, want) {
		f.t.Errorf("ages %v, want %v", got, want)
	}
}

func TestAgesOfDuplicatesAreCounted(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Window = 8 * time.Hour
	l, other := f.acquire("kafka", "orders/0"), f.acquire("nats", "lane-0")
	f.handle(l.batch("a", "b", "a", "a=other")) // a duplicate, and a conflict, which is none
	f.passTime(2 * time.Hour)
	f.handle(l.batch("a", "c"), other.batch("b"))
	f.rotate()
	f.passTime(3 * time.Hour)
	f.handle(l.batch("b", "a=other", "c", ""))
	f.wantAges(days, map[int64]int64{}) // not flushed
	f.flushAges()
	want := map[int64]int64{1: 1, 4 * 3600: 3, 2 * 3600: 1}
	f.wantAges(days, want)
	f.flushAges()
	f.wantAges(days, want)
	if used := testutil.ToFloat64(f.Metrics.WindowUsed()); used < 0.375 || used > 0.38 {
		t.Errorf("a copy after 3 h uses %v of a window of 8 h", used)
	}
	f.handle(l.batch("b"))
	f.flushAges()
	want[4*3600]++
	f.wantAges(days, want)
}

// TestOnlyWhatLandedHasAges lets the sink fail twice with the same duplicates, and
// divides a group for a message that the sink never accepts.
func TestOnlyWhatLandedHasAges(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b"))
	failures := 2
	f.sink.fail = func(*message.Message) error {
		if failures--; failures >= 0 {
			return &pgconn.PgError{Code: "40001"}
		}
		return nil
	}
	b := l.batch("a", "c", "b")
	for range 2 {
		if err := f.Handle(t.Context(), []lane.Batch{b}); err == nil {
			t.Fatal("the sink's failure was not reported")
		}
	}
	f.handle(b)
	f.sink.fail = nil
	f.handle(l.batch("a", "d=check", "e", "b"))
	f.flushAges()
	f.wantAges(days, map[int64]int64{1: 4})
	f.wantBooks(l, books{applied: 4, resent: 4, dead: 1, next: 9})
}

// TestAgesFallIntoTheirBuckets has each bound, and what is just above it.
func TestAgesFallIntoTheirBuckets(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	now := time.Now()
	f.CountAges(now, 0, 0.5, 1, 1.001, 10, 7*86400, 7*86400+0.1, 90*86400, 90*86400+0.1, 1e12, math.Inf(1))
	f.CountAges(now)
	f.flushAges()
	f.wantAges(days, map[int64]int64{1: 3, 10: 2, 7 * 86400: 1, 10 * 86400: 1, 90 * 86400: 1, math.MaxInt64: 3})
}

// TestManyWorkersAddUp counts on four processes at once, with many goroutines
// each. Were the rows not locked in one order, they would deadlock.
func TestManyWorkersAddUp(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	workers := []*fixture{f, attach(t, f.db), attach(t, f.db), attach(t, f.db)}
	const rounds = 100
	seconds := []float64{0, 5, 30, 200, 1000, 5000, 20000, 1e5, 5e5, 1e9}
	want := make(map[int64]int64)
	for _, bound := range []int64{1, 10, 60, 300, 1800, 2 * 3600, 6 * 3600, 2 * 86400, 6 * 86400, math.MaxInt64} {
		want[bound] = int64(len(workers)) * 2 * rounds
	}
	var all sync.WaitGroup
	for _, w := range workers {
		for range 2 {
			all.Go(func() {
				for range rounds {
					w.CountAges(time.Now(), seconds...)
					if err := w.FlushAges(t.Context()); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	all.Wait()
	f.wantAges(days, want)
}

// TestAFailedFlushKeepsItsCounts removes the table for a while, and has more duplicates
// meanwhile.
func TestAFailedFlushKeepsItsCounts(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	rename := func(from, to string) {
		t.Helper()
		if _, err := f.pool.Exec(t.Context(), fmt.Sprintf(`ALTER TABLE dedupd.%s RENAME TO %s`, from, to)); err != nil {
			t.Fatal(err)
		}
	}
	f.CountAges(time.Now(), 1, 1, 50)
	rename("duplicate_ages", "away")
	for range 2 {
		var missing *pgconn.PgError
		if err := f.FlushAges(t.Context()); !errors.As(err, &missing) || missing.Code != "42P01" {
			t.Errorf("flush without a table: %v", err)
		}
	}
	f.CountAges(time.Now(), 1)
	rename("away", "duplicate_ages")
	f.flushAges()
	f.flushAges()
	f.wantAges(days, map[int64]int64{1: 3, 60: 1})
}

// TestTwoFlushesAtOnce has one process flush twice, as it may at its end, while
// the first is kept waiting.
func TestTwoFlushesAtOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.CountAges(time.Now(), 1)
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `LOCK TABLE dedupd.duplicate_ages`); err != nil {
		t.Fatal(err)
	}
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			if err := f.FlushAges(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(200 * time.Millisecond)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	both.Wait()
	f.wantAges(days, map[int64]int64{1: 1})
}

func TestAgesHaveDays(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	// Sessions with other ideas of the date count for the same day: where it is
	// tomorrow already, or yesterday still.
	zone := "Etc/GMT-14"
	if time.Now().UTC().Hour() < 12 {
		zone = "Etc/GMT+12"
	}
	if _, err := f.pool.Exec(t.Context(), fmt.Sprintf(`ALTER DATABASE %s SET timezone TO '%s'`, f.db.Name, zone)); err != nil {
		t.Fatal(err)
	}
	other := attach(t, f.db)
	f.CountAges(time.Now(), 1)
	f.flushAges()
	other.CountAges(time.Now(), 1, 20)
	other.flushAges()
	f.wantAges(0, map[int64]int64{1: 2, 60: 1})

	f.passTime(3 * days)
	f.CountAges(time.Now(), 1)
	f.flushAges()
	f.wantAges(0, map[int64]int64{1: 1})
	f.wantAges(2*days, map[int64]int64{1: 1})
	f.wantAges(3*days, map[int64]int64{1: 3, 60: 1})
	buckets, err := f.Store.DuplicateAges(t.Context(), 30*days)
	if err != nil {
		t.Fatal(err)
	}
	if apart := buckets[0].LastDay.Sub(buckets[0].FirstDay); apart != 3*days || !buckets[1].FirstDay.Equal(buckets[1].LastDay) {
		t.Errorf("days of the buckets: %+v", buckets)
	}
	if apart := time.Since(buckets[0].FirstDay); apart < 0 || apart > 25*time.Hour {
		t.Errorf("today is %s", buckets[0].FirstDay)
	}

	// Days of long ago go with the next count.
	f.passTime(402 * days)
	f.flushAges()
	f.wantAges(500*days, map[int64]int64{1: 3, 60: 1})
	f.CountAges(time.Now(), 10)
	f.flushAges()
	f.wantAges(500*days, map[int64]int64{1: 1, 10: 1})
}

func TestTheLargestAgeIsForgottenInTime(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	start := time.Now()
	at := func(minutes int) time.Time { return start.Add(time.Duration(minutes) * time.Minute) }
	want := func(minutes int, want float64) {
		t.Helper()
		if got := f.RecentAge(at(minutes)); got != want {
			t.Errorf("after %d minutes the largest age is %v, want %v", minutes, got, want)
		}
	}
	want(0, 0)
	f.CountAges(at(0), 100)
	f.CountAges(at(10), 7)
	want(10, 100)
	f.CountAges(at(31), 9)
	want(59, 100)
	want(61, 9)
	want(89, 9)
	want(90, 0)
	f.CountAges(at(91), 5)
	want(300, 0)
}
