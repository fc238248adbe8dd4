package dedup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
)

// burySize is how many dead letters one statement writes. Headers are sliced out
// of one array for all, which takes the longer the more there are.
const burySize = 128

// burySteps are the statements that write dead letters, in the transaction that
// moves their lanes.
func (p *Processor) burySteps(g *group) (steps []pipeline.Step) {
	var chunk []*item
	for i := range g.items {
		if it := &g.items[i]; p.burial(it) != nil {
			chunk = append(chunk, it)
		}
		if len(chunk) == burySize || i == len(g.items)-1 && len(chunk) > 0 {
			steps = append(steps, p.buryStep(g, chunk))
			chunk = nil
		}
	}
	return steps
}

func (p *Processor) buryStep(g *group, items []*item) pipeline.Step {
	var sources, lanes, positions, classes, reasons, states, keys, ids, topics, messageKeys, values, times, originalLanes, originalPositions, laneIDs, streamIDs, attempts [][]byte
	var headersFrom, headersTo, headerKeys, headerValues [][]byte
	for _, it := range items {
		m, why := g.message(it), p.burial(it)
		sources, lanes = append(sources, []byte(m.Position.Lane.Source)), append(lanes, []byte(m.Position.Lane.Name))
		positions = append(positions, pipeline.Int8(m.Position.Offset))
		classes, reasons = append(classes, []byte(why.class)), append(reasons, pipeline.CleanText(why.reason))
		states = append(states, nilIfEmpty(why.sqlstate))
		keys, ids = append(keys, it.key[:]), append(ids, nilIfEmpty(m.ID))
		topics, messageKeys, values = append(topics, nonNil([]byte(m.Topic))), append(messageKeys, m.Key), append(values, m.Value)
		times = append(times, pipeline.Timestamptz(m.Time))
		originalLanes, originalPositions = append(originalLanes, it.original.laneParam()), append(originalPositions, it.original.positionParam())
		laneIDs, streamIDs = append(laneIDs, pipeline.Int4(g.lanes[it.batch])), append(streamIDs, []byte(g.batches[it.batch].StreamID))
		attempts = append(attempts, pipeline.Int4(max(why.attempts, 1)))
		headersFrom = append(headersFrom, pipeline.Int4(int32(len(headerKeys)+1)))
		for _, h := range m.Headers {
			headerKeys, headerValues = append(headerKeys, nonNil([]byte(h.Key))), append(headerValues, h.Value)
		}
		headersTo = append(headersTo, pipeline.Int4(int32(len(headerKeys))))
	}
	next := 0
	return pipeline.Step{
		Name: "dedupd_bury_3",
		// The rows that are new come back in the order they were sent.
		Row: func(v [][]byte) error {
			for ; next < len(items); next++ {
				if bytes.Equal(v[0], keys[next]) && bytes.Equal(v[1], positions[next]) && bytes.Equal(v[2], classes[next]) {
					items[next].buried = true
					next++
					return nil
				}
			}
			return errors.New("the server returned a dead letter that was not sent")
		},
		SQL: `INSERT INTO ` + p.Store.name("dead_letters") + ` (scope, source, lane, position, class, reason, sqlstate, claim_key, message_id, topic, key, value,
			header_keys, header_values, broker_time, original_lane, original_position, lane_id, stream_id, attempts)
			SELECT $1::text, u.source, u.lane, u.position, u.class, u.reason, u.sqlstate, u.claim_key, u.message_id, u.topic, u.key, u.value,
				($2::bytea[])[u.headers_from:u.headers_to], ($3::bytea[])[u.headers_from:u.headers_to], u.broker_time, u.original_lane, u.original_position, u.lane_id, u.stream_id, u.attempts
			FROM unnest($4::text[], $5::text[], $6::bigint[], $7::text[], $8::text[], $9::text[], $10::uuid[], $11::bytea[], $12::bytea[], $13::bytea[], $14::bytea[],
				$15::integer[], $16::integer[], $17::timestamptz[], $18::integer[], $19::bigint[], $20::integer[], $21::text[], $22::integer[])
				AS u (source, lane, position, class, reason, sqlstate, claim_key, message_id, topic, key, value,
				headers_from, headers_to, broker_time, original_lane, original_position, lane_id, stream_id, attempts)
			ON CONFLICT DO NOTHING RETURNING claim_key, position, class`,
		OIDs: []uint32{
			pgtype.TextOID, pgtype.ByteaArrayOID, pgtype.ByteaArrayOID,
			pgtype.TextArrayOID, pgtype.TextArrayOID, pgtype.Int8ArrayOID, pgtype.TextArrayOID, pgtype.TextArrayOID, pgtype.TextArrayOID, pgtype.UUIDArrayOID,
			pgtype.ByteaArrayOID, pgtype.ByteaArrayOID, pgtype.ByteaArrayOID, pgtype.ByteaArrayOID,
			pgtype.Int4ArrayOID, pgtype.Int4ArrayOID, pgtype.TimestamptzArrayOID, pgtype.Int4ArrayOID, pgtype.Int8ArrayOID,
			pgtype.Int4ArrayOID, pgtype.TextArrayOID, pgtype.Int4ArrayOID,
		},
		Params: [][]byte{
			[]byte(p.Store.scope), pipeline.Array(pgtype.ByteaOID, headerKeys), pipeline.Array(pgtype.ByteaOID, headerValues),
			pipeline.Array(pgtype.TextOID, sources), pipeline.Array(pgtype.TextOID, lanes), pipeline.Array(pgtype.Int8OID, positions), pipeline.Array(pgtype.TextOID, classes),
			pipeline.Array(pgtype.TextOID, reasons), pipeline.Array(pgtype.TextOID, states), pipeline.Array(pgtype.UUIDOID, keys),
			pipeline.Array(pgtype.ByteaOID, ids), pipeline.Array(pgtype.ByteaOID, topics), pipeline.Array(pgtype.ByteaOID, messageKeys), pipeline.Array(pgtype.ByteaOID, values),
			pipeline.Array(pgtype.Int4OID, headersFrom), pipeline.Array(pgtype.Int4OID, headersTo), pipeline.Array(pgtype.TimestamptzOID, times),
			pipeline.Array(pgtype.Int4OID, originalLanes), pipeline.Array(pgtype.Int8OID, originalPositions),
			pipeline.Array(pgtype.Int4OID, laneIDs), pipeline.Array(pgtype.TextOID, streamIDs), pipeline.Array(pgtype.Int4OID, attempts),
		},
	}
}

