package retention

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dedupd/dedupd/internal/human"
)

const (
	day  = 24 * time.Hour
	week = 7 * day
)

// windows are compared, besides the configured one.
var windows = []time.Duration{time.Hour, 6 * time.Hour, 12 * time.Hour, day, 2 * day, 3 * day, week, 2 * week, 4 * week}

const (
	// safety is how many times the largest age seen the window should cover: the next
	// copy may come later than any so far.
	safety = 2
	// enoughDuplicates, enoughTime and enoughWindows are the least that a window is
	// judged by. Copies as late as the window must have had time to come, several times;
	// and traffic has a weekly rhythm.
	enoughDuplicates = 100
	enoughTime       = week
	enoughWindows    = 3
	// mostTime is as far back as ages go. They are kept for some days more, but the first
	// of those may have had no duplicate.
	mostTime = 365 * day
	// lateShare is the share of duplicates in the last quarter of the time for which
	// claims are kept that suggests that more come after it.
	lateShare = 0.01

	// defaultBytes is what a claim takes on disk, with its index, and defaultFilterBytes
	// what it takes in a filter, if nothing was measured.
	defaultBytes       = 100
	defaultFilterBytes = 2.3

	// maxGenerations is the most that the configuration allows in a window.
	maxGenerations = 1000
)

// AgeBucket counts the duplicates that were at most UpTo old and older than the bucket
// before; math.MaxInt64: all older ones.
type AgeBucket struct {
	UpTo       time.Duration
	Duplicates int64
}

// BrokerRetention is how long a broker keeps messages; 0: without limit.
type BrokerRetention struct {
	Name  string
	Keeps time.Duration
}

// AdviceInput is what Advise needs to know of a scope.
type AdviceInput struct {
	// Ages are the duplicates by age, youngest first. Observed is how long they were
	// counted for.
	Ages     []AgeBucket
	Observed time.Duration
	// Since is how far back somebody asked to look; 0: as far as is needed.
	Since time.Duration
	// Horizon is the age of the oldest claim. A copy of anything older isn't recognised,
	// and is in none of the Ages.
	Horizon time.Duration

	// The current settings.
	Window, Generation, MaxHold time.Duration
	GenerationMaxClaims         int64
	FilterMemory                int64

	// ClaimsPerSecond is 0 if it isn't known. The bytes per claim have defaults.
	ClaimsPerSecond     float64
	BytesPerClaim       float64
	FilterBytesPerClaim float64

	// Asked: the brokers were asked how long they keep messages. Brokers has those that
	// answered, Unknown the others, each with its name and why it didn't.
	Asked   bool
	Brokers []BrokerRetention
	Unknown []string
}

// Candidate is what one window would have caught, and what it costs. Sizes are the largest,
// just before a generation expires; 0: the number of claims per second isn't known.
type Candidate struct {
	Window time.Duration
	// Caught counts the duplicates that it would certainly have recognised. Share is their
	// part of all, from 0 to 1.
	Caught int64
	Share  float64

	Claims      int64
	DiskBytes   int64
	FilterBytes int64
	Generations int
}

// Advice recommends a window.
type Advice struct {
	// Window is the recommended one, Configured the current one.
	Window, Configured time.Duration
	Duplicates         int64 // in all
	// Candidates are the windows compared, those two among them, shortest first.
	Candidates []Candidate
	// Reasons are sentences that justify the window. Warnings say what else to set, and
	// what the numbers don't show.
	Reasons, Warnings []string
}

// Advise compares windows by the duplicates so far, and recommends the shortest that covers
// twice the age of the oldest. It never shortens the window on little evidence, such as
// before claims were kept for a whole window, nor below what a broker can replay if the
// window covers that now.
func Advise(in AdviceInput) Advice {
	if in.BytesPerClaim <= 0 {
		in.BytesPerClaim = defaultBytes
	}
	if in.FilterBytesPerClaim <= 0 {
		in.FilterBytesPerClaim = defaultFilterBytes
	}
	a := Advice{Window: in.Window, Configured: in.Window, Duplicates: in.total()}
	a.judge(&in)
	a.coverBrokers(&in)
	for _, w := range unique(append(slices.Clone(windows), in.Window, a.Window)) {
		a.Candidates = append(a.Candidates, in.candidate(w))
	}
	a.settings(&in)
	a.limits(&in)
	return a
}

