// Package top shows a scope at work: what is read, what happens to it, and how far its
// lanes are behind. It turns samples of the database into frames and frames into
// screens, and drives the terminal. The caller supplies the samples.
package top

import (
	"math"
	"time"

	"github.com/dedupd/dedupd/dedup"
)

const (
	// smoothing is the time after which an average has forgotten two thirds.
	smoothing = 10 * time.Second
	// remembered is how many points of history are kept.
	remembered = 300
)

// Counts are numbers of messages: in all, or per second.
type Counts struct {
	Fetched        float64 `json:"fetched"`
	Applied        float64 `json:"applied"`
	Written        float64 `json:"written"`
	AlreadyPresent float64 `json:"already_present"`
	Stale          float64 `json:"stale"`
	Rejected       float64 `json:"rejected"`
	Duplicates     float64 `json:"duplicates"`
	Redelivered    float64 `json:"redelivered"`
	Resent         float64 `json:"resent"`
	CrossSource    float64 `json:"cross_source"`
	Conflicts      float64 `json:"conflicts"`
	Dead           float64 `json:"dead"`
	Filtered       float64 `json:"filtered"`
}

func counts(b *dedup.Books) Counts {
	return Counts{
		float64(b.Fetched), float64(b.Applied), float64(b.Written), float64(b.AlreadyPresent), float64(b.Stale), float64(b.Rejected),
		float64(b.Duplicates), float64(b.Redelivered), float64(b.Resent),
		float64(b.CrossSource), float64(b.Conflicts), float64(b.Dead), float64(b.Filtered),
	}
}

// each combines two Counts, number by number.
func each(a, b Counts, f func(a, b float64) float64) Counts {
	return Counts{
		f(a.Fetched, b.Fetched), f(a.Applied, b.Applied), f(a.Written, b.Written), f(a.AlreadyPresent, b.AlreadyPresent), f(a.Stale, b.Stale), f(a.Rejected, b.Rejected),
		f(a.Duplicates, b.Duplicates), f(a.Redelivered, b.Redelivered), f(a.Resent, b.Resent),
		f(a.CrossSource, b.CrossSource), f(a.Conflicts, b.Conflicts), f(a.Dead, b.Dead), f(a.Filtered, b.Filtered),
	}
}

func plus(a, b Counts) Counts {
	return each(a, b, func(a, b float64) float64 { return a + b })
}

// Shares are the parts of what was fetched; nil if nothing was.
func (c Counts) Shares() *Counts {
	if c.Fetched <= 0 {
		return nil
	}
	s := each(c, c, func(a, _ float64) float64 { return a / c.Fetched })
	return &s
}

// Frame is what to show after a sample. It never changes.
type Frame struct {
	Sample dedup.Sample
	// Interval is the time that Rates cover; 0 in the first frame, which has none.
	Interval time.Duration
	// Rates are per second, in the interval; Smooth is their average. Totals count since
	// the lanes began.
	Rates, Smooth, Totals Counts
	// LaneRates are messages fetched per second, in the sample's order of lanes.
	LaneRates []float64
	// History has a point for each interval, the newest last.
	History []Point
}

// Point is one interval's throughput, and its share of duplicates.
type Point struct{ Fetched, Duplicates float64 }

// Tracker turns samples into frames. The database's clock times the rates.
type Tracker struct {
	last *Frame
}

type place struct{ source, lane string }

