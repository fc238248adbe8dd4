// Package retention decides when a scope's generations of claims are sealed, expired and
// dropped, and when filters are built and loaded. How that is done is the Store's affair.
//
// Every process of a scope runs a Loop. One at a time, the leader, changes the database:
// whichever holds the lock at that moment.
package retention

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
)

// Store does what the Loop decides. One process at a time takes a step that changes the
// database: led is false, and nothing done, while another is at it. Each step leaves things
// in order, whatever follows it.
type Store interface {
	// Status returns what is kept, by the database's clock.
	Status(ctx context.Context) (Status, error)

	// Prepare makes the tables for the next rotation, and those of results that were lost,
	// unless they are there.
	Prepare(ctx context.Context) (led bool, err error)
	// Rotate seals the open generation, if it has that number, and opens the prepared
	// one. took bounds how long claims were held up. rotated may be true beside an
	// error, which is then of something that came after the rotation.
	Rotate(ctx context.Context, generation int) (rotated, led bool, took time.Duration, err error)
	// BuildFilter builds and stores a missing part of a sealed generation's filter.
	// claims is how many it covers; 0: nothing is missing.
	BuildFilter(ctx context.Context) (claims int, led bool, err error)
	// Expire takes generations out of use: those that every lane has passed by the
	// window, and those older than maxHold. n is how many.
	Expire(ctx context.Context, window, maxHold time.Duration) (n int, led bool, err error)
	// Drop drops the table of an expired generation.
	Drop(ctx context.Context, generation int) (led bool, err error)
	// Sweep drops tables of claims that nothing refers to, and returns their names.
	Sweep(ctx context.Context) (dropped []string, led bool, err error)
	// CountDeadLetters returns how many dead letters are kept.
	CountDeadLetters(ctx context.Context) (int64, error)
	// ExpireDeadLetters deletes dead letters older than age.
	ExpireDeadLetters(ctx context.Context, age time.Duration) (n int64, led bool, err error)
	// ExpireMarks deletes the marks of producers that weren't seen for the window, in
	// stream time.
	ExpireMarks(ctx context.Context, window time.Duration) (n int64, led bool, err error)

	// FlushAges stores how old this process' duplicates were.
	FlushAges(ctx context.Context) error
	// LoadFilters reads filters into this process' memory, up to its budget.
	// FiltersBehind reports whether there may be some to read.
	LoadFilters(ctx context.Context) error
	FiltersBehind() bool
}

// Status is what the scope keeps.
type Status struct {
	// Now is the database's clock. Stream is how far all lanes have come; zero: one of
	// them has no clock yet.
	Now, Stream time.Time
	// Lane is the one furthest behind; empty: there are no lanes.
	Lane string
	// LanesAhead counts the lanes whose clock is ahead of Now. Such a clock isn't believed.
	LanesAhead int
	// Generations are listed oldest first.
	Generations []Generation
}

// Generation is one table of claims.
type Generation struct {
	Number int
	// State is next, open, sealed or dropping.
	State    string
	OpenedAt time.Time // zero: not yet
	SealedAt time.Time // zero: not yet
	// Claims is exact or estimated. Bytes is the size on disk, with the index.
	Claims, Bytes int64
	// Missing: the table is gone. Ahead: the generation was opened or sealed at a time that
	// is still to come, by a wrong clock.
	Missing, Ahead bool
}

func (s *Status) in(state string) (all []Generation) {
	for _, g := range s.Generations {
		if g.State == state {
			all = append(all, g)
		}
	}
	return all
}

// passTimeout bounds one pass. The next one goes on where it ended.
const passTimeout = 5 * time.Minute

// leadWait is how long a pass that has to rotate waits for another leader. leadPause is
// about how long it pauses between its tries.
const (
	leadWait  = 10 * time.Second
	leadPause = 30 * time.Millisecond
)

// dropTries is the most tables that a pass tries to drop: a failed try takes seconds.
const dropTries = 5

// followInterval is how often a process looks for new filters.
const followInterval = 2 * time.Second

