package table

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
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