// nilIfEmpty is NULL for an empty text.
func nilIfEmpty(s string) []byte {
	if s == "" {
		return nil
	}
	return []byte(s)
}

func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// CountDeadLetters is how many the scope has.
func (s *Store) CountDeadLetters(ctx context.Context) (n int64, err error) {
	err = s.pool.QueryRow(ctx, `SELECT count(*) FROM `+s.name("dead_letters")+` WHERE scope = $1`, s.scope).Scan(&n)
	if err != nil {
		err = fmt.Errorf("count dead letters: %w", err)
	}
	return n, err
}

// ExpireDeadLetters deletes dead letters older than age, by the database's clock,
// in small transactions, and tells how many. led is false, and nothing done,
// while another process is at it. One that is just being replayed or discarded is
// passed over, for it has a better end, or the next call finds it.
func (s *Store) ExpireDeadLetters(ctx context.Context, age time.Duration) (n int64, led bool, err error) {
	for {
		var some int64
		led, err = s.generations.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
			tag, err := tx.Exec(ctx, `DELETE FROM `+s.name("dead_letters")+` WHERE id IN (
				SELECT id FROM `+s.name("dead_letters")+` WHERE scope = $1 AND created_at < `+s.name("clock")+`() - make_interval(secs => $2) ORDER BY created_at LIMIT 1000 FOR UPDATE SKIP LOCKED)`,
				s.scope, age.Seconds())
			some = tag.RowsAffected()
			return err
		})
		n += some
		if err != nil {
			return n, led, fmt.Errorf("expire dead letters: %w", err)
		}
		if some < 1000 {
			return n, led, nil
		}
	}
}
