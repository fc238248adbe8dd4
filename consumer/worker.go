package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Worker gathers what sources offer into groups and hands them to the Handler,
// by natural group commit: there is no linger timer. While one transaction
// commits, the next batch of each lane gathers, so that low load gives the
// latency of a single message and high load full batches.
//
// The fields are set before Run and not changed after.
type Worker struct {
	Handler Handler
	Lanes   Lanes
	Sources []Source
	// Writers is how many groups may be in their transactions at a time: one for
	// each database connection that is kept for them.
	Writers int
	// MaxMessages and MaxBytes bound one group.
	MaxMessages int
	MaxBytes    int64
	Budget      *Budget
	// Drain is how long transactions in hand may still take once Run's context
	// has ended.
	Drain time.Duration
	// UntilIdle, if not zero, ends Run once every lane has been caught up for
	// that long.
	UntilIdle time.Duration
	// Pulse is how often Lanes is told which lanes are caught up. Zero: 15 s.
	HeartbeatInterval time.Duration
	// HangTimeout is how long a writer may be in one transaction before it is
	// taken to hang and the run ends. Zero: TransactionTimeout and 10 s.
	HangTimeout time.Duration
	Logger      *slog.Logger
	Metrics     *Metrics

	// hard outlives the context of Run by Drain: it is what transactions run
	// under. One context for both would either kill a good transaction at the
	// first sign of the end, or overrun the time there is.
	hard context.Context

	mu           sync.Mutex
	work         sync.Cond // a lane became ready, or stopped was set
	ready        []*Lane   // lanes with a batch to take, none of them in flight
	lanes        map[*Lane]struct{}
	intakes      []*Session
	gaveBack     map[message.Lane]gaveBack // held lanes that aren't open for now
	idle         int                       // writers that wait
	stopped      bool
	activity     time.Time            // of the last offer or commit, or when a lane was last seen behind
	transactions map[int]*transaction // by writer: the transaction that it is in
	hang         *HangError           // the first that was found
	done         int64                // messages made durable
	began        time.Time            // of the first offer
	ended        time.Time            // of the last commit
	started      time.Time

	writing sync.WaitGroup // writers that have neither ended nor been given up
}

// Run reads all sources until ctx ends, drains, and returns nil. With UntilIdle
// it also returns nil once everything is caught up. It returns an error when a
// source can't work, or when it was to run until idle and a lane is held. Run
// must be called once only.
func (w *Worker) Run(ctx context.Context) error {
	soft, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	hard, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer kill()
	w.mu.Lock() // probes may ask already
	w.hard = hard
	w.work.L = &w.mu
	w.lanes = make(map[*Lane]struct{})
	w.transactions = make(map[int]*transaction)
	w.started = time.Now()
	w.activity = w.started
	for _, s := range w.Sources {
		w.intakes = append(w.intakes, &Session{Lanes: w.Lanes, w: w, source: s.Name()})
		w.Metrics.ready.WithLabelValues(s.Name()).Set(0)
	}
	w.mu.Unlock()

	for i := range w.Writers {
		w.writing.Add(1)
		go w.write(i)
	}
	watching, unwatch := context.WithCancel(context.Background())
	var watch sync.WaitGroup
	watch.Go(func() { w.watchdog(watching, stop) })
	defer watch.Wait()
	defer unwatch()
	var sources sync.WaitGroup
	for i, s := range w.Sources {
		sources.Go(func() {
			// Whatever ends first ends all: half a worker would look healthy
			// while the other half's lag grows.
			err := s.Run(soft, w.intakes[i])
			switch {
			case err != nil && soft.Err() != nil: // too late to be the cause
				w.Logger.Warn("source failed while it stopped", "source", s.Name(), "error", err)
			case err != nil:
				err = fmt.Errorf("source %s: %w", s.Name(), err)
			case soft.Err() == nil:
				err = fmt.Errorf("source %s ended by itself", s.Name())
			}
			stop(err)
		})
	}
	sources.Go(func() { w.heartbeats(soft) })
	if w.UntilIdle > 0 {
		sources.Go(func() { w.watchIdle(soft, stop) })
	}

	<-soft.Done()
	// The sources close their lanes now. What hasn't come to its end by the
	// drain budget is cut off; it rolls back or, if its COMMIT was under way,
	// the lane row tells the next owner.
	cut := time.AfterFunc(w.Drain, kill)
	defer cut.Stop()
	last := time.AfterFunc(w.Drain+answerTimeout, func() { w.giveUp(stop, func(*transaction) bool { return true }) })
	defer last.Stop()
	sources.Wait()
	w.mu.Lock()
	w.stopped = true
	w.work.Broadcast()
	w.mu.Unlock()
	w.writing.Wait()

	if err := w.Alive(); err != nil {
		return err
	}
	if cause := context.Cause(soft); ctx.Err() == nil && !errors.Is(cause, errIdle) {
		return cause
	}
	return nil
}

