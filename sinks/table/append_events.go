package table

import (
	"context"
	"crypto/sha1" //nolint:gosec // UUIDs of version 5 are made with it
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
	"github.com/dedupd/dedupd/sinks/internal/mismatch"
)

// appending is one call of Write.
type appending struct {
	*appendWriter
	tx    sinks.Tx
	batch *sinks.Batch
}

// events are messages of a batch that are added by one statement.
type events struct {
	at     []int // their indexes in the batch; nil: these are all
	values *columns.Values
	*found
	numbers []int64 // of each message's event; 0: it becomes none
	count   int64   // of events
}

func (e *events) index(i int) int {
	if e.at == nil {
		return i
	}
	return e.at[i]
}

// mostLooks is how often a transaction looks where one stream is, while others append to it.
// Then it is tried again, after a pause.
const mostLooks = 100

// add numbers events and adds them. If somebody has added one to such a stream meanwhile, it
// looks again, and goes on with a part of the streams at a time: who appends to many streams
// would find each time that another one has moved. A stream with an event of ours stays where
// it is.
func (a *appending) add(ctx context.Context, e *events) error {
	for looks := 1; ; looks++ {
		if len(e.streams) != e.values.Len() {
			return errChanged
		}
		if err := a.m.number(a.batch, e); err != nil || e.count == 0 {
			return err
		}
		refused := a.insert(ctx, e)
		if sqlstate.Of(refused) != sqlstate.UniqueViolation {
			return refused
		}
		if _, err := a.tx.Exec(ctx, "ROLLBACK TO SAVEPOINT dedupd_append"); err != nil {
			return err
		}
		before := e.found
		if err := a.look(ctx, e); err != nil {
			return err
		}
		// If nothing is new, it wasn't another's event that was in the way: another unique
		// index refuses a row.
		if slices.Equal(e.versions, before.versions) && slices.Equal(e.present, before.present) {
			return refused
		}
		if parts := e.divide(); len(parts) > 1 {
			for _, part := range parts {
				if err := errors.Join(a.look(ctx, part), ctx.Err()); err != nil {
					return err
				}
				if err := a.add(ctx, part); err != nil {
					return err
				}
			}
			return nil
		}
		if looks == mostLooks {
			return meanwhile("others append to a stream of this batch all the time")
		}
	}
}

// insert adds the events, behind a savepoint.
func (a *appending) insert(ctx context.Context, e *events) error {
	var ids []pgtype.UUID
	if a.m.eventID != "" {
		ids = eventIDs(a.batch.Messages(), e)
	}
	q := a.write(e.values, e.streams, e.numbers, ids)
	var b pgx.Batch
	var rows int64
	b.Queue("SAVEPOINT dedupd_append")
	b.Queue(q.sql, q.args...).Exec(func(tag pgconn.CommandTag) error {
		rows = tag.RowsAffected()
		return nil
	})
	a.m.queueTargets(&b, a.p)
	b.Queue("RELEASE SAVEPOINT dedupd_append")
	err := a.tx.SendBatch(ctx, &b).Close()
	if sqlstate.Means(sqlstate.Of(err), sqlstate.Outdated) {
		a.m.current.CompareAndSwap(a.p, nil)
	}
	if err == nil && rows != e.count {
		return fmt.Errorf("%d events were to be added, and the server added %d: a trigger keeps rows from being written", e.count, rows)
	}
	return err
}

// look finds where the streams are now.
func (a *appending) look(ctx context.Context, e *events) error {
	var b pgx.Batch
	var rows int64
	e.found = new(found)
	a.queueFind(&b, e.values, e.found, &rows)
	return a.tx.SendBatch(ctx, &b).Close()
}

// mostParts is how many parts are made of some streams at once.
const mostParts = 8

// divide makes parts of the events, by their streams, in the order of the streams.
func (e *events) divide() []*events {
	streams := slices.Max(e.streams)
	each := (streams + mostParts - 1) / mostParts
	parts := make([]*events, (streams+each-1)/each)
	for i, stream := range e.streams {
		if stream == 0 {
			continue
		}
		n := (stream - 1) / each
		if parts[n] == nil {
			parts[n] = new(events)
		}
		parts[n].at = append(parts[n].at, i)
	}
	for _, part := range parts {
		part.values = e.values.Rows(part.at)
		for i, at := range part.at {
			part.at[i] = e.index(at)
		}
	}
	return parts
}

