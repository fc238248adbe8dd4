package dedup

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// deadGuard keeps a lane from draining into the dead letters. A few messages without an
// id, or that the sink refuses, are at fault themselves. A large share of them has
// another cause: a renamed header, a changed table. The lane's row records which of its
// last messages were dead, numbered as its books count them; kept in memory, the record
// would be lost with each process that a message ends. It is read and written only if
// there is a dead letter.
type deadGuard struct {
	limit  int // dead letters among the last window messages of a lane
	window int64
}

// check refuses a group that would raise a lane above the limit.
func (d deadGuard) check(ctx context.Context, t *txn, all []tally) error {
	if d.window == 0 {
		return nil
	}
	for _, part := range t.deadParts(all) {
		seen, recent := int64(0), []int64(nil)
		if err := t.send(ctx, t.store.recentDeadStep(part.lane, &seen, &recent)); err != nil {
			return &ownError{fmt.Errorf("read the last dead letters of lane %s: %w", part.lane, err)}
		}
		for i := range part.items {
			it := &part.items[i]
			seen++
			if it.outcome == dead {
				recent = append(recent, seen)
			}
			for len(recent) > 0 && recent[0] <= seen-d.window {
				recent = recent[1:]
			}
			if len(recent) > d.limit && it.outcome == dead {
				why := fmt.Sprintf("%d of the last %d messages can't be applied, which is more than dead_letters.max_share allows, so the messages are hardly at fault",
					len(recent), min(seen, d.window))
				return &lane.HoldError{
					Lane: part.lane, Err: fmt.Errorf("%s; the last one: %s", why, it.reject.reason),
					Summary: fmt.Sprintf("%s; the last one: %s %s", why, it.reject.class, it.reject.sqlstate),
				}
			}
		}
	}
	return nil
}

// steps record which messages are dead, before their lanes move.
func (d deadGuard) steps(s *Store, g *group, all []tally) map[message.Lane]pipeline.Step {
	if d.window == 0 {
		return nil
	}
	var steps map[message.Lane]pipeline.Step
	for _, part := range g.deadParts(all) {
		var at []int64 // counted from 1
		for i := range part.items {
			if part.items[i].outcome == dead {
				at = append(at, int64(i+1))
			}
		}
		if steps == nil {
			steps = make(map[message.Lane]pipeline.Step)
		}
		steps[part.lane] = pipeline.Step{
			Name: "dedupd_recent_dead",
			SQL: `UPDATE ` + s.name("lanes") + ` SET recent_dead = ARRAY(SELECT n FROM (
				SELECT unnest(recent_dead) AS n UNION ALL SELECT fetched + unnest($4::bigint[])) AS d WHERE n > fetched + $5::bigint ORDER BY n)
				WHERE scope = $1::text AND source = $2::text AND lane = $3::text`,
			OIDs: []uint32{pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.Int8ArrayOID, pgtype.Int8OID},
			Params: [][]byte{
				[]byte(s.scope), []byte(part.lane.Source), []byte(part.lane.Name),
				pipeline.AppendInt8s(nil, len(at), func(i int) int64 { return at[i] }), pipeline.Int8(int64(len(part.items)) - d.window),
			},
		}
	}
	return steps
}

func (s *Store) recentDeadStep(lane message.Lane, seen *int64, recent *[]int64) pipeline.Step {
	return pipeline.Step{
		Name: "dedupd_read_recent_dead",
		SQL: `SELECT l.fetched, d.n FROM ` + s.name("lanes") + ` l LEFT JOIN LATERAL unnest(l.recent_dead) AS d (n) ON true
			WHERE l.scope = $1::text AND l.source = $2::text AND l.lane = $3::text ORDER BY d.n`,
		OIDs:   []uint32{pgtype.TextOID, pgtype.TextOID, pgtype.TextOID},
		Params: [][]byte{[]byte(s.scope), []byte(lane.Source), []byte(lane.Name)},
		Row: func(v [][]byte) (err error) {
			if *seen, err = pipeline.ReadInt8(v[0]); err != nil || v[1] == nil {
				return err
			}
			n, err := pipeline.ReadInt8(v[1])
			*recent = append(*recent, n)
			return err
		},
	}
}

// deadPart is the items of one lane, some of which are dead.
type deadPart struct {
	lane  message.Lane
	items []item
}

// deadParts are those of a group. Batches of one lane are adjacent, and so are their
// items.
func (g *group) deadParts(all []tally) (parts []deadPart) {
	at := 0
	for i := 0; i < len(g.batches); {
		lane, from, died := g.batches[i].Lane, at, int64(0)
		for ; i < len(g.batches) && g.batches[i].Lane == lane; i++ {
			at += len(g.batches[i].Messages)
			died += all[i][dead]
		}
		if died > 0 {
			parts = append(parts, deadPart{lane, g.items[from:at]})
		}
	}
	return parts
}