// judge recommends a window by the ages alone.
func (a *Advice) judge(in *AdviceInput) {
	enough := min(max(enoughTime, enoughWindows*in.Window), mostTime)
	late := in.late()
	missed := late >= lateShare && a.Duplicates >= enoughDuplicates && in.Horizon >= in.Window
	switch {
	case a.Duplicates < enoughDuplicates:
		within := ""
		if in.Since > 0 {
			within = fmt.Sprintf(" in the %s that --since asks for", text(in.Since))
		}
		a.because("Only %s counted%s: fewer than %d say little about how late copies come, so the window stays as it is.",
			were(a.Duplicates, "duplicate"), within, enoughDuplicates)
		return
	case in.Observed < enough && !missed && in.Since > 0 && in.Since < enough:
		a.because("Only the last %s were looked at, as --since asks. Later copies may be among those that came before: judged by less than %s (three windows, from a week to a year), the window stays as it is.",
			text(in.Since), text(enough))
		return
	case in.Observed < enough && !missed:
		a.because("Ages were counted for %s only. Late copies may just not have come yet: until %s have been counted (three windows, from a week to a year), the window stays as it is.",
			text(in.Observed), text(enough))
		return
	}
	largest := in.largest()
	needed := safety * largest
	a.Window = in.reaching(needed)
	if n := in.unbounded(); n > 0 {
		a.because("%d of %d duplicates were older than the ages that are counted. They count as old as anything that was kept, %s.", n, a.Duplicates, text(largest))
	} else {
		a.because("All %d duplicates came within %s.", a.Duplicates, text(largest))
	}
	a.because("Twice that, since the next copy may be later than any so far, is %s: the shortest window compared that reaches it is %s.", text(needed), text(a.Window))
	if a.Window < in.Window && in.Horizon < in.Window {
		// Either the window was lengthened less than its own length ago, or there was no
		// traffic before.
		a.Window = in.Window
		a.because("But claims reach back %s only, of a window of %s: copies that came later could not be recognised so far, so the window stays as it is.", text(in.Horizon), text(in.Window))
	}
	if missed {
		a.because("%s of the duplicates may have come in the last quarter of the time for which claims are kept (%s), or after it. Copies that came later still were probably not recognised, and applied again: lengthen the window, and look again when it has passed.",
			percent(late), text(in.Horizon))
	}
}

// coverBrokers doesn't let a window that covers what a broker can replay be shortened below
// that. A window that doesn't cover it isn't lengthened, since that may cost any amount for
// something that nobody may ever do; there is a warning instead.
func (a *Advice) coverBrokers(in *AdviceInput) {
	for _, b := range in.Brokers {
		if b.Keeps > a.Window && b.Keeps <= in.Window {
			a.Window = in.reaching(b.Keeps)
			a.because("%s keeps messages for %s at least. Whoever resets a group to the earliest offset replays that much, and no less than %s recognises it.", b.Name, text(b.Keeps), text(a.Window))
		}
	}
	for _, b := range in.Brokers {
		switch {
		case b.Keeps == 0:
			a.warn("%s keeps messages without limit. Whoever resets a group to the earliest offset has everything older than the window applied again; no window prevents that.", b.Name)
		case b.Keeps > a.Window:
			cost := ""
			if c := in.candidate(b.Keeps); c.Claims > 0 {
				cost = fmt.Sprintf(" It would take %s on disk.", human.Bytes(c.DiskBytes))
			}
			a.warn("%s keeps messages for %s at least. Whoever resets a group to the earliest offset replays that much, and what is older than the window of %s is applied again. Only a window of %s or longer prevents that.%s",
				b.Name, text(b.Keeps), text(a.Window), text(b.Keeps), cost)
		}
	}
}

// settings warns about what else has to be set for the recommended window.
func (a *Advice) settings(in *AdviceInput) {
	c := in.candidate(a.Window)
	if in.Generation > a.Window {
		a.warn("Set retention.generation to %s, a sixth of the window: a generation may not be longer than the window.", text(a.Window/6))
	} else if a.Window/max(in.Generation, 1) > maxGenerations {
		a.warn("Set retention.generation to %s at least: a window may have no more than %d generations.", text(roundUp(a.Window/100, time.Hour)), maxGenerations)
	}
	if in.MaxHold < a.Window {
		a.warn("Set retention.max_hold above the window, such as %s: no claim is kept longer than it.", text(4*a.Window))
	}
	if c.FilterBytes > in.FilterMemory {
		const step = 64 << 20
		a.warn("The filters of %d claims take %s: set retention.filter_memory to %dMiB, or the oldest generations are looked up through their index, which is slower.",
			c.Claims, human.Bytes(c.FilterBytes), (c.FilterBytes+step-1)/step*step>>20)
	}
}

