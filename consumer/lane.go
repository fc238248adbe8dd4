package consumer

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/lane"
)

// Lane is one open lane of a source. At most one of its batches is in a
// transaction; what is offered meanwhile gathers into the next.
type Lane struct {
	w       *Worker
	options LaneOptions
	lost    chan struct{} // closed when the lane is fenced
	space   chan struct{} // signalled when an Offer may fit
	ended   chan struct{} // closed when the lane is closed and no transaction of it is in flight

	// The worker's mutex guards everything below.

	pending *queuedBatch // gathers; no writer has it yet
	flight  *queuedBatch // in a transaction, or waiting to be tried again
	running bool         // flight is in a transaction now, and its writer's
	queued  bool         // is in the worker's ready list
	closed  bool
	lag     int64 // see SetLag
	// undecided is how many messages are behind an open transaction at the broker.
	undecided int64

	position   int64     // of the lane's row
	unmoved    bool      // no commit and no release since it was acquired
	gaveUp     time.Time // when a batch was last abandoned for other workers to do (KeepFor)
	caughtUpAt time.Time // when the broker last held nothing beyond what was offered; zero: not known

	cancel context.CancelFunc // of the running transaction

	attempts  int
	alone     bool  // no neighbours in the group until it succeeds
	held      error // why it is held; nil: it isn't
	heldSince time.Time
	failing   time.Time // since when no transaction of it has been made durable; zero: the last one was
	failure   error     // of the last attempt, if that may pass by itself
	problem   logonce.Problem
	timer     *time.Timer
}

// queuedBatch is what has gathered of a lane's batches, with their tokens.
type queuedBatch struct {
	batch   lane.Batch
	tokens  []any
	offered time.Time // the first of them
}

// add appends the next batch. The caller clips the first one's messages, so that
// appending doesn't write behind the source's slice.
func (q *queuedBatch) add(more *lane.Batch, tokens ...any) {
	b := &q.batch
	b.Messages = append(b.Messages, more.Messages...)
	// What a queue delivers again is below what came before it.
	b.Next, b.Lag, b.BrokerPosition, b.Checkpoint = max(b.Next, more.Next), more.Lag, more.BrokerPosition, more.Checkpoint
	b.LeaderEpochs = more.LeaderEpochs
	b.Bytes += more.Bytes
	q.tokens = append(q.tokens, tokens...)
}

// Offer hands a batch over, with a token that comes back when it is committed
// or abandoned. It blocks while the lane holds its share (Session.Share). The
// batch's bytes must have been acquired from the budget; from here on they are
// the worker's to release, also when Offer returns an error. A batch of an
// ordered lane starts where the last one ended.
//
// One goroutine at a time may offer to a lane. The error is ErrClosed or the
// context's.
func (l *Lane) Offer(ctx context.Context, b lane.Batch, token any) error {
	w := l.w
	w.Metrics.fetched.WithLabelValues(b.Lane.Source).Add(float64(len(b.Messages)))
	for {
		w.mu.Lock()
		if l.closed {
			l.abandonLocked(&queuedBatch{batch: b, tokens: []any{token}})
			w.mu.Unlock()
			return ErrClosed
		}
		if l.pending == nil || l.fitsLocked(&b) {
			l.gatherLocked(b, token)
			w.mu.Unlock()
			return nil
		}
		w.mu.Unlock()
		select {
		case <-l.space:
		case <-ctx.Done():
			w.mu.Lock()
			l.abandonLocked(&queuedBatch{batch: b, tokens: []any{token}})
			w.mu.Unlock()
			return ctx.Err()
		}
	}
}

func (l *Lane) fitsLocked(b *lane.Batch) bool {
	p := &l.pending.batch
	messages, bytes := l.w.shareLocked()
	return len(p.Messages)+len(b.Messages) <= messages && p.Bytes+b.Bytes <= bytes
}

