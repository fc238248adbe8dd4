package consumer

import (
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
// A Worker has a Session for each source and a Lane for each open lane. One mutex,
// Worker.mu, guards what changes in all three; methods named ...Locked need it held.
//
//   - A source's goroutine offers to a Lane, which appends to its pending batch and
//     enters the worker's ready list.
//   - A writer takes ready lanes as one transaction, and their pending batches become
//     their flights. Until the transaction ends, the writer alone touches a flight.
//     Then it tells the lanes: committed or failed.
//   - A lane is closed by its source, or lost when it is fenced. What it holds is
//     abandoned, at the latest when its transaction ends.
//   - The watchdog takes a transaction that hangs away from its writer, and closes its
//     lanes. The writer finds that when it ends.
//
// Handler, Lanes and LaneOptions.Committed are called without the mutex,
// LaneOptions.Abandoned with it.
//
// The fields are set before Run and not changed after.
type Worker struct {
	Handler Handler
	Lanes   Lanes
	Sources []Source
	// Writers is how many transactions may run at a time: one for each database
	// connection that is kept for them.
	Writers int
	// MaxMessages and MaxBytes bound one group.
	MaxMessages int
	MaxBytes    int64
	Budget      *Budget
	// Drain is how long transactions in flight may still take once Run's context
	// has ended.
	Drain time.Duration
	// UntilIdle, if not zero, ends Run once every lane has been caught up for
	// that long.
	UntilIdle time.Duration
	// HeartbeatInterval is how often Lanes gets a heartbeat of the lanes that are
	// caught up. Zero: 15 s.
	HeartbeatInterval time.Duration
	// HangTimeout is how long a transaction may take before it is considered to hang
	// and the run ends. Zero: TransactionTimeout and 10 s.
	HangTimeout time.Duration
	Logger      *slog.Logger
	Metrics     *Metrics

	// hard outlives the context of Run by Drain: transactions run under it. One
	// context for both would either kill a good transaction at the first sign of
	// the end, or overrun the time there is.
	hard context.Context

	mu           sync.Mutex
	work         sync.Cond // a lane became ready, or stopped was set
	ready        []*Lane   // lanes with a batch to take, none of them in flight
	lanes        map[*Lane]struct{}
	sessions     []*Session
	evicted      map[message.Lane]evictedLane // held lanes that aren't open for now
	idle         int                          // writers that wait
	stopped      bool
	activity     time.Time            // of the last offer or commit, or when a lane was last seen behind
	transactions map[int]*transaction // in flight, by writer
	hang         *HangError           // the first that was found
	done         int64                // messages made durable
	began        time.Time            // of the first offer
	ended        time.Time            // of the last commit
	started      time.Time

	writing sync.WaitGroup // writers that have neither ended nor lost their transaction to the watchdog
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
	w.start(hard)
	defer w.watch(stop)()
	sources := w.runSources(soft, stop)

	<-soft.Done()
	// The sources close their lanes now. What hasn't ended by the drain budget is cut
	// off: it rolls back or, if its COMMIT was under way, the next owner finds that in
	// the lane's row.
	cut := time.AfterFunc(w.Drain, kill)
	defer cut.Stop()
	last := time.AfterFunc(w.Drain+answerTimeout, func() { w.abandonTransactions(stop, func(*transaction) bool { return true }) })
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

// start sets up the state and starts the writers, whose transactions run under hard.
func (w *Worker) start(hard context.Context) {
	w.mu.Lock() // probes may ask already
	defer w.mu.Unlock()
	w.hard = hard
	w.work.L = &w.mu
	w.lanes = make(map[*Lane]struct{})
	w.transactions = make(map[int]*transaction)
	w.started = time.Now()
	w.activity = w.started
	for _, s := range w.Sources {
		w.sessions = append(w.sessions, &Session{Lanes: w.Lanes, w: w, source: s.Name()})
		w.Metrics.ready.WithLabelValues(s.Name()).Set(0)
	}
	for i := range w.Writers {
		w.writing.Add(1)
		go w.write(i)
	}
}

// watch runs the watchdog until end is called, which waits for it.
func (w *Worker) watch(stop context.CancelCauseFunc) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var watchdog sync.WaitGroup
	watchdog.Go(func() { w.watchdog(ctx, stop) })
	return func() { cancel(); watchdog.Wait() }
}

// runSources runs the sources, and what goes on as long as they do, until soft ends.
func (w *Worker) runSources(soft context.Context, stop context.CancelCauseFunc) *sync.WaitGroup {
	var sources sync.WaitGroup
	for i, s := range w.Sources {
		sources.Go(func() {
			// Whatever ends first ends all: half a worker would look healthy
			// while the other half's lag grows.
			err := s.Run(soft, w.sessions[i])
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
	sources.Go(func() { w.sendHeartbeats(soft) })
	if w.UntilIdle > 0 {
		sources.Go(func() { w.watchIdle(soft, stop) })
	}
	return &sources
}

// write is one writer: it takes a group, has it made durable, and tells the
// lanes, until the worker stops. If the watchdog took its transaction, it ends
// silently: the lanes are closed already.
func (w *Worker) write(id int) {
	for {
		t, ctx, cancel := w.nextTransaction(id)
		if t == nil {
			w.writing.Done()
			return
		}
		w.Metrics.batchMessages.Observe(float64(t.messages))
		err := w.Handler.Handle(ctx, t.batches)
		cancel()
		if !w.endTransaction(id) {
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

// shareLocked is what one lane may hold of that: see Session.Share.
func (w *Worker) shareLocked() (messages int, bytes int64) {
	lanes := 0
	for l := range w.lanes {
		if !l.idleLocked() {
			lanes++
		}
	}
	lanes = max(lanes, 1)
	groups := lookAhead * max(w.Writers, 1)
	messages = min(max(groups*w.MaxMessages/lanes, fairShare), w.MaxMessages)
	bytes = min(max(min(int64(groups)*w.MaxBytes, w.Budget.ahead())/int64(lanes), leastShare), w.MaxBytes)
	return messages, bytes
}

// nextTransaction waits for ready lanes and takes a share of them: all of them when
// they hold little, so that few transactions do the work; otherwise the share of one
// of the free writers, so that the others have work too. Nil: the worker has stopped.
func (w *Worker) nextTransaction(id int) (*transaction, context.Context, context.CancelFunc) {
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
		total += len(l.nextLocked().batch.Messages)
	}
	share := min(w.MaxMessages, max(fairShare, total/(w.idle+1)))
	ctx, cancel := context.WithTimeout(w.hard, TransactionTimeout)

	t := &transaction{began: time.Now()}
	bytes := int64(0)
	for _, l := range w.ready {
		p := l.nextLocked()
		n := len(p.batch.Messages)
		if len(t.group) > 0 && (l.alone || t.messages+n > w.MaxMessages || bytes+p.batch.Bytes > w.MaxBytes || t.messages >= share) {
			break
		}
		t.messages += n
		bytes += p.batch.Bytes
		l.beginLocked(cancel)
		t.group, t.batches = append(t.group, l), append(t.batches, p.batch)
		if l.alone {
			break
		}
	}
	w.ready = w.ready[:copy(w.ready, w.ready[len(t.group):])]
	w.transactions[id] = t
	return t, ctx, cancel
}

// committed tells the lanes of a group that it is durable. A lane's source is told
// before the lane's next batch can be taken, so that it hears of positions in order.
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
		if l.problem.End() {
			w.Logger.Info("lane goes on", "source", l.options.Lane.Source, "lane", l.options.Lane.Name, "attempts", l.attempts+1)
		}
		l.position, l.unmoved = l.flight.batch.Next, false
		l.flight, l.running = nil, false
		l.recoverLocked()
		if l.closed {
			l.closeLocked()
		} else {
			l.enqueueLocked()
		}
	}
}

// failed does with each lane of a group what the error means for it. Lanes are tried
// again one by one, so that a lane at fault doesn't hold up its neighbours.
func (w *Worker) failed(group []*Lane, err error) {
	var fenced *lane.FencedError
	isFenced := errors.As(err, &fenced)
	var hold *lane.HoldError
	isHold := errors.As(err, &hold)
	concerned := func(l *Lane) bool {
		if isFenced {
			return slices.Contains(fenced.Lanes, l.options.Lane)
		}
		return !isHold || hold.Lane == message.Lane{} || hold.Lane == l.options.Lane
	}
	if !slices.ContainsFunc(group, concerned) {
		// It names none of them: trying all of them again at once would spin.
		isFenced, isHold = false, false
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range group {
		l.alone = true
		switch {
		case !concerned(l): // a neighbour's fault: try again at once
			l.retryLocked(0)
		case isFenced:
			w.Metrics.fenced.Inc()
			l.logLocked("lane lost", err)
			l.loseLocked()
		case isHold:
			if hold.Landed { // it has gone on since it was held, if it was
				l.attempts = 0
				l.setHeldLocked(nil)
			}
			l.setHeldLocked(err)
			l.logLocked("lane held", err)
			l.attempts++
			if l.options.KeepFor == 0 && w.Budget.starves() {
				l.evictLocked()
			} else {
				l.retryLocked(backoff(l.attempts, holdBackoff))
			}
		default:
			if l.failure = err; l.failing.IsZero() {
				l.failing = time.Now()
			}
			l.logLocked("transaction failed, trying again", err)
			l.attempts++
			l.retryLocked(backoff(l.attempts, retryBackoff))
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
