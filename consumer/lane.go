package consumer

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Lane is one open lane of a source. At most one of its batches is in a
// transaction; what is offered meanwhile gathers into the next. All fields below
// options are guarded by the worker's mutex.
type Lane struct {
	w       *Worker
	options LaneOptions
	lost    chan struct{}
	space   chan struct{} // signalled when an Offer may fit
	ended   chan struct{} // closed when the lane is closed and nothing is in hand

	pending *queuedBatch // gathers; not yet taken by a writer
	flight  *queuedBatch // in a transaction, or waiting to be tried again
	running bool         // flight is in a transaction now
	queued  bool         // stands in the worker's ready list
	closed  bool
	lag     int64
	// undecided is how many messages stand behind an open transaction at the broker.
	undecided int64

	position int64     // where the lane's row stands
	fresh    bool      // neither moved nor given up since it was taken
	gaveUp   time.Time // when a batch was last abandoned that others are to do
	asked    time.Time // the broker last held nothing beyond what was offered; zero: it never said so

	cancel context.CancelFunc // of the running transaction

	attempts  int
	alone     bool // no neighbours in the group until it succeeds
	held      error
	heldSince time.Time
	failing   time.Time // since when no transaction of it has been made durable; zero: the last one was
	failure   error     // of the last try, if that may pass by itself
	lastError string
	timer     *time.Timer
}

type queuedBatch struct {
	batch   lane.Batch
	tokens  []any
	offered time.Time
}

// add appends what was offered next. Nobody else has the messages' memory behind the
// parcel's own.
func (p *queuedBatch) add(more *lane.Batch, tokens ...any) {
	b := &p.batch
	b.Messages = append(b.Messages, more.Messages...)
	// What a queue delivers again stands below what came before it.
	b.Next, b.Lag, b.BrokerPosition, b.Checkpoint = max(b.Next, more.Next), more.Lag, more.BrokerPosition, more.Checkpoint
	b.LeaderEpochs = more.LeaderEpochs
	b.Bytes += more.Bytes
	p.tokens = append(p.tokens, tokens...)
}

// Offer hands a batch over, with a token that comes back when it is committed
// or abandoned. It blocks while the lane holds its share (Intake.Share). The
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
		if l.pending == nil || l.fits(&b) {
			l.gather(b, token)
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

func (l *Lane) fits(b *lane.Batch) bool {
	p := &l.pending.batch
	messages, bytes := l.w.share()
	return len(p.Messages)+len(b.Messages) <= messages && p.Bytes+b.Bytes <= bytes
}

func (l *Lane) gather(b lane.Batch, token any) {
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
		l.enqueue()
		return
	}
	l.pending.add(&b, token)
}

// SetLag tells how many messages the broker holds beyond what was offered; -1:
// not known. A lane counts as caught up only at 0.
func (l *Lane) SetLag(n int64) {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	l.lag = n
	if n >= 0 && !l.closed { // else the metric of a closed lane would come back
		l.w.Metrics.lag.WithLabelValues(l.options.Lane.Source, l.options.Lane.Name).Set(float64(n))
	}
}

// SetUndecided tells how many messages the broker holds behind a producer's
// transaction that is still open. They are no lag, since nobody can read them yet; but
// a run until idle waits for them.
func (l *Lane) SetUndecided(n int64) {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	l.undecided = n
	if !l.closed {
		l.w.Metrics.undecided.WithLabelValues(l.options.Lane.Source, l.options.Lane.Name).Set(float64(n))
	}
}

