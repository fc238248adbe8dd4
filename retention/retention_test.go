package retention_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dedupd/dedupd/retention"
)

const day = 24 * time.Hour

// store keeps generations in memory, by the clock of the test's bubble.
type store struct {
	ahead       time.Duration // of the database's clock
	lanesAhead  int
	mu          sync.Mutex
	generations []retention.Generation
	// stream is how far all lanes have come; nil: they are caught up.
	stream     *time.Time
	unbuilt    int // chunks of filters to be built
	behind     bool
	calls      []string
	led        bool
	fail       string // the step that fails
	err        error
	hang       bool
	rotateTook time.Duration
	rotateErr  error // of what comes after a rotation
	busy       int   // for how many calls another process leads
	seen       seen
}

// seen is what was asked of the store.
type seen struct {
	passes, loads int
	at            []time.Time // when each pass was made
	deadAge       time.Duration
}

func (s *store) asked() seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen
}

func (s *store) fallBehind() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.behind = true
}

func (s *store) failAt(step string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = step
}

func newStore() *store {
	return &store{led: true, generations: []retention.Generation{{Number: 1, State: "open", OpenedAt: time.Now()}}}
}

func (s *store) call(name string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, name)
	if s.fail == name {
		return false, s.err
	}
	if s.busy > 0 {
		s.busy--
		return false, nil
	}
	return s.led, nil
}

func (s *store) Status(ctx context.Context) (retention.Status, error) {
	if s.hang {
		<-ctx.Done()
		return retention.Status{}, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st := retention.Status{Now: time.Now().Add(s.ahead), Stream: time.Now().Add(s.ahead), Lane: "kafka:orders/0", LanesAhead: s.lanesAhead, Generations: slices.Clone(s.generations)}
	if s.stream != nil {
		st.Stream = *s.stream
	}
	return st, nil
}

func (s *store) CountDeadLetters(context.Context) (int64, error) { return 3, nil }

func (s *store) Prepare(context.Context) (bool, error) {
	led, err := s.call("prepare")
	if led && err == nil {
		s.generations = slices.DeleteFunc(s.generations, func(g retention.Generation) bool { return g.State == "next" })
		last := s.generations[len(s.generations)-1]
		s.generations = append(s.generations, retention.Generation{Number: last.Number + 1, State: "next"})
	}
	return led, err
}

func (s *store) Rotate(_ context.Context, generation int) (bool, bool, time.Duration, error) {
	led, err := s.call("rotate")
	if !led || err != nil {
		return false, led, 0, err
	}
	for i := range s.generations {
		switch g := &s.generations[i]; {
		case g.Number == generation && g.State == "open":
			g.State, g.SealedAt = "sealed", time.Now()
			s.unbuilt++
		case g.State == "next":
			g.State, g.OpenedAt = "open", time.Now()
		}
	}
	return true, led, s.rotateTook, s.rotateErr
}

func (s *store) BuildFilter(context.Context) (int, bool, error) {
	led, err := s.call("filter")
	if !led || err != nil || s.unbuilt == 0 {
		return 0, led, err
	}
	s.unbuilt--
	s.behind = true
	return 10, led, nil
}

func (s *store) Expire(_ context.Context, window, maxHold time.Duration) (n int, led bool, err error) {
	led, err = s.call("expire")
	if !led || err != nil {
		return 0, led, err
	}
	status, _ := s.Status(context.Background())
	for i := range s.generations {
		if g := &s.generations[i]; g.State == "sealed" && (g.SealedAt.Add(window).Before(status.Stream) || g.SealedAt.Add(maxHold).Before(status.Now)) {
			g.State = "dropping"
			n++
		}
	}
	return n, led, nil
}

func (s *store) Drop(_ context.Context, generation int) (bool, error) {
	led, err := s.call("drop")
	if s.fail == fmt.Sprint("drop ", generation) {
		return false, s.err
	}
	if led && err == nil {
		s.generations = slices.DeleteFunc(s.generations, func(g retention.Generation) bool { return g.Number == generation && g.State == "dropping" })
	}
	return led, err
}

func (s *store) Sweep(context.Context) ([]string, bool, error) {
	led, err := s.call("sweep")
	return nil, led, err
}

func (s *store) ExpireDeadLetters(_ context.Context, age time.Duration) (int64, bool, error) {
	s.mu.Lock()
	s.seen.deadAge = age
	s.seen.passes++
	s.seen.at = append(s.seen.at, time.Now())
	s.mu.Unlock()
	led, err := s.call("dead letters")
	return 2, led, err
}

func (s *store) ExpireMarks(context.Context, time.Duration) (int64, bool, error) {
	led, err := s.call("marks")
	return 0, led, err
}

func (s *store) FlushAges(context.Context) error {
	_, err := s.call("flush")
	return err
}

func (s *store) LoadFilters(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.loads++
	s.behind = false
	return nil
}

func (s *store) FiltersBehind() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.behind
}

