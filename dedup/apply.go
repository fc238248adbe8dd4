package dedup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// apply runs a group's transaction until the group is durable or put off, or the
// worker has to decide.
func (p *Processor) apply(ctx context.Context, batches []lane.Batch, h *handOver) error {
	g := p.prepare(h.join(batches))
	g.belongTo(h)
	for {
		began := time.Now()
		all, err := p.transact(ctx, g)
		if err == nil {
			p.landed(g, all)
			return nil
		}
		if again, err := p.respond(ctx, g, all, began, err); !again {
			return err
		}
	}
}

// respond does what the error of a group's transaction asks for, which began then. It
// says whether to run the same transaction again.
func (p *Processor) respond(ctx context.Context, g *group, all []tally, began time.Time, err error) (again bool, _ error) {
	switch {
	case errors.Is(err, errConcurrentDuplicate):
		p.copies.met(g)
		p.Metrics.retries.WithLabelValues("concurrent_duplicate").Inc()
		return true, nil
	case errors.Is(err, errUnproven):
		return false, p.putOff(g.handOver, g.batches)
	case errors.Is(err, errTriedAgain):
		return false, p.apply(ctx, g.batches, g.handOver)
	}
	var lost *commitError
	if errors.As(err, &lost) {
		// If the commit landed, its lanes have moved, and the fence says so. If the server
		// is still at it, the next try waits for its locks. That is exact: an epoch has one
		// owner, and an ordered lane one transaction at a time.
		p.remember(g, all)
		p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
		return wait.For(ctx, 50*time.Millisecond), err
	}
	switch react(err) {
	case fence:
		rest, err := p.fenced(ctx, g.batches)
		if err != nil || len(rest) == 0 {
			return false, err
		}
		return false, p.apply(ctx, rest, g.handOver)
	case reload:
		p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
		err := p.reload(ctx, g, err)
		return err == nil, err
	case isolate:
		return false, p.isolate(ctx, g, err)
	case internal:
		p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
		if g.internal++; g.internal > internalTries {
			return false, p.doubt(ctx, g, err)
		}
		return wait.For(ctx, doubtPause), err
	case doubt:
		return false, p.doubt(ctx, g, err)
	case retry:
		p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
		return false, p.slow.timedOut(g, time.Since(began), err)
	}
	var at *heldAt
	if errors.As(err, &at) {
		return false, p.landBefore(ctx, g, at)
	}
	return false, p.held(err)
}

// transact runs the claim transaction of a group: claim, write, dead-letter, move the
// lanes, commit.
//
// Nil means durable, and gives the outcomes by batch. A *commitError means that the
// outcome is unknown; any other error, that nothing was done.
func (p *Processor) transact(ctx context.Context, g *group) (all []tally, err error) {
	err = p.Store.begin(ctx, g, func(t *txn) error {
		all, err = p.transactOn(ctx, t)
		return err
	})
	return all, err
}

func (p *Processor) transactOn(ctx context.Context, t *txn) (all []tally, err error) {
	start := time.Now()
	t.reset()
	t.began = p.doubts.now.Load()
	if err := p.open(ctx, t); err != nil {
		return nil, &ownError{fmt.Errorf("claim: %w", err)}
	}
	if i := slices.IndexFunc(t.items, func(it item) bool { return it.hold != nil }); i >= 0 {
		return nil, t.heldAt(&t.items[i], t.items[i].hold, "the message has no usable id, and id.missing is stop")
	}
	claimed := time.Now()
	p.Metrics.claim.Observe(claimed.Sub(start).Seconds())

	if err := t.write(ctx, p.Sink); err != nil {
		return nil, t.sinkFailed(err)
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

// open opens the transaction and gives every message its outcome, by the strategy.
func (p *Processor) open(ctx context.Context, t *txn) (err error) {
	if t.lanes, err = p.Store.laneIDs(t.batches); err != nil {
		return err
	}
	switch p.Strategy {
	case policy.StrategyPosition:
		return t.byPosition(ctx)
	case policy.StrategySequence:
		return p.bySequence(ctx, t)
	}
	t.fingerprint, t.byCopy = p.comparesPayloads(), p.claimsByCopy(t.group)
	err = t.claim(ctx, beginStep, t.enterStep())
	p.Metrics.probed(t.probed)
	if err != nil {
		return err
	}
	return p.settle(ctx, t)
}

// reload reads the catalog again. The error is a *lane.HoldError where nothing
// has changed: the next try would fail as well.
func (p *Processor) reload(ctx context.Context, g *group, cause error) error {
	if now, err := p.Store.generations.Loaded(ctx); err == nil && g.catalog != nil && now.Identity != g.catalog.Identity {
		return nil // another writer has read it
	}
	now, err := p.Store.generations.Refresh(ctx)
	if err != nil {
		return holdUnlessPassing(err)
	}
	if g.catalog != nil && now.Identity == g.catalog.Identity {
		gone := "a table of claims is gone that is in the catalog (`dedupd retention status` shows which)"
		if failed := (*pipeline.StepError)(nil); errors.As(cause, &failed) && failed.Name == keepResults {
			gone = "a generation's table of results is gone: the next pass of retention makes it again, empty (`dedupd retention run` does so now)"
		}
		return &lane.HoldError{Err: fmt.Errorf("%s: %w", gone, cause), Summary: gone}
	}
	return nil
}

// landed counts what has become durable.
func (p *Processor) landed(g *group, all []tally) {
	p.Metrics.observe(p, g, all)
	p.ages.count(g.ages, time.Now())
	p.slow.landed(g.batches, p.MaxMessages)
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

// handOver is what all parts of a divided hand-over share.
type handOver struct {
	clocks clocks
	// known are the messages known to be poison, by their places.
	known map[message.Position]*rejection
	// recorded is set if attempts at its messages are on record.
	recorded bool

	holds int // messages that hold their lanes, so far

	// What is in doubt: see doubt.go.
	suspects map[message.Position]*suspect
	putOff   []lane.Batch
	landed   []*group // since the first doubt
	doubted  bool
	examined bool
	internal int // errors so far
}

func (h *handOver) reject(m *message.Message, why *rejection) {
	if h.known == nil {
		h.known = make(map[message.Position]*rejection)
	}
	h.known[m.Position] = why
}

// belongTo makes a group part of a hand-over, which may know some of its messages to be
// poison.
func (g *group) belongTo(h *handOver) {
	g.handOver = h
	if len(h.known) == 0 {
		return
	}
	for i := range g.items {
		if why := h.known[g.message(&g.items[i]).Position]; why != nil {
			g.items[i].reject = why
		}
	}
}