// SetCaughtUp tells that the broker, when it was asked at that time, held nothing
// beyond what has been offered by now: nothing that may not be read yet, either,
// and nothing that others have in hand. A lane that was held for what it has given up
// since isn't held any longer. Once all that was offered is committed,
// the lane's clock may follow the database's up to then.
//
// A lag of 0 says less. It may be old when it is told, for an Offer may have
// waited in between; and it leaves out what will come with an old timestamp.
func (l *Lane) SetCaughtUp(asked time.Time) {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	if !asked.After(l.gaveUp) {
		return // what was given up since is still to be done
	}
	l.asked = asked
	if l.held != nil && l.flight == nil && l.pending == nil {
		// What it was held for was given up (KeepFor), and others have had it committed.
		l.w.Logger.Info("lane goes on: what it was held for is done", "source", l.options.Lane.Source, "lane", l.options.Lane.Name)
		l.attempts, l.alone, l.lastError = 0, false, ""
		l.failing, l.failure = time.Time{}, nil
		l.setHeld(nil)
	}
}

// idle tells whether everything that was offered is committed, and there is
// nothing more to offer.
func (l *Lane) idle() bool { return l.flight == nil && l.pending == nil && l.lag == 0 }

// Lost is closed when the lane was fenced: its batches are abandoned, and the
// source takes the lane anew or lets it go.
func (l *Lane) Lost() <-chan struct{} { return l.lost }

// Close lets the lane go. What was offered but not begun is abandoned; what is
// in its transaction is waited for until ctx ends, then cut off. When Close
// returns, no callback of the lane runs or will run, but for one that an Offer
// still makes. A lane may be closed more than once, also when it was lost.
func (l *Lane) Close(ctx context.Context) {
	w := l.w
	w.mu.Lock()
	l.shutLocked()
	w.mu.Unlock()
	select {
	case <-l.ended:
		l.letGo()
		return
	case <-ctx.Done():
	}
	w.mu.Lock()
	if l.running {
		l.cancel()
	}
	w.mu.Unlock()
	// The handler answers to its context; of one that doesn't, watch gives the
	// lane up.
	<-l.ended
	l.letGo()
}

// letGoTimeout bounds the word to a database that may be away: a group waits for
// its members to let go.
const letGoTimeout = time.Second

// letGo tells the authority of a lane that didn't move while it was ours. One that
// moved has told by that, and of one that was lost the epoch tells.
func (l *Lane) letGo() {
	w := l.w
	w.mu.Lock()
	fresh := l.fresh
	l.fresh = false
	w.mu.Unlock()
	if !fresh {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), letGoTimeout)
	defer cancel()
	if err := w.Lanes.Release(ctx, l.options.Lane, l.options.Epoch); err != nil {
		w.Logger.Debug("tell that a lane was let go", "source", l.options.Lane.Source, "lane", l.options.Lane.Name, "error", err)
	}
}

// begin moves the lane's next parcel into its transaction.
func (l *Lane) begin(cancel context.CancelFunc) {
	l.queued = false
	if l.flight == nil {
		l.flight, l.pending = l.pending, nil
		l.signalSpace()
	}
	l.running, l.cancel = true, cancel
}

func (l *Lane) next() *queuedBatch {
	if l.flight != nil {
		return l.flight
	}
	return l.pending
}

// settled is called when nothing is in flight any more.
func (l *Lane) settled() {
	l.running = false
	if l.closed {
		l.shutLocked()
		return
	}
	l.enqueue()
}

func (l *Lane) enqueue() {
	if l.closed || l.running || l.queued || l.timer != nil || l.next() == nil {
		return
	}
	l.queued = true
	l.w.ready = append(l.w.ready, l)
	l.w.work.Signal()
}

// retry puts the flight back, after a while. A closed lane's is abandoned: a
// next owner starts from what the database says.
func (l *Lane) retry(after time.Duration) {
	l.running = false
	kept := time.Since(l.flight.offered)
	switch {
	case l.closed:
		l.shutLocked()
	case l.options.KeepFor > 0 && kept+after > l.options.KeepFor:
		l.abandonLocked(l.flight)
		l.flight = nil
		l.attempts = 0
		l.lag, l.asked, l.gaveUp = -1, time.Time{}, time.Now() // what was given up is still to be done
		l.enqueue()
	case after == 0:
		l.enqueue()
	default:
		l.retryIn(after)
	}
}