// Loop runs retention until its context ends. The fields are set before Run.
type Loop struct {
	Store Store
	// Schedule is the time between passes. Each wait is up to a tenth longer, so that many
	// processes don't start at the same moment.
	Schedule time.Duration
	// Window is how long claims are kept at least, in stream time. MaxHold is how long
	// lanes that don't move may hold them.
	Window, MaxHold time.Duration
	// ClockSlack bounds how far the database's clock may be ahead of this process' own: a
	// clock that jumped ahead would expire all claims. Beyond it nothing expires. It also
	// bounds how far the two may differ for a generation to be sealed without delay, since
	// the time of its seal decides how long its claims are kept. Zero: no bound, for somebody
	// who has looked at the clocks and makes a pass by hand.
	ClockSlack time.Duration
	// A generation is sealed once it is as old as Generation or holds MaxClaims.
	Generation time.Duration
	MaxClaims  int64
	// DeadLetterAge is how long dead letters are kept.
	DeadLetterAge time.Duration
	Logger        *slog.Logger
	Metrics       *Metrics

	marksExpired time.Time // when that was last done here

	// The lane furthest behind, its clock, and since when that stands still.
	lane          string
	stream, still time.Time
	// When these were last logged: a lane is behind, and it stands still too; nothing
	// expires because the database's clock is ahead.
	toldBehind, toldStands time.Time
	toldAhead              time.Time
	// apartSince is since when a generation isn't sealed because the clocks differ; zero:
	// they don't.
	apartSince time.Time
	// undropped is the last generation whose table could not be dropped.
	undropped int
}

// Run loads filters, makes a pass soon after the start, and then by the schedule. It
// returns when ctx ends. A failed pass is logged when its reason changes, and made again:
// retention is never a reason to stop consuming.
func (l *Loop) Run(ctx context.Context) {
	var follower sync.WaitGroup
	defer follower.Wait()
	follower.Go(func() { l.follow(ctx) })
	var problem logonce.Problem
	pause := rand.N(max(min(l.Schedule, 5*time.Second), 1))
	for wait.For(ctx, pause) {
		pause = l.Schedule + rand.N(max(l.Schedule/10, 1))
		_, err := l.Pass(ctx, false)
		if ctx.Err() != nil {
			return
		}
		if problem.IsNew(err) {
			l.Logger.Warn("retention failed, trying again by the schedule", "error", err)
		}
	}
}

// follow loads filters once any process has built them.
func (l *Loop) follow(ctx context.Context) {
	var problem logonce.Problem
	for {
		if l.Store.FiltersBehind() {
			if err := l.Store.LoadFilters(ctx); ctx.Err() == nil && problem.IsNew(err) {
				l.Logger.Warn("filters could not be loaded: keys are looked up in the indexes of sealed generations", "error", err)
			}
		}
		if !wait.For(ctx, followInterval) {
			return
		}
	}
}

// Report is what a pass has done.
type Report struct {
	// Led: this process was the leader. If not, what the leader did is missing here.
	Led bool `json:"led"`
	// Sealed is the generation that was sealed; 0: none.
	Sealed int `json:"sealed"`
	// Filtered is how many claims new filters cover.
	Filtered int64 `json:"filtered_claims"`
	// Expired generations were taken out of use; Dropped ones are gone.
	Expired int   `json:"expired"`
	Dropped []int `json:"dropped"`
	// Swept are tables that nothing referred to.
	Swept       []string `json:"swept"`
	DeadLetters int64    `json:"expired_dead_letters"`
	Marks       int64    `json:"expired_marks"`
}

// errBusy is the error of a pass that had to rotate and wasn't the leader.
var errBusy = errors.New("no generation was sealed: another process runs retention just now; try again")

// Pass runs every step once. With rotate, the open generation is sealed whatever its age and
// size, if it holds a claim; Pass then waits for another leader, and it is an error if that
// one doesn't end soon. A failed step doesn't stop the others.
func (l *Loop) Pass(ctx context.Context, rotate bool) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	p := &pass{Loop: l, report: Report{Led: true, Dropped: []int{}, Swept: []string{}}}
	if rotate {
		p.waitUntil = time.Now().Add(leadWait)
	}
	p.own(l.Store.FlushAges(ctx))
	p.step(ctx, p.deadLetters)
	p.step(ctx, p.marks)
	led := p.step(ctx, func(ctx context.Context, s *Status) (bool, error) { return p.rotate(ctx, s, rotate) })
	if rotate && !led {
		p.own(errBusy)
	}
	p.waitUntil = time.Time{} // another leader may as well do the rest
	p.step(ctx, p.expire)
	p.step(ctx, p.drop)
	p.step(ctx, p.sweep)
	p.step(ctx, p.filters)
	p.own(l.Store.LoadFilters(ctx))
	status, err := l.Store.Status(ctx)
	p.own(err)
	if err == nil {
		l.Metrics.show(&status, l.Window)
		l.warn(&status)
		p.own(missing(&status))
	}
	dead, err := l.Store.CountDeadLetters(ctx)
	p.own(err)
	if err == nil {
		l.Metrics.deadLetters.Set(float64(dead))
	}
	if p.report.Led && p.err == nil {
		l.Metrics.lastSuccess.SetToCurrentTime()
	}
	return p.report, p.err
}

