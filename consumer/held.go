package consumer

import (
	"slices"
	"time"

	"github.com/dedupd/dedupd/message"
)

// A lane is held until somebody changes something. It is open and tries its batch
// again, rarely; or its source can't open it (Session.Hold); or it is evicted, to be
// opened again.

// heldLane is why a lane that isn't open is held, and since when.
type heldLane struct {
	err   error
	since time.Time
}

// Hold reports that a lane can't be opened until somebody changes something, as
// after a loss of data at the broker: it counts among the held lanes, and makes
// the process not ready. A nil error ends that. Readiness shows the error, so it must
// quote no message.
func (in *Session) Hold(l message.Lane, err error) {
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	old, was := in.held[l]
	switch {
	case err == nil && was:
		delete(in.held, l)
		in.w.Metrics.held.Dec()
	case err != nil && was:
		in.held[l] = heldLane{err, old.since}
	case err != nil:
		if in.held == nil {
			in.held = make(map[message.Lane]heldLane)
		}
		in.held[l] = heldLane{err, time.Now()}
		in.w.Metrics.held.Inc()
	}
}

// growHeldLocked adds what has gathered to the batch of a held, ordered lane, as far
// as a batch may grow. A refused message is known to be at fault only once another one
// is written, and in this lane that one comes behind it.
func (l *Lane) growHeldLocked() {
	if l.held == nil || l.flight == nil || l.pending == nil || !l.flight.batch.Ordered {
		return
	}
	b, more := &l.flight.batch, &l.pending.batch
	if len(b.Messages)+len(more.Messages) > l.w.MaxMessages || b.Bytes+more.Bytes > l.w.MaxBytes {
		return
	}
	b.Messages = slices.Clip(b.Messages)
	l.flight.add(more, l.pending.tokens...)
	l.pending = nil
	l.signalSpace()
}

// evictedLane is a held lane that isn't open until its source acquires it again.
type evictedLane struct {
	heldLane
	attempts int
}

// evictLocked closes a held lane whose memory others wait for: they would wait for as
// long as it is held. The source acquires it again and reads from its position; it is
// still held then. (A queue's slot abandons its batch by itself: KeepFor.)
func (l *Lane) evictLocked() {
	w := l.w
	if !l.closed {
		if w.evicted == nil {
			w.evicted = make(map[message.Lane]evictedLane)
		}
		w.evicted[l.options.Lane] = evictedLane{heldLane{l.held, l.heldSince}, l.attempts}
		w.Metrics.held.Inc() // until it is open again
		w.Logger.Info("a held lane gives back the memory that others wait for, and is read again", "source", l.options.Lane.Source, "lane", l.options.Lane.Name)
	}
	l.loseLocked()
}

// restoreHeldLocked makes a lane that was evicted as held as it was. It waits before
// its next attempt, or it would be read and evicted without end.
func (l *Lane) restoreHeldLocked() {
	e, ok := l.w.evicted[l.options.Lane]
	if !ok {
		return
	}
	l.w.forgetEvictedLocked(l.options.Lane)
	l.setHeldLocked(e.err)
	l.heldSince, l.attempts, l.alone = e.since, e.attempts, true
	l.problem.IsNew(e.err) // it was logged before
	l.retryInLocked(backoff(l.attempts, holdBackoff))
}

func (w *Worker) forgetEvictedLocked(l message.Lane) {
	if _, ok := w.evicted[l]; ok {
		delete(w.evicted, l)
		w.Metrics.held.Dec()
	}
}

func (l *Lane) setHeldLocked(err error) {
	if (l.held == nil) != (err == nil) {
		if err == nil {
			l.w.Metrics.held.Dec()
		} else {
			l.w.Metrics.held.Inc()
			l.heldSince = time.Now()
		}
	}
	l.held = err
}
