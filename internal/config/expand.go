package config

import (
	"regexp"
	"strings"
	"unicode/utf8"
)

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// expand replaces ${NAME} and ${NAME:-default} in a scalar's text by the
// environment's value; $${ means ${. It works on the value that YAML has read, never
// on the file's text: a variable can't add a key, a list or a comment.
//
// A text that can't be expanded becomes nothing, so that it is reported once.
func (b *builder) expand(n *node) {
	if !strings.Contains(n.text, "${") {
		return
	}
	found := len(b.problems)
	defer func() {
		if len(b.problems) > found {
			*n = node{line: n.line, column: n.column, size: n.size}
		}
	}()
	var out strings.Builder
	rest := n.text
	for {
		i := strings.Index(rest, "${")
		if i < 0 {
			out.WriteString(rest)
			break
		}
		if i > 0 && rest[i-1] == '$' {
			out.WriteString(rest[:i-1] + "${")
			rest = rest[i+2:]
			continue
		}
		out.WriteString(rest[:i])
		body, after, closed := strings.Cut(rest[i+2:], "}")
		if !closed {
			b.add(n.line, n.column, "a ${ without its }; write $${ for the two characters themselves")
			return
		}
		rest = after
		name, fallback, hasFallback := strings.Cut(body, ":-")
		if !variableName.MatchString(name) {
			b.add(n.line, n.column, "${%s} names no variable; write ${NAME} or ${NAME:-default}, or $${ for the two characters themselves", body)
			return
		}
		value, ok := b.lookup(name)
		if (!ok || value == "") && hasFallback {
			value, ok = fallback, true
		}
		if !ok {
			b.add(n.line, n.column, "the environment variable %s is not set; set it, or write ${%s:-default}", name, name)
		}
		if !utf8.ValidString(value) {
			b.add(n.line, n.column, "the environment variable %s is not valid UTF-8", name)
		}
		out.WriteString(value)
		n.variables = append(n.variables, name)
	}
	n.text = out.String()
}

// escape protects a text from expand.
func escape(s string) string { return strings.ReplaceAll(s, "${", "$${") }
