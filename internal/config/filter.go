package config

import (
	"github.com/dedupd/dedupd/message"
)

// Filter says which messages are wanted; empty: all.
type Filter struct {
	conditions []message.Condition
	node       *node
}

// New makes the filter; nil: it lets everything pass.
func (f *Filter) New() (*message.Filter, error) {
	if len(f.conditions) == 0 {
		return nil, nil
	}
	return message.NewFilter(f.conditions)
}

// absent is how the file asks that there is nothing in a place. In a list it is a text.
const absent = "absent"

func (f *Filter) decodeNode(d *decoder, n *node, path string) {
	*f = Filter{}
	d.replaces(path)
	if n.kind == nullNode || !d.want(n, path, mapNode) || len(n.entries) == 0 {
		return
	}
	f.node = n
	for _, e := range n.entries {
		at := join(path, e.key)
		d.note(at, e.line, e.column, e.value)
		c := message.Condition{Place: e.key}
		value := e.value
		if value.kind == mapNode {
			not := value.entry("not")
			if not == nil || len(value.entries) != 1 {
				d.add(value, at, "must be a text, a list of texts, absent, or one of these under not: {not: [test]}")
				continue
			}
			c.Not, value = true, not.value
			at = join(at, "not")
			d.note(at, not.line, not.column, value)
		}
		switch {
		case value.kind == mapNode:
			d.add(value, at, "must be a text, a list of texts, or absent")
			continue
		case value.kind == scalarNode && value.text == absent:
			c.Absent = true
		default:
			before := len(d.problems)
			c.Values = d.texts(value, at)
			if len(d.problems) > before {
				continue
			}
		}
		if _, err := message.NewFilter([]message.Condition{c}); err != nil {
			d.problems = append(d.problems, Problem{Key: join(path, e.key), File: d.file, Line: e.line, Column: e.column, Message: err.Error()})
			continue
		}
		f.conditions = append(f.conditions, c)
	}
}
