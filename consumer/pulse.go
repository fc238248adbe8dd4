package consumer

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dedupd/dedupd/message"
)

const (
	// pulseInterval is how often the authority is told which lanes are caught up.
	// Claims live for hours at least, so this needs no haste.
	pulseInterval = 15 * time.Second
	pulseTimeout  = 5 * time.Second
)

// pulse tells the authority from time to time which lanes have nothing left to
// read: they commit nothing, and would hold up the expiry of claims for ever. It
// ends with ctx. A run until idle tells it at its end as well.
func (w *Worker) pulse(ctx context.Context) {
	interval := cmp.Or(w.Pulse, pulseInterval)
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval - interval/8 + rand.N(max(interval/4, 1))): // workers that started together drift apart
			w.tellCaughtUp(ctx)
		}
	}
}

func (w *Worker) tellCaughtUp(ctx context.Context) {
	lanes := w.caughtUp(time.Now())
	if len(lanes) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, pulseTimeout)
	defer cancel()
	if err := w.Lanes.CaughtUp(ctx, lanes); err != nil {
		w.Logger.Debug("tell which lanes are caught up", "error", err)
	}
}

// caughtUp are the lanes that have nothing left to read, in the order of their
// rows. The slots of a queue share one row: it is caught up when all of them
// are, and since the one that was told the longest ago.
func (w *Worker) caughtUp(now time.Time) []message.CaughtUp {
	w.mu.Lock()
	defer w.mu.Unlock()
	rows := make(map[message.Lane]message.CaughtUp)
	behind := make(map[message.Lane]bool)
	for l := range w.lanes {
		o := &l.options
		if l.held != nil || l.asked.IsZero() || !l.idle() {
			behind[o.Lane] = true
			continue
		}
		rows[o.Lane] = message.CaughtUp{
			Lane: o.Lane, Epoch: o.Epoch, Next: l.position,
			Age: max(rows[o.Lane].Age, age(l.asked, now)),
		}
	}
	maps.DeleteFunc(rows, func(lane message.Lane, _ message.CaughtUp) bool { return behind[lane] })
	return slices.SortedFunc(maps.Values(rows), func(a, b message.CaughtUp) int { return a.Lane.Compare(b.Lane) })
}

// age is how long ago something was. The monotonic clock stands still while the
// machine sleeps, the wall clock may be set back: the longer time is the safe
// one.
func age(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}
