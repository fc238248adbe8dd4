package table

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

func init() { sinks.Register("table", New) }

// The modes of writing.
const (
	// ModeInsert adds a row for each message, also for a tombstone, whose value and JSON
	// places are NULL. With a key, an existing row stays as it is. Without one, a message
	// that violates a constraint is dead-lettered.
	ModeInsert = "insert"
	// ModeUpsert adds a row or overwrites the one with the same key. The last message of a
	// key wins, also within a batch. A tombstone is dead-lettered: it would write NULL over
	// the row.
	ModeUpsert = "upsert"

	modeVersioned = "versioned"
	modeAppend    = "append"
)

// Config has the keys under sink.table.
type Config struct {
	// Name is "schema.table", exactly as the catalog has it: nothing is folded to lower
	// case. A part that contains a dot is written in double quotes.
	Name string `yaml:"name"`
	// Mode is insert (the default) or upsert.
	Mode string `yaml:"mode"`
	// Key has the columns that tell whether two rows are the same. There must be a unique
	// index on exactly these. Upsert requires it.
	Key []string `yaml:"key"`
	// AcceptReordering lets mode upsert read from a queue, where an older message may come
	// last, and win.
	AcceptReordering bool `yaml:"accept_reordering"`
	// Version is for a mode that this version doesn't have.
	Version string `yaml:"version"`
	// Columns says which place in the message fills each column: id, key, value, topic,
	// lane, position, time, header:NAME, json:PATH, now or const:TEXT.
	Columns map[string]string `yaml:"columns"`
}

// New makes the sink from its part of the configuration. The error joins everything that is
// wrong with it.
func New(decode func(into any) error) (sinks.Sink, error) {
	var c Config
	if err := decode(&c); err != nil {
		return nil, err
	}
	return c.Sink()
}

// Sink makes the sink. It checks what needs no database.
func (c Config) Sink() (*Sink, error) {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	s := &Sink{mode: c.Mode, key: c.Key, acceptReordering: c.AcceptReordering}
	var err error
	if s.schema, s.table, err = splitName(c.Name); err != nil {
		fail("name: %w", err)
	}
	switch c.Mode {
	case "":
		s.mode = ModeInsert
	case ModeInsert:
	case ModeUpsert:
		if len(c.Key) == 0 {
			fail("key: mode upsert needs the columns that identify a row, such as [id]")
		}
	case modeVersioned, modeAppend:
		fail("mode: %s is not in this version yet; use insert or upsert", c.Mode)
	default:
		fail("mode: %q is none; use insert or upsert", c.Mode)
	}
	if c.Version != "" && c.Mode != modeVersioned {
		fail("version: only mode versioned reads it")
	}
	if c.AcceptReordering && c.Mode != ModeUpsert {
		fail("accept_reordering: only mode upsert reads it")
	}
	if len(c.Columns) == 0 {
		fail("columns: none are given, so nothing would be written; name them with the place that fills each, such as {id: id, payload: value}")
	}
	for _, name := range slices.Sorted(maps.Keys(c.Columns)) {
		f, err := message.ParseField(c.Columns[name])
		switch {
		case err != nil:
			fail("columns.%s: %w", name, err)
			continue
		case f.Kind == message.FieldCloudEvent || f.Kind == message.FieldNATSMsgID:
			fail("columns.%s: %q is a way to find an id; once found it is %q", name, f, "id")
		}
		if err := checkName(name); err != nil {
			fail("columns: %w", err)
		}
		s.cols = append(s.cols, columns.Column{Name: name, Field: f})
	}
	for i, k := range c.Key {
		if _, ok := c.Columns[k]; !ok && len(c.Columns) > 0 {
			fail("key: %q is not among the columns", k)
		}
		if slices.Contains(c.Key[:i], k) {
			fail("key: %q is there twice", k)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// splitName reads schema.table; parts may be in double quotes.
func splitName(name string) (schema, table string, err error) {
	var parts []string
	for rest := name; ; {
		var part string
		if quoted, ok := strings.CutPrefix(rest, `"`); ok {
			for {
				before, after, found := strings.Cut(quoted, `"`)
				if !found {
					return "", "", fmt.Errorf("%s has a quote that doesn't end", name)
				}
				part, quoted = part+before, after
				if !strings.HasPrefix(quoted, `"`) {
					break
				}
				part, quoted = part+`"`, quoted[1:]
			}
			rest = quoted
		} else {
			end := strings.IndexByte(rest, '.')
			if end < 0 {
				end = len(rest)
			}
			part, rest = rest[:end], rest[end:]
		}
		parts = append(parts, part)
		if rest == "" {
			break
		}
		if rest[0] != '.' {
			return "", "", fmt.Errorf("%s is no schema.table", name)
		}
		rest = rest[1:]
	}
	if len(parts) != 2 || parts[0] == "" || parts[1] == "" {
		return "", "", fmt.Errorf("%q is no table with its schema; write it as in public.orders", name)
	}
	return parts[0], parts[1], errors.Join(checkName(parts[0]), checkName(parts[1]))
}

// checkName refuses a name that Postgres would cut, or can't hold.
func checkName(name string) error {
	const most = 63 // bytes, NAMEDATALEN - 1
	switch {
	case name == "":
		return errors.New("a name is empty")
	case len(name) > most:
		return fmt.Errorf("%q is longer than the %d bytes that Postgres keeps of a name", name, most)
	case strings.IndexByte(name, 0) >= 0:
		return fmt.Errorf("%q holds a NUL", name)
	case !utf8.ValidString(name):
		return fmt.Errorf("%q is not valid UTF-8", name)
	}
	return nil
}
