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
	"github.com/tidwall/gjson"

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
// committed. A writer that waits in a stream waits for somebody's event with that number. So
// it has none in that stream yet, nor in any later one; whoever it waits for can only wait in
// this stream, where it is first, or in a later one. Before it looks again, it takes back
// what it has added.
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
	return []query{w.find(values), w.write(values, &found{})}
}

func (w *appendWriter) write(values *columns.Values, f *found) query {
	args := append(values.Args(), f.streams, f.versions)
	if w.m.eventID != "" {
		args = append(args, eventIDs(values.Messages()))
	}
	return query{w.sql, args}
}

func (w *appendWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s, f := &sent{}, new(found)
	w.queueFind(b, values, f, &s.rows)
	s.settle = func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
		return w.settle(ctx, tx, batch, values, f)
	}
	return s
}

// found is where the streams of a batch are. All have an element for each message.
type found struct {
	streams    []int64 // numbers the streams in their order; 0: the message has none
	versions   []int64 // of the stream's last event, 0: it has none. Then of the message's event: see number
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

// mostLooks is how often a transaction looks where its streams are, while others append to
// them. Then it is tried again, after a pause.
const mostLooks = 5

// settle numbers the events and adds them. Whoever adds one to such a stream meanwhile makes
// it look again.
func (w *appendWriter) settle(ctx context.Context, tx sinks.Tx, batch *sinks.Batch, values *columns.Values, f *found) error {
	for look := 1; ; look++ {
		if len(f.streams) != len(batch.Messages()) {
			return errChanged
		}
		before := &found{versions: slices.Clone(f.versions), present: f.present}
		events, err := w.m.number(batch, f)
		if err != nil || events == 0 {
			return err
		}
		rows, err := w.add(ctx, tx, values, f)
		switch {
		case err == nil && rows != events:
			return fmt.Errorf("%d events were to be added, and the server added %d: a trigger keeps rows from being written", events, rows)
		case sqlstate.Of(err) != sqlstate.UniqueViolation:
			return err
		}
		if f, err = w.lookAgain(ctx, tx, values, err, before); err != nil {
			return err
		}
		if look == mostLooks {
			return meanwhile("others append to streams of this batch all the time")
		}
	}
}

// add adds the events.
func (w *appendWriter) add(ctx context.Context, tx sinks.Tx, values *columns.Values, f *found) (rows int64, err error) {
	q := w.write(values, f)
	var b pgx.Batch
	b.Queue("SAVEPOINT dedupd_append")
	b.Queue(q.sql, q.args...).Exec(func(tag pgconn.CommandTag) error {
		rows = tag.RowsAffected()
		return nil
	})
	w.p.targets.queue(&b)
	b.Queue("RELEASE SAVEPOINT dedupd_append")
	err = tx.SendBatch(ctx, &b).Close()
	if sqlstate.Means(sqlstate.Of(err), sqlstate.Outdated) {
		w.m.current.CompareAndSwap(w.p, nil)
	}
	return rows, err
}

// lookAgain takes back what was added, and looks where the streams are now. If nothing is
// new, it wasn't another's event that was in the way: another unique index refuses a row,
// and that error is returned.
func (w *appendWriter) lookAgain(ctx context.Context, tx sinks.Tx, values *columns.Values, refused error, before *found) (*found, error) {
	if _, err := tx.Exec(ctx, "ROLLBACK TO SAVEPOINT dedupd_append"); err != nil {
		return nil, err
	}
	var b pgx.Batch
	var rows int64
	now := new(found)
	w.queueFind(&b, values, now, &rows)
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return nil, err
	}
	if slices.Equal(now.versions, before.versions) && slices.Equal(now.present, before.present) {
		return nil, refused
	}
	return now, nil
}

// number puts into f.versions the number of each message's event, or 0 if it becomes none,
// and returns how many get one. The error names those that are to be dead-lettered.
func (m *appender) number(batch *sinks.Batch, f *found) (events int64, err error) {
	msgs := batch.Messages()
	last, added := make([]int64, len(msgs)+1), make([]bool, len(msgs)+1) // by stream; by operation
	for i, stream := range f.streams {
		last[stream] = f.versions[i]
	}
	var refused []error
	for i := range msgs {
		stream, operation := f.streams[i], f.operations[i]
		f.versions[i] = 0
		if stream == 0 {
			refused = append(refused, sinks.PermanentAt(i, fmt.Errorf("column %q is NULL, so the event has no stream", m.stream)))
			continue
		}
		if f.present[i] || added[operation] {
			batch.Outcome(i, sinks.AlreadyPresent)
			continue
		}
		expected, err := m.expects(&msgs[i], last[stream])
		switch {
		case err != nil:
			refused = append(refused, sinks.PermanentAt(i, err))
		case expected != last[stream]:
			refused = append(refused, mismatch.Settle(batch, i, m.onMismatch,
				fmt.Errorf("the message expects its stream at version %d, and it is at %d; sink.table.on_mismatch is %s", expected, last[stream], m.onMismatch)))
		default:
			last[stream]++
			f.versions[i], added[operation] = last[stream], true
			events++
			batch.Outcome(i, sinks.Written) // an earlier look may have found it rejected
		}
	}
	return events, errors.Join(refused...)
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
		if !r.Exists() || r.Type == gjson.Null {
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
func eventIDs(msgs []message.Message) []pgtype.UUID {
	ids := make([]pgtype.UUID, len(msgs))
	h := sha1.New() //nolint:gosec // as version 5 has it
	var sum []byte
	for i := range msgs {
		h.Reset()
		_, _ = h.Write(eventNamespace[:])
		_, _ = io.WriteString(h, msgs[i].ID+"/0")
		sum = h.Sum(sum[:0])
		copy(ids[i].Bytes[:], sum)
		ids[i].Bytes[6] = ids[i].Bytes[6]&0x0f | 0x50
		ids[i].Bytes[8] = ids[i].Bytes[8]&0x3f | 0x80
		ids[i].Valid = true
	}
	return ids
}
