package config

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/multi"
)

// Sinks are what messages do: one kind of sink, or a list of them.
type Sinks []Sink

func (s *Sinks) decodeNode(d *decoder, n *node, path string) {
	*s = nil
	d.replaces(path)
	if n.kind != listNode {
		var one Sink
		one.decode(d, n, path)
		*s = Sinks{one}
		return
	}
	if len(n.items) == 0 {
		d.add(n, path, "names no sink")
	}
	for i, item := range n.items {
		at := index(path, i)
		d.note(at, item.line, item.column, item)
		var one Sink
		one.decode(d, item, at)
		*s = append(*s, one)
	}
}

// Kinds are the sinks' kinds, for people.
func (s Sinks) Kinds() string {
	kinds := make([]string, len(s))
	for i := range s {
		kinds[i] = s[i].Kind
	}
	return strings.Join(kinds, ", ")
}

// Sink is the part of the configuration that a kind of sink decodes itself.
type Sink struct {
	// Kind is the name under which the sink is registered.
	Kind string
	// Filter says which messages it wants.
	Filter Filter

	at       string // its path without the kind
	pipeline string // the path of its pipeline; empty: none
	node     *node
	file     string
	places   map[string]place
	// line and column of the kind's key.
	line, column int
	// keys are the fields of the kind's configuration struct.
	keys map[string]reflect.Value
}

func (s *Sink) decode(d *decoder, n *node, path string) {
	if n.kind == nullNode && strings.HasSuffix(path, "]") {
		d.add(n, path, "is empty; write one kind of sink, such as table or statement")
		return
	}
	if n.kind == nullNode || !d.want(n, path, mapNode) {
		return
	}
	var kinds []string
	for _, e := range n.entries {
		d.note(join(path, e.key), e.line, e.column, e.value)
		if e.key == "filter" {
			s.Filter.decodeNode(d, e.value, join(path, e.key))
			continue
		}
		kinds = append(kinds, e.key)
		*s = Sink{Kind: e.key, Filter: s.Filter, at: path, pipeline: d.pipeline, node: e.value, file: d.file, places: d.places, line: e.line, column: e.column}
	}
	switch {
	case len(kinds) == 0:
		d.add(n, path, "has no kind of sink, such as table or statement")
	case len(kinds) > 1:
		d.add(n, path, "must have exactly one kind of sink, not %d (%s); several sinks are a list", len(kinds), strings.Join(kinds, ", "))
		s.Kind = ""
	}
}

func (s *Sink) path() string { return join(s.at, s.Kind) }

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
	d := &decoder{file: s.file, places: s.places, pipeline: s.pipeline}
	d.decode(s.node, s.path(), v)
	return d.problems.err()
}

// NewSink makes the sink, which applies each message to those of the sinks that want it.
// The error is Problems.
func (c *Config) NewSink(registry *sinks.Registry) (sinks.Sink, error) {
	parts, problems := c.parts(registry)
	if err := problems.err(); err != nil {
		return nil, err
	}
	all, err := c.Filter.New()
	if err != nil {
		return nil, Problems{c.problem("filter", "%v", err)}
	}
	return multi.New(all, parts...), nil
}

// parts makes the sinks, and finds everything that is wrong with them.
func (c *Config) parts(registry *sinks.Registry) (parts []multi.Part, problems Problems) {
	for i := range c.Sink {
		s := &c.Sink[i]
		if s.Kind == "" {
			continue // a problem already
		}
		sink, err := s.new(registry)
		if err != nil {
			problems = append(problems, split(err, c.problem(s.path(), "")).in(s.pipeline)...)
			continue
		}
		problems = append(problems, s.unsuited(sink, c).in(s.pipeline)...)
		filter, err := s.Filter.New()
		if err != nil {
			problems = append(problems, c.problem(join(s.at, "filter"), "%v", err))
		}
		parts = append(parts, multi.Part{Name: s.path(), Sink: sink, Filter: filter})
	}
	return parts, problems
}

// new makes the sink that the registry has for the kind. The error is Problems: everything
// that the kind finds wrong.
func (s *Sink) new(registry *sinks.Registry) (sinks.Sink, error) {
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

// unsuited are problems if the sink needs an order that a source doesn't have, or ids that
// the strategy doesn't need.
func (s *Sink) unsuited(sink sinks.Sink, c *Config) (problems Problems) {
	add := func(err error) {
		if err != nil {
			problems = append(problems, s.locate(Problem{Key: s.path(), File: s.file, Line: s.line, Column: s.column, Message: err.Error()}))
		}
	}
	queue := func(src Source) bool { return src.NATS != nil && src.NATS.Mode == policy.ModeQueue }
	if sensitive, ok := sink.(sinks.OrderSensitive); ok && slices.ContainsFunc(c.Sources, queue) {
		add(sensitive.NeedsOrder())
	}
	if remembering, ok := sink.(sinks.Remembering); ok && c.Dedup.Strategy != policy.StrategyClaim && c.places["id.from"].line == 0 {
		add(remembering.NeedsID())
	}
	return problems
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
