package config

import (
	"encoding"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/dedupd/dedupd/internal/policy"
)

// decoder fills Go values from nodes. It goes on after a problem, to report all of
// them at once, and records where each value came from.
type decoder struct {
	file     string
	problems Problems
	places   map[string]place
	// pipeline is the path of the pipeline that is read, after what stands above it.
	pipeline string
}

// nodeDecoder is a value that reads its own node.
type nodeDecoder interface {
	decodeNode(d *decoder, n *node, path string)
}

type defaulter interface{ setDefaults() }

// unmarshaler is goccy's InterfaceUnmarshaler, which custom sinks may use.
type unmarshaler interface {
	UnmarshalYAML(unmarshal func(any) error) error
}

func (d *decoder) add(n *node, path, format string, args ...any) {
	d.problems = append(d.problems, Problem{Key: path, File: d.file, Line: n.line, Column: n.column, Message: fmt.Sprintf(format, args...)})
}

func (d *decoder) note(path string, line, column int, n *node) {
	origin := fmt.Sprintf("line %d", line)
	if len(n.variables) > 0 {
		origin += ", $" + strings.Join(n.variables, ", $")
	}
	d.places[path] = place{line: line, column: column, origin: origin, pipeline: d.pipeline}
}

// replaces forgets the places of what a pipeline replaces as a whole.
func (d *decoder) replaces(path string) {
	if d.pipeline == "" {
		return
	}
	maps.DeleteFunc(d.places, func(at string, _ place) bool {
		rest, ok := strings.CutPrefix(at, path)
		return ok && (strings.HasPrefix(rest, ".") || strings.HasPrefix(rest, "["))
	})
}

// decode fills the settable v from n. A key without a value leaves v as it is.
func (d *decoder) decode(n *node, path string, v reflect.Value) {
	if n.kind == nullNode {
		if p, ok := v.Interface().(policy.Policy); ok && v.Kind() == reflect.String && n.text == "null" && slices.Contains(p.Values(), n.text) {
			v.SetString(n.text) // it is the policy's name, as in absent: null
		}
		return
	}
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
			if x, ok := v.Interface().(defaulter); ok {
				x.setDefaults()
			}
		}
		d.decode(n, path, v.Elem())
		return
	}
	if v.CanAddr() && d.byItself(n, path, v.Addr().Interface()) {
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.structure(n, path, v)
	case reflect.Map:
		d.mapping(n, path, v)
	case reflect.Slice:
		d.list(n, path, v)
	case reflect.Interface:
		if v.NumMethod() == 0 {
			v.Set(reflect.ValueOf(plain(n)))
			return
		}
		d.add(n, path, "can't be read into a %s: the program's fault", v.Type())
	default:
		d.scalar(n, path, v)
	}
}

// byItself decodes into a type that has its own way of reading a node. It returns
// whether the type is one.
func (d *decoder) byItself(n *node, path string, to any) bool {
	switch x := to.(type) {
	case nodeDecoder:
		x.decodeNode(d, n, path)
	case unmarshaler:
		d.custom(n, path, x)
	case encoding.TextUnmarshaler:
		d.text(n, path, x)
	case *yaml.MapSlice:
		if d.want(n, path, mapNode) {
			for _, e := range n.entries {
				d.note(join(path, e.key), e.line, e.column, e.value)
				*x = append(*x, yaml.MapItem{Key: e.key, Value: plain(e.value)})
			}
		}
	default:
		return false
	}
	return true
}

func (d *decoder) want(n *node, path string, kind nodeKind) bool {
	if n.kind == kind {
		return true
	}
	d.add(n, path, "must be %s, not %s", kind, n.kind)
	return false
}

func (d *decoder) text(n *node, path string, to encoding.TextUnmarshaler) {
	if !d.want(n, path, scalarNode) {
		return
	}
	if err := to.UnmarshalText([]byte(n.text)); err != nil {
		d.add(n, path, "%v", err)
	}
}

// custom lets a type decode itself. Problems keep their places.
func (d *decoder) custom(n *node, path string, to unmarshaler) {
	before := len(d.problems)
	err := to.UnmarshalYAML(func(into any) error {
		inner := decoder{file: d.file, places: d.places, pipeline: d.pipeline}
		inner.decode(n, path, reflect.ValueOf(into))
		return inner.problems.err()
	})
	if err != nil && len(d.problems) == before {
		d.problems = append(d.problems, split(err, Problem{Key: path, File: d.file, Line: n.line, Column: n.column})...)
	}
}

