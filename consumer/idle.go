package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
)

// Runs until idle: jobs and tests.

var errIdle = errors.New("caught up")

// startTimeout is how long a run until idle waits for a source that has never been
// ready. Other runs wait for ever.
const startTimeout = time.Minute

// heldTimeout is how long, at least, such a run waits for a lane that can't be
// opened: the reason may pass soon, such as a topic that is being created.
const heldTimeout = 5 * time.Second

// NotReadyError says that a run until idle gave up because a source never reached
// what it is to read.
type NotReadyError struct{ Source string }

func (e *NotReadyError) Error() string {
	return fmt.Sprintf("source %s could not be reached, or does not have what is to be read, for %s: the log says why", e.Source, startTimeout)
}

// watchIdle ends the run once every lane has been caught up for UntilIdle, the others' are
// too or are worked on, and the database still has what was read.
func (w *Worker) watchIdle(ctx context.Context, stop context.CancelCauseFunc) {
	tick := time.NewTicker(max(min(w.UntilIdle/10, 100*time.Millisecond), time.Millisecond))
	defer tick.Stop()
	var problem logonce.Problem
	var undecided undecidedLog
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			done, err := w.isIdle(now)
			if done && w.othersBehind(ctx) {
				wait.For(ctx, othersPause)
				continue
			}
			if !done && err == nil {
				undecided.check(w, now)
				continue
			}
			// A run may be shorter than the heartbeats' interval: send one now, or the
			// clocks of quiet lanes would stand still from one run to the next. And a
			// run has done its work only if the database still has it.
			sent := w.sendHeartbeat(ctx)
			if err == nil && sent != nil {
				if !errors.Is(sent, errGone) && ctx.Err() == nil && problem.IsNew(sent) {
					w.Logger.Warn("everything is read, but not known to be in the database: asking again", "error", sent)
				}
				continue
			}
			stop(cmp.Or(err, errIdle))
			return
		}
	}
}

// othersPause is the wait before others are asked about again.
const othersPause = 500 * time.Millisecond

// othersBehind reports whether a source knows of lanes that aren't ours, aren't caught up,
// and may become ours.
func (w *Worker) othersBehind(ctx context.Context) bool {
	w.mu.Lock()
	var all []func(context.Context) bool
	for _, in := range w.sessions {
		if in.othersBehind != nil {
			all = append(all, in.othersBehind)
		}
	}
	w.mu.Unlock()
	return slices.ContainsFunc(all, func(behind func(context.Context) bool) bool { return behind(ctx) })
}

// undecidedLog logs, once, that a run until idle waits for producers' transactions.
type undecidedLog struct {
	since  time.Time
	logged bool
}

// undecidedPause is how long a transaction may be open before that is logged.
const undecidedPause = 5 * time.Second

func (u *undecidedLog) check(w *Worker, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var messages int64
	lane := ""
	for l := range w.lanes {
		if l.undecided > 0 {
			messages += l.undecided
			lane = max(lane, l.options.Lane.String())
		}
	}
	switch {
	case messages == 0:
		*u = undecidedLog{}
	case u.since.IsZero():
		u.since = now
	case !u.logged && now.Sub(u.since) >= undecidedPause:
		u.logged = true
		w.Logger.Warn("waiting for producers to end their open transactions: messages behind them can't be read before",
			"messages", messages, "lane", lane)
	}
}

// isIdle reports whether every lane has been caught up for UntilIdle. The error ends the
// run: something will not be caught up by itself.
func (w *Worker) isIdle(now time.Time) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	caughtUp := true
	for _, in := range w.sessions {
		for _, h := range in.held {
			if now.Sub(h.since) >= max(w.UntilIdle, heldTimeout) {
				return false, h.err
			}
		}
		if !in.ready && !in.wasReady && now.Sub(w.started) > max(startTimeout, w.UntilIdle) {
			return false, &NotReadyError{in.source}
		}
		caughtUp = caughtUp && in.ready
	}
	for _, e := range w.evicted {
		if e.attempts >= 3 && now.Sub(e.since) >= w.UntilIdle {
			return false, e.err
		}
		caughtUp = false
	}
	for l := range w.lanes {
		if l.held != nil && l.attempts >= 3 && now.Sub(l.heldSince) >= w.UntilIdle {
			return false, l.held
		}
		caughtUp = caughtUp && l.idleLocked() && l.undecided == 0
	}
	if !caughtUp {
		w.activity = now
	}
	return now.Sub(w.activity) >= w.UntilIdle, nil
}