func (l *Lane) retryIn(after time.Duration) {
	l.timer = time.AfterFunc(after, func() {
		l.w.mu.Lock()
		defer l.w.mu.Unlock()
		if l.timer != nil {
			l.timer = nil
			l.growHeld()
			l.enqueue()
		}
	})
}

// growHeld adds what has gathered to the batch of an ordered lane that is held, as
// far as a batch may grow. A message that was refused is only known to be at fault
// once another one is written, and in this lane that one comes behind it.
func (l *Lane) growHeld() {
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

// gaveBack is a held lane that isn't open while its source takes it anew.
type gaveBack struct {
	heldLane
	attempts int
}

// giveBack lets a held lane's bytes go, for which others have waited: they would
// wait for as long as it is held. The source takes the lane anew, and reads again
// from where it stands; it is held still. (A queue's slot gives up by itself.)
func (l *Lane) giveBack() {
	w := l.w
	if !l.closed {
		if w.gaveBack == nil {
			w.gaveBack = make(map[message.Lane]gaveBack)
		}
		w.gaveBack[l.options.Lane] = gaveBack{heldLane{l.held, l.heldSince}, l.attempts}
		w.Metrics.held.Inc() // until it is open again
		w.Logger.Info("a held lane gives back the memory that others wait for, and is read again", "source", l.options.Lane.Source, "lane", l.options.Lane.Name)
	}
	l.loseLocked()
}

// heldStill makes a lane that is opened again as held as it was. Its next try waits
// its time, or it would be read and given back without end.
func (l *Lane) heldStill() {
	g, ok := l.w.gaveBack[l.options.Lane]
	if !ok {
		return
	}
	l.w.forgetGivenBack(l.options.Lane)
	l.setHeld(g.err)
	l.heldSince, l.attempts, l.alone, l.lastError = g.since, g.attempts, true, g.err.Error()
	l.retryIn(backoff(l.attempts, holdBackoff))
}

func (w *Worker) forgetGivenBack(lane message.Lane) {
	if _, ok := w.gaveBack[lane]; ok {
		delete(w.gaveBack, lane)
		w.Metrics.held.Dec()
	}
}

func (l *Lane) loseLocked() {
	l.running = false
	l.shutLocked()
	close(l.lost)
}

// shutLocked closes the lane as far as it goes now; a running transaction calls
// it again when it has ended.
func (l *Lane) shutLocked() {
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	if l.queued {
		l.queued = false
		for i, other := range l.w.ready {
			if other == l {
				l.w.ready = append(l.w.ready[:i], l.w.ready[i+1:]...)
				break
			}
		}
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
		l.setHeld(nil)
		l.w.Metrics.forget(l.options.Lane)
		close(l.ended)
	}
}

func (l *Lane) abandonLocked(p *queuedBatch) {
	l.w.Budget.Release(p.batch.Bytes)
	l.w.Metrics.abandoned.WithLabelValues(p.batch.Lane.Source).Add(float64(len(p.batch.Messages)))
	if l.options.Abandoned != nil {
		l.options.Abandoned(p.tokens)
	}
}

func (l *Lane) signalSpace() {
	select {
	case l.space <- struct{}{}:
	default:
	}
}

func (l *Lane) setHeld(err error) {
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

// log warns when the reason changes and is quiet about repetitions.
func (l *Lane) log(what string, err error) {
	if errors.Is(err, context.Canceled) && (l.closed || l.w.hard.Err() != nil) {
		return // we cut it off ourselves
	}
	log := l.w.Logger.Debug
	if text := err.Error(); text != l.lastError {
		l.lastError = text
		log = l.w.Logger.Warn
	}
	log(what, "source", l.options.Lane.Source, "lane", l.options.Lane.Name, "attempt", l.attempts+1, "error", err)
}
