package table

import (
	"context"
	"crypto/sha1" //nolint:gosec // UUIDs of version 5 are made with it
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
	"github.com/dedupd/dedupd/sinks/internal/mismatch"
)

// appender adds each message to its stream as an event, with the number after that of the
// stream's last event. The first event of a stream has number 1; a stream without events is
// at 0.
//
// Nothing keeps others from appending to the same streams, be they workers or not. All read
// where a stream is, and write the next number; the unique index on (stream, version) lets
// one of them win. The others look again, see the new event, and number theirs behind it, or
// find that it isn't what they expect.
//
// Writers can't deadlock on these indexes. Each adds its events in the order of (stream,
// version), and its first event of a stream has the number after the last one that is
// committed. So nobody else can have a later one, and a writer that waits in a stream waits
// for somebody's first event there, and has none itself. Whoever it waits for has been in
// that stream, so it waits in a later one, if at all. Before a writer looks again where a
// stream is, it takes back what it has added to that stream and to later ones.
type appender struct {
	*Sink
	stream, version, operation string // columns
	eventID                    string // a column; empty: none
	expected                   *message.Field
	onMismatch                 policy.Mismatch
	acceptReordering           bool
}

func newAppender(s *Sink, c Config) (mode, error) {
	m := &appender{Sink: s, stream: c.Stream, version: c.Version, operation: c.Operation, eventID: c.EventID, acceptReordering: c.AcceptReordering}
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	var seen []string
	for _, k := range []struct {
		key, column, needs string
	}{
		{"stream", c.Stream, "the column that says to which stream an event belongs"},
		{"version", c.Version, "the column for an event's number in its stream"},
		{"operation", c.Operation, "the column for the id of the event's message"},
		{"event_id", c.EventID, ""},
	} {
		_, filled := c.Columns[k.column]
		switch {
		case k.column == "" && k.needs != "":
			fail("%s: mode append needs %s", k.key, k.needs)
		case k.column == "":
		case slices.Contains(seen, k.column):
			fail("%s: column %q is another key's already", k.key, k.column)
		case k.key == "stream" && !filled && len(c.Columns) > 0:
			fail("stream: %q is not among the columns", k.column)
		case k.key == "operation" && filled && c.Columns[k.column] != "id":
			fail("operation: column %q is filled by %q, but an operation is known by the message's id; leave it out of columns, or fill it by id", k.column, c.Columns[k.column])
		case (k.key == "version" || k.key == "event_id") && filled:
			fail("%s: dedupd fills column %q itself; leave it out of columns", k.key, k.column)
		}
		seen = append(seen, k.column)
	}
	if len(c.Key) > 0 {
		fail("key: mode append goes by stream, version and operation; leave key out")
	}
	if c.Expected != "" {
		f, err := message.ParseField(c.Expected)
		if err == nil && f.Kind != message.FieldHeader && f.Kind != message.FieldJSON {
			err = fmt.Errorf("%q names no stream's version; use header:NAME or json:PATH", c.Expected)
		}
		if err != nil {
			fail("expected: %w", err)
		}
		m.expected = &f
	} else if c.OnMismatch != "" {
		fail("on_mismatch: without expected, messages expect nothing of their stream")
	}
	var err error
	if m.onMismatch, err = choice("on_mismatch", c.OnMismatch, policy.MismatchDeadLetter); err != nil {
		errs = append(errs, err)
	}
	return m, errors.Join(errs...)
}

// withOperation are the columns with that of the operation, which needn't be among them.
func (c Config) withOperation() map[string]string {
	if _, ok := c.Columns[c.Operation]; ok || c.Mode != ModeAppend || c.Operation == "" || len(c.Columns) == 0 {
		return c.Columns
	}
	all := maps.Clone(c.Columns)
	all[c.Operation] = "id"
	return all
}

func (m *appender) overwrites() bool { return false }

func (m *appender) needsOrder() error {
	if m.acceptReordering {
		return nil
	}
	return errors.New("mode: append numbers events as they come, and a NATS queue has no order: the events of a stream may be numbered in another order than they were sent; " +
		"use a source with mode lanes, or set accept_reordering: true if that may be")
}

func (m *appender) access(column string) access {
	return access{inserts: true, selects: column == m.stream || column == m.version || column == m.operation}
}

func (m *appender) fillsItself() []string {
	if m.eventID == "" {
		return []string{m.version}
	}
	return []string{m.version, m.eventID}
}

// check looks for the unique indexes that make the events a log, each once.
func (m *appender) check(t *target) error {
	if t.kind != "r" && t.kind != "p" || !t.plain {
		return errors.New("mode append needs a table whose rows it can see and count: no view, no rules, no row security")
	}
	var errs []error
	if a := t.attribute(m.version); a != nil && !slices.Contains([]uint32{pgtype.Int8OID, pgtype.Int4OID, pgtype.Int2OID}, a.typ.OID) {
		errs = append(errs, fmt.Errorf("version: column %q is of type %s; make it bigint", m.version, a.typ.Name))
	}
	if a := t.attribute(m.eventID); a != nil && !slices.Contains([]uint32{pgtype.UUIDOID, pgtype.TextOID, pgtype.VarcharOID}, a.typ.OID) {
		errs = append(errs, fmt.Errorf("event_id: column %q is of type %s; make it uuid", m.eventID, a.typ.Name))
	}
	for _, k := range []struct{ second, why string }{
		{m.version, "two writers could give two events of a stream the same number"},
		{m.operation, "a message could become an event twice"},
	} {
		index := t.uniqueOn(m.stream, k.second)
		if index == nil {
			errs = append(errs, fmt.Errorf("there is no unique index on just (%s, %s), in this order, so %s; run: CREATE UNIQUE INDEX ON %s (%[1]s, %[2]s)",
				quote(m.stream), quote(k.second), k.why, m.sql()))
			continue
		}
		errs = append(errs, t.comparesAsColumns(index))
	}
	return errors.Join(errs...)
}

