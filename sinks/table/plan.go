package table

import (
	"fmt"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// plan is how the sink writes to the target as it was found. Immutable.
type plan struct {
	set *columns.Set
	sql string
	// names are the columns'. copies: COPY into them does exactly what sql does.
	names  []string
	copies bool
	shape  string
	// counts: sql reports how many rows it wrote. If it wrote none, the columns may have
	// changed.
	counts bool
	// constant: a column has the same text for all rows. The server may cast it when it
	// plans sql, before sql compares the columns.
	constant bool
	// present: sql is presentSQL. compare is compareSQL, with on_present compare.
	present bool
	compare string
	// stale is staleSQL, with mode versioned.
	stale string
	// targets are the tables that sql writes to, such as the one behind a view.
	targets tables
}

// plan makes the statement: one INSERT ... SELECT over arrays, whose text doesn't depend on
// the number of messages. It writes nothing if the columns have changed: see insert.
func (s *Sink) plan(t *target) (*plan, error) {
	cols := slices.Clone(s.cols)
	p := &plan{names: make([]string, len(cols)), shape: t.shape}
	for i := range cols {
		cols[i].Type = t.attribute(cols[i].Name).typ
		p.names[i] = cols[i].Name
		p.constant = p.constant || cols[i].Field.Kind == message.FieldConst
	}
	var err error
	if p.set, err = columns.NewSet(cols); err != nil {
		return nil, err
	}

	values, err := p.set.Encode(nil)
	if err != nil {
		return nil, err
	}
	unchanged := len(values.Args()) + 1
	p.counts = t.plain && !t.fills && (t.kind == "r" || t.kind == "p")

	// COPY knows no conflicts, no rules and no row security.
	p.copies = len(s.key) == 0 && t.plain && (t.kind == "r" || t.kind == "p") && p.set.CanCopy()

	names, exprs := make([]string, len(cols)), make([]string, len(cols))
	for i := range cols {
		names[i], exprs[i] = quote(cols[i].Name), p.set.Expr(i)
		if cols[i].Name == s.version || slices.Contains(s.key, cols[i].Name) {
			exprs[i] = s.comparedExpr(t, p.set, i)
		}
	}
	distinct, order, conflict := s.keyed(t, p.set)
	p.sql = fmt.Sprintf("INSERT INTO %s AS t (%s) SELECT %s%s FROM %s WHERE (%s) = $%d%s%s", s.sql(),
		strings.Join(names, ", "), distinct, strings.Join(exprs, ", "), p.set.From(), shapeFrom(unchanged), unchanged+3, order, conflict)
	if s.reportsPresent(t) {
		p.present, p.sql = true, s.presentSQL(t, p.set, exprs, unchanged)
		if s.onPresent == policy.PresentCompare {
			p.compare = s.compareSQL(t, p.set, unchanged)
		}
	}
	if s.mode == ModeVersioned {
		p.stale = s.staleSQL(t, p.set, unchanged)
	}
	return p, nil
}

// args are sql's parameters for these values.
func (s *Sink) args(p *plan, values *columns.Values) []any {
	return append(values.Args(), s.schema, s.table, p.names, p.shape)
}

// keyed returns the parts of the statement that a key adds.
//
// Rows are written in key order, so that two workers with keys in common lock them in the
// same order and can't deadlock. The key's columns are named by their number in the select
// list: they are then cast once, and compared as they will be stored. An upsert first keeps
// the last message of each key, since one statement can't update a row twice; a versioned
// write keeps the one with the highest version, the first of several.
func (s *Sink) keyed(t *target, set *columns.Set) (distinct, order, conflict string) {
	if len(s.key) == 0 {
		return "", "", ""
	}
	var numbers, key, others []string
	for i, c := range set.Columns() {
		if !slices.Contains(s.key, c.Name) {
			others = append(others, fmt.Sprintf("%s = EXCLUDED.%[1]s", quote(c.Name)))
			continue
		}
		numbers = append(numbers, fmt.Sprint(i+1))
		key = append(key, quote(c.Name))
	}
	conflict = " ON CONFLICT (" + strings.Join(key, ", ") + ") DO NOTHING"
	by := strings.Join(numbers, ", ")
	if s.mode == ModeInsert {
		return "", " ORDER BY " + by + ", u.ord", conflict
	}
	if apart := s.nullsApart(t, set); apart != "" {
		by += ", " + apart
	}
	if len(others) > 0 {
		conflict = strings.TrimSuffix(conflict, "NOTHING") + "UPDATE SET " + strings.Join(others, ", ")
	}
	if s.mode == ModeVersioned {
		at := 1 + slices.IndexFunc(set.Columns(), func(c columns.Column) bool { return c.Name == s.version })
		version := quote(s.version)
		return "DISTINCT ON (" + by + ") ", fmt.Sprintf(" ORDER BY %s, %d DESC NULLS LAST, u.ord", by, at),
			conflict + " WHERE " + newer("EXCLUDED."+version, "t."+version)
	}
	return "DISTINCT ON (" + by + ") ", " ORDER BY " + by + ", u.ord DESC", conflict
}

// nullsApart is an expression that keeps rows with a NULL in their key apart, as a unique
// index does: two of them are two rows. It is empty if there can be none, or if the index
// takes NULLs for equal.
func (s *Sink) nullsApart(t *target, set *columns.Set) string {
	if index := s.keyIndex(t); index != nil && index.nullsNotDistinct {
		return ""
	}
	var null []string
	for i, c := range set.Columns() {
		if !slices.Contains(s.key, c.Name) || t.attribute(c.Name).notNull {
			continue
		}
		if u := set.Row(i); u != "" {
			null = append(null, u+" IS NULL")
		}
	}
	if len(null) == 0 {
		return ""
	}
	return "CASE WHEN " + strings.Join(null, " OR ") + " THEN u.ord END"
}