// limits warns about what the numbers don't show.
func (a *Advice) limits(in *AdviceInput) {
	if in.Horizon > 0 {
		a.warn("The oldest claim is %s old. A copy of anything older isn't recognised: it is applied again, and in none of these numbers.", text(in.Horizon))
	}
	for _, reason := range in.Unknown {
		a.warn("How long a broker keeps messages could not be found out: %s. Whoever resets a group to the earliest offset replays all of that, and a window at least as long recognises it.",
			strings.ReplaceAll(reason, "\n", "; "))
	}
	if !in.Asked {
		a.warn("How long the brokers keep messages was not looked at. Whoever resets a group to the earliest offset replays all of that, and a window at least as long recognises it.")
	}
	if in.ClaimsPerSecond <= 0 {
		a.warn("How many claims come per second is not known yet, so there are no sizes.")
	}
}

func (a *Advice) because(format string, args ...any) {
	a.Reasons = append(a.Reasons, fmt.Sprintf(format, args...))
}

func (a *Advice) warn(format string, args ...any) {
	a.Warnings = append(a.Warnings, fmt.Sprintf(format, args...))
}

func (in *AdviceInput) candidate(w time.Duration) Candidate {
	c := Candidate{Window: w}
	for _, b := range in.Ages {
		// Where in its bucket an age is isn't known: err on the safe side.
		if b.UpTo <= w && b.UpTo != math.MaxInt64 {
			c.Caught += b.Duplicates
		}
	}
	if total := in.total(); total > 0 {
		c.Share = float64(c.Caught) / float64(total)
	}
	length := in.generation(w)
	// The oldest generation goes as a whole, once its last claim is old enough.
	claims := in.ClaimsPerSecond * (w + length).Seconds()
	c.Claims, c.DiskBytes, c.FilterBytes = number(claims), number(claims*in.BytesPerClaim), number(claims*in.FilterBytesPerClaim)
	c.Generations = int((w+length-1)/length) + 1
	return c
}

// generation is how long a generation stays open with window w: as configured, unless it is
// full before. If that is longer than w, it is a sixth of w.
func (in *AdviceInput) generation(w time.Duration) time.Duration {
	length := in.Generation
	if length > w || length <= 0 {
		length = w / 6
	}
	if in.GenerationMaxClaims > 0 && in.ClaimsPerSecond > 0 {
		full := float64(in.GenerationMaxClaims) / in.ClaimsPerSecond * float64(time.Second)
		length = time.Duration(min(float64(length), full))
	}
	return max(length, 1)
}

// reaching is the shortest of the windows that is at least d; beyond all of them, d in
// whole weeks.
func (in *AdviceInput) reaching(d time.Duration) time.Duration {
	for _, w := range unique(append(slices.Clone(windows), in.Window)) {
		if w >= d {
			return w
		}
	}
	return roundUp(d, week)
}

func (in *AdviceInput) total() (n int64) {
	for _, b := range in.Ages {
		n += b.Duplicates
	}
	return n
}

// unbounded counts the duplicates whose age has no bound.
func (in *AdviceInput) unbounded() (n int64) {
	for _, b := range in.Ages {
		if b.UpTo == math.MaxInt64 {
			n += b.Duplicates
		}
	}
	return n
}

// largest is the largest age that a duplicate may have had.
func (in *AdviceInput) largest() (age time.Duration) {
	for _, b := range in.Ages {
		if b.Duplicates > 0 && b.UpTo != math.MaxInt64 {
			age = max(age, b.UpTo)
		}
	}
	if in.unbounded() > 0 {
		age = max(age, in.Horizon, in.Window)
	}
	return age
}

// late is the share of duplicates whose buckets reach into the last quarter before the
// horizon, or beyond it: claims may have been kept for longer once.
func (in *AdviceInput) late() float64 {
	var n int64
	for _, b := range in.Ages {
		if b.UpTo > in.Horizon-in.Horizon/4 {
			n += b.Duplicates
		}
	}
	return float64(n) / float64(max(in.total(), 1))
}

func unique(all []time.Duration) []time.Duration {
	slices.Sort(all)
	return slices.Compact(all)
}

func roundUp(d, to time.Duration) time.Duration { return (d + to - 1) / to * to }

// number converts f, however large it is.
func number(f float64) int64 { return int64(min(math.Ceil(f), 1<<62)) }

// text is a duration as the configuration writes it, in days and below; to the minute, if
// it is longer than one.
func text(d time.Duration) string {
	if d < time.Minute {
		return d.Round(time.Second).String()
	}
	d = d.Round(time.Minute)
	s := ""
	for _, unit := range []struct {
		name string
		size time.Duration
	}{{"d", day}, {"h", time.Hour}, {"m", time.Minute}} {
		if n := d / unit.size; n > 0 {
			s += strconv.FormatInt(int64(n), 10) + unit.name
			d %= unit.size
		}
	}
	return s
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

func were(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun + " was"
	}
	return fmt.Sprintf("%d %ss were", n, noun)
}
