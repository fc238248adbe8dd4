package consumer

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	// heartbeatInterval: claims live for hours at least, so heartbeats need no haste.
	heartbeatInterval = 15 * time.Second
	heartbeatTimeout  = 5 * time.Second
)

// sendHeartbeats sends a heartbeat from time to time until ctx ends. Lanes that are
// caught up commit nothing: without it they would hold up the expiry of claims for
// ever, and never learn that the database lost their last commits. A run until idle
// also sends one at its end.
func (w *Worker) sendHeartbeats(ctx context.Context) {
	interval := cmp.Or(w.HeartbeatInterval, heartbeatInterval)
	for wait.For(ctx, interval-interval/8+rand.N(max(interval/4, 1))) { // workers that started together drift apart
		if err := w.sendHeartbeat(ctx); err != nil && !errors.Is(err, errGone) {
			w.Logger.Debug("send a heartbeat", "error", err)
		}
	}
}

// errGone says that lanes that seemed caught up are lost.
var errGone = errors.New("another worker owns a quiet lane, or the database went back")

// sendHeartbeat reports the lanes that are caught up, and loses those that it learns
// are not ours: the source acquires them again, and reads what the database has lost.
func (w *Worker) sendHeartbeat(ctx context.Context) error {
	rows, positions := w.caughtUp(time.Now())
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
	// The source needs time to open them again.
	w.activity = time.Now()
	for l, position := range positions {
		_, open := w.lanes[l]
		// The answer is about the lane as it was reported. One that has been closed since
		// doesn't matter. One that has been offered more will be fenced if it is lost.
		// And one that has moved since was ours after all.
		if slices.Contains(gone, l.options.Lane) && open && l.idleLocked() && l.position == position {
			w.Metrics.fenced.Inc()
			l.logLocked("lane lost", errGone)
			l.loseLocked()
		}
	}
	return errGone
}

// caughtUp lists the lanes that are caught up, in the order of their rows, and the
// position of each. The slots of a queue share one row: it is caught up when all of
// them are, and since the earliest of their times.
func (w *Worker) caughtUp(now time.Time) (sorted []lane.Heartbeat, positions map[*Lane]int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	positions = make(map[*Lane]int64)
	rows := make(map[message.Lane]lane.Heartbeat)
	behind := make(map[message.Lane]bool)
	for l := range w.lanes {
		o := &l.options
		if l.held != nil || l.caughtUpAt.IsZero() || !l.idleLocked() {
			behind[o.Lane] = true
			continue
		}
		positions[l] = l.position
		rows[o.Lane] = lane.Heartbeat{
			Lane: o.Lane, Epoch: o.Epoch, Next: l.position, Checkpoint: o.Checkpoint,
			Age: max(rows[o.Lane].Age, age(l.caughtUpAt, now)),
		}
	}
	maps.DeleteFunc(rows, func(l message.Lane, _ lane.Heartbeat) bool { return behind[l] })
	return slices.SortedFunc(maps.Values(rows), func(a, b lane.Heartbeat) int { return a.Lane.Compare(b.Lane) }), positions
}

// age is how long ago then was. The monotonic clock stops while the machine sleeps,
// the wall clock may be set back: the longer time is the safe one.
func age(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}