var errIdle = errors.New("caught up")

// startTimeout is how long a run until idle waits for a source that has never
// been ready. One without end waits for ever.
const startTimeout = time.Minute

// heldTimeout is how long, at least, such a run waits for a lane that can't be
// opened: what holds it may be a moment's, such as a topic being made.
const heldTimeout = 5 * time.Second

// NotReadyError says that a run until idle gave up since a source has never
// reached what it is to read.
type NotReadyError struct{ Source string }

func (e *NotReadyError) Error() string {
	return fmt.Sprintf("source %s could not be reached, or does not have what is to be read, for %s: the log says why", e.Source, startTimeout)
}

func (w *Worker) watchIdle(ctx context.Context, stop context.CancelCauseFunc) {
	tick := time.NewTicker(max(min(w.UntilIdle/10, 100*time.Millisecond), time.Millisecond))
	defer tick.Stop()
	said := ""
	var undecided waiting
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			done, err := w.isIdle(now)
			if !done && err == nil {
				undecided.tell(w, now)
				continue
			}
			// A run may be shorter than a pulse's interval: it is told now, or the
			// clocks of quiet lanes would stand still from one run to the next. And a
			// run has done its work only if the database still has it.
			told := w.sendHeartbeats(ctx)
			if err == nil && told != nil {
				if !errors.Is(told, errGone) && told.Error() != said && ctx.Err() == nil {
					said = told.Error()
					w.Logger.Warn("everything is read, but not known to be in the database: asking again", "error", told)
				}
				continue
			}
			stop(cmp.Or(err, errIdle))
			return
		}
	}
}

// waiting tells, once, that a run until idle waits for producers.
type waiting struct {
	since time.Time
	told  bool
}

// undecidedPause is how long a transaction may be open before that is told.
const undecidedPause = 5 * time.Second

func (u *waiting) tell(w *Worker, now time.Time) {
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
		*u = waiting{}
	case u.since.IsZero():
		u.since = now
	case !u.told && now.Sub(u.since) >= undecidedPause:
		u.told = true
		w.Logger.Warn("waiting for producers whose transactions are open: what stands behind them can't be read before they end",
			"messages", messages, "lane", lane)
	}
}

func (w *Worker) isIdle(now time.Time) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	caughtUp := true
	for _, in := range w.intakes {
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
	for _, g := range w.gaveBack {
		if g.attempts >= 3 && now.Sub(g.since) >= w.UntilIdle {
			return false, g.err
		}
		caughtUp = false
	}
	for l := range w.lanes {
		if l.held != nil && l.attempts >= 3 && now.Sub(l.heldSince) >= w.UntilIdle {
			return false, l.held
		}
		caughtUp = caughtUp && l.idle() && l.undecided == 0
	}
	if !caughtUp {
		w.activity = now
	}
	return now.Sub(w.activity) >= w.UntilIdle, nil
}

// write is one writer: it takes a group, has it made durable, and tells the
// lanes, until the worker stops. One that was given up ends without a word: its
// lanes have been told, and are somebody else's.
func (w *Worker) write(id int) {
	for {
		t, ctx, cancel := w.takeTurn(id)
		if t == nil {
			w.writing.Done()
			return
		}
		w.Metrics.batchMessages.Observe(float64(t.messages))
		err := w.Handler.Handle(ctx, t.batches)
		cancel()
		if !w.answered(id) {
			return
		}
		if err == nil {
			w.committed(t.group)
		} else {
			w.failed(t.group, err)
		}
	}
}

// fairShare is the size of a group below which sharing it among writers costs
// more in transactions than it gains in parallel work.
const fairShare = 256

// lookAhead is how many groups for each writer are worth having at hand, beside
// the one that it is at. More of them bring no speed, and every message that is
// held costs the garbage collector a look at each of its rounds.
const lookAhead = 2

// leastShare is what a lane may ask for however many there are, in bytes.
const leastShare = 64 << 10

