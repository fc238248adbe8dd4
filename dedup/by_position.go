package dedup

import (
	"context"
	"errors"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// byPosition opens a transaction that claims nothing. Every message is new: advance() moves
// an ordered lane from the position that the batch begins at, or nothing is committed. So
// no position has its effect twice, whoever reads it.
func (t *txn) byPosition(ctx context.Context) error {
	if err := t.needsOrder("position"); err != nil {
		return err
	}
	if err := t.send(ctx, beginStep, t.enterStep(), t.atStep()); err != nil {
		return err
	}
	for i := range t.items {
		t.newByPosition(&t.items[i])
	}
	return nil
}

// needsOrder holds a lane that has no order to go by.
func (g *group) needsOrder(strategy string) error {
	for _, b := range g.batches {
		if !b.Ordered {
			why := "strategy " + strategy + " needs a lane with an order, and a queue has no order"
			return &lane.HoldError{Lane: b.Lane, Err: errors.New(why), Summary: why}
		}
	}
	return nil
}

// newByPosition gives a message its outcome. A dead letter is known by its place, which has
// no claim.
func (g *group) newByPosition(it *item) {
	if it.unwanted {
		return
	}
	it.outcome = written
	if it.reject != nil {
		it.outcome = dead
		it.key = claimkey.OfPlace(message.PositionID(g.batches[it.batch].StreamID, g.message(it).Position))
	}
}

// comparesPayloads tells whether copies of an id are compared.
func (p *Processor) comparesPayloads() bool {
	return p.Strategy == policy.StrategyClaim && !p.Fingerprint.None()
}
