// Package columns turns messages into the array parameters of one set-based statement: one
// array for each column, one element for each message. The table and the statement sink
// share it.
//
// It is told the types of the columns, and returns the parameters and the SQL that reads
// them. Except for Resolve, it runs no SQL.
package columns

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/dedupd/dedupd/message"
)

// The base types that aren't simply sent as text and cast, or that some place can't fill.
const (
	oidBytea       = 17
	oidChar        = 18
	oidName        = 19
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidText        = 25
	oidJSON        = 114
	oidBpchar      = 1042
	oidVarchar     = 1043
	oidTimestamptz = 1184
	oidNumeric     = 1700
	oidUUID        = 2950
	oidJSONB       = 3802
)

// Type is the Postgres type that a column's values are cast to.
type Type struct {
	// Cast is the type as SQL. It carries the schema, so that no search path changes its
	// meaning, and no length: a cast to varchar(20), or to a domain over it, would silently
	// cut a longer value. Without the length, the assignment to the column checks it and
	// fails.
	Cast string
	// Name is the type as people write it, for errors.
	Name string
	// OID is pg_type's; for a domain, that of the base type.
	OID uint32
	// Category is pg_type.typcategory: 'A' array, 'D' date and time, 'N'
	// number, 'S' string and so on.
	Category byte
	// Element is the OID of an array's element type; for a domain, that of the base type.
	Element uint32
}

func (t Type) json() bool        { return t.OID == oidJSON || t.OID == oidJSONB }
func (t Type) jsonElement() bool { return t.Element == oidJSON || t.Element == oidJSONB }

// Column is a column, with the place in a message that fills it.
type Column struct {
	Name  string
	Field message.Field
	Type  Type
	// Keeps: a message without the column's place leaves the column as it is. Values.Absent
	// then tells which messages those are.
	Keeps bool
}

// MayBeAbsent reports whether a message may be without a place: a header that isn't there, a
// path that leads nowhere, no key, no value, no time. A null is there.
func MayBeAbsent(f message.Field) bool {
	switch f.Kind {
	case message.FieldHeader, message.FieldJSON, message.FieldKey, message.FieldValue, message.FieldTime:
		return true
	}
	return false
}

// CheckName refuses a name that Postgres would cut, or can't hold.
func CheckName(name string) error {
	const most = 63 // bytes, NAMEDATALEN - 1
	switch {
	case name == "":
		return errors.New("a name is empty")
	case len(name) > most:
		return fmt.Errorf("%q is longer than the %d bytes that Postgres keeps of a name", name, most)
	case strings.IndexByte(name, 0) >= 0:
		return fmt.Errorf("%q holds a NUL", name)
	case !utf8.ValidString(name):
		return fmt.Errorf("%q is not valid UTF-8", name)
	}
	return nil
}

// wire is how a column's values travel to the server.
type wire int

const (
	wireText  wire = iota // text[], cast there
	wireBytea             // bytea[], as they are
	wireUUID              // uuid[]
	wireInt8              // bigint[]
	wireTime              // timestamptz[]
	wireConst             // one text for all rows
	wireNow               // nothing: now() in the SQL
)

var wireArray = map[wire]string{
	wireText:  "pg_catalog.text[]",
	wireBytea: "pg_catalog.bytea[]",
	wireUUID:  "pg_catalog.uuid[]",
	wireInt8:  "pg_catalog.int8[]",
	wireTime:  "pg_catalog.timestamptz[]",
}

