package dedup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
)

// deadLettersAtOnce is how many dead letters one statement writes. Headers are sliced out
// of one array for all, which gets slower as that grows.
const deadLettersAtOnce = 128

// deadLetterColumns are the columns of dead_letters that are written, except the scope
// and the headers: name, type, and the value of one dead letter.
var deadLetterColumns = []struct {
	name       string
	element    string
	oid, array uint32
	value      func(g *group, it *item, why *rejection) []byte
}{
	{"claim_key", "uuid", pgtype.UUIDOID, pgtype.UUIDArrayOID, func(_ *group, it *item, _ *rejection) []byte { return it.key[:] }},
	{"position", "bigint", pgtype.Int8OID, pgtype.Int8ArrayOID, func(g *group, it *item, _ *rejection) []byte {
		return pipeline.Int8(g.message(it).Position.Offset)
	}},
	{"class", "text", pgtype.TextOID, pgtype.TextArrayOID, func(_ *group, _ *item, why *rejection) []byte { return []byte(why.class) }},
	{"outcome", "text", pgtype.TextOID, pgtype.TextArrayOID, func(_ *group, it *item, _ *rejection) []byte { return []byte(outcomeNames[it.outcome]) }},
	{"reason", "text", pgtype.TextOID, pgtype.TextArrayOID, func(_ *group, _ *item, why *rejection) []byte { return pipeline.CleanText(why.reason) }},
	{"sqlstate", "text", pgtype.TextOID, pgtype.TextArrayOID, func(_ *group, _ *item, why *rejection) []byte { return nilIfEmpty(why.sqlstate) }},
	{"attempts", "integer", pgtype.Int4OID, pgtype.Int4ArrayOID, func(_ *group, _ *item, why *rejection) []byte { return pipeline.Int4(max(why.attempts, 1)) }},
	{"source", "text", pgtype.TextOID, pgtype.TextArrayOID, func(g *group, it *item, _ *rejection) []byte { return []byte(g.batches[it.batch].Lane.Source) }},
	{"lane", "text", pgtype.TextOID, pgtype.TextArrayOID, func(g *group, it *item, _ *rejection) []byte { return []byte(g.batches[it.batch].Lane.Name) }},
	{"lane_id", "integer", pgtype.Int4OID, pgtype.Int4ArrayOID, func(g *group, it *item, _ *rejection) []byte { return pipeline.Int4(g.lanes[it.batch]) }},
	{"stream_id", "text", pgtype.TextOID, pgtype.TextArrayOID, func(g *group, it *item, _ *rejection) []byte { return []byte(g.batches[it.batch].StreamID) }},
	{"message_id", "bytea", pgtype.ByteaOID, pgtype.ByteaArrayOID, func(g *group, it *item, _ *rejection) []byte { return nilIfEmpty(g.message(it).ID) }},
	{"topic", "bytea", pgtype.ByteaOID, pgtype.ByteaArrayOID, func(g *group, it *item, _ *rejection) []byte { return nonNil([]byte(g.message(it).Topic)) }},
	{"key", "bytea", pgtype.ByteaOID, pgtype.ByteaArrayOID, func(g *group, it *item, _ *rejection) []byte { return g.message(it).Key }},
	{"value", "bytea", pgtype.ByteaOID, pgtype.ByteaArrayOID, func(g *group, it *item, _ *rejection) []byte { return g.message(it).Value }},
	{"broker_time", "timestamptz", pgtype.TimestamptzOID, pgtype.TimestamptzArrayOID, func(g *group, it *item, _ *rejection) []byte {
		return pipeline.Timestamptz(g.message(it).Time)
	}},
	{"original_lane", "integer", pgtype.Int4OID, pgtype.Int4ArrayOID, func(_ *group, it *item, _ *rejection) []byte { return it.original.laneParam() }},
	{"original_position", "bigint", pgtype.Int8OID, pgtype.Int8ArrayOID, func(_ *group, it *item, _ *rejection) []byte { return it.original.positionParam() }},
}

