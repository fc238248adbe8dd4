package config

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// node is a YAML document's tree, with aliases followed, merge keys merged and
// variables expanded. An aliased node is in the tree several times.
type node struct {
	kind         nodeKind
	text         string // of a scalar
	quoted       bool   // a scalar that can only be a text
	entries      []entry
	items        []*node
	line, column int
	// size counts the nodes below, as often as each occurs.
	size int
	// variables are the names of those in the scalar's text.
	variables []string
}

type entry struct {
	key          string
	line, column int
	value        *node
}

type nodeKind int

const (
	nullNode nodeKind = iota
	scalarNode
	mapNode
	listNode
)

func (k nodeKind) String() string {
	return [...]string{"nothing", "a single value", "a mapping", "a list"}[k]
}

func (n *node) entry(key string) *entry {
	for i := range n.entries {
		if n.entries[i].key == key {
			return &n.entries[i]
		}
	}
	return nil
}

const (
	// maxFile keeps a wrong file from being read into memory.
	maxFile = 4 << 20
	// maxNodes stops aliases of aliases.
	maxNodes = 50_000
	maxDepth = 100
)

// builder turns goccy's syntax tree into nodes.
type builder struct {
	file     string
	path     string // of the current key
	lookup   func(name string) (string, bool)
	anchors  map[string]*node
	problems Problems
}

// add adds a problem of the current key.
func (b *builder) add(line, column int, format string, args ...any) {
	b.problems = append(b.problems, Problem{Key: b.path, File: b.file, Line: line, Column: column, Message: fmt.Sprintf(format, args...)})
}

// at builds the value of a key or an index.
func (b *builder) at(path string, build func() *node) *node {
	above := b.path
	b.path = path
	defer func() { b.path = above }()
	return build()
}

// parse reads a file's text. If it isn't YAML at all, it returns nil.
func (b *builder) parse(text []byte) *node {
	if !utf8.Valid(text) {
		b.add(1, 1, "the file is not valid UTF-8")
		return nil
	}
	file, err := parseYAML(text)
	var at yaml.Error
	switch {
	case errors.As(err, &at):
		line, column := position(at.GetToken())
		b.add(line, column, "not valid YAML: %s", at.GetMessage())
		return nil
	case err != nil:
		b.add(1, 1, "not valid YAML: %v", err)
		return nil
	}
	b.anchors = make(map[string]*node)
	var root *node
	for _, doc := range file.Docs {
		switch {
		case doc.Body == nil:
		case root == nil:
			root = b.build(doc.Body, 0)
		default:
			line, column := position(doc.Body.GetToken())
			b.add(line, column, "a second YAML document; put everything into one")
			return root
		}
	}
	if root == nil {
		root = &node{line: 1, column: 1}
	}
	return root
}

// parseYAML turns a panic of the parser into an error.
func parseYAML(text []byte) (file *ast.File, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the parser gave up: %v", p)
		}
	}()
	// mapping finds all repeated keys, the parser only the first.
	return parser.Parse(tokens(text), 0, parser.AllowDuplicateMapKey())
}

func position(t *token.Token) (line, column int) {
	if t == nil || t.Position == nil {
		return 1, 1
	}
	return max(t.Position.Line, 1), max(t.Position.Column, 1)
}

