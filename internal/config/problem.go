package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one fault of a configuration, or a warning.
type Problem struct {
	// Key is the path of the key, such as sources[0].kafka.brokers; empty for the
	// file as a whole.
	Key string `json:"key"`
	// File, Line and Column are the key's place, or that of the nearest key above a
	// missing one. Lines and columns begin with 1; 0: not in a file (an environment
	// variable).
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
	// Message says what is wrong and what to do.
	Message string `json:"message"`
	// Warning: the configuration can be used all the same.
	Warning bool `json:"warning"`
	// Excerpt is the line at fault with a caret under the column. It may hold a secret:
	// show it on a terminal, never in a log.
	Excerpt string `json:"-"`
}

func (p Problem) String() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
		}
		b.WriteString(": ")
	}
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	b.WriteString(p.Message)
	return b.String()
}

// Problems is the error of an unusable configuration: everything that is wrong with
// it, in the file's order.
type Problems []Problem

func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// sorted also drops problems that were found twice.
func (ps Problems) sorted() Problems {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Message, b.Message))
	})
	return slices.CompactFunc(ps, func(a, b Problem) bool { return a == b })
}

// err returns nil for no problems: an empty Problems in an error isn't nil.
func (ps Problems) err() error {
	if len(ps) == 0 {
		return nil
	}
	return ps.sorted()
}

// place is where a value came from.
type place struct {
	line, column int
	// env is the DEDUPD_ variable that overrode the file.
	env string
	// origin says so in words, for config print; empty: the default.
	origin string
	// pipeline is the path of the pipeline that it is in; empty: none.
	pipeline string
}

// in puts the path of a pipeline before the keys.
func (ps Problems) in(pipeline string) Problems {
	for i := range ps {
		ps[i].Key = strings.TrimSuffix(join(pipeline, ps[i].Key), ".")
	}
	return ps
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// parent is the path one level up.
func parent(path string) string {
	if i := strings.LastIndexAny(path, ".["); i >= 0 {
		return path[:i]
	}
	return ""
}

// problem makes a Problem of a key path, with the place of that key or of the nearest
// one above it.
func (c *Config) problem(path, format string, args ...any) Problem {
	p := Problem{Key: path, File: c.file, Message: fmt.Sprintf(format, args...)}
	for at := path; ; at = parent(at) {
		where := c.places[at]
		if where.env != "" {
			p.File, p.Message = "", p.Message+" (from the environment variable "+where.env+")"
			return p
		}
		if where.line > 0 {
			p.Line, p.Column = where.line, where.column
			p.Key = join(where.pipeline, path)
			return p
		}
		if at == "" {
			return p
		}
	}
}
