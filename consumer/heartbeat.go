package consumer

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	// pulseInterval is how often the authority is told which lanes are caught up.
	// Claims live for hours at least, so this needs no haste.
	heartbeatInterval = 15 * time.Second
	heartbeatTimeout  = 5 * time.Second
)

// pulse tells the authority from time to time which lanes have nothing left to
// read: they commit nothing, and would hold up the expiry of claims for ever, and
// never learn that the database lost what they committed last. It ends with ctx. A
// run until idle tells it at its end as well.
func (w *Worker) heartbeats(ctx context.Context) {
	interval := cmp.Or(w.HeartbeatInterval, heartbeatInterval)
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval - interval/8 + rand.N(max(interval/4, 1))): // workers that started together drift apart
			if err := w.sendHeartbeats(ctx); err != nil && !errors.Is(err, errGone) {
				w.Logger.Debug("tell which lanes are caught up", "error", err)
			}
		}
	}
}

// errGone says that lanes which were taken for caught up are lost.
var errGone = errors.New("a quiet lane is another worker's, or the database went back")

// tellCaughtUp loses the lanes that the authority doesn't know as they are told: the
// source takes them anew, and reads again what the database has lost.
func (w *Worker) sendHeartbeats(ctx context.Context) error {
	rows, at := w.caughtUp(time.Now())
	if len(rows) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	gone, err := w.Lanes.Heartbeat(ctx, rows)
	if err != nil || len(gone) == 0 {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// The source needs its time to open them anew.
	w.activity = time.Now()
	for l, position := range at {
		_, open := w.lanes[l]
		// The answer is about the lane as it was told. One that was closed meanwhile
		// is nobody's affair. One that has been offered more is fenced by that, if it
		// is lost. And one that has moved since was ours then, after all.
		if slices.Contains(gone, l.options.Lane) && open && l.idle() && l.position == position {
			w.Metrics.fenced.Inc()
			l.log("lane lost", errGone)
			l.loseLocked()
		}
	}
	return errGone
}

// caughtUp are the lanes that have nothing left to read, in the order of their
// rows, and where each of them stands. The slots of a queue share one row: it is
// caught up when all of them are, and since the one that was told the longest ago.
func (w *Worker) caughtUp(now time.Time) ([]lane.Heartbeat, map[*Lane]int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := make(map[*Lane]int64)
	rows := make(map[message.Lane]lane.Heartbeat)
	behind := make(map[message.Lane]bool)
	for l := range w.lanes {
		o := &l.options
		if l.held != nil || l.asked.IsZero() || !l.idle() {
			behind[o.Lane] = true
			continue
		}
		at[l] = l.position
		rows[o.Lane] = lane.Heartbeat{
			Lane: o.Lane, Epoch: o.Epoch, Next: l.position, Checkpoint: o.Checkpoint,
			Age: max(rows[o.Lane].Age, age(l.asked, now)),
		}
	}
	maps.DeleteFunc(rows, func(lane message.Lane, _ lane.Heartbeat) bool { return behind[lane] })
	return slices.SortedFunc(maps.Values(rows), func(a, b lane.Heartbeat) int { return a.Lane.Compare(b.Lane) }), at
}

// age is how long ago something was. The monotonic clock stands still while the
// machine sleeps, the wall clock may be set back: the longer time is the safe
// one.
func age(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}
