package columns

import (
	"fmt"
	"slices"

	"github.com/dedupd/dedupd/message"
)

// masks tell which places are absent: for each row a bit for each column. Nil: none is.
type masks [][]byte

func newMasks(rows, columns int) masks {
	m := make(masks, rows)
	size := (columns + 7) / 8
	all := make([]byte, rows*size)
	for i := range m {
		m[i] = all[i*size : (i+1)*size : (i+1)*size]
	}
	return m
}

func (m masks) has(row, col int) bool { return m != nil && m[row][col/8]&(1<<(col%8)) != 0 }
func (m masks) set(row, col int)      { m[row][col/8] |= 1 << (col % 8) }
func (m masks) clear(row, col int)    { m[row][col/8] &^= 1 << (col % 8) }

// nothing notes that row i has nothing in column c, unless the message says so by a null, or
// the column is NULL then in any case.
func (e *encoder) nothing(c, i int) {
	col := &e.set.cols[c]
	if !col.Keeps || e.isNull(col.Field) {
		return
	}
	if e.absent == nil {
		e.absent = newMasks(e.n, len(e.set.cols))
	}
	e.absent.set(i, c)
}

// isNull reports whether a place with nothing in it is there.
func (e *encoder) isNull(f message.Field) bool {
	switch f.Kind {
	case message.FieldHeader:
		_, ok := e.m.Header(f.Name)
		return ok
	case message.FieldJSON:
		return e.m.Value != nil && f.NullIn(e.m.Value)
	}
	return false
}

// HasAbsent reports whether any column that Keeps is absent in any row.
func (v *Values) HasAbsent() bool { return v.absent != nil }

// Absent reports whether a column that Keeps is absent in a row. Both count from 0.
func (v *Values) Absent(row, col int) bool { return v.absent.has(row, col) }

// Masks are the parameter for IsAbsent: a bytea for each row.
func (v *Values) Masks() [][]byte {
	if v.absent == nil {
		return newMasks(v.n, len(v.slots))
	}
	return v.absent
}

// IsAbsent is the condition for column i to be absent, of a row's mask, which is an SQL
// expression.
func IsAbsent(mask string, i int) string {
	return fmt.Sprintf("pg_catalog.get_bit(%s, %d) = 1", mask, i)
}

// Len is the number of rows.
func (v *Values) Len() int { return v.n }

// Rows returns some of the rows, in this order.
func (v *Values) Rows(rows []int) *Values {
	some := v.empty(len(rows))
	for to, from := range rows {
		for c := range v.slots {
			some.copy(to, c, v, from)
		}
	}
	return some
}

// Of returns the rows with only those columns that another set has. It mustn't have others.
func (v *Values) Of(set *Set) *Values {
	of := &Values{set: set, slots: make([]slot, len(set.cols)), n: v.n}
	for i, c := range set.cols {
		for from := range v.set.cols {
			if v.set.cols[from].Name == c.Name {
				of.slots[i] = v.slots[from]
			}
		}
	}
	return of
}

// Fold makes one row of those of each group, which are numbered from 1 to groups. Each column
// has the value of its group's last row in which it isn't absent. Unread are the rows of which
// that loses a value that the server might refuse, except for the columns of a set that it has
// read already.
func (v *Values) Fold(group []int32, groups int, read *Set) (folded *Values, unread []int) {
	n := len(v.slots)
	folded = v.empty(groups)
	if v.absent != nil {
		folded.absent = newMasks(groups, n)
		for row := range folded.absent {
			for c := range n {
				folded.absent.set(row, c)
			}
		}
	}
	matters := make([]bool, n)
	for c, col := range v.set.cols {
		matters[c] = !v.set.exact(c) && !slices.ContainsFunc(read.cols, func(r Column) bool { return r.Name == col.Name })
	}
	last := make([]int, groups*n) // the row that each value is of, from 1
	lost := make([]bool, v.n)
	for row, g := range group {
		for c := range n {
			if v.absent.has(row, c) {
				continue
			}
			to := int(g - 1)
			of := &last[to*n+c]
			if *of > 0 && matters[c] {
				lost[*of-1] = true
			}
			*of = row + 1
			folded.copy(to, c, v, row)
		}
	}
	for row, is := range lost {
		if is {
			unread = append(unread, row)
		}
	}
	return folded, unread
}

// exact reports whether a column's values are as the server has them, so that it refuses none.
func (s *Set) exact(i int) bool {
	switch oid := s.cols[i].Type.OID; s.wires[i] {
	case wireText:
		return oid == oidText || oid == oidVarchar || oid == oidBpchar
	case wireInt8:
		return oid == oidInt8
	}
	return true
}

// empty makes values of the same columns with nothing in them.
func (v *Values) empty(n int) *Values {
	return &Values{set: v.set, slots: newEncoder(v.set, n).slots, n: n}
}

// copy takes a value from another row.
func (v *Values) copy(to, c int, from *Values, row int) {
	d, s := &v.slots[c], &from.slots[c]
	switch v.set.wires[c] {
	case wireText:
		d.text[to] = s.text[row]
	case wireBytea:
		d.bytes[to] = s.bytes[row]
	case wireUUID:
		d.uuid[to] = s.uuid[row]
	case wireInt8:
		d.int8[to] = s.int8[row]
	case wireTime:
		d.time[to] = s.time[row]
	}
	switch {
	case from.absent.has(row, c):
		if v.absent == nil {
			v.absent = newMasks(v.n, len(v.slots))
		}
		v.absent.set(to, c)
	case v.absent != nil:
		v.absent.clear(to, c)
	}
}
