package consumer_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// ledger checks, for every rig and at every callback of its lanes, that a lane
// hears of a commit only after the handler has answered nil for all that it is
// told of, and that each offer is told once: as committed or as abandoned.
type ledger struct {
	t  *testing.T
	mu sync.Mutex

	durable map[message.Position]bool
	ends    map[message.Lane]int64 // one after the last durable position
	offers  []*offer
}

// offer stands for a test's token, so that the ledger knows what was offered with
// it.
type offer struct {
	token int
	batch lane.Batch
	told  string // empty: not yet
}

func newLedger(t *testing.T) *ledger {
	return &ledger{t: t, durable: make(map[message.Position]bool), ends: make(map[message.Lane]int64)}
}

func (g *ledger) offered(b lane.Batch, token int) *offer {
	g.mu.Lock()
	defer g.mu.Unlock()
	b.Messages = slices.Clone(b.Messages) // only the positions: the worker may still change the rest
	o := &offer{token: token, batch: b}
	g.offers = append(g.offers, o)
	return o
}

// handled notes what became durable.
func (g *ledger) handled(group []lane.Batch) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range group {
		b := &group[i]
		g.ends[b.Lane] = max(g.ends[b.Lane], b.Next)
		for j := range b.Messages {
			g.durable[b.Messages[j].Position] = true
		}
	}
}

func (g *ledger) committed(next int64, tokens []any) []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, t := range tokens {
		o := t.(*offer)
		for j := range o.batch.Messages {
			if p := o.batch.Messages[j].Position; !g.durable[p] {
				g.t.Errorf("lane %s hears of a commit of position %d, which isn't durable", p.Lane, p.Offset)
				break
			}
		}
		if end := g.ends[o.batch.Lane]; next > end {
			g.t.Errorf("lane %s hears of position %d; durable is what is below %d", o.batch.Lane, next, end)
		}
	}
	return g.told("committed", tokens)
}

func (g *ledger) abandoned(tokens []any) []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.told("abandoned", tokens)
}

func (g *ledger) told(what string, tokens []any) (plain []int) {
	for _, t := range tokens {
		o := t.(*offer)
		if o.told != "" {
			g.t.Errorf("lane %s: the offer of %d to %d is told as %s after it was told as %s", o.batch.Lane, o.batch.From, o.batch.Next-1, what, o.told)
		}
		o.told = what
		plain = append(plain, o.token)
	}
	return plain
}

// check tells, once the worker has ended, what was never told.
func (g *ledger) check() {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, o := range g.offers {
		if o.told == "" {
			g.t.Errorf("lane %s: the offer of %d to %d was told neither as committed nor as abandoned", o.batch.Lane, o.batch.From, o.batch.Next-1)
		}
	}
}

// Offer hands a batch over with a token that the ledger keeps book of.
func (l *openLane) Offer(ctx context.Context, b lane.Batch, token int) error {
	return l.Lane.Offer(ctx, b, l.rig.ledger.offered(b, token))
}

// track makes a lane's callbacks go through the ledger.
func (l *openLane) track(o *consumer.LaneOptions) {
	o.Committed = func(next int64, tokens []any) {
		l.note(&l.committed, l.rig.ledger.committed(next, tokens))
		l.position = next
	}
	o.Abandoned = func(tokens []any) { l.note(&l.abandoned, l.rig.ledger.abandoned(tokens)) }
}
