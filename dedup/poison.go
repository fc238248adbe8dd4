package dedup

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// poisonGuard keeps a lane from being drained into the dead letters. A few
// messages without an id, or that the sink can't take, are their own fault; a
// large share of them is somebody else's: a renamed header, a changed table.
type poisonGuard struct {
	limit  int // dead letters among the last window messages of a lane
	window int64

	mu    sync.Mutex
	lanes map[message.Lane]*deadHistory
}

// deadHistory counts a lane's messages and remembers which of the last ones were
// dead.
type deadHistory struct {
	seen int64
	dead []int64 // their numbers, ascending, none older than the window
}

func (p *poisonGuard) init(share float64, window int) {
	p.limit, p.window = int(share*float64(window)), int64(window)
	p.lanes = make(map[message.Lane]*deadHistory)
}

// check refuses a group that would bring a lane above the limit.
func (p *poisonGuard) check(g *group) error {
	if p.window == 0 || !g.anyDead() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for bi := range g.batches {
		lane := g.batches[bi].Lane
		var h deadHistory
		if old := p.lanes[lane]; old != nil {
			h = deadHistory{old.seen, append([]int64(nil), old.dead...)}
		}
		var last *rejection
		for i := range g.items {
			it := &g.items[i]
			if int(it.batch) != bi {
				continue
			}
			if it.outcome == dead {
				last = it.reject
			}
			h.add(1, it.outcome == dead, p.window)
			if len(h.dead) > p.limit {
				return &message.HoldError{Lane: lane, Err: fmt.Errorf(
					"%d of the last %d messages can't be applied, which is more than dead_letters.max_share allows, so the fault is hardly theirs; the last one: %s",
					len(h.dead), min(h.seen, p.window), last.reason)}
			}
		}
	}
	return nil
}

func (g *group) anyDead() bool {
	for i := range g.items {
		if g.items[i].outcome == dead {
			return true
		}
	}
	return false
}

// note records a group that has landed.
func (p *poisonGuard) note(g *group, all []tally) {
	if p.window == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for bi := range g.batches {
		h := p.lanes[g.batches[bi].Lane]
		if h == nil {
			h = new(deadHistory)
			p.lanes[g.batches[bi].Lane] = h
		}
		if all[bi][dead] == 0 {
			h.add(int64(len(g.batches[bi].Messages)), false, p.window)
			continue
		}
		for i := range g.items {
			if int(g.items[i].batch) == bi {
				h.add(1, g.items[i].outcome == dead, p.window)
			}
		}
	}
}

func (h *deadHistory) add(n int64, isDead bool, window int64) {
	h.seen += n
	if isDead {
		h.dead = append(h.dead, h.seen)
	}
	old := 0
	for old < len(h.dead) && h.dead[old] <= h.seen-window {
		old++
	}
	h.dead = h.dead[old:]
}

// rejections are messages known to be poison, by their address, which all parts
// of a divided group share.
type rejections map[*message.Message]*rejection

func (g *group) reject(known rejections) {
	if len(known) == 0 {
		return
	}
	for i := range g.items {
		if why := known[g.message(&g.items[i])]; why != nil {
			g.items[i].reject = why
		}
	}
}

// isolate finds the messages that the sink can't take. Those that it has named
// are dead-lettered when the group is tried again; else the group is divided and each
// part made durable by itself, in order, down to one message: about 2·log2(n)
// transactions for each such message among n.
func (p *Processor) isolate(ctx context.Context, g *group, cause error, known rejections) error {
	candidates := len(g.winners())
	bad := sinks.AllPermanent(cause)
	if candidates == 1 {
		bad = map[int]error{0: cause}
	}
	if known == nil {
		known = make(rejections)
	}
	found := false
	for at, why := range bad {
		if at >= 0 && at < candidates {
			known[g.message(g.candidate(at))] = &rejection{class: classPoison, reason: why.Error(), sqlstate: sqlstate(why)}
			found = true
		}
	}
	if found {
		return p.apply(ctx, g.batches, g.clocks, known)
	}
	if candidates == 0 {
		// The database objects to data although the sink was given none.
		return &message.HoldError{Err: cause}
	}
	p.Metrics.retries.WithLabelValues("poison").Inc()
	left, right := g.divide(candidates)
	if err := p.apply(ctx, left, g.clocks, known); err != nil {
		return err
	}
	return p.apply(ctx, right, g.clocks, known)
}

// divide cuts a group in two: between lanes, or within the one lane so that each
// part has half of what went to the sink. If the first part lands and the second
// doesn't, the lane stands in between, which the next try finds out.
func (g *group) divide(candidates int) (left, right []message.Batch) {
	if n := len(g.batches); n > 1 {
		return slices.Clone(g.batches[:n/2]), slices.Clone(g.batches[n/2:])
	}
	b := g.batches[0]
	at := g.candidate(candidates / 2).message
	first, second := b, b
	first.Messages, second.Messages = b.Messages[:at:at], b.Messages[at:]
	first.Next = b.Messages[at].Position.Offset
	if b.Lag >= 0 {
		first.Lag += int64(len(second.Messages))
	}
	second.From = first.Next
	return []message.Batch{first}, []message.Batch{second}
}
