package dedup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// The policies, as configuration writes them.
const (
	MissingDeadLetter = "dead_letter"
	MissingPosition   = "position"
	MissingStop       = "stop"

	DuplicateDrop       = "drop"
	DuplicateDeadLetter = "dead_letter"

	ConflictDeadLetter = "dead_letter"
	ConflictDrop       = "drop"
	ConflictStop       = "stop"
)

// Processor makes groups of batches durable, each message id once. The fields
// are set before the first Handle and not changed after. It may be used by many
// goroutines.
type Processor struct {
	Store       *Store
	Sink        sinks.Sink
	Identity    *message.Identity
	Fingerprint claimkey.Fingerprint
	// Missing is what happens to a message without an id, OnDuplicate to a copy,
	// OnConflict to a copy with another payload: one of the constants.
	Missing, OnDuplicate, OnConflict string
	// MaxDeadShare of the last DeadWindow messages of a lane may be dead letters;
	// above it the fault isn't the messages', and the lane is held.
	MaxDeadShare float64
	DeadWindow   int
	// CopyFrom is the number of ids in a transaction from which they are looked up
	// first and those that are new claimed by COPY: less work for Postgres, and a
	// round trip more. Zero: 256; math.MaxInt: never.
	CopyFrom int
	// MaxMessages is the most messages that a batch has: for that many a lane is
	// handled with care after its workers have ended again and again. Zero: 4000.
	MaxMessages int
	// Window is how long claims are kept at least; duplicates are told as a share
	// of it. Zero: not told.
	Window  time.Duration
	Metrics *Metrics

	guard     deadGuard
	doubts    doubts
	copies    copyGuard
	ages      ageCounter
	slow      slowLanes
	sinkStale atomic.Bool // the sink's view of the database may be out of date
	// sinking is shared by all who are at the sink, and held alone by a message
	// that may end the process: no other may be blamed for it.
	sinkSlots *semaphore.Weighted

	mu sync.Mutex
	// unknown keeps what would have happened, for commits whose answer was lost.
	unknown map[message.Lane]unknownCommit
}

type unknownCommit struct {
	epoch, next int64
	tally       tally
}

// Start prepares the sink and the guards. It must be called once, before Handle.
func (p *Processor) Start(ctx context.Context) error {
	p.unknown = make(map[message.Lane]unknownCommit)
	p.guard = deadGuard{limit: int(p.MaxDeadShare * float64(p.DeadWindow)), window: int64(p.DeadWindow)}
	p.sinkSlots = semaphore.NewWeighted(allSinkSlots)
	p.copies.hold = copyPause
	return p.prepareSink(ctx)
}

func (p *Processor) prepareSink(ctx context.Context) error {
	preparer, ok := p.Sink.(sinks.Preparer)
	if !ok {
		return nil
	}
	tx, err := p.Store.pool.Begin(ctx)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = tx.Rollback(ctx) // it only looked
	}()
	if err := preparer.Prepare(ctx, tx); err != nil {
		return fmt.Errorf("prepare the sink: %w", err)
	}
	return nil
}

// Handle makes the batches durable in one transaction, or in several where a
// message that the sink can't take has to be found among them. It is
// consumer.Handler's method; the errors are described there.
func (p *Processor) Handle(ctx context.Context, batches []lane.Batch) error {
	if p.sinkStale.Load() {
		if err := p.prepareSink(ctx); err != nil {
			return holdUnlessPassing(err)
		}
		p.sinkStale.Store(false)
	}
	p.Store.clearAttempts(ctx)
	clocks := clocksOf(batches)
	plain, suspects := p.divide(batches)
	if len(plain) > 0 {
		if err := p.together(ctx, plain, clocks); err != nil {
			return err
		}
	}
	for _, b := range suspects {
		if err := p.applyOneByOne(ctx, b, clocks); err != nil {
			return err
		}
	}
	return nil
}

// together applies batches in one transaction, beside others.
func (p *Processor) together(ctx context.Context, batches []lane.Batch, clocks clocks) error {
	if err := p.sinkSlots.Acquire(ctx, 1); err != nil {
		return err
	}
	defer p.sinkSlots.Release(1)
	return p.handOver(ctx, batches, &handOver{clocks: clocks})
}

// handOver applies batches, and settles what they left in doubt.
func (p *Processor) handOver(ctx context.Context, batches []lane.Batch, h *handOver) error {
	batches, slow := p.slow.split(batches)
	if len(batches) > 0 {
		if err := p.apply(ctx, batches, h); err != nil {
			return err
		}
	}
	for _, b := range slow {
		if err := p.inPieces(ctx, b, h); err != nil {
			return err
		}
	}
	return p.settleDoubts(ctx, h)
}

