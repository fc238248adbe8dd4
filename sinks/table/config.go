package table

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/internal/policy"
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

	// ModeVersioned is upsert for rows with a version: a message is stale unless its version
	// is above its row's, and changes nothing. So the order of messages doesn't matter.
	ModeVersioned = "versioned"

	modeAppend = "append"
)

// Config has the keys under sink.table.
type Config struct {
	// Name is "schema.table", exactly as the catalog has it: nothing is folded to lower
	// case. A part that contains a dot is written in double quotes.
	Name string `yaml:"name"`
	// Mode is insert (the default), upsert or versioned.
	Mode string `yaml:"mode"`
	// Key has the columns that tell whether two rows are the same. There must be a unique
	// index on exactly these. Upsert and versioned require it.
	Key []string `yaml:"key"`
	// OnPresent says what happens to a message whose row is there already: ignore (the
	// default), compare or dead_letter. Only mode insert with a key reads it.
	OnPresent policy.Present `yaml:"on_present"`
	// AcceptReordering lets mode upsert read from a queue, where an older message may come
	// last, and win.
	AcceptReordering bool `yaml:"accept_reordering"`
	// Version is the column with the version; for mode versioned.
	Version string `yaml:"version"`
	// OnStale says what happens to a message that is stale: ignore (the default) or
	// dead_letter. Only mode versioned reads it.
	OnStale policy.Stale `yaml:"on_stale"`
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

	s := &Sink{mode: c.Mode, key: c.Key, version: c.Version, onPresent: c.OnPresent, onStale: c.OnStale, acceptReordering: c.AcceptReordering}
	var err error
	if s.schema, s.table, err = splitName(c.Name); err != nil {
		fail("name: %w", err)
	}
	switch c.Mode {
	case "":
		s.mode = ModeInsert
	case ModeInsert:
	case ModeUpsert, ModeVersioned:
		if len(c.Key) == 0 {
			fail("key: mode %s needs the columns that identify a row, such as [id]", c.Mode)
		}
	case modeAppend:
		fail("mode: append is not in this version yet; use insert, upsert or versioned")
	default:
		fail("mode: %q is none; use insert, upsert or versioned", c.Mode)
	}
	switch {
	case c.Mode != ModeVersioned && c.Version != "":
		fail("version: only mode versioned reads it")
	case c.Mode != ModeVersioned:
	case c.Version == "":
		fail("version: mode versioned needs the column that tells which of two states is newer")
	case slices.Contains(c.Key, c.Version):
		fail("version: %q is part of the key, so each version would be a row of its own", c.Version)
	case len(c.Columns) > 0 && c.Columns[c.Version] == "":
		fail("version: %q is not among the columns", c.Version)
	}
	if c.OnStale == "" {
		s.onStale = policy.StaleIgnore
	} else if err := policy.Check(c.OnStale); err != nil {
		fail("on_stale: %w", err)
	} else if c.Mode != ModeVersioned {
		fail("on_stale: only mode versioned reads it")
	}
	if c.OnPresent == "" {
		s.onPresent = policy.PresentIgnore
	} else if err := policy.Check(c.OnPresent); err != nil {
		fail("on_present: %w", err)
	} else if s.mode != ModeInsert || len(c.Key) == 0 {
		fail("on_present: only mode insert with a key reads it")
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
		if err := columns.CheckName(name); err != nil {
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
	parts := schemaAndTable.FindStringSubmatch(name)
	if parts == nil {
		return "", "", fmt.Errorf("%q is no table with its schema; write it as in public.orders", name)
	}
	part := func(plain, quoted string) string { return plain + strings.ReplaceAll(quoted, `""`, `"`) }
	schema, table = part(parts[1], parts[2]), part(parts[3], parts[4])
	return schema, table, errors.Join(columns.CheckName(schema), columns.CheckName(table))
}

var schemaAndTable = func() *regexp.Regexp {
	const part = `(?:([^".][^.]*)|"((?:[^"]|"")+)")`
	return regexp.MustCompile(`^` + part + `\.` + part + `$`)
}()