func (b *builder) build(from ast.Node, depth int) *node {
	n := &node{size: 1}
	if from == nil {
		n.line, n.column = 1, 1
		return n
	}
	n.line, n.column = position(from.GetToken())
	if depth > maxDepth {
		b.add(n.line, n.column, "nested deeper than %d levels", maxDepth)
		return n
	}
	switch x := from.(type) {
	case *ast.NullNode:
		if x.Token.Type == token.NullType {
			n.text = x.Token.Value
		}
	case *ast.StringNode:
		n.scalar(x.Value)
		n.quoted = x.Token.Type == token.SingleQuoteType || x.Token.Type == token.DoubleQuoteType
		b.expand(n)
	case *ast.LiteralNode:
		n.scalar(x.Value.Value)
		n.quoted = true
		b.expand(n)
	case *ast.AnchorNode:
		value := b.build(x.Value, depth+1)
		if x.Name != nil {
			b.anchors[x.Name.GetToken().Value] = value
		}
		return value
	case *ast.AliasNode:
		name := x.Value.GetToken().Value
		value, ok := b.anchors[name]
		if !ok {
			b.add(n.line, n.column, "no anchor &%s is above this alias", name)
			return n
		}
		return value
	case *ast.TagNode:
		b.add(n.line, n.column, "YAML tags such as %s are not used here; remove it", x.Start.Value)
	case ast.ScalarNode: // numbers, booleans and the like, as written
		n.scalar(x.GetToken().Value)
	case *ast.SequenceNode:
		n.kind = listNode
		for i, v := range x.Values {
			item := b.at(index(b.path, i), func() *node { return b.item(v, depth+1) })
			n.items = append(n.items, item)
			n.size += item.size
		}
	case ast.MapNode:
		b.mapping(n, x, depth)
	default:
		b.add(n.line, n.column, "%s can't be here", from.Type())
	}
	if n.size > maxNodes {
		b.add(n.line, n.column, "more than %d values", maxNodes)
		return &node{line: n.line, column: n.column, size: 1}
	}
	return n
}

// item builds a list's item. Within brackets goccy reads [header:x] as the pair
// {header: x} (its issue 832). YAML has one text there, "header:x": a colon separates
// only before a space.
func (b *builder) item(from ast.Node, depth int) *node {
	if m, ok := from.(*ast.MappingNode); ok && len(m.Values) == 1 && m.Start.Type == token.MappingValueType {
		pair := m.Values[0]
		key, isText := pair.Key.(*ast.StringNode)
		value, isScalar := pair.Value.(ast.ScalarNode)
		if isText && isScalar && key.Token.Type == token.StringType && plainToken(value) {
			at, next := pair.Start.Position, value.GetToken().Position
			if at.Line == next.Line && at.Column+1 == next.Column {
				line, column := position(key.Token)
				n := &node{line: line, column: column, size: 1}
				n.scalar(key.Value + ":" + value.GetToken().Value)
				b.expand(n)
				return n
			}
		}
	}
	return b.build(from, depth)
}

func plainToken(n ast.ScalarNode) bool {
	switch n.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		t := n.GetToken().Type
		return t != token.SingleQuoteType && t != token.DoubleQuoteType
	}
	return false
}

func (n *node) scalar(text string) { n.kind, n.text = scalarNode, text }

func (b *builder) mapping(n *node, x ast.MapNode, depth int) {
	n.kind = mapNode
	var merged []*node
	for it := x.MapRange(); it.Next(); {
		key := it.Key()
		line, column := position(key.GetToken())
		if n.size == 1 {
			n.line, n.column = line, column // goccy's own is the first colon's
		}
		if key.IsMergeKey() {
			value := b.build(it.Value(), depth+1)
			n.size += value.size
			merged = append(merged, value)
			continue
		}
		var name string
		switch k := key.(type) {
		case *ast.StringNode:
			name = k.Value
		case ast.ScalarNode:
			name = k.GetToken().Value
		default:
			b.add(line, column, "a key must be a plain text")
			continue
		}
		value := b.at(join(b.path, name), func() *node {
			if first := n.entry(name); first != nil {
				b.add(line, column, "the key is repeated, first on line %d; remove one", first.line)
				return nil
			}
			return b.build(it.Value(), depth+1)
		})
		if value == nil {
			continue
		}
		n.size += value.size
		n.entries = append(n.entries, entry{name, line, column, value})
	}
	for _, m := range merged {
		b.merge(n, m)
	}
}

// merge adds a merge key's entries that the mapping doesn't have.
func (b *builder) merge(n, from *node) {
	switch from.kind {
	case mapNode:
		for _, e := range from.entries {
			if n.entry(e.key) == nil {
				n.entries = append(n.entries, e)
			}
		}
	case listNode:
		for _, item := range from.items {
			if item.kind == mapNode {
				b.merge(n, item)
			}
		}
	default:
		b.add(from.line, from.column, "only a mapping can be merged with <<")
	}
}
