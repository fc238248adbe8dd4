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
	// ModeUpsert adds a row or overwrites columns of the one with the same key. Each column
	// takes its value of the last message of the key that has one, also within a batch. A
	// tombstone is dead-lettered: it asks to delete the row.
	ModeUpsert = "upsert"

	// ModeVersioned is upsert for rows with a version: a message is stale unless its version
	// is above its row's, and changes nothing. So the order of messages doesn't matter.
	ModeVersioned = "versioned"

	// ModeUpdate changes the row of a message's key if it is as the message expects, and adds
	// none.
	ModeUpdate = "update"

	// ModeAppend adds each message to its stream as an event, with the number after that of
	// the stream's last event.
	ModeAppend = "append"
)

// Config has the keys under sink.table.
type Config struct {
	// Name is "schema.table", exactly as the catalog has it: nothing is folded to lower
	// case. A part that contains a dot is written in double quotes.
	Name string `yaml:"name"`
	// Mode is insert (the default), upsert, versioned, update or append.
	Mode string `yaml:"mode"`
	// Key has the columns that tell whether two rows are the same. There must be a unique
	// index on exactly these. All modes but insert require it.
	Key []string `yaml:"key"`
	// OnPresent says what happens to a message whose row is there already: ignore (the
	// default), compare or dead_letter. Only mode insert with a key reads it.
	OnPresent policy.Present `yaml:"on_present"`
	// Absent says what happens to a column whose place a message doesn't have: keep (the
	// default) or null. Only the modes upsert and update read it.
	Absent policy.Absent `yaml:"absent"`
	// AcceptReordering lets the modes upsert and update read from a queue, where an older
	// message may come last, and win; and mode append, which numbers events as they come.
	AcceptReordering bool `yaml:"accept_reordering"`
	// Version is the column with the version, for mode versioned; or with an event's number
	// in its stream, for mode append, which fills it.
	Version string `yaml:"version"`
	// OnStale says what happens to a message that is stale: ignore (the default) or
	// dead_letter. Only mode versioned reads it.
	OnStale policy.Stale `yaml:"on_stale"`
	// Expect says which place in the message has what a column of the row must hold, for mode
	// update. NULL is as good as any other value.
	Expect map[string]string `yaml:"expect"`
	// OnMismatch says what happens to a message whose row or stream isn't as it expects:
	// dead_letter (the default), ignore or stop. Only the modes update and append read it.
	OnMismatch policy.Mismatch `yaml:"on_mismatch"`
	// Stream and Operation are the columns that say to which stream an event belongs, and
	// which message it was. There must be unique indexes on just (Stream, Version) and
	// (Stream, Operation). EventID is a column for an id of the event, or empty. For mode
	// append.
	Stream    string `yaml:"stream"`
	Operation string `yaml:"operation"`
	EventID   string `yaml:"event_id"`
	// Expected is the place, header:NAME or json:PATH, of the version that the message
	// expects its stream to be at. Only mode append reads it.
	Expected string `yaml:"expected"`
	// History keeps the ids of a row's last messages in the row itself, so that a message that
	// comes again changes nothing. Only mode upsert reads it.
	History History `yaml:"history"`
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

	c.Columns = c.withOperation()
	s := &Sink{key: c.Key}
	var err error
	if s.schema, s.table, err = splitName(c.Name); err != nil {
		fail("name: %w", err)
	}
	if s.mode, err = c.newMode(s); err != nil {
		errs = append(errs, err)
	}
	if len(c.Columns) == 0 {
		fail("columns: none are given, so nothing would be written; name them with the place that fills each, such as {id: id, payload: value}")
	}
	for _, name := range slices.Sorted(maps.Keys(c.Columns)) {
		col, err := placed("columns", name, c.Columns[name])
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.cols = append(s.cols, col)
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

// placed is a column, and the place that a key of the configuration names for it.
func placed(key, name, place string) (columns.Column, error) {
	f, err := message.ParseField(place)
	switch {
	case err != nil:
		return columns.Column{}, fmt.Errorf("%s.%s: %w", key, name, err)
	case f.Kind == message.FieldCloudEvent || f.Kind == message.FieldNATSMsgID:
		return columns.Column{}, fmt.Errorf("%s.%s: %q is a way to find an id; once found it is %q", key, name, f, "id")
	}
	if err := columns.CheckName(name); err != nil {
		return columns.Column{}, fmt.Errorf("%s: %w", key, err)
	}
	return columns.Column{Name: name, Field: f}, nil
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
