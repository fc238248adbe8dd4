package dedup

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// fenced finds out why a lane didn't move: which batches landed after all, under our own
// epoch, what is left to do, and which lanes we no longer own.
func (p *Processor) fenced(ctx context.Context, batches []lane.Batch) (rest []lane.Batch, err error) {
	rows, err := p.Store.lanePositions(ctx, batches)
	if err != nil {
		return nil, holdUnlessPassing(err)
	}
	lost := &lane.FencedError{}
	landed := false
	for i, b := range batches {
		at := rows[i]
		if at.epoch < b.Epoch || at.epoch == b.Epoch && (b.Ordered && at.next < b.From || !b.Ordered && at.checkpoint < b.Checkpoint.Number) {
			// Epochs, positions and checkpoints only rise.
			p.Store.generations.Forget("lane " + b.Lane.String() + " went back")
		}
		switch {
		case at.epoch != b.Epoch, at.elsewhere, !b.Ordered && at.checkpoint < b.Checkpoint.Number, b.Ordered && (at.next < b.From || at.next > b.Next):
			lost.Lanes = append(lost.Lanes, b.Lane)
		case !b.Ordered, at.next == b.From:
			rest = append(rest, b)
		default:
			// Our own commit, whose answer was lost, or the first part of a divided
			// batch.
			if !landed {
				id, err := p.Store.laneID(b.Lane)
				if err == nil {
					err = p.Store.waitForStandby(ctx, id)
				}
				if err != nil {
					return nil, holdUnlessPassing(fmt.Errorf("lane %s has moved, but whether that is durable is not known: %w", b.Lane, err))
				}
				landed = true
			}
			p.confirm(b, at.next)
			if at.next < b.Next {
				rest = append(rest, trim(b, at.next))
			}
		}
	}
	if len(lost.Lanes) > 0 {
		p.Store.forgetLanes()
		return nil, lost
	}
	if len(rest) == len(batches) && !wait.For(ctx, 20*time.Millisecond) {
		return nil, ctx.Err()
	}
	return rest, nil
}

// waitForStandby makes sure that what is visible is as durable as the database was asked
// to make it. A COMMIT that waits in vain for a synchronous standby ends by our own
// time-out, or by somebody who cancels the wait: it then stands, visible but not
// replicated. A small commit of our own comes after it in the WAL: once that one is
// replicated, so is the other.
func (s *Store) waitForStandby(ctx context.Context, lane int32) error {
	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	return s.pool.AcquireFunc(ctx, func(pooled *pgxpool.Conn) error {
		conn := pooled.Conn()
		t := &txn{store: s, conn: conn, prepare: s.prepare}
		err := t.send(ctx,
			beginStep,
			pipeline.Step{SQL: `SELECT CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END, ` + sendWarnings},
			pipeline.Step{SQL: `UPDATE ` + s.name("lanes") + ` SET updated_at = updated_at WHERE id = $1::integer`, OIDs: []uint32{pgtype.Int4OID}, Params: [][]byte{pipeline.Int4(lane)}})
		if err == nil {
			err = t.commit(ctx) // its wait may be cancelled like the other's
		}
		if err != nil {
			return abort(conn, err)
		}
		return nil
	})
}

// trim drops the messages below a position.
func trim(b lane.Batch, next int64) lane.Batch {
	at, _ := slices.BinarySearchFunc(b.Messages, next, func(m message.Message, next int64) int {
		return int(min(1, max(-1, m.Position.Offset-next)))
	})
	b.From, b.Messages = next, b.Messages[at:]
	return b
}

func (p *Processor) remember(g *group, all []tally) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, b := range g.batches {
		if b.Ordered {
			p.unknown[b.Lane] = unknownCommit{b.Epoch, b.Next, all[i]}
		}
	}
}

// confirm counts a commit that turned out to have landed.
func (p *Processor) confirm(b lane.Batch, next int64) {
	p.mu.Lock()
	u, ok := p.unknown[b.Lane]
	delete(p.unknown, b.Lane)
	p.mu.Unlock()
	if ok && u.epoch == b.Epoch && u.next == next {
		p.Metrics.count(b.Lane.Source, u.tally)
	}
}

func (s *Store) forgetLanes() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.lanes)
	for lane, id := range s.numbers {
		s.lanes[id] = lane
	}
}
