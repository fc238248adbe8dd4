package dedup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Some errors leave open whether a message is at fault or the table: a trigger's RAISE
// refuses one row or every row. So a message that is refused this way stays a suspect
// until there is proof: another message is written, of its lane or of its topic, in its
// own transaction or after it was refused. The suspect is then tried once more, for the
// table may have been repaired in between. A hand-over that ends without proof is held,
// and none of its suspects is dead-lettered.
//
// Where order allows no other message before the suspect, the proof is in the transaction
// that dead-letters it: the suspect joins what follows in its lane.

const (
	// mostSuspects is how many suspects a hand-over may have without proof before the
	// table is blamed. Each costs the database two or three transactions.
	mostSuspects = 16
	// refusals is how often a message is refused alone before it becomes a suspect: a
	// change in the database may break a statement for a moment.
	refusals = 2
	// internalTries is how many of the server's internal errors a hand-over takes for
	// passing ones.
	internalTries = 4
	// doubtPause is the wait before a retry of what may have been a passing failure.
	doubtPause = 50 * time.Millisecond
	// mostDoubts bounds the messages remembered for holding their lanes.
	mostDoubts = 1000
)

// errUnproven ends a transaction whose suspects lack proof so far.
var errUnproven = errors.New("no other message was written beside the one that was refused")

// errTriedAgain ends a transaction whose suspects have proof, if some were last tried
// before it: the table may have been repaired in between.
var errTriedAgain = errors.New("another message was written since the suspect was refused")

// suspect is what a hand-over knows of a message that was refused and may not be
// at fault.
type suspect struct {
	refusals int
	// retried is set once there is proof: tries from then on count.
	retried bool
}

// openDoubt is about a suspect that holds its lane.
type openDoubt struct {
	topic string
	since uint64 // of doubts.now
	// proven is set once a transaction that began since has written another message.
	proven bool
}

// doubts are the suspects that hold their lanes, of all hand-overs.
type doubts struct {
	now atomic.Uint64 // counts the doubts; a transaction that began at n knows of n

	mu   sync.Mutex
	open map[message.Position]*openDoubt
}

// add begins a doubt unless there is one.
func (d *doubts) add(at message.Position, topic string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open == nil || len(d.open) >= mostDoubts {
		d.open = make(map[message.Position]*openDoubt) // a forgotten doubt begins again with the next try
	}
	if d.open[at] == nil {
		d.open[at] = &openDoubt{topic: topic, since: d.now.Add(1)}
	}
}

func (d *doubts) proven(at message.Position) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	doubt := d.open[at]
	return doubt != nil && doubt.proven
}

// landed ends doubts about a group's messages, which are proof for other doubts.
func (d *doubts) landed(g *group) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.open) == 0 {
		return
	}
	for i := range g.items {
		delete(d.open, g.message(&g.items[i]).Position)
	}
	for at, doubt := range d.open {
		if !doubt.proven && g.began >= doubt.since {
			doubt.proven = g.wrote(at.Lane, doubt.topic)
		}
	}
}

// wrote reports whether the group wrote a message of that lane, or of that topic of its
// source.
func (g *group) wrote(lane message.Lane, topic string) bool {
	for i := range g.items {
		if g.items[i].outcome != written {
			continue
		}
		m := g.message(&g.items[i])
		if m.Position.Lane == lane || m.Position.Lane.Source == lane.Source && m.Topic == topic {
			return true
		}
	}
	return false
}

// prove returns errUnproven if the group would dead-letter a suspect without proof, and
// errTriedAgain if one wasn't tried since there is proof. That one then counts as no
// suspect until it is refused again.
func (p *Processor) prove(g *group) error {
	outdated := false
	for i := range g.items {
		it := &g.items[i]
		if it.outcome != dead || it.reject.suspected == nil {
			continue
		}
		m := g.message(it)
		wrote := func(g *group) bool { return g.wrote(m.Position.Lane, m.Topic) }
		if !wrote(g) && !slices.ContainsFunc(g.landed, wrote) && !p.doubts.proven(m.Position) {
			return errUnproven
		}
		if s := g.handOver.suspects[m.Position]; s != nil && !s.retried {
			s.retried, outdated = true, true
			s.refusals--
			delete(g.handOver.known, m.Position)
		}
	}
	if outdated {
		return errTriedAgain
	}
	return nil
}

