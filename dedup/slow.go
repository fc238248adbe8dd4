package dedup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// A batch that the sink can't write within a transaction's time-out would be retried at
// the same size for ever. So a lane whose batch took too long gets transactions of half
// as many messages, down to one, and larger ones again as they succeed. What has landed
// stays landed: when a batch runs out of time in the middle, the next try goes on from
// there.

const (
	// slowAfter is how long a transaction must have taken before a time-out is blamed on
	// its size. One that began late in a hand-over is cut off early.
	slowAfter = 10 * time.Second
	// slowTries is how often a message alone may take too long before its lane is held.
	slowTries = 3
	// slowGrowth is how many transactions in a row must be fast enough before their size
	// doubles.
	slowGrowth = 8
)

// slowLanes are the lanes that get smaller transactions.
type slowLanes struct {
	after time.Duration // slowAfter, but for tests

	mu    sync.Mutex
	lanes map[message.Lane]*slowLane
}

type slowLane struct {
	most  int // messages in a transaction
	fast  int // transactions in a row that were fast enough
	alone int // time-outs in a row of one message alone
}

// most is how many messages of a lane a transaction may have; 0: any number.
func (s *slowLanes) most(lane message.Lane) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.lanes[lane]; l != nil {
		return l.most
	}
	return 0
}

// split separates batches that are too large for their slow lanes from the others.
func (s *slowLanes) split(batches []lane.Batch) (plain, slow []lane.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.lanes) == 0 {
		return batches, nil
	}
	for _, b := range batches {
		if l := s.lanes[b.Lane]; l != nil && len(b.Messages) > l.most {
			slow = append(slow, b)
		} else {
			plain = append(plain, b)
		}
	}
	return plain, slow
}

// landed lets a lane's transactions grow. Once they may have as many messages as a whole
// batch, the lane is slow no longer.
func (s *slowLanes) landed(batches []lane.Batch, whole int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.lanes) == 0 {
		return
	}
	for i := range batches {
		l := s.lanes[batches[i].Lane]
		if l == nil {
			continue
		}
		l.alone = 0
		if l.fast++; l.fast < slowGrowth {
			continue
		}
		l.fast, l.most = 0, 2*l.most
		if l.most >= whole {
			delete(s.lanes, batches[i].Lane)
		}
	}
}

// timedOut halves the transactions of a group's lane if the time-out ended the group's in
// the sink, and only its size can be at fault. A group of several lanes proves nothing:
// each of them is tried alone next. The error is a *lane.HoldError once a message alone
// takes too long.
func (s *slowLanes) timedOut(g *group, took time.Duration, cause error) error {
	var sink *sinkError
	name, n := g.batches[0].Lane, len(g.items)
	isTime := sqlstate.Of(cause) == sqlstate.QueryCanceled || errors.Is(cause, context.DeadlineExceeded)
	if !errors.As(cause, &sink) || !isTime || took < s.after || g.batches[len(g.batches)-1].Lane != name {
		return cause
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes == nil {
		s.lanes = make(map[message.Lane]*slowLane)
	}
	l := s.lanes[name]
	if l == nil {
		l = &slowLane{}
		s.lanes[name] = l
	}
	l.most, l.fast = max(n/2, 1), 0
	if n > 1 {
		return cause
	}
	if l.alone++; l.alone < slowTries {
		return cause
	}
	what := fmt.Sprintf("position %d: the sink takes more than %s for this message alone, so it can't be written in time: look at the table's locks, indexes and triggers, or at the statement's plan",
		g.message(&g.items[0]).Position.Offset, took.Round(time.Second))
	return &lane.HoldError{Lane: name, Err: fmt.Errorf("%s: %w", what, cause), Summary: what}
}

// inPieces applies a batch of a slow lane in as many transactions as it needs.
func (p *Processor) inPieces(ctx context.Context, b lane.Batch, h *handOver) error {
	b, there, err := p.unlanded(ctx, b)
	for err == nil && there {
		run, rest := b, lane.Batch{}
		if most := p.slow.most(b.Lane); most > 0 && most < len(b.Messages) {
			run, rest = cutAt(b, most)
		}
		err = p.apply(ctx, []lane.Batch{run}, h)
		b, there = rest, len(rest.Messages) > 0
	}
	return err
}

// unlanded is what is left of a batch that is retried, of which a part may have landed.
func (p *Processor) unlanded(ctx context.Context, b lane.Batch) (rest lane.Batch, there bool, err error) {
	if !b.Ordered {
		return b, true, nil // claims tell what has landed
	}
	at, err := p.Store.lanePositions(ctx, []lane.Batch{b})
	if err != nil {
		return b, false, holdUnlessPassing(err)
	}
	if at[0] == (lanePosition{epoch: b.Epoch, next: b.From}) {
		return b, true, nil
	}
	left, err := p.fenced(ctx, []lane.Batch{b})
	if err != nil || len(left) == 0 {
		return b, false, err
	}
	return left[0], true, nil
}
