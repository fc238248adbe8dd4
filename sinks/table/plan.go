package table

import (
	"fmt"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// plan is how the sink writes to the target as it was found. Immutable.
type plan struct {
	writer
	set *columns.Set
	// names are the columns', the expected ones last. copies: COPY into them does exactly what the writer does.
	names  []string
	copies bool
	shape  string
	// ordinary: what is written are rows of the target and of its partitions. fills: a trigger
	// runs before they are inserted.
	ordinary, fills bool
	index           *uniqueIndex // of the key
	// counts: the server reports how many rows are written. If none are, the columns may
	// have changed.
	counts bool
	// constant: a column has the same text for all rows. The server may cast it when it
	// plans a statement, before that compares the columns.
	constant bool
	// params is the number of parameters that the values take. After them come what
	// unchanged takes, the condition that the columns are still those of the plan.
	params    int
	unchanged string
	schema    string
	table     string
	// targets are the tables that are written to, such as the one behind a view.
	targets tables
}

func (s *Sink) plan(t *target) (*plan, error) {
	cols := slices.Concat(s.cols, s.expected)
	p := &plan{names: make([]string, len(cols)), shape: t.shape, index: s.keyIndex(t), schema: s.schema, table: s.table}
	for i := range cols {
		cols[i].Type = t.attribute(cols[i].Name).typ
		cols[i].Keeps = i < len(s.cols) && s.mode.keeps(cols[i])
		p.names[i] = cols[i].Name
		p.constant = p.constant || cols[i].Field.Kind == message.FieldConst
	}
	var err error
	if p.set, err = columns.NewSet(append(cols, s.mode.reads(t)...)); err != nil {
		return nil, err
	}
	values, err := p.set.Encode(nil)
	if err != nil {
		return nil, err
	}
	p.params = len(values.Args())
	p.unchanged = unchangedAfter(p.params)
	p.ordinary, p.fills = t.plain && (t.kind == "r" || t.kind == "p"), t.fills
	p.counts = p.ordinary && !p.fills
	// COPY knows no conflicts, no rules and no row security.
	_, inserts := s.mode.(*insert)
	p.copies = inserts && len(s.key) == 0 && p.ordinary && p.set.CanCopy()
	p.writer = s.mode.writer(t, p)
	return p, nil
}

// unchangedAfter is the condition that the columns are those of a plan. It takes four
// parameters, after so many others: see args.
func unchangedAfter(params int) string {
	return fmt.Sprintf("(%s) = $%d", shapeFrom(params+1), params+4)
}

// args are the parameters for these values and for the plan's condition unchanged. What a
// writer adds begins at params+5.
func (p *plan) args(values *columns.Values) []any {
	return append(values.Args(), p.schema, p.table, p.names, p.shape)
}

// exprs are the values of a row. Those that are compared are so as the target compares them.
func (s *Sink) exprs(t *target, p *plan) []string {
	exprs := make([]string, len(p.names))
	for i, name := range p.names {
		if exprs[i] = p.set.Expr(i); s.mode.access(name).selects {
			exprs[i] = s.comparedExpr(t, p.set, i)
		}
	}
	return exprs
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