// pass is one pass under way.
type pass struct {
	*Loop
	report Report
	err    error
	// waitUntil is until when a step waits for another leader; zero: not at all.
	waitUntil time.Time
}

// step takes one step of the leader's, on a fresh Status, unless another process turned out
// to be the leader. A failed step counts as led.
func (p *pass) step(ctx context.Context, do func(ctx context.Context, s *Status) (led bool, err error)) (led bool) {
	if !p.report.Led {
		return false
	}
	for {
		status, err := p.Store.Status(ctx)
		if err == nil {
			led, err = do(ctx, &status)
		}
		p.own(err)
		p.report.Led = led || err != nil
		// A leader gives up the lock only for a moment, between two steps.
		if p.report.Led || !time.Now().Before(p.waitUntil) || !wait.For(ctx, leadPause/2+rand.N(leadPause)) {
			return p.report.Led
		}
	}
}

func (p *pass) own(err error) {
	if err != nil && (p.err == nil || !errors.Is(err, context.DeadlineExceeded)) {
		p.err = errors.Join(p.err, err)
	}
}

func (p *pass) deadLetters(ctx context.Context, _ *Status) (bool, error) {
	n, led, err := p.Store.ExpireDeadLetters(ctx, p.DeadLetterAge)
	p.report.DeadLetters = n
	p.Metrics.expiredDeadLetters.Add(float64(n))
	if n > 0 {
		p.Logger.Info("dead letters expired", "count", n, "age", p.DeadLetterAge)
	}
	return led, err
}

// marks reads all of them, so it isn't for every pass.
func (p *pass) marks(ctx context.Context, _ *Status) (bool, error) {
	if time.Since(p.marksExpired) < p.Window/100 {
		return true, nil
	}
	n, led, err := p.Store.ExpireMarks(ctx, p.Window)
	if p.report.Marks = n; n > 0 {
		p.Logger.Info("producers' marks expired", "count", n, "window", p.Window)
	}
	if led && err == nil {
		p.marksExpired = time.Now()
	}
	return led, err
}

// rotate seals the open generation when it is due. The next one's table is made ahead of
// that. A generation without claims may stay open.
func (p *pass) rotate(ctx context.Context, s *Status, force bool) (led bool, err error) {
	open := s.in("open")
	if len(open) == 0 {
		return true, nil
	}
	if led, err := p.Store.Prepare(ctx); err != nil || !led {
		return led, err
	}
	g := open[0]
	due := s.Now.Sub(g.OpenedAt) >= p.Generation || g.Claims >= p.MaxClaims
	held := p.apart(s, due)
	if g.Claims == 0 || !due && !force {
		return true, nil
	}
	if held && !force && g.Claims < 2*p.MaxClaims {
		return true, nil
	}
	rotated, led, took, err := p.Store.Rotate(ctx, g.Number)
	if !rotated {
		return led, err
	}
	p.report.Sealed = g.Number
	p.Metrics.rotation.Observe(took.Seconds())
	p.Logger.Info("generation sealed", "generation", g.Number, "claims", g.Claims, "age", s.Now.Sub(g.OpenedAt).Round(time.Second), "took", took.Round(time.Millisecond))
	return true, err
}

func (p *pass) expire(ctx context.Context, s *Status) (led bool, err error) {
	due := false
	for _, g := range s.in("sealed") {
		passed := g.SealedAt.Add(p.Window).Before(s.Stream)
		held := g.SealedAt.Add(p.MaxHold).Before(s.Now)
		due = due || passed || held
		if held && !passed {
			p.Logger.Warn("claims expire though a lane has not passed them, because they were held for retention.max_hold: copies of these ids that the lane still brings are applied again",
				"generation", g.Number, "lane", s.Lane, "max_hold", p.MaxHold)
		}
	}
	if !due || p.ahead(s) {
		return true, nil
	}
	p.report.Expired, led, err = p.Store.Expire(ctx, p.Window, p.MaxHold)
	return led, err
}

