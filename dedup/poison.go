package dedup

import (
	"fmt"
	"sync"

	"github.com/dedupd/dedupd/message"
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