// number gives each message the number of its event, or none. The error names those that are
// to be dead-lettered.
func (m *appender) number(batch *sinks.Batch, e *events) error {
	msgs, n := batch.Messages(), len(e.streams)
	last, added := make([]int64, n+1), make([]bool, n+1) // by stream; by operation
	for i, stream := range e.streams {
		last[stream] = e.versions[i]
	}
	e.numbers, e.count = make([]int64, n), 0
	var refused []error
	for i := range n {
		at, stream, operation := e.index(i), e.streams[i], e.operations[i]
		if stream == 0 {
			refused = append(refused, sinks.PermanentAt(at, fmt.Errorf("column %q is NULL, so the event has no stream", m.stream)))
			continue
		}
		if e.present[i] || added[operation] {
			batch.Outcome(at, sinks.AlreadyPresent)
			continue
		}
		expected, err := m.expects(&msgs[at], last[stream])
		switch {
		case err != nil:
			refused = append(refused, sinks.PermanentAt(at, err))
		case expected != last[stream]:
			refused = append(refused, mismatch.Settle(batch, at, m.onMismatch,
				fmt.Errorf("the message expects its stream at version %d, and it is at %d; sink.table.on_mismatch is %s", expected, last[stream], m.onMismatch)))
		default:
			last[stream]++
			e.numbers[i], added[operation] = last[stream], true
			e.count++
			batch.Outcome(at, sinks.Written) // an earlier look may have found it rejected
		}
	}
	return errors.Join(refused...)
}

// expects is the version at which a message expects its stream. A message that doesn't say
// takes it as it is.
func (m *appender) expects(msg *message.Message, at int64) (int64, error) {
	if m.expected == nil {
		return at, nil
	}
	text, err := placeText(msg, m.expected)
	if err != nil || text == nil {
		return at, err
	}
	n, err := strconv.ParseUint(*text, 10, 63)
	if err != nil {
		return 0, fmt.Errorf("sink.table.expected, %s: %.30q is no version that a stream can be at, a whole number from 0 (no events yet) to 9223372036854775807", m.expected, *text)
	}
	return int64(n), nil
}

// placeText is what a header or a JSON place holds; nil: nothing, or null.
func placeText(msg *message.Message, f *message.Field) (*string, error) {
	if f.Kind == message.FieldHeader {
		v, _ := msg.Header(f.Name)
		if v == nil {
			return nil, nil //nolint:nilnil // it holds nothing
		}
		text := string(v)
		return &text, nil
	}
	if msg.Value == nil {
		return nil, nil //nolint:nilnil // it holds nothing
	}
	err := message.ValidJSON(msg.Value)
	if err == nil {
		r := f.JSON(msg.Value)
		if r.Value() == nil { // also if it isn't there
			return nil, nil //nolint:nilnil // it holds nothing
		}
		var text string
		if text, err = message.JSONText(r); err == nil {
			return &text, nil
		}
	}
	return nil, fmt.Errorf("sink.table.expected, %s: %w", f, err)
}

// eventNamespace is the UUIDv5 of https://github.com/dedupd/dedupd.
var eventNamespace = [16]byte{0x5d, 0x4e, 0xd4, 0xb2, 0x31, 0x7e, 0x54, 0xbe, 0xb0, 0x5a, 0x13, 0xfb, 0xab, 0x3c, 0xe4, 0xbd}

// eventIDs are the ids of the messages' events: the same again, whatever is tried again. Each
// is the UUIDv5 of the message's id, a slash, and the number of the event among those of its
// message, of which there is one: 0.
func eventIDs(msgs []message.Message, e *events) []pgtype.UUID {
	ids := make([]pgtype.UUID, len(e.streams))
	h := sha1.New() //nolint:gosec // as version 5 has it
	var sum []byte
	for i := range ids {
		h.Reset()
		_, _ = h.Write(eventNamespace[:])
		_, _ = io.WriteString(h, msgs[e.index(i)].ID+"/0")
		sum = h.Sum(sum[:0])
		copy(ids[i].Bytes[:], sum)
		ids[i].Bytes[6] = ids[i].Bytes[6]&0x0f | 0x50
		ids[i].Bytes[8] = ids[i].Bytes[8]&0x3f | 0x80
		ids[i].Valid = true
	}
	return ids
}
