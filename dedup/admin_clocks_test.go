package dedup_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/message"
)

// clockJump is how far the database's clock is wrong.
const clockJump = 2 * 365 * 24 * time.Hour

func (f *fixture) setClock(l *ownedLane, set generations.ClockSetting) error {
	f.t.Helper()
	audits := f.audits()
	c, err := f.Store.SetLaneClock(f.t.Context(), "ann@host", l.Lane, set)
	if n := f.audits() - audits; err == nil && n != 1 || err != nil && n != 0 {
		f.t.Errorf("%d lines in the audit, and the error is %v", n, err)
	}
	if at := f.laneStates()[l.Source+" "+l.Name].StreamTime; err == nil && ((at == nil) != (c.To == nil) || at != nil && !at.Equal(*c.To)) {
		f.t.Errorf("the lane's clock is at %v, want %v", at, c.To)
	}
	return err
}

func (f *fixture) setGenerationClock(generation int, set generations.ClockSetting) error {
	f.t.Helper()
	audits := f.audits()
	_, err := f.Store.Generations().SetClock(f.t.Context(), "ann@host", generation, set)
	if n := f.audits() - audits; err == nil && n != 1 || err != nil && n != 0 {
		f.t.Errorf("%d lines in the audit, and the error is %v", n, err)
	}
	return err
}

