package table

import (
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// insert adds a row for each message. With a key, it leaves a row that is there as it is.
type insert struct {
	*Sink
	onPresent policy.Present
}

func newInsert(s *Sink, c Config) (mode, error) {
	onPresent, err := choice("on_present", c.OnPresent, policy.PresentIgnore)
	return &insert{s, onPresent}, err
}

func (m *insert) overwrites() bool  { return false }
func (m *insert) needsOrder() error { return nil }

func (m *insert) access(column string) access {
	return access{inserts: true, selects: slices.Contains(m.key, column)}
}

func (m *insert) check(t *target) error {
	if m.onPresent != policy.PresentIgnore && !m.reportsPresent(t) {
		return fmt.Errorf("on_present: which rows were there isn't known of a view, nor of a table with rules, row security or a trigger before inserts; leave on_present out")
	}
	return nil
}

func (m *insert) writer(t *target, p *plan) writer {
	if m.reportsPresent(t) {
		return m.presentWriter(t, p)
	}
	// Rows are written in key order: see keyed.
	rows := rowsSQL{}
	if k := m.keyed(t, p); len(m.key) > 0 {
		rows.order, rows.conflict = " ORDER BY "+k.numbers+", u.ord", k.conflict+" DO NOTHING"
	}
	return &rowsWriter{p, m.insertSQL(t, p, rows)}
}

// rowsSQL are the parts of a statement that adds rows which differ from mode to mode.
type rowsSQL struct{ distinct, order, conflict string }

// insertSQL is one INSERT ... SELECT over arrays, whose text doesn't depend on the number of
// messages. It writes nothing if the columns have changed: see Sink.insert.
func (s *Sink) insertSQL(t *target, p *plan, with rowsSQL) string {
	return fmt.Sprintf("INSERT INTO %s AS t (%s) SELECT %s%s FROM %s WHERE %s%s%s", s.sql(),
		strings.Join(quoted(p.names), ", "), with.distinct, strings.Join(s.exprs(t, p), ", "), p.set.From(), p.unchanged, with.order, with.conflict)
}

// rowsWriter writes by one statement that says no more than how many rows it wrote.
type rowsWriter struct {
	p   *plan
	sql string
}

func (w *rowsWriter) statements(values *columns.Values) []query {
	return []query{{w.sql, w.p.args(values)}}
}

func (w *rowsWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	s := &sent{}
	b.Queue(w.sql, w.p.args(values)...).Exec(func(tag pgconn.CommandTag) error {
		s.rows = tag.RowsAffected()
		return nil
	})
	return s
}