func (m *appender) writer(t *target, p *plan) writer {
	return &appendWriter{m: m, p: p, find: m.findSQL(t, p), sql: m.appendSQL(t, p)}
}

// appendWriter finds where the streams are, then writes.
type appendWriter struct {
	m    *appender
	p    *plan
	find func(values *columns.Values) query
	sql  string
}

func (w *appendWriter) statements(values *columns.Values) []query {
	return []query{w.find(values), w.write(values, nil, nil, nil)}
}

func (w *appendWriter) write(values *columns.Values, streams, numbers []int64, ids []pgtype.UUID) query {
	args := append(values.Args(), streams, numbers)
	if w.m.eventID != "" {
		args = append(args, ids)
	}
	return query{w.sql, args}
}

func (w *appendWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s, f := &sent{}, new(found)
	w.queueFind(b, values, f, &s.rows)
	s.settle = func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
		a := &appending{w, tx, batch}
		return a.add(ctx, &events{values: values, found: f})
	}
	return s
}

// found is where the streams of some messages are. All have an element for each message.
type found struct {
	streams    []int64 // numbers the streams in their order; 0: the message has none
	versions   []int64 // of the stream's last event, 0: it has none
	operations []int64 // the ord of the first message with that operation of that stream
	present    []bool  // the operation is in the table
}

// queueFind lets the planner use the indexes: see versionedWriter.queue.
func (w *appendWriter) queueFind(b *pgx.Batch, values *columns.Values, f *found, rows *int64) {
	q := w.find(values)
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(q.sql, q.args...).QueryRow(func(row pgx.Row) error { return row.Scan(rows, &f.streams, &f.versions, &f.operations, &f.present) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
}

// findSQL tells of each message where its stream is, and whether its operation is there. It
// takes the values of these columns alone: events may be large.
func (m *appender) findSQL(t *target, p *plan) func(*columns.Values) query {
	set, params := m.looks(p)
	sql := fmt.Sprintf(`WITH b AS MATERIALIZED (
  SELECT u.*, pg_catalog.dense_rank() OVER (ORDER BY stream) AS n, pg_catalog.min(ord) OVER (PARTITION BY stream, operation) AS first
    FROM (SELECT u.ord, %s AS stream, %s AS operation FROM %s WHERE (%s) = $%d) AS u
), s AS MATERIALIZED (
  SELECT d.n, l.version FROM (SELECT DISTINCT ON (n) n, stream FROM b ORDER BY n) AS d
   CROSS JOIN LATERAL (SELECT t.%[6]s::pg_catalog.int8 AS version FROM %[7]s AS t
                        WHERE %[8]s AND t.%[6]s IS NOT NULL ORDER BY t.%[6]s DESC LIMIT 1) AS l
)
SELECT pg_catalog.count(*),
       pg_catalog.array_agg(CASE WHEN b.stream IS NULL THEN 0 ELSE b.n END ORDER BY b.ord), pg_catalog.array_agg(coalesce(s.version, 0) ORDER BY b.ord),
       pg_catalog.array_agg(b.first ORDER BY b.ord), pg_catalog.array_agg(o.present IS NOT NULL ORDER BY b.ord)
  FROM b LEFT JOIN s USING (n)
  LEFT JOIN LATERAL (SELECT true AS present FROM %[7]s AS t WHERE s.n IS NOT NULL AND %[9]s AND %[10]s LIMIT 1) AS o ON true`,
		m.comparedExpr(t, set, 0), m.comparedExpr(t, set, 1), set.From(), shapeFrom(params+1), params+4,
		quote(m.version), m.rows(t), t.equal(m.stream, "t."+quote(m.stream), "d.stream"),
		t.equal(m.stream, "t."+quote(m.stream), "b.stream"), t.equal(m.operation, "t."+quote(m.operation), "b.operation"))
	return func(values *columns.Values) query {
		return query{sql, append(values.Of(set).Args(), p.schema, p.table, p.names, p.shape)}
	}
}

// looks are the columns that findSQL takes, stream and operation, and the number of their
// parameters.
func (m *appender) looks(p *plan) (set *columns.Set, params int) {
	cols := make([]columns.Column, 2)
	for _, c := range p.set.Columns() {
		switch c.Name {
		case m.stream:
			cols[0] = c
		case m.operation:
			cols[1] = c
		}
	}
	set, err := columns.NewSet(cols)
	if err == nil {
		var values *columns.Values
		if values, err = set.Encode(nil); err == nil {
			return set, len(values.Args())
		}
	}
	panic(err) // they are columns of p's set
}

// appendSQL adds the messages that have a number, in the order of (stream, version).
func (m *appender) appendSQL(t *target, p *plan) string {
	names, exprs := append(quoted(p.names), quote(m.version)), append(m.exprs(t, p), "u.event_number")
	arrays := []columns.Array{
		{Name: "stream_number", Type: "pg_catalog.int8", Param: p.params + 1},
		{Name: "event_number", Type: "pg_catalog.int8", Param: p.params + 2},
	}
	if m.eventID != "" {
		names, exprs = append(names, quote(m.eventID)), append(exprs, "u.event_id")
		arrays = append(arrays, columns.Array{Name: "event_id", Type: "pg_catalog.uuid", Param: p.params + 3})
	}
	return fmt.Sprintf("INSERT INTO %s AS t (%s) SELECT %s FROM %s WHERE u.event_number > 0 ORDER BY u.stream_number, u.event_number",
		m.sql(), strings.Join(names, ", "), strings.Join(exprs, ", "), p.set.From(arrays...))
}

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
