package sinks

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Factory makes a sink from its part of the configuration. decode fills the sink's own
// configuration struct (yaml tags) from the keys under the kind's name; an unknown key is an
// error with its line. The factory checks what needs no database, and returns all problems
// that it finds (errors.Join).
type Factory func(decode func(into any) error) (Sink, error)

// Registry has kinds of sinks by name. The zero value is empty and ready. All kinds are
// registered before the first is made.
type Registry struct{ kinds map[string]Factory }

// Default is the registry that the dedupd command reads.
var Default Registry

// Register adds a kind of sink to Default, from an init function.
func Register(kind string, f Factory) { Default.Register(kind, f) }

// Register adds a kind of sink. It panics for an empty or repeated name, for "filter", which
// stands beside a kind in the configuration, and for a nil factory: all are mistakes of the
// program, not of its input.
func (r *Registry) Register(kind string, f Factory) {
	if kind == "" || f == nil {
		panic("sinks: Register needs a kind and a factory")
	}
	if kind == "filter" {
		panic("sinks: no kind can be called filter")
	}
	if _, ok := r.kinds[kind]; ok {
		panic("sinks: kind " + kind + " is registered twice")
	}
	if r.kinds == nil {
		r.kinds = make(map[string]Factory)
	}
	r.kinds[kind] = f
}

// Kinds lists the registered names, sorted.
func (r *Registry) Kinds() []string { return slices.Sorted(maps.Keys(r.kinds)) }

// New makes a sink of a kind. An unknown kind's error lists the known ones.
func (r *Registry) New(kind string, decode func(into any) error) (Sink, error) {
	f := r.kinds[kind]
	if f == nil {
		return nil, fmt.Errorf("unknown sink kind %q; this binary has: %s", kind, strings.Join(r.Kinds(), ", "))
	}
	return f(decode)
}