func (s *store) states() string {
	var all []string
	for _, g := range s.generations {
		all = append(all, g.State)
	}
	return strings.Join(all, " ")
}

// claim gives the open generation claims.
func (s *store) claim(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.generations {
		if g := &s.generations[i]; g.State == "open" {
			g.Claims += n
		}
	}
}

type rig struct {
	*retention.Loop
	store *store
	reg   *prometheus.Registry
	log   *strings.Builder
}

func newRig() *rig {
	r := &rig{store: newStore(), reg: prometheus.NewRegistry(), log: new(strings.Builder)}
	r.Loop = &retention.Loop{
		Store: r.store, Schedule: time.Minute, Window: 7 * day, MaxHold: 28 * day, Generation: 6 * time.Hour, MaxClaims: 1000,
		DeadLetterAge: 30 * day, Logger: slog.New(slog.NewTextHandler(r.log, nil)), Metrics: retention.NewMetrics(r.reg),
	}
	return r
}

// TestAClockThatJumpsAheadExpiresNothing has the database's clock jump by a year. A pass
// by hand, of somebody who has looked at it, does what it is asked to.
func TestAClockThatJumpsAheadExpiresNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.ClockSlack = 5 * time.Minute
		r.store.claim(1000)
		r.pass(t)
		for _, ahead := range []time.Duration{365 * day, 6 * time.Minute} {
			r.store.ahead = ahead
			time.Sleep(8 * day)
			for range 3 {
				if n := r.pass(t).Expired; n != 0 {
					t.Fatalf("%d generations expired by a clock that is %s ahead", n, ahead)
				}
			}
		}
		if n := strings.Count(r.log.String(), "the database's clock is ahead"); n != 2 {
			t.Errorf("told %d times, want once each hour:\n%s", n, r.log)
		}
		byHand := *r.Loop
		byHand.ClockSlack = 0
		if report, err := byHand.Pass(t.Context(), false); err != nil || report.Expired != 1 {
			t.Errorf("a pass by hand: %+v, %v", report, err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.ClockSlack = 5 * time.Minute
		r.store.claim(1000)
		r.pass(t)
		r.store.ahead = 4 * time.Minute
		time.Sleep(8 * day)
		if n := r.pass(t).Expired; n != 1 {
			t.Errorf("%d generations expired by a clock that is nearly right, want 1", n)
		}
	})
}