// Next makes the frame of the next sample.
func (t *Tracker) Next(s dedup.Sample) *Frame {
	f := &Frame{Sample: s, LaneRates: make([]float64, len(s.Lanes))}
	before := map[place]Counts{}
	if t.last != nil {
		f.Interval = s.Now.Sub(t.last.Sample.Now)
		f.Smooth, f.History = t.last.Smooth, t.last.History
		for i := range t.last.Sample.Lanes {
			b := &t.last.Sample.Lanes[i].Books
			before[place{b.Source, b.Lane}] = counts(b)
		}
	}
	var moved Counts
	for i := range s.Lanes {
		b := &s.Lanes[i].Books
		now := counts(b)
		f.Totals = plus(f.Totals, now)
		if f.Interval <= 0 {
			continue
		}
		// A new lane began within the interval. If a lane's books went back, it was
		// forgotten, or the database is an older copy: what it did isn't known. A
		// replay takes a dead letter out of the books; that isn't a message less.
		was := before[place{b.Source, b.Lane}]
		if now.Fetched < was.Fetched {
			continue
		}
		d := each(now, was, func(now, was float64) float64 { return max(0, now-was) })
		moved = plus(moved, d)
		f.LaneRates[i] = d.Fetched / f.Interval.Seconds()
	}
	if f.Interval <= 0 { // the first, or the database's clock went back
		f.Interval = 0
		t.last = f
		return f
	}
	f.Rates = each(moved, moved, func(a, _ float64) float64 { return a / f.Interval.Seconds() })
	f.Smooth = f.smoothed(t.last)
	p := Point{Fetched: f.Rates.Fetched}
	if shares := f.Rates.Shares(); shares != nil {
		p.Duplicates = shares.Duplicates
	}
	past := f.History[max(0, len(f.History)-remembered+1):]
	f.History = append(append(make([]Point, 0, len(past)+1), past...), p)
	t.last = f
	return f
}

func (f *Frame) smoothed(last *Frame) Counts {
	if last.Interval == 0 {
		return f.Rates
	}
	weight := 1 - math.Exp(-f.Interval.Seconds()/smoothing.Seconds())
	return each(last.Smooth, f.Rates, func(was, now float64) float64 { return was + weight*(now-was) })
}

// Owners counts the workers that own lanes.
func (f *Frame) Owners() int {
	owners := map[string]bool{}
	for i := range f.Sample.Lanes {
		if o := f.Sample.Lanes[i].Owner; o != "" {
			owners[o] = true
		}
	}
	return len(owners)
}

// Lag sums up the lanes whose lag is known; nil: it is known of none.
func (f *Frame) Lag() *int64 {
	var sum *int64
	for i := range f.Sample.Lanes {
		if l := f.Sample.Lanes[i].Lag; l != nil {
			if sum == nil {
				sum = new(int64)
			}
			*sum += *l
		}
	}
	return sum
}

// The states of a lane, as far as its row shows. Only its worker knows that a lane is
// held, and why: here it stands still.
const (
	StateReads       = "reads"
	StateCaughtUp    = "caught up"
	StateStandStill  = "stands still"
	StateQuarantined = "quarantined"
	StateNoNews      = "no news"
)

const (
	// still is how long a lane with something to read may take to move.
	still = 30 * time.Second
	// quiet is how long a worker may be silent about a lane that is caught up. It sends
	// a heartbeat each 15 s.
	quiet = time.Minute
)

// State is what a lane does.
func (f *Frame) State(i int) string {
	l := &f.Sample.Lanes[i]
	switch {
	case l.InQuarantine():
		return StateQuarantined
	case f.LaneRates[i] > 0:
		return StateReads
	case l.Lag != nil && *l.Lag == 0:
		// The clock of a lane that is caught up follows the database's.
		if b := f.Behind(i); (b < 0 || b > quiet) && f.Sample.Now.Sub(l.UpdatedAt) > quiet {
			return StateNoNews
		}
		return StateCaughtUp
	case f.Sample.Now.Sub(l.UpdatedAt) > still:
		return StateStandStill
	}
	return StateReads
}

// Behind is how far a lane's clock is behind the database's; -1: not known.
func (f *Frame) Behind(i int) time.Duration {
	t := f.Sample.Lanes[i].StreamTime
	if t == nil {
		return -1
	}
	return max(0, f.Sample.Now.Sub(*t))
}
