package config

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// Print writes the configuration as YAML, with defaults. It redacts secrets. A comment
// says where each value came from.
func (c *Config) Print(w io.Writer) error {
	p := &printer{c: c}
	return p.print(w)
}

// printer writes block YAML. In tests it reveals secrets: its output then reads back
// as the same configuration.
type printer struct {
	c      *Config
	reveal bool
	// shared is set for a pipeline: what is there once for all isn't printed.
	shared bool
	out    strings.Builder
}

func (p *printer) print(w io.Writer) error {
	if len(p.c.Pipelines) > 0 {
		p.pipelines()
	} else {
		p.structure(reflect.ValueOf(p.c).Elem(), "", 0)
	}
	_, err := io.WriteString(w, p.out.String())
	return err
}

// pipelines prints what is there once for all, and each pipeline whole.
func (p *printer) pipelines() {
	v := reflect.ValueOf(p.c).Elem()
	for _, name := range []string{"HTTP", "Shutdown", "Log"} {
		p.field(v.FieldByName(name), strings.ToLower(name), strings.ToLower(name), 0)
	}
	p.line(0, "batch:", "")
	p.field(v.FieldByName("Batch").FieldByName("InflightBytes"), "inflight_bytes", "batch.inflight_bytes", 1)
	p.line(0, pipelinesKey+":", "")
	for _, c := range p.c.Pipelines {
		p.line(1, "-", "")
		one := &printer{c: c, reveal: p.reveal, shared: true}
		one.structure(reflect.ValueOf(c).Elem(), "", 2)
		p.out.WriteString(one.out.String())
	}
}

// line writes one line with its comment.
func (p *printer) line(indent int, text, comment string) {
	text = strings.Repeat("  ", indent) + text
	if comment != "" {
		text = fmt.Sprintf("%-44s # %s", text, comment)
	}
	p.out.WriteString(text + "\n")
}

func (p *printer) origin(path string) string {
	if o := p.c.places[path].origin; o != "" {
		return o
	}
	return "default"
}

func (p *printer) structure(v reflect.Value, path string, indent int) {
	for i := range v.NumField() {
		name, ok := v.Type().Field(i).Tag.Lookup("yaml")
		if !ok {
			continue
		}
		at := join(path, name)
		if at == pipelinesKey || p.shared && slices.Contains(sharedKeys, at) {
			continue
		}
		if file := v.FieldByName(v.Type().Field(i).Name + "File"); file.IsValid() && file.String() != "" && v.Field(i).Type() == reflect.TypeFor[Secret]() {
			continue // the file is printed
		}
		p.field(v.Field(i), name, at, indent)
	}
}

func (p *printer) field(v reflect.Value, name, path string, indent int) {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return
		}
		v = v.Elem()
	}
	switch x := v.Interface().(type) {
	case Secret:
		text := x.String()
		if p.reveal {
			text = x.Reveal()
		}
		p.line(indent, name+": "+quote(text), p.origin(path))
	case Duration, Size:
		p.line(indent, fmt.Sprintf("%s: %s", name, x), p.origin(path))
	case StringList:
		p.texts(name, x, path, indent)
	case Addresses:
		shown := make([]string, len(x))
		for i, a := range x {
			shown[i] = a
			if !p.reveal {
				shown[i] = redactURL(a)
			}
		}
		p.texts(name, shown, path, indent)
	case Filter:
		if x.node != nil {
			p.value(name+":", name, x.node, path, indent)
		} else {
			p.line(indent, name+": {}", p.origin(path))
		}
	case Sinks:
		p.sinks(x, name, path, indent)
	case []Source:
		p.line(indent, name+":", "")
		for i := range x {
			p.line(indent+1, "-", "")
			p.structure(reflect.ValueOf(&x[i]).Elem(), index(path, i), indent+2)
		}
	default:
		switch v.Kind() {
		case reflect.Struct:
			p.line(indent, name+":", "")
			p.structure(v, path, indent+1)
		case reflect.String:
			p.line(indent, name+": "+quote(v.String()), p.origin(path))
		default:
			p.line(indent, fmt.Sprintf("%s: %v", name, x), p.origin(path))
		}
	}
}

