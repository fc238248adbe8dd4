package dedup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
)

// Sequence says where strategy sequence finds who produced a message, and the number that
// the producer gave it.
type Sequence struct {
	Producer, Number *message.Identity
	// Epoch rises when a producer begins its numbers anew. Nil: producers have none.
	Epoch *message.Identity
	Gaps  policy.SequenceGap
}

// sequenced is where a message is among its producer's.
type sequenced struct {
	producer      string
	epoch, number int64
}

// read finds a message's producer and number. The error wraps message.ErrNoID if one of
// them is missing.
func (s *Sequence) read(m *message.Message, streamID string) (at *sequenced, err error) {
	at = new(sequenced)
	if at.producer, err = s.Producer.ID(m, streamID); err != nil {
		return at, fmt.Errorf("dedup.sequence.producer: %w", err)
	}
	if at.number, err = number(s.Number, m, streamID); err != nil {
		return at, fmt.Errorf("dedup.sequence.seq: %w", err)
	}
	if s.Epoch != nil {
		if at.epoch, err = number(s.Epoch, m, streamID); err != nil {
			return at, fmt.Errorf("dedup.sequence.epoch: %w", err)
		}
	}
	return at, nil
}

func number(from *message.Identity, m *message.Message, streamID string) (int64, error) {
	text, err := from.ID(m, streamID)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(text, 10, 63)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%.30s is above %d", text, int64(math.MaxInt64))
	case err != nil:
		return 0, fmt.Errorf("%.30q is no whole number from 0 on", text)
	}
	return int64(n), nil
}

// mark is how far a producer's messages have been applied. It belongs to the lane that
// they came by: over two lanes, a later number may come before an earlier one, and the
// earlier would be taken for a duplicate.
type mark struct {
	lane          int32 // 0: it is gone, and the next one takes over
	epoch, number int64
	// position is that of the message with the number.
	position int64
	// first has an item of the producer's.
	first *item
	// isNew: there is no row yet.
	isNew bool
}

// bySequence opens a transaction, locks its producers' marks in the order of their keys,
// and gives every message its outcome by them.
func (p *Processor) bySequence(ctx context.Context, t *txn) error {
	if err := t.needsOrder("sequence"); err != nil {
		return err
	}
	t.marks = make(map[claimkey.Key]*mark)
	steps := append([]pipeline.Step{beginStep, t.enterStep()}, byIndex([]pipeline.Step{t.lockMarksStep(), t.marksStep()})...)
	steps = append(steps, t.atStep())
	if err := t.send(ctx, steps...); err != nil {
		return err
	}
	for i := range t.items {
		it := &t.items[i]
		if it.sequenced == nil { // known only by its place
			t.newByPosition(it)
		} else if err := p.settleByMark(t, it); err != nil {
			return err
		}
	}
	return nil
}

// lockMarksStep locks the marks of a group's producers, in the order of their keys. They
// are read by a statement of its own: one that waits for a lock sees the new row, but joins
// it with what was there before.
func (t *txn) lockMarksStep() pipeline.Step {
	return pipeline.Step{
		Name: "dedupd_lock_marks",
		SQL:  `SELECT FROM ` + t.store.name("sequences") + ` WHERE scope_id = $1::integer AND producer = ANY ($2::uuid[]) ORDER BY producer FOR NO KEY UPDATE`,
		OIDs: []uint32{pgtype.Int4OID, pgtype.UUIDArrayOID}, Params: t.producers(),
		Row: func([][]byte) error { return nil },
	}
}

// producers are the scope and the keys of the group's producers.
func (t *txn) producers() [][]byte {
	return [][]byte{
		pipeline.Int4(t.catalog.ScopeID),
		pipeline.AppendKeys(nil, len(t.unique), func(i int) *claimkey.Key { return &t.items[t.unique[i]].key }),
	}
}

