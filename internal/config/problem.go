package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong with a configuration, or a warning.
type Problem struct {
	// Key is the path of the key, such as sources[0].kafka.brokers; empty for the
	// file as a whole.
	Key string `json:"key"`
	// File, Line and Column tell where: the key's own place, or that of the
	// nearest key above a missing one. Lines and columns begin with 1; 0: not in
	// a file (an environment variable).
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
	// Message says what is wrong and what to do.
	Message string `json:"message"`
	// Warning tells that the configuration can be used all the same.
	Warning bool `json:"warning"`
	// Excerpt is the line at fault with a caret under the column, for problems of
	// form. It may hold a secret: it is for the terminal, never for a log.
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

// Problems is the error of a configuration that can't be used: everything that
// is wrong with it, in the order of the file.
type Problems []Problem

func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// sorted also drops what was found twice.
func (ps Problems) sorted() Problems {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Message, b.Message))
	})
	return slices.CompactFunc(ps, func(a, b Problem) bool { return a == b })
}

// err is nil for no problem, which a Problems of length 0 as an error is not.
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
	// origin says it in words, for config print; empty: the default.
	origin string
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

// problem describes what is wrong at a key path, with the place of that key or
// of the nearest one above it.
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
			return p
		}
		if at == "" {
			return p
		}
	}
}