// apply tries a group until it is durable, put off, or the worker has to decide.
func (p *Processor) apply(ctx context.Context, batches []lane.Batch, h *handOver) error {
	g, err := p.prepare(h.join(batches))
	if err != nil {
		return err
	}
	g.belongTo(h)
	for {
		began := time.Now()
		all, err := p.transact(ctx, g)
		if err == nil {
			p.landed(g, all)
			return nil
		}
		var lost *commitError
		isLost := errors.As(err, &lost)
		if isLost {
			// Send the same batch again: if the commit landed, its lane has moved,
			// and the fence says so. The server may even be at it still; then this
			// one waits for its locks. It is exact since an epoch has one owner,
			// and an ordered lane one transaction at a time.
			p.remember(g, all)
		}
		switch {
		case errors.Is(err, errConcurrentDuplicate):
			p.copies.met(g)
			p.Metrics.retries.WithLabelValues("concurrent_duplicate").Inc()
			continue
		case errors.Is(err, errUnproven):
			return p.putOff(h, g.batches)
		case errors.Is(err, errTriedAgain):
			return p.apply(ctx, g.batches, h)
		}
		switch react(err) {
		case fence:
			rest, err := p.fenced(ctx, g.batches)
			if err != nil || len(rest) == 0 {
				return err
			}
			return p.apply(ctx, rest, h)
		case reload:
			p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
			if err := p.reload(ctx, g, err); err != nil {
				return err
			}
		case isolate:
			return p.isolate(ctx, g, err, h)
		case internal:
			p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
			if h.internal++; h.internal > internalTries {
				return p.doubt(ctx, g, err, h)
			}
			if !wait.For(ctx, doubtPause) {
				return err
			}
		case doubt:
			return p.doubt(ctx, g, err, h)
		case retry:
			p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
			if !isLost {
				return p.slow.timedOut(g, time.Since(began), err)
			}
			if !wait.For(ctx, 50*time.Millisecond) {
				return err
			}
		default:
			return p.held(err)
		}
	}
}

// transact runs the claim transaction of a group: claim, write, dead-letter, move the
// lanes, commit.
//
// Nil means durable, and gives the outcomes by batch. A *commitError means that
// nobody knows; any other error that nothing was done.
func (p *Processor) transact(ctx context.Context, g *group) (all []tally, err error) {
	began, err := p.Store.begin(ctx, g, func(t *txn) error {
		all, err = p.transactOn(ctx, t)
		return err
	})
	if err != nil && !began {
		err = &ownError{err}
	}
	return all, err
}

func (p *Processor) transactOn(ctx context.Context, t *txn) (all []tally, err error) {
	start := time.Now()
	t.reset()
	t.began = p.doubts.now.Load()
	if err := p.claim(ctx, t); err != nil {
		return nil, &ownError{fmt.Errorf("claim: %w", err)}
	}
	claimed := time.Now()
	p.Metrics.claim.Observe(claimed.Sub(start).Seconds())

	if err := t.write(ctx, p.Sink); err != nil {
		return nil, &sinkError{err}
	}
	p.Metrics.sink.Observe(time.Since(claimed).Seconds())

	all, err = t.tallies()
	if err != nil {
		return nil, err
	}
	if err := p.prove(t.group); err != nil {
		return nil, err
	}
	if err := p.guard.check(ctx, t, all); err != nil {
		return nil, err
	}
	if err := p.commit(ctx, t, all); err != nil {
		return all, err
	}
	p.Metrics.transaction.Observe(time.Since(start).Seconds())
	return all, nil
}

// claim opens the transaction, claims the group's keys, and gives every message its
// outcome.
func (p *Processor) claim(ctx context.Context, t *txn) error {
	var err error
	if t.lanes, err = p.Store.laneIDs(t.batches); err != nil {
		return err
	}
	t.fingerprint, t.byCopy = !p.Fingerprint.None(), p.claimsByCopy(t.group)
	err = t.claim(ctx, beginStep, t.enterStep())
	p.Metrics.probed(t.probed)
	if err != nil {
		return err
	}
	return p.settle(ctx, t)
}

// reload reads the catalog anew. The error is a *message.HoldError where nothing
// has changed, so that the next try would fail as well.
func (p *Processor) reload(ctx context.Context, g *group, cause error) error {
	if now, err := p.Store.generations.Loaded(ctx); err == nil && g.catalog != nil && now.Identity != g.catalog.Identity {
		return nil // another writer has read it anew
	}
	now, err := p.Store.generations.Refresh(ctx)
	if err != nil {
		return holdUnlessPassing(err)
	}
	if g.catalog != nil && now.Identity == g.catalog.Identity {
		const gone = "a table of claims is gone that the catalog has (`dedupd retention status` tells which)"
		return &lane.HoldError{Err: fmt.Errorf(gone+": %w", cause), Summary: gone}
	}
	return nil
}

// held makes an error one that the worker understands. What the sink knows of the
// database may be out of date then.
func (p *Processor) held(err error) error {
	var held *lane.HoldError
	if errors.As(err, &held) {
		return held
	}
	var sink *sinkError
	if errors.As(err, &sink) {
		p.sinkStale.Store(true)
	}
	return holdFor(err)
}

// holdFor holds a lane for an error, and says what to do where the error's own words
// don't.
func holdFor(err error) *lane.HoldError {
	cure := PoolerCure(err)
	if cure == "" {
		return &lane.HoldError{Err: err}
	}
	return &lane.HoldError{Err: fmt.Errorf("%w (%s)", err, cure), Summary: cure}
}

// holdUnlessPassing makes an error of dedupd's own look-ups one that the worker
// understands.
func holdUnlessPassing(err error) error {
	if react(err) == retry {
		return err
	}
	return holdFor(err)
}

// landed counts what has become durable.
func (p *Processor) landed(g *group, all []tally) {
	p.Metrics.observe(p, g, all)
	p.ages.count(g.ages, time.Now())
	p.slow.landed(g.batches, p.quarantineSpan())
	p.doubts.landed(g)
	if g.doubted {
		g.handOver.landed = append(g.handOver.landed, g)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.unknown) > 0 {
		for _, b := range g.batches {
			delete(p.unknown, b.Lane) // it had not landed
		}
	}
}