// TestAWrongClockSealsNothing has the database's clock go wrong while a generation is due.
func TestAWrongClockSealsNothing(t *testing.T) {
	for name, by := range map[string]time.Duration{"ahead": 6 * time.Minute, "behind": -6 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig()
				r.ClockSlack = 5 * time.Minute
				r.store.claim(r.MaxClaims) // it is due by their number
				sealed := func() bool { return r.pass(t).Sealed != 0 }
				r.store.ahead = by
				for range 3 {
					if sealed() {
						t.Fatal("a generation was sealed by a wrong clock")
					}
				}
				if n := strings.Count(r.log.String(), "differ"); n != 1 {
					t.Errorf("told %d times, want once:\n%s", n, r.log)
				}
				byHand := *r.Loop
				byHand.ClockSlack = 0
				if report, err := byHand.Pass(t.Context(), false); err != nil || report.Sealed == 0 {
					t.Errorf("a pass by hand: %+v, %v", report, err)
				}

				// The clock is set right.
				r.store.claim(r.MaxClaims)
				if sealed() {
					t.Fatal("a generation was sealed by a wrong clock")
				}
				r.store.ahead = 0
				if !sealed() {
					t.Error("clocks agree again, and a generation that is due isn't sealed")
				}

				// It is this process' clock that is wrong, and stays so.
				r.store.ahead = by
				r.store.claim(r.MaxClaims)
				if sealed() {
					t.Error("time that has passed before counts")
				}
				time.Sleep(r.Generation)
				if !sealed() {
					t.Error("a generation is held up for longer than one is open")
				}

				// There are too many claims to wait.
				r.store.ahead = 0
				r.pass(t)
				r.store.ahead = by
				r.store.claim(2*r.MaxClaims - 1)
				if sealed() {
					t.Error("a generation was sealed by a wrong clock")
				}
				r.store.claim(1)
				if !sealed() {
					t.Error("the open generation grows without an end")
				}
			})
		})
	}
}

func (r *rig) pass(t *testing.T) retention.Report {
	t.Helper()
	report, err := r.Pass(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func (r *rig) wantMetric(t *testing.T, name string, want float64) {
	t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			if got := m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount()); got != want {
				t.Errorf("%s is %g, want %g", name, got, want)
			}
			return
		}
	}
	t.Errorf("there is no metric %s", name)
}

// TestWhatAPassTells looks at what alerts and dashboards go by.
func TestWhatAPassTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.claim(5)
		r.store.generations[0].Bytes = 700
		time.Sleep(3 * time.Hour)
		if report, err := r.Pass(t.Context(), true); err != nil || report.Sealed != 1 || report.DeadLetters != 2 || report.Filtered != 10 {
			t.Errorf("%+v, %v", report, err)
		}
		r.store.generations[1].Bytes = 50
		time.Sleep(time.Hour)
		r.pass(t)
		r.wantMetric(t, "dedupd_claims_bytes", 750)
		r.wantMetric(t, "dedupd_oldest_claim_age_seconds", (4 * time.Hour).Seconds())
		r.wantMetric(t, "dedupd_expired_dead_letters_total", 4)
		r.wantMetric(t, "dedupd_rotation_seconds", 1)
		r.wantMetric(t, "dedupd_retention_last_success_timestamp_seconds", float64(time.Now().Unix()))
		for _, want := range []string{"generation sealed", "filters built", "dead letters expired"} {
			if !strings.Contains(r.log.String(), want) {
				t.Errorf("%q isn't logged:\n%s", want, r.log)
			}
		}
	})
}

// TestPassesFollowTheSchedule has many processes that start at the same moment.
func TestPassesFollowTheSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		began := time.Now()
		var rigs []*rig
		for range 20 {
			r := newRig()
			rigs = append(rigs, r)
			go r.Run(ctx)
		}
		time.Sleep(time.Hour + 5*time.Second)
		stop()
		synctest.Wait()
		var first []time.Duration
		for _, r := range rigs {
			at := r.store.asked().at
			first = append(first, at[0].Sub(began))
			if n := len(at); n < 54 || n > 61 {
				t.Errorf("%d passes in an hour", n)
			}
			var waits []time.Duration
			for i := range at[1:] {
				waits = append(waits, at[i+1].Sub(at[i]))
			}
			if least, most := slices.Min(waits), slices.Max(waits); least < time.Minute || most > 66*time.Second || most-least < time.Second {
				t.Errorf("from %s to %s between passes, want a minute and up to a tenth, never the same", least, most)
			}
		}
		if least, most := slices.Min(first), slices.Max(first); most > 5*time.Second || most-least < time.Second {
			t.Errorf("the first passes came from %s to %s after the start, want them spread over 5s", least, most)
		}
		if age := rigs[0].store.asked().deadAge; age != 30*day {
			t.Errorf("dead letters were kept for %s", age)
		}
		rigs[0].wantMetric(t, "dedupd_dead_letters", 3)
	})
}

func TestAGenerationIsSealedByAgeOrSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		time.Sleep(7 * time.Hour)
		if report := r.pass(t); report.Sealed != 0 {
			t.Error("a generation without claims was sealed")
		}
		r.store.claim(1)
		if report := r.pass(t); report.Sealed != 1 || report.Filtered != 10 {
			t.Errorf("after its time: %+v", report)
		}
		time.Sleep(time.Hour)
		r.store.claim(999)
		if report := r.pass(t); report.Sealed != 0 {
			t.Error("a generation was sealed before its time")
		}
		r.store.claim(1)
		if report := r.pass(t); report.Sealed != 2 {
			t.Errorf("at its size: %+v", report)
		}
		r.store.claim(1)
		if report, err := r.Pass(t.Context(), true); err != nil || report.Sealed != 3 {
			t.Errorf("by hand: %+v, %v", report, err)
		}
		r.wantMetric(t, "dedupd_generations", 4)
		r.wantMetric(t, "dedupd_claims", 1002)
	})
}

func TestGenerationsGoWhenTheWindowHasPassed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		for range 3 {
			r.store.claim(5)
			if _, err := r.Pass(t.Context(), true); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(7 * day)
		r.pass(t)
		if got := r.store.states(); got != "sealed sealed sealed open next" {
			t.Errorf("just before the window's end: %s", got)
		}
		time.Sleep(time.Second)
		// One table is dropped a pass.
		for _, want := range []string{"dropping dropping open next", "dropping open next", "open next"} {
			r.pass(t)
			if got := r.store.states(); got != want {
				t.Errorf("after the window: %s, want %s", got, want)
			}
		}
		r.wantMetric(t, "dedupd_expired_claims_total", 15)
		r.wantMetric(t, "dedupd_retention_held_seconds", 0)
	})
}

func TestALaneThatHoldsUpExpiryIsToldOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.claim(5)
		if _, err := r.Pass(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		r.store.stream = new(time.Now())
		time.Sleep(7*day + 30*time.Minute)
		r.pass(t)
		r.wantMetric(t, "dedupd_retention_held_seconds", 1800)
		if strings.Contains(r.log.String(), "orders/0") {
			t.Errorf("told at once: %s", r.log)
		}
		for range 3 {
			time.Sleep(time.Hour)
			r.pass(t)
		}
		if n := strings.Count(r.log.String(), "lane=kafka:orders/0"); n != 1 {
			t.Errorf("told %d times within hours, want once: %s", n, r.log)
		}
		time.Sleep(2 * day)
		r.pass(t)
		if n := strings.Count(r.log.String(), "lane=kafka:orders/0"); n != 2 {
			t.Errorf("told %d times after two more days, want twice", n)
		}
		time.Sleep(19 * day)
		r.pass(t)
		if got := r.store.states(); got != "open" && got != "open next" {
			t.Errorf("after max_hold: %s", got)
		}
		if !strings.Contains(r.log.String(), "max_hold=672h") {
			t.Errorf("not told that max_hold ended it: %s", r.log)
		}
	})
}

// told counts the warnings of lanes.
func (r *rig) told(t *testing.T, behind, stands int) {
	t.Helper()
	if n := strings.Count(r.log.String(), "a lane is behind: claims are kept"); n != behind {
		t.Errorf("told %d times that a lane is behind, want %d:\n%s", n, behind, r.log)
	}
	if n := strings.Count(r.log.String(), "lanes forget"); n != stands {
		t.Errorf("told %d times to forget a lane, want %d:\n%s", n, stands, r.log)
	}
}

