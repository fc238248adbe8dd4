package table

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

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
