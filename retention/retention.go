// Package retention decides when the housekeeping of one scope is done: when a
// generation of claims is sealed, when one has had its time, what to keep in
// memory. It imports nothing of dedupd's own: how things are done is the store's
// affair.
//
// Every process of a scope runs a Loop. What changes the database is done by one
// of them at a time, whichever has the lock at that moment.
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

// Store does what the Loop decides. Steps that change what is kept are done by
// one process at a time: led is false, and nothing done, while another is at it.
// Each step leaves things in order, whatever comes after it.
type Store interface {
	// Status looks at what is kept, by the database's clock.
	Status(ctx context.Context) (Status, error)

	// Prepare makes the table for the next rotation, again if it is gone.
	Prepare(ctx context.Context) (led bool, err error)
	// Rotate seals the open generation, if it is the one of that number, and
	// opens the prepared one. took is how long claims were held up at most.
	// rotated may be true beside an error: of what came after it.
	Rotate(ctx context.Context, generation int) (rotated, led bool, took time.Duration, err error)
	// BuildFilter builds and stores a missing part of a sealed generation's
	// filter, and tells of how many claims; 0: nothing is missing.
	BuildFilter(ctx context.Context) (claims int, led bool, err error)
	// Expire takes generations out of use that every lane has passed by the
	// window, or that are older than maxHold, and tells how many.
	Expire(ctx context.Context, window, maxHold time.Duration) (n int, led bool, err error)
	// Drop drops the table of a generation that was taken out of use.
	Drop(ctx context.Context, generation int) (led bool, err error)
	// Sweep drops tables of claims that nothing refers to, and names them.
	Sweep(ctx context.Context) (dropped []string, led bool, err error)
	// CountDeadLetters tells how many are kept.
	CountDeadLetters(ctx context.Context) (int64, error)
	// ExpireDeadLetters deletes dead letters that are older than age.
	ExpireDeadLetters(ctx context.Context, age time.Duration) (n int64, led bool, err error)

	// FlushAges writes down how old the duplicates were that this process met.
	FlushAges(ctx context.Context) error
	// LoadFilters reads filters into this process's memory, as far as its budget
	// goes; FiltersBehind tells that there may be some to read.
	LoadFilters(ctx context.Context) error
	FiltersBehind() bool
}

// Status is what the scope keeps.
type Status struct {
	// Now is the database's clock, Stream how far all lanes have come; zero: of
	// one of them nothing is known yet.
	Now, Stream time.Time
	// Lane is the one that is furthest behind; empty: there are no lanes.
	Lane string
	// LanesAhead is how many lanes have a clock that is ahead of Now. It isn't believed.
	LanesAhead int
	// Generations are in their order, oldest first.
	Generations []Generation
}

// Generation is one table of claims.
type Generation struct {
	Number int
	// State is next, open, sealed or dropping.
	State    string
	OpenedAt time.Time // zero: not yet
	SealedAt time.Time // zero: not yet
	// Claims is exact or estimated; Bytes are on disk, with the index.
	Claims, Bytes int64
	// Missing tells that the table is gone; Ahead that it was opened or sealed at a time
	// that is still to come, by a clock that was wrong.
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

// passTimeout bounds one pass: the next one goes on where it ended.
const passTimeout = 5 * time.Minute

// leadWait is how long a pass that has to rotate waits for another leader, and
// leadPause about how long it pauses between its tries.
const (
	leadWait  = 10 * time.Second
	leadPause = 30 * time.Millisecond
)

// dropTries is how many tables a pass tries to drop at most: each try that fails
// takes seconds.
const dropTries = 5

// followInterval is how often a process looks for filters that were built since.
const followInterval = 2 * time.Second

// Loop does the housekeeping until its context ends. The fields are set before
// Run.
type Loop struct {
	Store Store
	// Schedule is the time between passes; each wait is up to a tenth longer, so
	// that many processes don't come at the same moment.
	Schedule time.Duration
	// Window is how long claims are kept at least, in stream time; MaxHold how
	// long they are kept at most for lanes that don't move.
	Window, MaxHold time.Duration
	// ClockSlack is how far the database's clock may be ahead of this process' own for
	// claims to expire: one that has jumped ahead would have all of them expire. And how
	// far the two may differ for a generation to be sealed without delay, for its claims
	// are kept by the time at which it is. Zero: however far, as for whoever has looked at
	// the clocks and makes a pass by hand.
	ClockSlack time.Duration
	// A generation is sealed when it is as old as Generation, or holds MaxClaims.
	Generation time.Duration
	MaxClaims  int64
	// DeadLetterAge is how long dead letters are kept.
	DeadLetterAge time.Duration
	Logger        *slog.Logger
	Metrics       *Metrics

	// What warn remembers: the lane furthest behind, with its clock and since when
	// that stands still; and when it was last told that a lane is behind, and that
	// one stands still.
	lane                   string
	stream, still          time.Time
	toldBehind, toldStands time.Time
	toldAhead              time.Time // that nothing expires by the database's clock
	apartSince             time.Time // that a generation isn't sealed by it; zero: it is
	// undropped is the last generation whose table could not be dropped.
	undropped int
}

// Run loads the filters there are, makes a pass soon after the start and then by
// the schedule. It returns when ctx ends. A pass that fails is logged when its
// reason changes, and made again: housekeeping is never a reason to stop
// consuming.
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

// follow loads filters as they are built, by whichever process.
func (l *Loop) follow(ctx context.Context) {
	var problem logonce.Problem
	for {
		if l.Store.FiltersBehind() {
			if err := l.Store.LoadFilters(ctx); ctx.Err() == nil && problem.IsNew(err) {
				l.Logger.Warn("filters could not be loaded: sealed generations are looked up through their indexes", "error", err)
			}
		}
		if !wait.For(ctx, followInterval) {
			return
		}
	}
}

// Report is what a pass has done.
type Report struct {
	// Led tells that no other process was at it. If not, what that one does is
	// missing here.
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
}

// errBusy ends a pass that was to rotate and could not.
var errBusy = errors.New("no generation is sealed, since another process keeps house just now: try again")

// Pass does the housekeeping once. With rotate the open generation is sealed
// whatever its age and size, if it holds a claim; another process that is at it
// is waited for, and it is an error if that doesn't end soon. A step that fails
// doesn't keep the others from their work.
func (l *Loop) Pass(ctx context.Context, rotate bool) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	p := &pass{Loop: l, report: Report{Led: true, Dropped: []int{}, Swept: []string{}}}
	if rotate {
		p.waitUntil = time.Now().Add(leadWait)
	}
	p.own(l.Store.FlushAges(ctx))
	p.step(ctx, p.deadLetters)
	led := p.step(ctx, func(ctx context.Context, s *Status) (bool, error) { return p.rotate(ctx, s, rotate) })
	if rotate && !led {
		p.own(errBusy)
	}
	p.waitUntil = time.Time{} // the rest is as well done by the other
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
	// waitUntil is for how long a step waits for another leader; zero: not at all.
	waitUntil time.Time
}

