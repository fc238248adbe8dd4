package statement

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

func init() { sinks.Register("statement", New) }

// Config has the keys under sink.statement.
type Config struct {
	// SQL is one statement that reads the relation batch.
	SQL string `yaml:"sql"`
	// Columns are those of batch, as name: FIELD or FIELD::TYPE. Default: id, key, value,
	// topic, lane, position and time, each from the place of that name.
	Columns map[string]string `yaml:"columns"`
	// Expect is returned if SQL returns the column ord of every message that it has applied:
	// the others weren't as the target expects. Default: SQL applies all.
	Expect Expectation `yaml:"expect"`
	// Key are the columns of batch that say which row a message is about, with expect: returned.
	// Messages of different keys share a statement, those of one key take turns.
	Key []string `yaml:"key"`
	// OnMismatch says what happens to a message whose ord SQL doesn't return: dead_letter (the
	// default), ignore or stop.
	OnMismatch policy.Mismatch `yaml:"on_mismatch"`
}

// Expectation says how the statement reports what it has applied.
type Expectation string

const (
	// ExpectNothing is of a statement that applies all messages.
	ExpectNothing Expectation = ""
	// ExpectReturned is of one that returns the column ord of those that it has applied.
	ExpectReturned Expectation = "returned"
)

func (Expectation) Values() []string { return policy.Values(ExpectNothing, ExpectReturned) }

var defaultColumns = map[string]string{
	"id": "id", "key": "key", "value": "value", "topic": "topic", "lane": "lane", "position": "position", "time": "time",
}

// defaultTypes are the types of columns that name none, by their places.
var defaultTypes = map[message.FieldKind]string{
	message.FieldID:       "pg_catalog.text",
	message.FieldKey:      "pg_catalog.bytea",
	message.FieldValue:    "pg_catalog.bytea",
	message.FieldTopic:    "pg_catalog.text",
	message.FieldLane:     "pg_catalog.text",
	message.FieldPosition: "pg_catalog.int8",
	message.FieldTime:     "pg_catalog.timestamptz",
	message.FieldNow:      "pg_catalog.timestamptz",
	message.FieldHeader:   "pg_catalog.text",
	message.FieldJSON:     "pg_catalog.jsonb",
	message.FieldConst:    "pg_catalog.text",
}

// ordinal is the column of batch that dedupd adds.
const ordinal = "ord"

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
	s := &Sink{returns: c.Expect == ExpectReturned, onMismatch: cmp.Or(c.OnMismatch, policy.MismatchDeadLetter)}
	var errs []error
	var err error
	if err = policy.Check(c.Expect); err != nil {
		errs = append(errs, fmt.Errorf("expect: %w", err))
	}
	if err = policy.Check(s.onMismatch); err != nil {
		errs = append(errs, fmt.Errorf("on_mismatch: %w", err))
	} else if c.OnMismatch != "" && c.Expect == ExpectNothing {
		errs = append(errs, errors.New("on_mismatch: only a statement with expect: returned can tell"))
	}
	switch {
	case len(c.Key) > 0 && c.Expect == ExpectNothing:
		errs = append(errs, errors.New("key: only with expect: returned do messages take turns"))
	case len(c.Key) == 0 && s.returns:
		errs = append(errs, errors.New("key: expect: returned needs the columns that say which row a message is about, since messages of one row have to take turns"))
	}
	if s.sql, err = parse(c.SQL); err != nil {
		errs = append(errs, fmt.Errorf("sql: %w", err))
	}
	wanted := c.Columns
	if len(wanted) == 0 {
		wanted = defaultColumns
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		col, typ, err := parseColumn(name, wanted[name])
		if err != nil {
			errs = append(errs, fmt.Errorf("columns.%s: %w", name, err))
			continue
		}
		s.cols, s.types = append(s.cols, col), append(s.types, typ)
	}
	for _, name := range c.Key {
		i := slices.IndexFunc(s.cols, func(col columns.Column) bool { return col.Name == name })
		if i < 0 {
			errs = append(errs, fmt.Errorf("key: %q is not among the columns", name))
			continue
		}
		s.key = append(s.key, i)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// parseColumn reads FIELD or FIELD::TYPE. The type follows the last "::", so a constant that
// contains one needs a type.
func parseColumn(name, spec string) (columns.Column, string, error) {
	var none columns.Column
	if name == ordinal {
		return none, "", errors.New("that is the name of the column that dedupd adds: the place of the message in the batch, from 1")
	}
	if err := columns.CheckName(name); err != nil {
		return none, "", err
	}
	place, typ := spec, ""
	if i := strings.LastIndex(spec, "::"); i >= 0 {
		place, typ = spec[:i], strings.TrimSpace(spec[i+2:])
		switch {
		case typ == "":
			return none, "", fmt.Errorf("%q lacks the type after ::", spec)
		case strings.Contains(typ, "("):
			return none, "", fmt.Errorf("the type %s has a length or precision, to which longer values would be cut without a word; leave it out", typ)
		}
	}
	f, err := message.ParseField(place)
	if err != nil {
		return none, "", err
	}
	byDefault, ok := defaultTypes[f.Kind]
	if !ok {
		return none, "", fmt.Errorf("%q is a way to find an id; once found it is %q", place, "id")
	}
	if typ == "" {
		typ = byDefault
	}
	return columns.Column{Name: name, Field: f}, typ, nil
}
