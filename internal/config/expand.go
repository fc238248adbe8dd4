package config

import (
	"regexp"
	"strings"
	"unicode/utf8"
)

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// expand replaces ${NAME} and ${NAME:-default} in a scalar's text by the
// environment's value; $${ stands for ${. It works on the value that YAML has
// read, never on the file's text: what a variable holds can't add a key, a list
// or a comment.
//
// What can't be expanded becomes nothing: the problem is told once, here.
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

// escape undoes expand: what it gives, expand leaves as it was.
func escape(s string) string { return strings.ReplaceAll(s, "${", "$${") }
