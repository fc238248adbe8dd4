package table

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// upsert adds a row, or overwrites the columns of the one with its key.
type upsert struct {
	*Sink
	absent policy.Absent
	// acceptReordering: an older message may overwrite a newer one.
	acceptReordering bool
}

func newUpsert(s *Sink, c Config) (mode, error) {
	absent, err := choice("absent", c.Absent, policy.AbsentKeep)
	u := &upsert{s, absent, c.AcceptReordering}
	err = errors.Join(c.needsKey(), err)
	if c.History == (History{}) {
		return u, err
	}
	m, bad := newRemembering(u, c)
	return m, errors.Join(err, bad)
}

func (m *upsert) overwrites() bool    { return true }
func (m *upsert) check(*target) error { return nil }
func (m *upsert) undoes() bool        { return len(m.cols) > len(m.key) }

// keeps leaves out the key, which is NULL where it is absent.
func (m *upsert) keeps(c columns.Column) bool {
	return m.absent == policy.AbsentKeep && !slices.Contains(m.key, c.Name) && mayKeep(c)
}

// mayKeep leaves out the value: a message without one is a tombstone.
func mayKeep(c columns.Column) bool {
	return columns.MayBeAbsent(c.Field) && c.Field.Kind != message.FieldValue
}

// access includes the right to read every column: Postgres asks for it where a statement has
// EXCLUDED.
func (m *upsert) access(column string) access {
	return access{inserts: true, updates: !slices.Contains(m.key, column), selects: true}
}

// needsOrder is an error for an upsert that overwrites columns.
func (m *upsert) needsOrder() error {
	if m.acceptReordering || !m.undoes() {
		return nil
	}
	return errors.New("mode: upsert lets the message that comes last win, and a NATS queue has no order: an older message would overwrite a newer one; " +
		"use mode versioned if rows have a version, or set accept_reordering: true if that may be")
}

// writer keeps the last message of each key, since one statement can't update a row twice.
// Messages without some of the places take another way.
func (m *upsert) writer(t *target, p *plan) writer {
	k := m.keyed(t, p)
	whole := &rowsWriter{p, m.insertSQL(t, p, rowsSQL{
		distinct: "DISTINCT ON (" + k.apart + ") ",
		order:    " ORDER BY " + k.apart + ", u.ord DESC",
		conflict: k.conflict + k.overwrite,
	})}
	if !slices.ContainsFunc(p.set.Columns(), func(c columns.Column) bool { return c.Keeps }) {
		return whole
	}
	return &upsertWriter{whole, m.foldWriter(t, p)}
}

// upsertWriter writes batches in which no place is absent by one statement.
type upsertWriter struct {
	whole *rowsWriter
	fold  *foldWriter
}

func (w *upsertWriter) statements(values *columns.Values) []query {
	return append(w.fold.statements(values), w.whole.statements(values)...)
}

func (w *upsertWriter) queue(b *pgx.Batch, values *columns.Values) *sent {
	if values.HasAbsent() {
		return w.fold.queue(b, values)
	}
	return w.whole.queue(b, values)
}

// keyed are the parts of a statement that a key adds.
//
// Rows are written in key order, so that two workers with keys in common lock them in the
// same order and can't deadlock. The key's columns are named by their number in the select
// list: they are then cast once, and compared as they will be stored.
type keyed struct {
	numbers  string // of the key's columns
	apart    string // numbers, and what keeps NULLs apart
	conflict string // ON CONFLICT (key)
	// overwrite is what else an upsert does with a row that is there: DO UPDATE SET all other
	// columns, or DO NOTHING if there are none.
	overwrite string
}

// returned are the columns of the key of a row that is written, under these names.
func (s *Sink) returned(t *target, p *plan, names []string) string {
	var all []string
	for _, name := range p.names {
		if !slices.Contains(s.key, name) {
			continue
		}
		expr := "t." + quote(name)
		if c := t.attribute(name).collation; c != "" {
			expr += " COLLATE " + c
		}
		all = append(all, expr+" AS "+names[len(all)])
	}
	return strings.Join(all, ", ")
}

func (s *Sink) keyed(t *target, p *plan) keyed {
	var numbers, others []string
	for i, name := range p.names {
		if slices.Contains(s.key, name) {
			numbers = append(numbers, fmt.Sprint(i+1))
		} else {
			others = append(others, fmt.Sprintf("%s = EXCLUDED.%[1]s", quote(name)))
		}
	}
	k := keyed{numbers: strings.Join(numbers, ", "), overwrite: " DO NOTHING"}
	k.apart, k.conflict = k.numbers, " ON CONFLICT ("+strings.Join(quoted(s.key), ", ")+")"
	if apart := s.nullsApart(t, p.set); apart != "" {
		k.apart += ", " + apart
	}
	if len(others) > 0 {
		k.overwrite = " DO UPDATE SET " + strings.Join(others, ", ")
	}
	return k
}