// marksStep reads the marks of a group's producers, once they are locked.
func (t *txn) marksStep() pipeline.Step {
	return pipeline.Step{
		Name: "dedupd_marks",
		SQL: `SELECT s.producer, coalesce(l.id, 0), s.epoch, s.number, s.position FROM ` + t.store.name("sequences") + ` s LEFT JOIN ` + t.store.name("lanes") + ` l ON l.id = s.lane
			WHERE s.scope_id = $1::integer AND s.producer = ANY ($2::uuid[])`,
		OIDs: []uint32{pgtype.Int4OID, pgtype.UUIDArrayOID}, Params: t.producers(),
		Row: func(v [][]byte) error {
			key, err := pipeline.ReadKey(v[0])
			if err != nil {
				return err
			}
			m := &mark{lane: int32(binary.BigEndian.Uint32(v[1]))}
			if m.epoch, err = pipeline.ReadInt8(v[2]); err != nil {
				return err
			}
			if m.number, err = pipeline.ReadInt8(v[3]); err != nil {
				return err
			}
			m.position, err = pipeline.ReadInt8(v[4])
			t.marks[key] = m
			return err
		},
	}
}

// atStep makes sure that the lanes are where the batches begin. advance() does that too, but
// only after the messages were judged. If our own commit has landed and its answer was lost,
// the marks and the sink's rows are those behind the batch: what has landed would be dead
// letters, or hold its lane.
func (t *txn) atStep() pipeline.Step {
	n := len(t.batches)
	return pipeline.Step{
		Name: "dedupd_at",
		SQL:  `SELECT ` + t.store.name("at") + `($1::integer[], $2::bigint[], $3::bigint[])`,
		OIDs: []uint32{pgtype.Int4ArrayOID, pgtype.Int8ArrayOID, pgtype.Int8ArrayOID},
		Params: [][]byte{
			pipeline.AppendInt4s(nil, n, func(i int) int32 { return t.lanes[i] }),
			pipeline.AppendInt8s(nil, n, func(i int) int64 { return t.batches[i].Epoch }),
			pipeline.AppendInt8s(nil, n, func(i int) int64 { return t.batches[i].From }),
		},
	}
}

// settleByMark gives a message its outcome and moves its producer's mark. A dead letter
// moves it too: what comes after it is applied, and its replay passes the mark by. So does
// one that no sink wants: it leaves no gap, and hides none before it.
func (p *Processor) settleByMark(t *txn, it *item) error {
	at, l := it.sequenced, t.lanes[it.batch]
	m := t.marks[it.key]
	if m == nil {
		m = &mark{lane: l, epoch: at.epoch, number: at.number - 1, isNew: true}
		t.marks[it.key] = m
	}
	if m.first == nil {
		m.first = it
	}
	gap := int64(0)
	switch {
	case at.epoch > m.epoch: // the producer has begun anew, here
	case it.unwanted && (m.lane != l && m.lane != 0 || at.epoch < m.epoch || at.number <= m.number):
		return nil // whatever the mark says, it would have no effect
	case m.lane != l && m.lane != 0:
		return t.deadByMark(it, fmt.Sprintf("the producer's messages came by another lane, up to number %d: on two lanes, an earlier number can come after a later one; "+
			"keep a producer's messages in one partition, or raise its epoch when it moves (dedup.sequence.epoch)", m.number))
	case at.epoch < m.epoch:
		return t.deadByMark(it, fmt.Sprintf("the producer's epoch is %d, the message's %d: it was sent before the producer began anew", m.epoch, at.epoch))
	case at.number <= m.number:
		// What was read up to the mark comes again only because the lane went back.
		if it.outcome = resent; m.lane == l && t.message(it).Position.Offset <= m.position {
			it.outcome = redelivered
		}
		it.original = &claimRow{lane: new(l)}
		return nil
	default:
		gap = at.number - m.number - 1
	}
	before := m.number
	m.lane, m.epoch, m.number, m.position = l, at.epoch, at.number, t.message(it).Position.Offset
	if gap > 0 {
		why := fmt.Sprintf("numbers %d to %d of the producer are missing", before+1, at.number-1)
		switch p.Sequence.Gaps {
		case policy.SequenceGapDeadLetter:
			return t.deadByMark(it, why) // a rejection of its own stays
		case policy.SequenceGapStop:
			why += ", and dedup.sequence.gaps is stop"
			return t.heldAt(it, errors.New(why), why)
		}
	}
	if it.unwanted {
		return nil
	}
	it.outcome = written
	if it.reject != nil {
		it.outcome = dead
	}
	return nil
}

