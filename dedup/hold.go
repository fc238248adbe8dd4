package dedup

import (
	"context"
	"fmt"
	"slices"

	"github.com/dedupd/dedupd/lane"
)

// mostHolds is how many messages of a hand-over may hold their lane before the rest of it
// waits, too. A queue may have many, and each costs a transaction.
const mostHolds = 64

// heldAt ends a transaction at a message that holds its lane.
type heldAt struct {
	*lane.HoldError
	batch, message int32 // as an item's
}

func (e *heldAt) Unwrap() error { return e.HoldError }

// heldAt holds the lane of an item's message for a reason that may quote it, and one that
// doesn't.
func (g *group) heldAt(it *item, why error, summary string) *heldAt {
	m := g.message(it)
	return &heldAt{&lane.HoldError{
		Lane: m.Position.Lane, Err: fmt.Errorf("position %d: %w", m.Position.Offset, why),
		Summary: fmt.Sprintf("position %d: %s", m.Position.Offset, summary),
	}, it.batch, it.message}
}

// landBefore makes durable what comes before a message that holds its lane, and holds it
// then: the hold may be for something that happens only once the earlier messages are seen.
// A queue has no order, so all of its other messages land. The group's other lanes are left
// to the worker, which tries them again at once.
func (p *Processor) landBefore(ctx context.Context, g *group, at *heldAt) error {
	b := g.batches[at.batch]
	rest, there, err := p.unlanded(ctx, b)
	if err != nil {
		return err
	}
	if !there || rest.From != b.From {
		// A part has landed before. Only the rest tells whether the lane is still held.
		left := slices.Delete(slices.Clone(g.batches), int(at.batch), int(at.batch)+1)
		if there {
			left = append(left, rest)
		}
		if len(left) == 0 {
			return nil
		}
		return p.apply(ctx, left, g.handOver)
	}
	before, _ := cutAt(b, int(at.message))
	if !b.Ordered {
		before = b
		before.Messages = slices.Delete(slices.Clone(b.Messages), int(at.message), int(at.message)+1)
	}
	g.holds++
	if g.holds > mostHolds || len(before.Messages) == 0 || !b.Ordered && !g.newBeside(at) {
		return at.HoldError
	}
	if b.Ordered {
		// The lane's clock must not pass what stays behind.
		if now := streamTime(before.Messages); now.Before(g.clocks[b.Lane]) {
			g.clocks[b.Lane] = now
		}
	}
	if err := p.apply(ctx, []lane.Batch{before}, g.handOver); err != nil {
		return err
	}
	if err := p.settleDoubts(ctx, g.handOver); err != nil {
		return err
	}
	at.Landed = true
	return at.HoldError
}

// newBeside reports whether the batch has claimed another message: what has landed by an
// earlier try would be booked as a duplicate again and again.
func (g *group) newBeside(at *heldAt) bool {
	return slices.ContainsFunc(g.items, func(it item) bool { return it.isNew && it.batch == at.batch && it.message != at.message })
}