// share is what one lane may hold of that: see Intake.Share. The worker's mutex
// must be held.
func (w *Worker) share() (messages int, bytes int64) {
	lanes := 0
	for l := range w.lanes {
		if !l.idle() {
			lanes++
		}
	}
	lanes = max(lanes, 1)
	groups := lookAhead * max(w.Writers, 1)
	messages = min(max(groups*w.MaxMessages/lanes, fairShare), w.MaxMessages)
	bytes = min(max(min(int64(groups)*w.MaxBytes, w.Budget.limit/2)/int64(lanes), leastShare), w.MaxBytes)
	return messages, bytes
}

// takeTurn waits for ready lanes and takes a share of them: all of them when
// they hold little, so that few transactions do the work; else what falls to
// one of the writers that are free, so that the others have work too.
func (w *Worker) takeTurn(id int) (*transaction, context.Context, context.CancelFunc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.idle++
	for len(w.ready) == 0 && !w.stopped {
		w.work.Wait()
	}
	w.idle--
	if len(w.ready) == 0 {
		return nil, nil, nil
	}
	total := 0
	for _, l := range w.ready {
		total += len(l.next().batch.Messages)
	}
	share := min(w.MaxMessages, max(fairShare, total/(w.idle+1)))
	ctx, cancel := context.WithTimeout(w.hard, TransactionTimeout)

	t := &transaction{began: time.Now()}
	bytes := int64(0)
	for _, l := range w.ready {
		p := l.next()
		n := len(p.batch.Messages)
		if len(t.group) > 0 && (l.alone || t.messages+n > w.MaxMessages || bytes+p.batch.Bytes > w.MaxBytes || t.messages >= share) {
			break
		}
		t.messages += n
		bytes += p.batch.Bytes
		l.begin(cancel)
		t.group, t.batches = append(t.group, l), append(t.batches, p.batch)
		if l.alone {
			break
		}
	}
	w.ready = w.ready[:copy(w.ready, w.ready[len(t.group):])]
	w.transactions[id] = t
	return t, ctx, cancel
}

// committed tells the lanes of a group that it is durable. A lane is told before
// its next batch can be taken, so that it hears of its positions in order.
func (w *Worker) committed(group []*Lane) {
	for _, l := range group {
		b := &l.flight.batch
		l.options.Committed(b.Next, l.flight.tokens)
		w.Budget.Release(b.Bytes)
		w.Metrics.lanePosition.WithLabelValues(b.Lane.Source, b.Lane.Name).Set(float64(b.Next))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.activity = time.Now()
	w.ended = w.activity
	for _, l := range group {
		w.done += int64(len(l.flight.batch.Messages))
		if l.lastError != "" {
			w.Logger.Info("lane goes on", "source", l.options.Lane.Source, "lane", l.options.Lane.Name, "attempts", l.attempts+1)
		}
		l.position, l.fresh = l.flight.batch.Next, false
		l.flight = nil
		l.attempts, l.alone, l.lastError = 0, false, ""
		l.failing, l.failure = time.Time{}, nil
		l.setHeld(nil)
		l.settled()
	}
}

// failed sorts a group's lanes by what the error means for each. Lanes are tried
// again one by one, so that a lane at fault doesn't hold up its neighbours.
func (w *Worker) failed(group []*Lane, err error) {
	var fenced *lane.FencedError
	isFenced := errors.As(err, &fenced)
	var hold *lane.HoldError
	isHold := errors.As(err, &hold)
	concerns := func(l *Lane) bool {
		if isFenced {
			return slices.Contains(fenced.Lanes, l.options.Lane)
		}
		return !isHold || hold.Lane == message.Lane{} || hold.Lane == l.options.Lane
	}
	if !slices.ContainsFunc(group, concerns) {
		// It names none of them: to try all of them again at once would spin.
		isFenced, isHold = false, false
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range group {
		l.alone = true
		switch {
		case !concerns(l): // a neighbour's fault: at once again
			l.retry(0)
		case isFenced:
			w.Metrics.fenced.Inc()
			l.log("lane lost", err)
			l.loseLocked()
		case isHold:
			l.setHeld(err)
			l.log("lane held", err)
			l.attempts++
			if l.options.KeepFor == 0 && w.Budget.starves() {
				l.giveBack()
			} else {
				l.retry(backoff(l.attempts, holdBackoff))
			}
		default:
			if l.failure = err; l.failing.IsZero() {
				l.failing = time.Now()
			}
			l.log("transaction failed, trying again", err)
			l.attempts++
			l.retry(backoff(l.attempts, retryBackoff))
		}
	}
}

// Done is how many messages this run has made durable, and the time from the
// first one offered to the last commit.
func (w *Worker) Done() (messages int64, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done == 0 {
		return 0, 0
	}
	return w.done, w.ended.Sub(w.began)
}