// TestALaneThatCatchesUpIsNotToBeForgotten ends an outage of two days: the lane
// is behind, and moves. Then it stops.
func TestALaneThatCatchesUpIsNotToBeForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.claim(5)
		if _, err := r.Pass(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		clock := time.Now()
		r.store.stream = &clock
		time.Sleep(9 * day)
		clock = clock.Add(4 * day)
		r.pass(t)
		r.told(t, 1, 0)
		r.wantMetric(t, "dedupd_retention_held_seconds", (2 * day).Seconds())
		for range 3 {
			time.Sleep(50 * time.Minute)
			clock = clock.Add(12 * time.Hour)
			r.pass(t)
		}
		r.told(t, 1, 0)
		time.Sleep(59 * time.Minute)
		r.pass(t)
		r.told(t, 1, 0)
		time.Sleep(time.Minute)
		r.pass(t)
		r.told(t, 1, 1)
		// It passes them after all.
		clock = clock.Add(3 * day)
		r.store.fail, r.store.err = "expire", errors.New("lock time-out")
		if _, err := r.Pass(t.Context(), false); err == nil {
			t.Error("the failed expiry was not told of")
		}
		r.wantMetric(t, "dedupd_retention_held_seconds", 0)
	})
}

// TestAFailingExpiryIsNoLanesFault has every lane caught up.
func TestAFailingExpiryIsNoLanesFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.claim(5)
		if _, err := r.Pass(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		time.Sleep(7 * day)
		r.store.fail, r.store.err = "expire", errors.New("lock time-out")
		for range 3 {
			time.Sleep(time.Hour)
			if _, err := r.Pass(t.Context(), false); err == nil {
				t.Error("the failed expiry was not told of")
			}
		}
		r.told(t, 0, 0)
		r.wantMetric(t, "dedupd_retention_held_seconds", 0)
	})
}

// TestATableThatCannotBeDroppedDoesNotKeepTheOthers has one that somebody reads.
func TestATableThatCannotBeDroppedDoesNotKeepTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		expired := func(numbers ...int) {
			for _, n := range numbers {
				r.store.generations = append(r.store.generations, retention.Generation{Number: n, State: "dropping", SealedAt: time.Now()})
			}
		}
		r.store.generations = nil
		expired(1, 2, 3)
		r.store.fail, r.store.err = "drop 1", errors.New("lock time-out")
		report, err := r.Pass(t.Context(), false)
		if err == nil || !strings.Contains(err.Error(), "lock time-out") || !slices.Equal(report.Dropped, []int{2}) {
			t.Errorf("dropped %d, want 2 alone: %v", report.Dropped, err)
		}
		if report := r.pass(t); !slices.Equal(report.Dropped, []int{3}) {
			t.Errorf("dropped %d, want 3", report.Dropped)
		}
		r.store.fail = ""
		if report := r.pass(t); !slices.Equal(report.Dropped, []int{1}) {
			t.Errorf("dropped %d at last, want 1", report.Dropped)
		}

		// However many can't be dropped, each has its turn, a few a pass.
		expired(4, 5, 6, 7, 8, 9, 10, 11)
		r.store.fail = "drop"
		r.store.calls = nil
		if _, err := r.Pass(t.Context(), false); err == nil {
			t.Error("no error")
		}
		if n := len(slices.DeleteFunc(r.store.calls, func(c string) bool { return c != "drop" })); n != 5 {
			t.Errorf("%d tries in one pass, want 5", n)
		}
		r.store.fail = ""
		if report := r.pass(t); !slices.Equal(report.Dropped, []int{9}) {
			t.Errorf("dropped %d, want the one behind those that failed", report.Dropped)
		}
	})
}