// step does one step of the leader's, on the latest state of things, unless
// another process turned out to be the leader. A step that failed is led.
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
		// The leader lets go for moments only, between one step and the next.
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

// rotate seals the open generation when its time has come. The table for the
// next is made ahead of that time. One without claims may stay open.
func (p *pass) rotate(ctx context.Context, s *Status, force bool) (led bool, err error) {
	open := s.in("open")
	if len(open) == 0 {
		return true, nil
	}
	if next := s.in("next"); len(next) == 0 || next[0].Missing {
		if led, err := p.Store.Prepare(ctx); err != nil || !led {
			return led, err
		}
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
			p.Logger.Warn("claims expire though a lane has not passed them, since they were held for retention.max_hold: copies of these ids that the lane still brings are applied again",
				"generation", g.Number, "lane", s.Lane, "max_hold", p.MaxHold)
		}
	}
	if !due || p.ahead(s) {
		return true, nil
	}
	p.report.Expired, led, err = p.Store.Expire(ctx, p.Window, p.MaxHold)
	return led, err
}

// drop drops one table a pass: dropping a large one gives the disk much to do.
// One that can't be dropped, since somebody reads it, doesn't keep the others:
// each pass begins behind the last one that failed.
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
		p.Logger.Warn("a table of claims that the catalog doesn't know was dropped", "table", table)
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

// warnAfter is how long a lane may hold up expiry before it is told of, and how
// long its clock may stand still before it is taken for one that perhaps never
// moves again. warnEvery is how often that is repeated.
const (
	warnAfter = time.Hour
	warnEvery = 24 * time.Hour
)

// warn tells of a lane that keeps claims from expiring, long before max_hold.
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
		log.Warn("a lane is behind and its clock stands still: claims are kept beyond the window until it has passed them. See to its worker, or let the lane of a deleted topic go with `dedupd lanes forget`",
			"stands_for", stands.Round(time.Second))
	case time.Since(l.toldBehind) >= warnEvery:
		l.toldBehind = time.Now()
		log.Warn("a lane is behind: claims are kept beyond the window until it has passed them")
	}
}

// held is for how long the oldest sealed generation has been kept beyond the
// window for a lane that is behind; 0 where every lane has passed it, and only
// the expiry is still to come.
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

// missing is an error where the catalog has a generation and the database no
// such table. That of the next one holds nothing: it is made again.
func missing(s *Status) error {
	var all []error
	for _, g := range s.Generations {
		var effect string
		switch {
		case g.Missing && g.State == "sealed":
			effect = "ids that it may hold are neither applied nor dropped"
		case g.Missing && g.State == "open":
			effect = "nothing is applied, since there is nowhere to claim an id"
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

// MissingError says that the database lost tables that the catalog has.
type MissingError struct{ error }

func (e *MissingError) Unwrap() error { return e.error }
