package config

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
)

// Sink is the part of the configuration that a kind of sink decodes itself.
type Sink struct {
	// Kind is the name under which the sink is registered.
	Kind string

	node   *node
	file   string
	places map[string]place
	// line and column of the kind's key.
	line, column int
	// keys are the fields of the kind's configuration struct.
	keys map[string]reflect.Value
}

func (s *Sink) decodeNode(d *decoder, n *node, path string) {
	if !d.want(n, path, mapNode) {
		return
	}
	if len(n.entries) != 1 {
		kinds := make([]string, len(n.entries))
		for i, e := range n.entries {
			kinds[i] = e.key
		}
		d.add(n, path, "must have exactly one kind of sink, not %d (%s)", len(kinds), strings.Join(kinds, ", "))
		return
	}
	e := n.entries[0]
	d.note(join(path, e.key), e.line, e.column, e.value)
	*s = Sink{Kind: e.key, node: e.value, file: d.file, places: d.places, line: e.line, column: e.column}
}

func (s *Sink) path() string { return join("sink", s.Kind) }

// Decode fills a sink's own configuration struct by its yaml tags. An unknown key is
// an error. The error is Problems.
func (s *Sink) Decode(into any) error {
	v := reflect.ValueOf(into)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return fmt.Errorf("sink %s decodes into a %T, not a pointer", s.Kind, into)
	}
	if v.Elem().Kind() == reflect.Struct {
		s.keys = make(map[string]reflect.Value)
		collectFields(v.Elem(), s.keys)
	}
	if s.node == nil {
		return nil
	}
	d := &decoder{file: s.file, places: s.places}
	d.decode(s.node, s.path(), v)
	return d.problems.err()
}

// New makes the sink that the registry has for the kind. The error is Problems:
// everything that the kind finds wrong.
func (s *Sink) New(registry *sinks.Registry) (sinks.Sink, error) {
	sink, err := registry.New(s.Kind, s.Decode)
	if err == nil {
		return sink, nil
	}
	at := Problem{Key: s.path(), File: s.file, Line: s.line, Column: s.column}
	var found Problems
	for _, p := range split(err, at) {
		found = append(found, s.locate(p))
	}
	return nil, found.err()
}

// reordered is a problem if the sink needs an order that a source doesn't have.
func (s *Sink) reordered(sink sinks.Sink, sources []Source) Problems {
	sensitive, ok := sink.(sinks.OrderSensitive)
	if !ok || !slices.ContainsFunc(sources, func(src Source) bool { return src.NATS != nil && src.NATS.Mode == policy.ModeQueue }) {
		return nil
	}
	if err := sensitive.NeedsOrder(); err != nil {
		return Problems{s.locate(Problem{Key: s.path(), File: s.file, Line: s.line, Column: s.column, Message: err.Error()})}
	}
	return nil
}

// locate moves a problem to the key that its message begins with, as in
// "columns.id: no such place".
func (s *Sink) locate(p Problem) Problem {
	name, rest, ok := strings.Cut(p.Message, ": ")
	first, _, _ := strings.Cut(name, ".")
	if _, known := s.keys[first]; !ok || !known || p.Key != s.path() {
		return p
	}
	p.Key, p.Message = join(s.path(), name), rest
	for at := p.Key; at != s.path() && at != ""; at = parent(at) {
		if where, ok := s.places[at]; ok {
			p.Line, p.Column = where.line, where.column
			break
		}
	}
	return p
}

// split takes joined errors apart. Each is a problem at that place, unless it has its
// own.
func split(err error, at Problem) Problems {
	var known Problems
	if errors.As(err, &known) {
		// A wrapper adds nothing to our own problems.
		if joined, ok := err.(interface{ Unwrap() []error }); !ok || len(joined.Unwrap()) == 1 {
			return known
		}
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all Problems
		for _, e := range joined.Unwrap() {
			all = append(all, split(e, at)...)
		}
		return all
	}
	at.Message = err.Error()
	return Problems{at}
}