// TestARotationByHandWaitsForTheLeader finds another process at work, for a while
// or for too long.
func TestARotationByHandWaitsForTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.claim(5)
		r.store.busy = 50
		if report, err := r.Pass(t.Context(), true); err != nil || report.Sealed != 1 || !report.Led {
			t.Errorf("%+v, %v", report, err)
		}
		r.store.claim(5)
		r.store.busy = math.MaxInt
		start := time.Now()
		report, err := r.Pass(t.Context(), true)
		if err == nil || !strings.Contains(err.Error(), "another process runs retention just now; try again") || report.Sealed != 0 || report.Led {
			t.Errorf("%+v, %v", report, err)
		}
		if took := time.Since(start).Round(time.Second); took != 10*time.Second {
			t.Errorf("it waited for %s, want 10s", took)
		}
		// By the schedule nobody waits.
		start = time.Now()
		if report := r.pass(t); report.Led || time.Since(start) != 0 {
			t.Errorf("%+v after %s", report, time.Since(start))
		}
	})
}

func TestASealThatSomethingFollowedIsToldOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.claim(5)
		r.store.rotateErr = errors.New("read the catalog: connection lost")
		if report, err := r.Pass(t.Context(), true); err == nil || report.Sealed != 1 {
			t.Errorf("%+v, %v", report, err)
		}
	})
}

func TestFiltersAreLoadedSoonAfterTheyAreBuilt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.led = false // another process builds them
		r.store.behind = true
		ctx, stop := context.WithCancel(t.Context())
		go r.Run(ctx)
		synctest.Wait()
		if n := r.store.asked().loads; n != 1 {
			t.Errorf("filters were loaded %d times at the start, want once", n)
		}
		time.Sleep(10 * time.Second)
		r.store.fallBehind()
		before := r.store.asked().loads
		time.Sleep(3 * time.Second)
		if n := r.store.asked().loads - before; n != 1 {
			t.Errorf("filters were loaded %d times soon after they were built, want once", n)
		}
		stop()
		synctest.Wait()
	})
}

func TestWhoIsNotTheLeaderOnlyLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.led = false
		r.store.claim(5)
		time.Sleep(8 * time.Hour)
		report := r.pass(t)
		if report.Led || report.Sealed != 0 {
			t.Errorf("%+v", report)
		}
		if want := []string{"flush", "dead letters"}; !slices.Equal(r.store.calls, want) {
			t.Errorf("it went on to %q", r.store.calls)
		}
		r.wantMetric(t, "dedupd_retention_last_success_timestamp_seconds", 0)
		r.wantMetric(t, "dedupd_claims", 5)
		if r.store.seen.loads != 1 {
			t.Errorf("it loaded filters %d times, want once", r.store.seen.loads)
		}
	})
}

func TestAFailedStepDoesNotKeepTheOthers(t *testing.T) {
	for _, step := range []string{"flush", "dead letters", "prepare", "rotate", "expire", "drop", "sweep", "filter"} {
		t.Run(step, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig()
				r.store.generations = append([]retention.Generation{
					{Number: -1, State: "dropping", SealedAt: time.Now()}, {Number: 0, State: "sealed", SealedAt: time.Now()},
				}, r.store.generations...)
				r.store.claim(5)
				time.Sleep(8 * day)
				r.store.fail, r.store.err = step, errors.New("permission denied")
				if _, err := r.Pass(t.Context(), false); err == nil || !strings.Contains(err.Error(), "permission denied") {
					t.Errorf("got %v", err)
				}
				r.wantMetric(t, "dedupd_retention_last_success_timestamp_seconds", 0)
				for _, other := range []string{"flush", "dead letters", "expire", "drop", "sweep", "filter"} {
					if !slices.Contains(r.store.calls, other) {
						t.Errorf("%s was not done", other)
					}
				}
			})
		})
	}
}

func TestFailuresAreToldOnceAndTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.fail, r.store.err = "sweep", errors.New("permission denied")
		ctx, stop := context.WithCancel(t.Context())
		go r.Run(ctx)
		time.Sleep(time.Hour)
		if n := r.store.asked().passes; n < 50 {
			t.Errorf("%d passes in an hour of failures", n)
		}
		for _, step := range []string{"", "sweep"} { // it ends, and comes back
			r.store.failAt(step)
			time.Sleep(time.Hour)
		}
		stop()
		synctest.Wait()
		if n := strings.Count(r.log.String(), "permission denied"); n != 2 {
			t.Errorf("two failures with the same text were logged %d times", n)
		}
	})
}

func TestAMissingTableIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for state, want := range map[string]string{"sealed": "neither applied nor dropped", "open": "nothing is applied"} {
			r := newRig()
			r.store.generations = []retention.Generation{{Number: 7, State: state, OpenedAt: time.Now(), SealedAt: time.Now(), Missing: true}}
			_, err := r.Pass(t.Context(), false)
			if err == nil || !strings.Contains(err.Error(), "generation 7 ("+state+") is gone") || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v", state, err)
			}
		}
		// The next one's holds nothing. It is made again before it is opened.
		r := newRig()
		r.store.claim(5)
		r.store.generations = append(r.store.generations, retention.Generation{Number: 2, State: "next", Missing: true})
		if report, err := r.Pass(t.Context(), true); err != nil || report.Sealed != 1 || !slices.Contains(r.store.calls, "prepare") {
			t.Errorf("%+v, %v after %q", report, err, r.store.calls)
		}
		r.store.generations = []retention.Generation{{Number: 2, State: "next", Missing: true}}
		r.pass(t)
	})
}

func TestAPassThatHangsIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.store.hang = true
		if _, err := r.Pass(t.Context(), false); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

// TestClocksThatAreAheadAreTold shows lanes and generations whose clocks are ahead, and
// how far the database's is.
func TestClocksThatAreAheadAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		want := func(text string) {
			t.Helper()
			if err := testutil.GatherAndCompare(r.reg, strings.NewReader(text), "dedupd_database_clock_ahead_seconds", "dedupd_lanes_clock_ahead", "dedupd_generations_clock_ahead"); err != nil {
				t.Error(err)
			}
		}
		const help = `# HELP dedupd_database_clock_ahead_seconds How far the database's clock is ahead of this process'; negative where it is behind.
# TYPE dedupd_database_clock_ahead_seconds gauge
dedupd_database_clock_ahead_seconds %d
# HELP dedupd_generations_clock_ahead Generations that were opened or sealed at a time more than a minute ahead of the database's clock: their claims are kept longer by as much.
# TYPE dedupd_generations_clock_ahead gauge
dedupd_generations_clock_ahead %d
# HELP dedupd_lanes_clock_ahead Lanes whose clock is ahead of the database's by more than a minute: while there is one, claims don't expire before retention.max_hold.
# TYPE dedupd_lanes_clock_ahead gauge
dedupd_lanes_clock_ahead %d
`
		r.pass(t)
		want(fmt.Sprintf(help, 0, 0, 0))
		r.store.ahead, r.store.lanesAhead = -10*time.Minute, 2
		for i, state := range []string{"sealed", "sealed", "dropping"} {
			r.store.generations = append(r.store.generations, retention.Generation{Number: i + 10, State: state, OpenedAt: time.Now(), SealedAt: time.Now(), Ahead: true})
		}
		r.store.fail, r.store.err = "drop", errors.New("it is being read")
		_, _ = r.Pass(t.Context(), false)
		want(fmt.Sprintf(help, -600, 2, 2))
	})
}

func TestMetricsAreRegisteredOnce(t *testing.T) {
	r := newRig()
	if n, err := testutil.GatherAndCount(r.reg); err != nil || n == 0 {
		t.Errorf("%d metrics, %v", n, err)
	}
}