func (l *Lane) gatherLocked(b lane.Batch, token any) {
	l.w.activity = time.Now()
	if l.w.began.IsZero() {
		l.w.began = l.w.activity
	}
	l.lag = b.Lag
	if l.pending == nil {
		// What is offered next is appended, which must not write into memory
		// behind the source's slice.
		b.Messages = slices.Clip(b.Messages)
		l.pending = &queuedBatch{batch: b, tokens: []any{token}, offered: l.w.activity}
		l.enqueueLocked()
		return
	}
	l.pending.add(&b, token)
}

// SetLag sets how many messages the broker holds beyond what was offered; -1: not
// known. A lane counts as caught up only at 0.
func (l *Lane) SetLag(n int64) {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	l.lag = n
	if n >= 0 && !l.closed { // else the metric of a closed lane would come back
		l.w.Metrics.lag.WithLabelValues(l.options.Lane.Source, l.options.Lane.Name).Set(float64(n))
	}
}

// SetUndecided sets how many messages the broker holds behind a producer's
// transaction that is still open. They aren't lag, since nobody can read them yet, but
// a run until idle waits for them.
func (l *Lane) SetUndecided(n int64) {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	l.undecided = n
	if !l.closed {
		l.w.Metrics.undecided.WithLabelValues(l.options.Lane.Source, l.options.Lane.Name).Set(float64(n))
	}
}

// SetCaughtUp says that the broker, asked at that time, held nothing beyond what has
// been offered by now: nothing that can't be read yet, either, and nothing that other
// workers have in hand. Once everything offered is committed, the lane's clock may
// follow the database's up to then. A lane that is held for what it has abandoned
// since isn't held any longer.
//
// A lag of 0 says less. It may be old when it is set, for an Offer may have waited in
// between; and it leaves out what will come with an old timestamp.
func (l *Lane) SetCaughtUp(asked time.Time) {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	if !asked.After(l.gaveUp) {
		return // what was abandoned since is still to be done
	}
	l.caughtUpAt = asked
	if l.held != nil && l.flight == nil && l.pending == nil {
		// What it was held for was abandoned (KeepFor), and another worker committed it.
		l.w.Logger.Info("lane goes on: what it was held for is done", "source", l.options.Lane.Source, "lane", l.options.Lane.Name)
		l.recoverLocked()
	}
}

// idleLocked reports whether everything that was offered is committed, and there is
// nothing more to offer.
func (l *Lane) idleLocked() bool { return l.flight == nil && l.pending == nil && l.lag == 0 }

// Lost is closed when the lane was fenced: its batches are abandoned, and the source
// closes it, and acquires it again or not.
func (l *Lane) Lost() <-chan struct{} { return l.lost }

// Close ends the lane. What was offered but isn't in a transaction is abandoned; the
// transaction in flight is waited for until ctx ends, then cut off. When Close
// returns, no callback of the lane runs or will run, except one that an Offer still
// makes. A lane may be closed more than once, also when it was lost.
func (l *Lane) Close(ctx context.Context) {
	w := l.w
	w.mu.Lock()
	l.closeLocked()
	w.mu.Unlock()
	select {
	case <-l.ended:
		l.release()
		return
	case <-ctx.Done():
	}
	w.mu.Lock()
	if l.running {
		l.cancel()
	}
	w.mu.Unlock()
	// The handler heeds its context; from one that doesn't, the watchdog takes the
	// lane.
	<-l.ended
	l.release()
}

// releaseTimeout bounds a release while the database may be away: the group waits for
// its members to release their lanes.
const releaseTimeout = time.Second