// plan decides how a column travels, or says why its place can't fill its type.
func (c Column) plan() (wire, error) {
	t := c.Type
	if t.OID == oidName || t.OID == oidChar {
		return 0, fmt.Errorf("column %q is of type %s, which cuts longer values without a word; make it text", c.Name, t.Name)
	}
	switch c.Field.Kind {
	case message.FieldNow:
		return wireNow, nil
	case message.FieldConst:
		return wireConst, nil
	case message.FieldID, message.FieldTopic, message.FieldLane:
		if t.json() {
			return 0, fmt.Errorf("column %q is of type %s, but %q is plain text; make the column text", c.Name, t.Name, c.Field)
		}
	case message.FieldPosition:
		switch t.OID {
		case oidInt8, oidInt4, oidInt2, oidNumeric, oidText, oidVarchar:
			return wireInt8, nil
		case oidBytea, oidUUID:
			return 0, fmt.Errorf("column %q is of type %s, but %q is a number; make the column bigint", c.Name, t.Name, c.Field)
		}
		return wireText, nil
	case message.FieldTime:
		switch {
		case t.OID == oidTimestamptz:
			return wireTime, nil
		case t.Category == 'D' || t.Category == 'S':
			return wireText, nil
		}
		return 0, fmt.Errorf("column %q is of type %s, but %q is a point in time; make the column timestamptz", c.Name, t.Name, c.Field)
	case message.FieldKey, message.FieldValue, message.FieldHeader, message.FieldJSON:
	default:
		return 0, fmt.Errorf("column %q: %q can't fill a column", c.Name, c.Field)
	}
	switch t.OID {
	case oidBytea:
		return wireBytea, nil
	case oidUUID:
		return wireUUID, nil
	}
	return wireText, nil
}

// Set has the columns of one statement. It is immutable and may be used by many goroutines.
type Set struct {
	cols  []Column
	wires []wire
	param []int // number of the column's parameter, 0: none
	// rows is the number of the parameter with the number of rows, if no column is an
	// array.
	rows int
}

// NewSet checks that each column's place can fill its type. The error joins all that can't.
func NewSet(cols []Column) (*Set, error) {
	s := &Set{cols: cols, wires: make([]wire, len(cols)), param: make([]int, len(cols))}
	var errs []error
	n, arrays := 0, 0
	for i, c := range cols {
		w, err := c.plan()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.wires[i] = w
		if w == wireNow {
			continue
		}
		n++
		s.param[i] = n
		if w != wireConst {
			arrays++
		}
	}
	if arrays == 0 {
		s.rows = n + 1
	}
	return s, errors.Join(errs...)
}

// Columns returns the columns that the set was made of, in their order.
func (s *Set) Columns() []Column { return s.cols }

// Array is one more array parameter for From, with an element for each row.
type Array struct {
	Name, Type string // Type without []
	Param      int
}

// From is the FROM item with one row u for each message, in their order; u.ord counts from 1.
// More arrays are further columns of u. They need a column that is an array.
func (s *Set) From(more ...Array) string {
	if s.rows > 0 {
		return "pg_catalog.generate_series(1, $" + strconv.Itoa(s.rows) + "::pg_catalog.int8) AS u(ord)"
	}
	var args, names strings.Builder
	for i, w := range s.wires {
		array, ok := wireArray[w]
		if !ok {
			continue
		}
		if args.Len() > 0 {
			args.WriteString(", ")
		}
		fmt.Fprintf(&args, "pg_catalog.unnest($%d::%s)", s.param[i], array)
		fmt.Fprintf(&names, "c%d, ", i+1)
	}
	for _, a := range more {
		fmt.Fprintf(&args, ", pg_catalog.unnest($%d::%s[])", a.Param, a.Type)
		names.WriteString(a.Name + ", ")
	}
	return "ROWS FROM (" + args.String() + ") WITH ORDINALITY AS u(" + names.String() + "ord)"
}

// Constants is a condition that is always true, for a statement that leaves out the columns
// with one text for all rows: the server must be told the type of every parameter.
func (s *Set) Constants() string {
	var all strings.Builder
	for i, w := range s.wires {
		if w == wireConst {
			fmt.Fprintf(&all, " AND $%d::pg_catalog.text IS NOT NULL", s.param[i])
		}
	}
	return all.String()
}

// Expr is column i of row u as an SQL expression of the column's type.
func (s *Set) Expr(i int) string {
	cast := s.cols[i].Type.Cast
	switch s.wires[i] {
	case wireNow:
		return "pg_catalog.now()"
	case wireConst:
		return fmt.Sprintf("$%d::pg_catalog.text::%s", s.param[i], cast)
	}
	return fmt.Sprintf("u.c%d::%s", i+1, cast)
}

// Row is column i of row u before its cast; empty if it can't be NULL, because the messages
// have no part in it.
func (s *Set) Row(i int) string {
	if _, ok := wireArray[s.wires[i]]; !ok {
		return ""
	}
	return "u.c" + strconv.Itoa(i+1)
}
