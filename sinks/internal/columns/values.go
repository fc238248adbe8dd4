package columns

import "github.com/jackc/pgx/v5"

// Values has the messages of one Write as columns.
type Values struct {
	set    *Set
	slots  []slot
	absent masks // nil: nothing is
	n      int   // rows
}

// Args are the parameters for From and Expr.
func (v *Values) Args() []any {
	args := make([]any, 0, len(v.slots)+1)
	for i, w := range v.set.wires {
		switch c := &v.slots[i]; w {
		case wireText:
			args = append(args, c.text)
		case wireBytea:
			args = append(args, c.bytes)
		case wireUUID:
			args = append(args, c.uuid)
		case wireInt8:
			args = append(args, c.int8)
		case wireTime:
			args = append(args, c.time)
		case wireConst:
			args = append(args, v.set.cols[i].Field.Name)
		}
	}
	if v.set.rows > 0 {
		args = append(args, int64(v.n))
	}
	return args
}

// CanCopy reports whether COPY writes exactly what the casts of Expr would: the binary form of
// each type is the value as we have it, so nothing is converted on our side. COPY checks
// domains over such types and lengths too.
func (s *Set) CanCopy() bool {
	for i, c := range s.cols {
		switch s.wires[i] {
		case wireBytea, wireUUID, wireTime:
		case wireInt8:
			if c.Type.OID != oidInt8 {
				return false
			}
		case wireText, wireConst:
			switch c.Type.OID {
			case oidText, oidVarchar, oidBpchar, oidJSON, oidJSONB:
			default:
				return false
			}
		default:
			return false
		}
	}
	return true
}

// Source returns the values row by row, for COPY. Only if CanCopy.
func (v *Values) Source() pgx.CopyFromSource {
	return &source{v: v, next: -1, row: make([]any, len(v.slots))}
}

type source struct {
	v    *Values
	next int
	row  []any // reused for each row
}

func (s *source) Next() bool { s.next++; return s.next < s.v.n }
func (s *source) Err() error { return nil }

func (s *source) Values() ([]any, error) {
	i := s.next
	for c, w := range s.v.set.wires {
		s.row[c] = nil
		switch slot := &s.v.slots[c]; w {
		case wireText:
			if t := &slot.text[i]; t.Valid {
				s.row[c] = t.String
			}
		case wireBytea:
			if b := slot.bytes[i]; b != nil {
				s.row[c] = b
			}
		case wireUUID:
			s.row[c] = slot.uuid[i]
		case wireInt8:
			s.row[c] = slot.int8[i]
		case wireTime:
			s.row[c] = slot.time[i]
		case wireConst:
			s.row[c] = s.v.set.cols[c].Field.Name
		}
	}
	return s.row, nil
}
