package message

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tidwall/gjson"
)

// Condition is what a Filter asks of one place in a message. Texts are compared byte by
// byte; of a JSON number or boolean, as the document writes it.
type Condition struct {
	// Place is key, value, topic, header:NAME or json:PATH.
	Place string
	// Values are the texts of which the place must have one.
	Values []string
	// Absent asks that there is nothing in the place instead: no such header, no key, a
	// tombstone's value, a JSON null or a path that leads nowhere.
	Absent bool
	// Not turns it round: none of the values, or anything at all.
	Not bool
}

// Filter says which messages are wanted: those of which all conditions hold. It is
// immutable and may be used by many goroutines.
type Filter struct {
	conditions []condition
	readsJSON  bool
}

type condition struct {
	Condition
	field Field
}

// NewFilter checks the conditions. The error begins with the place that is wrong.
func NewFilter(conditions []Condition) (*Filter, error) {
	f := new(Filter)
	for _, c := range conditions {
		field, err := ParseField(c.Place)
		if err != nil {
			return nil, err
		}
		switch field.Kind {
		case FieldKey, FieldValue, FieldTopic, FieldHeader:
		case FieldJSON:
			f.readsJSON = true
		default:
			return nil, fmt.Errorf("%q can't be filtered by; use key, value, topic, header:NAME or json:PATH", c.Place)
		}
		switch {
		case !c.Absent && len(c.Values) == 0:
			return nil, fmt.Errorf("%s: names no value", c.Place)
		case field.Kind == FieldTopic && c.Absent:
			return nil, errors.New("topic: every message has one, so it is never absent")
		}
		f.conditions = append(f.conditions, condition{c, field})
	}
	return f, nil
}

// ReadsJSON reports whether a condition looks into the value. Wants must then get only
// messages whose value is JSON (ValidJSON), or nil.
func (f *Filter) ReadsJSON() bool { return f.readsJSON }

// Wants reports whether a message passes. The error says why that can't be told. In a
// tombstone's value, nothing is in any place.
func (f *Filter) Wants(m *Message) (bool, error) {
	for i := range f.conditions {
		c := &f.conditions[i]
		holds, err := c.holds(m)
		if err != nil {
			return false, fmt.Errorf("the filter can't read %s: %w", c.Place, err)
		}
		if holds == c.Not {
			return false, nil
		}
	}
	return true, nil
}

// holds tells whether the place has one of the values, or nothing; Not aside.
func (c *condition) holds(m *Message) (bool, error) {
	var text []byte
	there := true
	switch c.field.Kind {
	case FieldKey:
		text, there = m.Key, m.Key != nil
	case FieldValue:
		text, there = m.Value, m.Value != nil
	case FieldTopic:
		return slices.Contains(c.Values, m.Topic), nil
	case FieldHeader:
		text, there = m.Header(c.field.Name)
	case FieldJSON:
		return c.holdsJSON(c.field.JSON(m.Value))
	}
	if c.Absent {
		return !there, nil
	}
	return there && slices.ContainsFunc(c.Values, func(v string) bool { return v == string(text) }), nil
}

func (c *condition) holdsJSON(r gjson.Result) (bool, error) {
	switch {
	case c.Absent:
		return r.Type == gjson.Null, nil
	case r.Type == gjson.Null, r.Type == gjson.JSON: // objects and arrays have no text
		return false, nil
	}
	text, err := JSONText(r)
	return slices.Contains(c.Values, text), err
}