func (d *decoder) list(n *node, path string, v reflect.Value) {
	if !d.want(n, path, listNode) {
		return
	}
	d.replaces(path)
	list := reflect.MakeSlice(v.Type(), len(n.items), len(n.items))
	for i, item := range n.items {
		at := index(path, i)
		d.note(at, item.line, item.column, item)
		if x, ok := list.Index(i).Addr().Interface().(defaulter); ok {
			x.setDefaults()
		}
		d.decode(item, at, list.Index(i))
	}
	v.Set(list)
}

func (d *decoder) mapping(n *node, path string, v reflect.Value) {
	if v.Type().Key().Kind() != reflect.String {
		d.add(n, path, "can't be read into a %s: the program's fault", v.Type())
		return
	}
	if !d.want(n, path, mapNode) {
		return
	}
	m := reflect.MakeMapWithSize(v.Type(), len(n.entries))
	for _, e := range n.entries {
		at := join(path, e.key)
		d.note(at, e.line, e.column, e.value)
		value := reflect.New(v.Type().Elem()).Elem()
		d.decode(e.value, at, value)
		m.SetMapIndex(reflect.ValueOf(e.key).Convert(v.Type().Key()), value)
	}
	v.Set(m)
}

func (d *decoder) structure(n *node, path string, v reflect.Value) {
	if !d.want(n, path, mapNode) {
		return
	}
	fields := make(map[string]reflect.Value)
	collectFields(v, fields)
	for _, e := range n.entries {
		at := join(path, e.key)
		d.note(at, e.line, e.column, e.value)
		field, ok := fields[e.key]
		if !ok {
			d.problems = append(d.problems, Problem{
				Key: at, File: d.file, Line: e.line, Column: e.column,
				Message: "unknown key; " + suggest(e.key, slices.Sorted(maps.Keys(fields))),
			})
			continue
		}
		d.decode(e.value, at, field)
	}
}

func collectFields(v reflect.Value, into map[string]reflect.Value) {
	t := v.Type()
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case name == "-" || !f.IsExported() && !f.Anonymous:
		case f.Type.Kind() == reflect.Struct && (strings.Contains(options, "inline") || f.Anonymous && name == ""):
			collectFields(v.Field(i), into)
		case name == "":
			into[strings.ToLower(f.Name)] = v.Field(i)
		default:
			into[name] = v.Field(i)
		}
	}
}

func (d *decoder) scalar(n *node, path string, v reflect.Value) {
	if !d.want(n, path, scalarNode) {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(n.text)
	case reflect.Bool:
		if n.text != "true" && n.text != "false" {
			d.add(n, path, "must be true or false, not %q", n.text)
			return
		}
		v.SetBool(n.text == "true")
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		i, err := strconv.ParseInt(strings.ReplaceAll(n.text, "_", ""), 10, 64)
		switch {
		case err != nil:
			d.add(n, path, "must be a whole number, not %q", n.text)
		case v.CanInt() && !v.OverflowInt(i):
			v.SetInt(i)
		case v.CanUint() && i >= 0 && !v.OverflowUint(uint64(i)):
			v.SetUint(uint64(i))
		default:
			d.add(n, path, "%s is out of range", n.text)
		}
	case reflect.Float32, reflect.Float64:
		f, err := strconv.ParseFloat(n.text, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			d.add(n, path, "must be a number, not %q", n.text)
			return
		}
		v.SetFloat(f)
	default:
		d.add(n, path, "can't be read into a %s: the program's fault", v.Type())
	}
}

// texts reads a list of texts; one text is a list of one.
func (d *decoder) texts(n *node, path string) []string {
	switch n.kind {
	case scalarNode:
		return []string{n.text}
	case listNode:
		list := make([]string, 0, len(n.items))
		for i, item := range n.items {
			at := index(path, i)
			d.note(at, item.line, item.column, item)
			if item.kind == nullNode {
				d.add(item, at, "is empty")
			} else if d.want(item, at, scalarNode) {
				list = append(list, item.text)
			}
		}
		return list
	case mapNode:
		d.add(n, path, "must be a text or a list of texts, not a mapping")
	}
	return nil
}

// plain converts a node to YAML's own types.
func plain(n *node) any {
	switch n.kind {
	case scalarNode:
		if n.quoted {
			return n.text
		}
		if i, err := strconv.ParseInt(n.text, 10, 64); err == nil {
			return i
		}
		if f, err := strconv.ParseFloat(n.text, 64); err == nil && !math.IsNaN(f) && !math.IsInf(f, 0) {
			return f
		}
		if n.text == "true" || n.text == "false" {
			return n.text == "true"
		}
		return n.text
	case mapNode:
		m := make(map[string]any, len(n.entries))
		for _, e := range n.entries {
			m[e.key] = plain(e.value)
		}
		return m
	case listNode:
		list := make([]any, len(n.items))
		for i, item := range n.items {
			list[i] = plain(item)
		}
		return list
	}
	return nil
}