// The columns that identify a dead letter come first in deadLetterColumns: the statement
// returns these of the rows that are new.
const identifyingColumns = 3

// deadLetterSQL writes dead letters into a table. $1 is the scope; $2 and $3 are the
// headers of all; $4 and $5 say where each one's begin and end.
func deadLetterSQL(table string) string {
	var names, selected, types []string
	for i, c := range deadLetterColumns {
		names, selected, types = append(names, c.name), append(selected, "u."+c.name), append(types, fmt.Sprintf("$%d::%s[]", i+6, c.element))
	}
	columns := strings.Join(names, ", ")
	return `INSERT INTO ` + table + ` (scope, header_keys, header_values, ` + columns + `)
		SELECT $1::text, ($2::bytea[])[u.headers_from:u.headers_to], ($3::bytea[])[u.headers_from:u.headers_to], ` + strings.Join(selected, ", ") + `
		FROM unnest($4::integer[], $5::integer[], ` + strings.Join(types, ", ") + `) AS u (headers_from, headers_to, ` + columns + `)
		ON CONFLICT DO NOTHING RETURNING ` + strings.Join(names[:identifyingColumns], ", ")
}

// deadLetterSteps are the statements that write dead letters, in the transaction that
// moves their lanes.
func (p *Processor) deadLetterSteps(g *group) (steps []pipeline.Step) {
	var chunk []*item
	for i := range g.items {
		if it := &g.items[i]; p.rejection(it) != nil {
			chunk = append(chunk, it)
		}
		if len(chunk) == deadLettersAtOnce || i == len(g.items)-1 && len(chunk) > 0 {
			steps = append(steps, p.deadLetterStep(g, chunk))
			chunk = nil
		}
	}
	return steps
}

func (p *Processor) deadLetterStep(g *group, items []*item) pipeline.Step {
	var from, to, headerKeys, headerValues [][]byte
	values := make([][][]byte, len(deadLetterColumns))
	for _, it := range items {
		why := p.rejection(it)
		for i, c := range deadLetterColumns {
			values[i] = append(values[i], c.value(g, it, why))
		}
		from = append(from, pipeline.Int4(int32(len(headerKeys)+1)))
		for _, h := range g.message(it).Headers {
			headerKeys, headerValues = append(headerKeys, nonNil([]byte(h.Key))), append(headerValues, h.Value)
		}
		to = append(to, pipeline.Int4(int32(len(headerKeys))))
	}
	st := pipeline.Step{
		Name: "dedupd_dead_letters", SQL: deadLetterSQL(p.Store.name("dead_letters")),
		OIDs: []uint32{pgtype.TextOID, pgtype.ByteaArrayOID, pgtype.ByteaArrayOID, pgtype.Int4ArrayOID, pgtype.Int4ArrayOID},
		Params: [][]byte{
			[]byte(p.Store.scope), pipeline.Array(pgtype.ByteaOID, headerKeys), pipeline.Array(pgtype.ByteaOID, headerValues),
			pipeline.Array(pgtype.Int4OID, from), pipeline.Array(pgtype.Int4OID, to),
		},
	}
	for i, c := range deadLetterColumns {
		st.OIDs, st.Params = append(st.OIDs, c.array), append(st.Params, pipeline.Array(c.oid, values[i]))
	}
	next := 0
	// New rows come back in the order they were sent.
	st.Row = func(v [][]byte) error {
		for ; next < len(items); next++ {
			if bytes.Equal(v[0], values[0][next]) && bytes.Equal(v[1], values[1][next]) && bytes.Equal(v[2], values[2][next]) {
				items[next].deadLettered = true
				next++
				return nil
			}
		}
		return errors.New("the server returned a dead letter that was not sent")
	}
	return st
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

// ExpireDeadLetters deletes dead letters older than age, by the database's clock, in
// small transactions, and returns how many. led is false, and nothing is done, while
// another process is at it. It skips one that is being replayed or discarded: that is the
// better end, or the next call finds it.
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