// doubt finds the message at fault, unless the table is.
func (p *Processor) doubt(ctx context.Context, g *group, cause error) error {
	var own *ownError
	if errors.As(cause, &own) {
		return p.held(cause)
	}
	g.doubted = true
	if err := p.examine(ctx, g.handOver); err != nil {
		return err
	}
	return p.isolate(ctx, g, cause)
}

// examine asks the sink, once in a hand-over, whether the table is at fault: a table that
// is gone, a grant that is missing. Nil: no fault that it can see.
func (p *Processor) examine(ctx context.Context, h *handOver) error {
	if h.examined {
		return nil
	}
	if err := p.prepareSink(ctx); err != nil {
		p.sinkStale.Store(true)
		return holdUnlessPassing(err)
	}
	h.examined = true
	return nil
}

// suspect records that a message was refused alone. True: often enough to blame it,
// unless the table is at fault.
func (h *handOver) suspect(m *message.Message, cause error) bool {
	if h.suspects == nil {
		h.suspects = make(map[message.Position]*suspect)
	}
	s := h.suspects[m.Position]
	if s == nil {
		s = &suspect{}
		h.suspects[m.Position] = s
	}
	if s.refusals++; s.refusals < refusals {
		return false
	}
	h.reject(m, &rejection{class: classPoison, reason: cause.Error(), sqlstate: sqlstate.Of(cause), suspected: cause})
	return true
}

// putOff holds back batches that have nothing but unproven suspects. The error is a
// *lane.HoldError if there are so many that the table is to blame.
func (p *Processor) putOff(h *handOver, batches []lane.Batch) error {
	h.putOff = append(h.putOff, batches...)
	if len(h.putOffSuspects()) > mostSuspects {
		return p.blameTable(h)
	}
	return nil
}

func (h *handOver) putOffSuspects() (all []*message.Message) {
	for _, b := range h.putOff {
		for i := range b.Messages {
			if why := h.known[b.Messages[i].Position]; why != nil && why.suspected != nil {
				all = append(all, &b.Messages[i])
			}
		}
	}
	return all
}

// join puts what was put off of the batches' lanes back in front of them.
func (h *handOver) join(batches []lane.Batch) []lane.Batch {
	for i := range batches {
		b := &batches[i]
		for j := 0; j < len(h.putOff); {
			before := h.putOff[j]
			if before.Lane != b.Lane {
				j++
				continue
			}
			b.From, b.Messages = before.From, append(slices.Clip(before.Messages), b.Messages...)
			h.putOff = slices.Delete(h.putOff, j, j+1)
		}
	}
	return batches
}

// settleDoubts ends a hand-over: what was put off is dead-lettered if there is proof by
// now, or else holds its lane.
func (p *Processor) settleDoubts(ctx context.Context, h *handOver) error {
	if len(h.putOff) == 0 {
		return nil
	}
	rest := h.putOff
	h.putOff = nil
	if err := p.apply(ctx, rest, h); err != nil || len(h.putOff) == 0 {
		return err
	}
	return p.blameTable(h)
}

// blameTable holds the lane of the first message that was put off. The others are retried
// without it.
func (p *Processor) blameTable(h *handOver) error {
	suspects := h.putOffSuspects()
	for _, m := range suspects {
		p.doubts.add(m.Position, m.Topic)
	}
	p.sinkStale.Store(true)
	first := suspects[0]
	const why = "no other message of the lane could be written, so the fault may be the table's, its triggers', policies' or grants'; " +
		"once another one is written, this one becomes a dead letter"
	return &lane.HoldError{
		Lane: first.Position.Lane, Err: fmt.Errorf("position %d: %w ("+why+")", first.Position.Offset, h.known[first.Position].suspected),
		Summary: fmt.Sprintf("position %d: "+why, first.Position.Offset),
	}
}
