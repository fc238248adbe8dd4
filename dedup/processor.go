package dedup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Processor makes groups of batches durable, each message id once. The fields are set
// before the first Handle and don't change after. It is safe for concurrent use.
type Processor struct {
	Store       *Store
	Sink        sinks.Sink
	Identity    *message.Identity
	Fingerprint claimkey.Fingerprint
	// Strategy says how each message takes effect once; empty: claim. Only claim compares
	// ids and payloads.
	Strategy policy.Strategy
	// Sequence is for strategy sequence.
	Sequence *Sequence
	// The policies. OnDuplicate is for copies that the producer sent, not for those
	// that the broker delivers again.
	Missing     policy.Missing
	OnDuplicate policy.Duplicate
	OnConflict  policy.Conflict
	// At most MaxDeadShare of a lane's last DeadWindow messages may be dead letters.
	// Above it the messages aren't at fault, and the lane is held.
	MaxDeadShare float64
	DeadWindow   int
	// CopyFrom is the number of ids in a transaction from which they are looked up first
	// and the new ones claimed by COPY: less work for Postgres, and one more round trip.
	// Zero: 256; math.MaxInt: never.
	CopyFrom int
	// Overwrite lets Replay apply messages that may undo newer ones: see
	// sinks.ReplaySensitive, and those of class sequence.
	Overwrite bool
	// MaxMessages is the most messages that a batch has: a quarantined lane applies that
	// many one by one before its quarantine ends. Zero: 4000.
	MaxMessages int
	// Window is how long claims are kept at least; the ages of duplicates are reported as
	// a share of it. Zero: not reported.
	Window  time.Duration
	Metrics *Metrics

	guard     deadGuard
	doubts    doubts
	copies    copyGuard
	ages      ageCounter
	slow      slowLanes
	sinkStale atomic.Bool // the sink's view of the database may be out of date
	// sinkSlots is shared by all who are at the sink. An attempt that may end the process
	// holds all of it, so that nothing else is blamed for that.
	sinkSlots *semaphore.Weighted

	mu sync.Mutex
	// unknown has the tallies of commits whose answer was lost.
	unknown map[message.Lane]unknownCommit
}

type unknownCommit struct {
	epoch, next int64
	tally       tally
}

// Start checks the policies, and prepares the sink and the guards. Call it once, before
// Handle.
func (p *Processor) Start(ctx context.Context) error {
	p.Strategy = cmp.Or(p.Strategy, policy.StrategyClaim)
	if err := errors.Join(policy.Check(p.Strategy), policy.Check(p.Missing), policy.Check(p.OnDuplicate), policy.Check(p.OnConflict)); err != nil {
		return fmt.Errorf("the processor's policies: %w", err)
	}
	if p.Strategy == policy.StrategySequence && p.Sequence == nil {
		return errors.New("strategy sequence needs to be told where the numbers are: Processor.Sequence")
	}
	p.MaxMessages = cmp.Or(p.MaxMessages, 4000)
	p.unknown = make(map[message.Lane]unknownCommit)
	p.guard = deadGuard{limit: int(p.MaxDeadShare * float64(p.DeadWindow)), window: int64(p.DeadWindow)}
	p.sinkSlots = semaphore.NewWeighted(allSinkSlots)
	p.copies.hold, p.slow.after = copyPause, slowAfter
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

// Handle makes the batches durable: in one transaction, or in several where it has to
// find a message that the sink can't take. It implements consumer.Handler, which
// documents the errors.
func (p *Processor) Handle(ctx context.Context, batches []lane.Batch) error {
	if p.sinkStale.Load() {
		if err := p.prepareSink(ctx); err != nil {
			return holdUnlessPassing(err)
		}
		p.sinkStale.Store(false)
	}
	p.Store.clearAttempts(ctx)
	clocks := clocksOf(batches)
	plain, quarantined := p.divide(batches)
	if len(plain) > 0 {
		if err := p.applyTogether(ctx, plain, clocks); err != nil {
			return err
		}
	}
	for _, b := range quarantined {
		if err := p.applyOneByOne(ctx, b, clocks); err != nil {
			return err
		}
	}
	return nil
}

// applyTogether applies batches in one transaction, beside others.
func (p *Processor) applyTogether(ctx context.Context, batches []lane.Batch, clocks clocks) error {
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
