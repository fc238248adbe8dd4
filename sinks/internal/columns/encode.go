package columns

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Encode returns the values of all columns for msgs. They point into the messages, so they
// live no longer than those.
//
// The error names every message that doesn't fit a column (sinks.AllPermanent), each with its
// first fault, so that a bad batch is encoded only once.
//
// pgx knows the types of all elements by their Go type alone: behind a connection pooler the
// server may not get to say what it expects, and bytes taken for a bytea would be cast to
// hexadecimal text.
func (s *Set) Encode(msgs []message.Message) (*Values, error) {
	return s.encode(msgs, newEncoder(s, len(msgs)))
}

// EncodeUnread is Encode for COPY. There the server reads every value, so it is left to the
// server to check a document that goes into a JSON column as it is. If it refuses the batch,
// Encode names the messages at fault. (Nesting is checked here in any case: what is too deep
// must not depend on the way it takes.)
func (s *Set) EncodeUnread(msgs []message.Message) (*Values, error) {
	e := newEncoder(s, len(msgs))
	e.unread = true
	return s.encode(msgs, e)
}

func (s *Set) encode(msgs []message.Message, e *encoder) (*Values, error) {
	var faults []error
	for i := range msgs {
		e.m, e.doc = &msgs[i], docUnread
		if err := e.message(i); err != nil {
			faults = append(faults, sinks.PermanentAt(i, err))
		}
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return &Values{set: s, slots: e.slots, absent: e.absent, n: len(msgs)}, nil
}

// slot holds one column's array. The column's wire says which one is used.
type slot struct {
	text  []pgtype.Text
	bytes [][]byte
	uuid  []pgtype.UUID
	int8  []pgtype.Int8
	time  []pgtype.Timestamptz
}

// encoder fills the slots, message by message.
type encoder struct {
	set    *Set
	slots  []slot
	absent masks
	n      int  // messages
	unread bool // see EncodeUnread
	m      *message.Message
	doc    docState // of m
	why    error    // with docBad
}

func newEncoder(s *Set, n int) *encoder {
	e := &encoder{set: s, slots: make([]slot, len(s.cols)), n: n}
	for i, w := range s.wires {
		switch c := &e.slots[i]; w {
		case wireText:
			c.text = make([]pgtype.Text, n)
		case wireBytea:
			c.bytes = make([][]byte, n)
		case wireUUID:
			c.uuid = make([]pgtype.UUID, n)
		case wireInt8:
			c.int8 = make([]pgtype.Int8, n)
		case wireTime:
			c.time = make([]pgtype.Timestamptz, n)
		}
	}
	return e
}

// message fills row i of every column from e.m. Elements that it doesn't set are NULL.
func (e *encoder) message(i int) error {
	for c := range e.set.cols {
		col := &e.set.cols[c]
		switch col.Field.Kind {
		case message.FieldNow, message.FieldConst:
			continue
		case message.FieldPosition:
			if e.set.wires[c] == wireInt8 {
				e.slots[c].int8[i] = pgtype.Int8{Int64: e.m.Position.Offset, Valid: true}
				continue
			}
		case message.FieldTime:
			if e.m.Time.IsZero() {
				e.nothing(c, i)
				continue
			}
			if err := checkTime(e.m.Time); err != nil {
				return fmt.Errorf("column %q: %w", col.Name, err)
			}
			if e.set.wires[c] == wireTime {
				e.slots[c].time[i] = pgtype.Timestamptz{Time: e.m.Time.UTC(), Valid: true}
				continue
			}
		}
		text, ok, err := e.text(col)
		if err == nil && ok {
			err = e.put(c, i, text)
		} else if err == nil {
			e.nothing(c, i)
		}
		if err != nil {
			return fmt.Errorf("column %q from %s: %w", col.Name, col.Field, err)
		}
	}
	return nil
}

// text returns what a column's place holds; ok is false if that is nothing.
func (e *encoder) text(col *Column) (text string, ok bool, err error) {
	m := e.m
	switch col.Field.Kind {
	case message.FieldID:
		return m.ID, true, nil
	case message.FieldTopic:
		return m.Topic, true, nil
	case message.FieldLane:
		return m.Position.Lane.Name, true, nil
	case message.FieldPosition:
		return strconv.FormatInt(m.Position.Offset, 10), true, nil
	case message.FieldTime:
		// Always in UTC, so that no session's time zone decides what a timestamp without
		// a time zone, a date or a text holds.
		return m.Time.UTC().Format(time.RFC3339Nano), true, nil
	case message.FieldHeader:
		v, _ := m.Header(col.Field.Name)
		if v == nil {
			return "", false, nil
		}
		return view(v), true, e.checkJSON(col.Type, v)
	case message.FieldKey:
		if m.Key == nil {
			return "", false, nil
		}
		return view(m.Key), true, e.checkJSON(col.Type, m.Key)
	case message.FieldValue:
		if m.Value == nil {
			return "", false, nil
		}
		if col.Type.json() && e.unread {
			return view(m.Value), true, message.ShallowJSON(m.Value)
		}
		if col.Type.json() {
			if err := e.document(); err != nil {
				return "", false, err
			}
			return view(m.Value), true, checkEscapes(col.Type, view(m.Value))
		}
		return view(m.Value), true, nil
	case message.FieldJSON:
		if m.Value == nil {
			return "", false, nil
		}
		if err := e.document(); err != nil {
			return "", false, err
		}
		return jsonColumn(col.Type, col.Field.JSON(m.Value))
	}
	return "", false, fmt.Errorf("%q can't fill a column", col.Field)
}

// put stores a text in the form of the column's wire.
func (e *encoder) put(c, i int, text string) error {
	switch e.set.wires[c] {
	case wireBytea:
		e.slots[c].bytes[i] = bytesOf(text)
	case wireUUID:
		u, ok := parseUUID(text)
		if !ok {
			return fmt.Errorf("%s is no UUID", quoted(text))
		}
		e.slots[c].uuid[i] = pgtype.UUID{Bytes: u, Valid: true}
	default:
		if err := checkText(text); err != nil {
			return err
		}
		e.slots[c].text[i] = pgtype.Text{String: text, Valid: true}
	}
	return nil
}

var (
	errNUL  = errors.New("it holds a NUL, which no Postgres text can")
	errUTF8 = errors.New("it is not valid UTF-8, so it is no text; a bytea column takes any bytes")
)

func checkText(s string) error {
	if strings.IndexByte(s, 0) >= 0 {
		return errNUL
	}
	if !utf8.ValidString(s) {
		return errUTF8
	}
	return nil
}

// checkTime refuses what no timestamptz can hold. A producer may set any time, and
// microseconds beyond 64 bits would come out as another one.
func checkTime(t time.Time) error {
	const first, last = -210866803200, 9224318016000 // 4714-11-24 BC, 294277-01-01
	if u := t.Unix(); u < first || u >= last {
		return fmt.Errorf("the message's time, %d seconds from 1970, is beyond what Postgres can hold", u)
	}
	return nil
}

// docState reports whether a message's value is a JSON document.
type docState int

const (
	docUnread docState = iota
	docGood
	docBad
)

// document is an error if the value is no JSON document. It is computed once a message,
// however many columns ask.
func (e *encoder) document() error {
	if e.doc == docUnread {
		e.doc = docGood
		if e.why = validJSON(e.m.Value); e.why != nil {
			e.doc = docBad
		}
	}
	return e.why
}

// checkJSON checks a key or a header that goes into a JSON column.
func (e *encoder) checkJSON(t Type, b []byte) error {
	if !t.json() {
		return nil
	}
	if e.unread {
		return message.ShallowJSON(b)
	}
	if err := validJSON(b); err != nil {
		return err
	}
	return checkEscapes(t, view(b))
}

// validJSON requires UTF-8, as Postgres does.
func validJSON(b []byte) error {
	if !utf8.Valid(b) {
		return errors.New("it is not valid UTF-8, so it is no JSON")
	}
	return message.ValidJSON(b)
}