func wantErr(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func (f *fixture) wantExpired(want int, when string) {
	f.t.Helper()
	if n := f.expire(); n != want {
		f.t.Errorf("%s: %d generations expired, want %d", when, n, want)
	}
}

// The owner may set a lane's clock back; forward only by saying that claims may expire
// earlier.
func TestALanesClockIsSetByHand(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	start := time.Now()
	f.rotate()
	f.passTime(2 * expiryWindow)
	f.caughtUp(l)

	wantErr(t, f.setClock(l, generations.ClockSetting{To: start}), nil)
	if line, detail := f.audited(); line != "test ann@host lanes set-clock lane orders/0 of source kafka" || detail["from"] == nil || detail["to"] == nil {
		t.Errorf("audited %s, %v", line, detail)
	}
	f.wantExpired(0, "set back")
	wantErr(t, f.setClock(l, generations.ClockSetting{To: start.Add(time.Hour)}), generations.ErrExpireEarlier)
	wantErr(t, f.setClock(l, generations.ClockSetting{Now: true}), generations.ErrExpireEarlier)
	wantErr(t, f.setClock(l, generations.ClockSetting{To: start.Add(3 * expiryWindow), Earlier: true}), generations.ErrClockAhead)
	f.wantClock(l, start)

	wantErr(t, f.setClock(l, generations.ClockSetting{}), nil)
	f.wantExpired(0, "not known")
	wantErr(t, f.setClock(l, generations.ClockSetting{To: start}), generations.ErrExpireEarlier)
	wantErr(t, f.setClock(l, generations.ClockSetting{To: start, Earlier: true}), nil)

	f.handle(l.batchAsOf(start.Add(time.Hour), "b")) // moves it on
	f.wantClock(l, start.Add(time.Hour))
	f.wantExpired(0, "a batch from within the window")
	wantErr(t, f.setClock(l, generations.ClockSetting{Now: true, Earlier: true}), nil)
	f.wantExpired(1, "set forward")
	wantErr(t, f.setClock(&ownedLane{Lane: message.Lane{Source: "kafka", Name: "orders/1"}}, generations.ClockSetting{}), dedup.ErrNoLane)
}

// A lane whose clock is ahead, and to which nothing comes, holds up expiry for its scope.
// It is named, and can be set right.
func TestALanesClockThatIsAheadIsSetRight(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	gone, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(gone.batch("a"), other.batch("b"))
	f.rotate()
	f.passTime(clockJump)
	f.caughtUp(gone)
	f.passTime(2 * expiryWindow)
	f.caughtUp(other)
	f.wantExpired(0, "of one lane the clock isn't believed")

	s := f.status()
	if s.LanesAhead != 1 || s.Lane != "kafka:orders/0" || !s.Stream.IsZero() {
		t.Errorf("%d lanes are ahead, %s holds up expiry, the stream clock is at %s", s.LanesAhead, s.Lane, s.Stream)
	}
	for name, want := range map[string]bool{"kafka orders/0": true, "kafka orders/1": false} {
		if l := f.laneStates()[name]; l.ClockAhead != want || l.HoldsUpExpiry != want {
			t.Errorf("%s: ahead %v, holds up expiry %v, want %v", name, l.ClockAhead, l.HoldsUpExpiry, want)
		}
	}
	wantErr(t, f.setClock(gone, generations.ClockSetting{Now: true}), generations.ErrExpireEarlier)
	wantErr(t, f.setClock(gone, generations.ClockSetting{Now: true, Earlier: true}), nil)
	if s := f.status(); s.LanesAhead != 0 || s.Stream.IsZero() {
		t.Errorf("%d lanes are ahead, the stream clock is at %s", s.LanesAhead, s.Stream)
	}
	f.wantExpired(1, "all lanes have passed it")
}

// A clock that is ahead doesn't show that a lane is in use.
func TestALaneWhoseClockIsAheadIsForgotten(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.passTime(clockJump)
	f.caughtUp(l)
	f.passTime(0)
	f.exec(`UPDATE dedupd.lanes SET updated_at = now() - interval '1 hour', acquired_at = now() - interval '1 hour'`)
	if _, err := f.Store.ForgetLane(t.Context(), "ann@host", l.Source, l.Name, false); err != nil {
		t.Error(err)
	}
}

// A generation that was sealed by a clock that was ahead is kept until that time, and a
// window longer. Set right, it is kept for a window, and no shorter unless that is said.
func TestAGenerationsClockIsSetByHand(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	f.passTime(clockJump)
	f.rotate()
	f.passTime(0)
	f.handle(l.batch("b"))
	for i, g := range f.generations() {
		if s := f.status(); !g.Ahead(s.Now) {
			t.Errorf("generation %d: %s, %v, and isn't ahead of %s", i, g.State, g.OpenedAt, s.Now)
		}
	}
	at := func(d time.Duration) {
		t.Helper()
		f.passTime(d)
		f.caughtUp(l)
	}
	at(2 * expiryWindow)
	f.wantExpired(0, "sealed in two years")
	at(0)
	wantErr(t, f.setGenerationClock(1, generations.ClockSetting{To: time.Now().Add(-time.Hour)}), generations.ErrExpireEarlier)
	wantErr(t, f.setGenerationClock(1, generations.ClockSetting{To: time.Now().Add(time.Hour), Earlier: true}), generations.ErrClockAhead)
	wantErr(t, f.setGenerationClock(1, generations.ClockSetting{Now: true}), nil)
	if line, detail := f.audited(); line != "test ann@host retention set-clock generation 1" || detail["from"] == nil || detail["state"] != "sealed" {
		t.Errorf("audited %s, %v", line, detail)
	}
	wantErr(t, f.setGenerationClock(1, generations.ClockSetting{To: time.Now().Add(-time.Hour)}), generations.ErrExpireEarlier)
	f.passTime(2 * time.Hour)
	wantErr(t, f.setGenerationClock(1, generations.ClockSetting{To: time.Now().Add(time.Hour)}), nil) // kept for longer
	at(expiryWindow + 30*time.Minute)
	f.wantExpired(0, "a window hasn't passed")

	// The open one is opened in two years: it would be sealed no sooner.
	wantErr(t, f.setGenerationClock(2, generations.ClockSetting{To: time.Now().Add(-time.Hour)}), nil)
	f.rotate()
	for _, g := range f.generations() {
		if g.Ahead(f.status().Now) {
			t.Errorf("generation %d, %s, is still ahead", g.Number, g.State)
		}
	}
	at(expiryWindow + 90*time.Minute)
	f.wantExpired(1, "a window has passed")
	wantErr(t, f.setGenerationClock(2, generations.ClockSetting{To: time.Now().Add(-2 * expiryWindow), Earlier: true}), nil)
	f.wantExpired(1, "set back, and that was meant")
	for _, g := range []int{1, 2, 4, 99} { // gone, gone, next, never there
		wantErr(t, f.setGenerationClock(g, generations.ClockSetting{Now: true}), generations.ErrNoGeneration)
	}
}

// A generation that is sealed while the database's clock is behind counts as sealed when
// it was opened: otherwise it would expire as soon as the clock is right.
func TestAClockThatIsBehindSealsNothingEarlier(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	f.passTime(-clockJump)
	f.rotate()
	f.handle(l.batch("b"))
	f.rotate()
	f.passTime(0)
	f.handle(l.batch("c"))
	f.caughtUp(l)
	f.wantExpired(0, "sealed two years ago, by a clock that was wrong")
	f.handle(l.batch("a", "b", "c"))
	f.wantLanded("a", "b", "c")
	if states := fmt.Sprint(f.generation("sealed"), f.generation("open")); states != "1 3" {
		t.Errorf("sealed and open: %s", states)
	}
}