func (p *printer) sinks(all Sinks, name, path string, indent int) {
	p.line(indent, name+":", "")
	for i := range all {
		s, indent := &all[i], indent+1
		if s.at != path {
			p.line(indent, "-", "")
			indent++
		}
		if s.Filter.node != nil {
			p.value("filter:", "filter", s.Filter.node, join(s.at, "filter"), indent)
		}
		if s.Kind != "" {
			p.value(quote(s.Kind)+":", s.Kind, s.node, s.path(), indent)
		}
	}
}

func (p *printer) texts(name string, list []string, path string, indent int) {
	quoted := make([]string, len(list))
	for i, s := range list {
		quoted[i] = quote(s)
	}
	p.line(indent, name+": ["+strings.Join(quoted, ", ")+"]", p.origin(path))
}

// value writes a part of the configuration that only its sink understands: a key's
// value, or an item of a list, whose head is "-" and which has no key.
func (p *printer) value(head, key string, n *node, path string, indent int) {
	empty := ""
	switch {
	case n.kind == nullNode && (key == "" || n.text == "null"): // which a policy may mean
		empty = " null"
	case n.kind == mapNode && len(n.entries) == 0:
		empty = " {}"
	case n.kind == listNode && len(n.items) == 0:
		empty = " []"
	}
	if n.kind == nullNode || empty != "" {
		p.line(indent, head+empty, p.origin(path))
		return
	}
	if n.kind == scalarNode {
		p.scalar(head, key, n, path, indent)
		return
	}
	p.line(indent, head, "")
	for _, child := range n.entries {
		p.value(quote(child.key)+":", child.key, child.value, join(path, child.key), indent+1)
	}
	for i, item := range n.items {
		p.value("-", "", item, index(path, i), indent+1)
	}
}

func (p *printer) scalar(head, key string, n *node, path string, indent int) {
	text := n.text
	if !p.reveal && secretKey.MatchString(key) {
		text = redacted
	} else if !p.reveal && strings.Contains(text, "://") {
		text = redactURL(text)
	}
	if block, ok := literal(text, indent+1); ok {
		p.line(indent, head+" "+block, "")
		return
	}
	p.line(indent, head+" "+scalar(text, n.quoted), p.origin(path))
}

var (
	secretKey = regexp.MustCompile(`(?i)(password|secret|token|credentials?|api_?key)$`)
	plainText = regexp.MustCompile(`^[A-Za-z_/][A-Za-z0-9_./@:-]*$`)
	// words that YAML, or an older YAML, doesn't read as text.
	words = regexp.MustCompile(`(?i)^(null|true|false|yes|no|on|off|y|n|_|inf|nan)$`)
)

// quote writes a text that reads back as that text.
func quote(s string) string {
	if plainText.MatchString(s) && !words.MatchString(s) && !strings.HasSuffix(s, ":") {
		return s
	}
	// JSON's strings are also YAML's.
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(escape(s))
	return strings.TrimSuffix(b.String(), "\n")
}

// scalar keeps a number or a boolean what it was.
func scalar(text string, quoted bool) string {
	if _, isText := plain(&node{kind: scalarNode, text: text, quoted: quoted}).(string); !isText {
		return text
	}
	return quote(text)
}

// literal writes a text of several lines, such as SQL, the way people do.
func literal(text string, indent int) (string, bool) {
	body, chomp := text, "|-"
	if strings.HasSuffix(text, "\n") {
		body, chomp = strings.TrimSuffix(text, "\n"), "|"
	}
	lines := strings.Split(body, "\n")
	if len(lines) < 2 {
		return "", false
	}
	for i, l := range lines {
		if l == "" && (i == 0 || i == len(lines)-1) || l != "" && i == 0 && l[0] == ' ' ||
			strings.TrimRight(l, " \t") != l || strings.ContainsFunc(l, func(r rune) bool { return r > '~' || !unicode.IsPrint(r) }) {
			return "", false
		}
		if l != "" {
			lines[i] = strings.Repeat("  ", indent) + escape(l)
		}
	}
	return chomp + "\n" + strings.Join(lines, "\n"), true
}
