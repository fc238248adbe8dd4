package message

import (
	"strings"
	"testing"
)

func TestFilter(t *testing.T) {
	event := &Message{
		Topic: "orders", Key: []byte("k"), Headers: []Header{{"kind", []byte("old")}, {"kind", []byte("new")}, {"null", nil}, {"empty", []byte{}}},
		Value: []byte(`{"type": "created", "n": 1.0, "flag": true, "none": null, "o": {"type": "inner"}, "a": ["x"], "escaped": "a\u0062"}`),
	}
	for name, c := range map[string]struct {
		conditions []Condition
		want       bool
	}{
		"none":                          {nil, true},
		"one value":                     {[]Condition{{Place: "json:type", Values: []string{"created"}}}, true},
		"one of several":                {[]Condition{{Place: "json:type", Values: []string{"changed", "created"}}}, true},
		"none of them":                  {[]Condition{{Place: "json:type", Values: []string{"changed"}}}, false},
		"not it":                        {[]Condition{{Place: "json:type", Values: []string{"test"}, Not: true}}, true},
		"not one of them":               {[]Condition{{Place: "json:type", Values: []string{"test", "created"}, Not: true}}, false},
		"within":                        {[]Condition{{Place: "json:o.type", Values: []string{"inner"}}}, true},
		"a number as written":           {[]Condition{{Place: "json:n", Values: []string{"1.0"}}}, true},
		"a number otherwise":            {[]Condition{{Place: "json:n", Values: []string{"1"}}}, false},
		"a boolean":                     {[]Condition{{Place: "json:flag", Values: []string{"true"}}}, true},
		"an escape":                     {[]Condition{{Place: "json:escaped", Values: []string{"ab"}}}, true},
		"null is absent":                {[]Condition{{Place: "json:none", Absent: true}}, true},
		"no such path":                  {[]Condition{{Place: "json:nowhere", Absent: true}}, true},
		"a path is there":               {[]Condition{{Place: "json:type", Absent: true, Not: true}}, true},
		"what is absent has no value":   {[]Condition{{Place: "json:nowhere", Values: []string{""}}}, false},
		"what is absent isn't a value":  {[]Condition{{Place: "json:nowhere", Values: []string{"x"}, Not: true}}, true},
		"an object has no text":         {[]Condition{{Place: "json:o", Values: []string{`{"type": "inner"}`}}}, false},
		"an object is there":            {[]Condition{{Place: "json:o", Absent: true}}, false},
		"an array has no text":          {[]Condition{{Place: "json:a", Values: []string{"x"}}}, false},
		"the last header":               {[]Condition{{Place: "header:kind", Values: []string{"new"}}}, true},
		"an earlier header":             {[]Condition{{Place: "header:kind", Values: []string{"old"}}}, false},
		"no header":                     {[]Condition{{Place: "header:x", Absent: true}}, true},
		"a header":                      {[]Condition{{Place: "header:kind", Absent: true}}, false},
		"a header without a value":      {[]Condition{{Place: "header:null", Absent: true}}, false},
		"an empty header":               {[]Condition{{Place: "header:empty", Values: []string{""}}}, true},
		"key":                           {[]Condition{{Place: "key", Values: []string{"k"}}}, true},
		"topic":                         {[]Condition{{Place: "topic", Values: []string{"orders"}}}, true},
		"another topic":                 {[]Condition{{Place: "topic", Values: []string{"orders"}, Not: true}}, false},
		"not a tombstone":               {[]Condition{{Place: "value", Absent: true, Not: true}}, true},
		"all must hold":                 {[]Condition{{Place: "json:type", Values: []string{"created"}}, {Place: "header:x", Absent: true}}, true},
		"all must hold, one doesn't":    {[]Condition{{Place: "json:type", Values: []string{"created"}}, {Place: "header:kind", Absent: true}}, false},
		"a place is compared byte-wise": {[]Condition{{Place: "key", Values: []string{"K"}}}, false},
	} {
		f, err := NewFilter(c.conditions)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got, err := f.Wants(event); got != c.want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestFilterOfATombstone(t *testing.T) {
	for name, c := range map[string]struct {
		condition Condition
		want      bool
	}{
		"its value is absent":  {Condition{Place: "value", Absent: true}, true},
		"a path is absent":     {Condition{Place: "json:type", Absent: true}, true},
		"a path has no value":  {Condition{Place: "json:type", Values: []string{"x"}}, false},
		"a path isn't a value": {Condition{Place: "json:type", Values: []string{"x"}, Not: true}, true},
		"no key":               {Condition{Place: "key", Absent: true}, true},
	} {
		f, err := NewFilter([]Condition{c.condition})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := f.Wants(new(Message)); got != c.want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// Half of a surrogate pair is no text, so it can't be told whether it is the one that is
// asked for.
func TestFilterCantTell(t *testing.T) {
	f, err := NewFilter([]Condition{{Place: "json:type", Values: []string{"x"}}})
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := f.Wants(&Message{Value: []byte(`{"type": "\ud800"}`)}); ok || err == nil || !strings.Contains(err.Error(), "json:type") {
		t.Errorf("%v, %v", ok, err)
	}
	if !f.ReadsJSON() {
		t.Error("it doesn't say that it reads JSON")
	}
}

func TestNewFilterRefuses(t *testing.T) {
	for place, c := range map[string]struct {
		condition Condition
		want      string
	}{
		"nowhere":      {Condition{Values: []string{"x"}}, "no place in a message"},
		"json:":        {Condition{Values: []string{"x"}}, "the JSON path is empty"},
		"position":     {Condition{Values: []string{"x"}}, "can't be filtered by"},
		"id":           {Condition{Values: []string{"x"}}, "can't be filtered by"},
		"header:x":     {Condition{}, "names no value"},
		"topic":        {Condition{Absent: true}, "never absent"},
		"const:x":      {Condition{Absent: true}, "can't be filtered by"},
		"header:":      {Condition{Absent: true}, "lacks the header's name"},
		"json:a\\":     {Condition{Absent: true}, "backslash"},
		"cloudevent":   {Condition{Values: []string{"x"}}, "can't be filtered by"},
		"nats-msg-id":  {Condition{Values: []string{"x"}}, "can't be filtered by"},
		"unknown:what": {Condition{Values: []string{"x"}}, "unknown prefix"},
	} {
		c.condition.Place = place
		if _, err := NewFilter([]Condition{c.condition}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", place, err, c.want)
		}
	}
}