// deadByMark makes a message a dead letter for what its producer's mark says.
func (t *txn) deadByMark(it *item, why string) error {
	it.outcome = dead
	if it.reject == nil {
		it.reject = &rejection{class: classSequence, reason: why}
	}
	return nil
}

// markSteps write the marks that were met: a producer that only sends copies is seen, too.
// The function refuses if a new one isn't new any more: another worker marks the same
// producer on another lane.
func (t *txn) markSteps() []pipeline.Step {
	if len(t.marks) == 0 {
		return nil
	}
	var moved []*mark
	for _, at := range t.unique { // by key
		if m := t.marks[t.items[at].key]; m != nil {
			moved = append(moved, m)
		}
	}
	names := make([][]byte, len(moved))
	for i, m := range moved {
		if m.isNew {
			names[i] = []byte(m.first.sequenced.producer)
		}
	}
	n := len(moved)
	return []pipeline.Step{{
		Name: "dedupd_mark",
		SQL:  `SELECT ` + t.store.name("mark") + `($1::integer, $2::uuid[], $3::bytea[], $4::integer[], $5::bigint[], $6::bigint[], $7::bigint[])`,
		OIDs: []uint32{pgtype.Int4OID, pgtype.UUIDArrayOID, pgtype.ByteaArrayOID, pgtype.Int4ArrayOID, pgtype.Int8ArrayOID, pgtype.Int8ArrayOID, pgtype.Int8ArrayOID},
		Params: [][]byte{
			pipeline.Int4(t.catalog.ScopeID),
			pipeline.AppendKeys(nil, n, func(i int) *claimkey.Key { return &moved[i].first.key }),
			pipeline.Array(pgtype.ByteaOID, names),
			pipeline.AppendInt4s(nil, n, func(i int) int32 { return moved[i].lane }),
			pipeline.AppendInt8s(nil, n, func(i int) int64 { return moved[i].epoch }),
			pipeline.AppendInt8s(nil, n, func(i int) int64 { return moved[i].number }),
			pipeline.AppendInt8s(nil, n, func(i int) int64 { return moved[i].position }),
		},
	}}
}

// ExpireMarks deletes the marks of producers that weren't seen for the window. Its days are
// counted as those of claims are: by the lane furthest behind, so that a producer isn't
// forgotten while nothing is read. It walks the marks in the order of their keys, in which
// transactions lock them.
func (s *Store) ExpireMarks(ctx context.Context, window time.Duration) (n int64, led bool, err error) {
	for after := new(claimkey.Key).String(); ; {
		var next *string
		var gone int64
		led, err = s.generations.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, `WITH page AS MATERIALIZED (
					SELECT m.scope_id, m.producer, m.seen_at FROM `+s.name("sequences")+` m
					WHERE m.scope_id = (SELECT id FROM `+s.name("scopes")+` WHERE scope = $1) AND m.producer > $3::text::uuid ORDER BY m.producer LIMIT 10000
				), gone AS (
					DELETE FROM `+s.name("sequences")+` m USING page p
					WHERE m.scope_id = p.scope_id AND m.producer = p.producer AND p.seen_at = m.seen_at
					AND p.seen_at + make_interval(secs => $2) < (SELECT `+s.name("stream_clock")+`($1)) RETURNING 1
				)
				SELECT (SELECT producer::text FROM page ORDER BY producer DESC LIMIT 1), (SELECT count(*) FROM gone)`,
				s.scope, window.Seconds(), after).Scan(&next, &gone)
		})
		n += gone
		if err != nil {
			return n, led, fmt.Errorf("expire producers' marks: %w", err)
		}
		if !led || next == nil {
			return n, led, nil
		}
		after = *next
	}
}