// release releases a lane that didn't move while it was ours: one that moved needs no
// release, and for one that was lost it does nothing, as the epoch is another.
func (l *Lane) release() {
	w := l.w
	w.mu.Lock()
	unmoved := l.unmoved
	l.unmoved = false
	w.mu.Unlock()
	if !unmoved {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	if err := w.Lanes.Release(ctx, l.options.Lane, l.options.Epoch); err != nil {
		w.Logger.Debug("release a lane", "source", l.options.Lane.Source, "lane", l.options.Lane.Name, "error", err)
	}
}

// beginLocked moves the lane's next batch into its transaction.
func (l *Lane) beginLocked(cancel context.CancelFunc) {
	l.queued = false
	if l.flight == nil {
		l.flight, l.pending = l.pending, nil
		l.signalSpace()
	}
	l.running, l.cancel = true, cancel
}

func (l *Lane) nextLocked() *queuedBatch {
	if l.flight != nil {
		return l.flight
	}
	return l.pending
}

// recoverLocked forgets what failed: the lane's last batch is durable.
func (l *Lane) recoverLocked() {
	l.attempts, l.alone = 0, false
	l.problem.End()
	l.failing, l.failure = time.Time{}, nil
	l.setHeldLocked(nil)
}

func (l *Lane) enqueueLocked() {
	if l.closed || l.running || l.queued || l.timer != nil || l.nextLocked() == nil {
		return
	}
	l.queued = true
	l.w.ready = append(l.w.ready, l)
	l.w.work.Signal()
}

// retryLocked tries the flight again, after a while. A closed lane's is abandoned:
// the next owner starts from what the database says.
func (l *Lane) retryLocked(after time.Duration) {
	l.running = false
	waited := time.Since(l.flight.offered)
	switch {
	case l.closed:
		l.closeLocked()
	case l.options.KeepFor > 0 && waited+after > l.options.KeepFor:
		l.abandonLocked(l.flight)
		l.flight = nil
		l.attempts = 0
		l.lag, l.caughtUpAt, l.gaveUp = -1, time.Time{}, time.Now() // what was abandoned is still to be done
		l.enqueueLocked()
	case after == 0:
		l.enqueueLocked()
	default:
		l.retryInLocked(after)
	}
}

func (l *Lane) retryInLocked(after time.Duration) {
	l.timer = time.AfterFunc(after, func() {
		l.w.mu.Lock()
		defer l.w.mu.Unlock()
		if l.timer != nil {
			l.timer = nil
			l.growHeldLocked()
			l.enqueueLocked()
		}
	})
}

func (l *Lane) loseLocked() {
	l.running = false
	l.closeLocked()
	close(l.lost)
}

// closeLocked closes the lane. While its transaction is in flight, only the rest is
// abandoned; it is called again when that has ended.
func (l *Lane) closeLocked() {
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	if l.queued {
		l.queued = false
		l.w.ready = slices.DeleteFunc(l.w.ready, func(other *Lane) bool { return other == l })
	}
	if l.pending != nil {
		l.abandonLocked(l.pending)
		l.pending = nil
	}
	l.signalSpace()
	if l.running {
		return
	}
	if l.flight != nil {
		l.abandonLocked(l.flight)
		l.flight = nil
	}
	if _, open := l.w.lanes[l]; open {
		delete(l.w.lanes, l)
		l.setHeldLocked(nil)
		l.w.Metrics.forget(l.options.Lane)
		close(l.ended)
	}
}

func (l *Lane) abandonLocked(q *queuedBatch) {
	l.w.Budget.Release(q.batch.Bytes)
	l.w.Metrics.abandoned.WithLabelValues(q.batch.Lane.Source).Add(float64(len(q.batch.Messages)))
	if l.options.Abandoned != nil {
		l.options.Abandoned(q.tokens)
	}
}

func (l *Lane) signalSpace() {
	select {
	case l.space <- struct{}{}:
	default:
	}
}

// logLocked warns when the reason changes; repetitions go to the debug log.
func (l *Lane) logLocked(what string, err error) {
	if errors.Is(err, context.Canceled) && (l.closed || l.w.hard.Err() != nil) {
		return // we cut it off
	}
	log := l.w.Logger.Debug
	if l.problem.IsNew(err) {
		log = l.w.Logger.Warn
	}
	log(what, "source", l.options.Lane.Source, "lane", l.options.Lane.Name, "attempt", l.attempts+1, "error", err)
}