// drop drops one table a pass: a large one keeps the disk busy. A table that can't be
// dropped, because somebody reads it, doesn't block the others: each pass begins behind the
// last one that failed.
func (p *pass) drop(ctx context.Context, s *Status) (led bool, err error) {
	expired := s.in("dropping")
	start := max(0, slices.IndexFunc(expired, func(g Generation) bool { return g.Number > p.undropped }))
	expired = slices.Concat(expired[start:], expired[:start])
	for _, g := range expired[:min(len(expired), dropTries)] {
		led, failed := p.Store.Drop(ctx, g.Number)
		if failed != nil && ctx.Err() == nil {
			p.undropped = g.Number
			err = errors.Join(err, failed)
			continue
		}
		if failed != nil || !led {
			return led, errors.Join(err, failed)
		}
		p.report.Dropped = append(p.report.Dropped, g.Number)
		p.Metrics.expiredClaims.Add(float64(g.Claims))
		p.Logger.Info("generation dropped", "generation", g.Number, "claims", g.Claims, "bytes", g.Bytes)
		break
	}
	return true, err
}

func (p *pass) sweep(ctx context.Context, _ *Status) (bool, error) {
	swept, led, err := p.Store.Sweep(ctx)
	for _, table := range swept {
		p.report.Swept = append(p.report.Swept, table)
		p.Logger.Warn("dropped a table of claims that the catalog doesn't have", "table", table)
	}
	return led, err
}

func (p *pass) filters(ctx context.Context, _ *Status) (bool, error) {
	start := time.Now()
	for {
		n, led, err := p.Store.BuildFilter(ctx)
		if err != nil || !led || n == 0 {
			if p.report.Filtered > 0 {
				p.Logger.Info("filters built", "claims", p.report.Filtered, "took", time.Since(start).Round(time.Millisecond))
			}
			return led, err
		}
		p.report.Filtered += int64(n)
	}
}

// warnAfter is how long a lane may hold up expiry before that is logged, and how long its
// clock may stand still before the log says that it may never move again. warnEvery is how
// often that is repeated.
const (
	warnAfter = time.Hour
	warnEvery = 24 * time.Hour
)

// warn logs that a lane keeps claims from expiring, long before max_hold.
func (l *Loop) warn(s *Status) {
	if s.Lane != l.lane || !s.Stream.Equal(l.stream) {
		l.lane, l.stream, l.still = s.Lane, s.Stream, s.Now
	}
	held, after := s.held(l.Window), min(warnAfter, l.MaxHold/2)
	if held == 0 || held < after {
		l.toldBehind, l.toldStands = time.Time{}, time.Time{}
		return
	}
	log := l.Logger.With("lane", s.Lane, "overdue", held.Round(time.Second), "held_until", s.in("sealed")[0].SealedAt.Add(l.MaxHold))
	stands := s.Now.Sub(l.still)
	switch {
	case stands >= after && time.Since(l.toldStands) >= warnEvery:
		l.toldBehind, l.toldStands = time.Now(), time.Now()
		log.Warn("a lane is behind and its clock stands still: claims are kept beyond the window until it has passed them. Check its worker, or remove the lane of a deleted topic with `dedupd lanes forget`",
			"stands_for", stands.Round(time.Second))
	case time.Since(l.toldBehind) >= warnEvery:
		l.toldBehind = time.Now()
		log.Warn("a lane is behind: claims are kept beyond the window until it has passed them")
	}
}

// held is how long the oldest sealed generation has been kept beyond the window for a lane
// that is behind. It is 0 once every lane has passed it and only the expiry is to come.
func (s *Status) held(window time.Duration) time.Duration {
	sealed := s.in("sealed")
	if len(sealed) == 0 {
		return 0
	}
	end := sealed[0].SealedAt.Add(window)
	if end.Before(s.Stream) {
		return 0
	}
	return max(0, s.Now.Sub(end))
}

// missing is an error if the catalog has a generation but the database has no such table.
// The next generation's table holds nothing: it is made again.
func missing(s *Status) error {
	var all []error
	for _, g := range s.Generations {
		var effect string
		switch {
		case g.Missing && g.State == "sealed":
			effect = "ids that it may hold are neither applied nor dropped"
		case g.Missing && g.State == "open":
			effect = "nothing is applied, because there is nowhere to claim an id"
		default:
			continue
		}
		all = append(all, fmt.Errorf("the table of generation %d (%s) is gone, and with it its claims: bring it back from a backup, or give them up with `dedupd retention run --accept-missing`; until then %s", g.Number, g.State, effect))
	}
	if len(all) == 0 {
		return nil
	}
	return &MissingError{errors.Join(all...)}
}

// MissingError says that the database has lost tables that the catalog has.
type MissingError struct{ error }

func (e *MissingError) Unwrap() error { return e.error }
