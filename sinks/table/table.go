// Package table is the sink that writes each message as a row of a table. How it does so is
// its mode, such as insert or upsert.
//
// It creates and alters no table. It reads the target from the catalog: the columns, their
// types, and the unique index behind the key. Postgres casts the values, so every type that
// can be read from text works, and nothing is cut or rounded that an INSERT typed by hand
// wouldn't cut or round.
package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// Sink writes to one table. It may be used by many goroutines.
type Sink struct {
	schema, table string
	mode          mode
	key           []string
	cols          []columns.Column // that are filled, without their types
	expected      []columns.Column // that are compared with what a message expects, the same
	current       atomic.Pointer[plan]
	changed       atomic.Bool  // the target has changed once: see distrust
	doubt         atomic.Int64 // until when documents are read before they are sent, in Unix nanoseconds: see readsFirst
}

var (
	_ sinks.Sink            = (*Sink)(nil)
	_ sinks.Preparer        = (*Sink)(nil)
	_ sinks.OrderSensitive  = (*Sink)(nil)
	_ sinks.ReplaySensitive = (*Sink)(nil)
)

// String is the table's name as the configuration has it.
func (s *Sink) String() string { return s.schema + "." + s.table }

// sql is the table's name as SQL.
func (s *Sink) sql() string { return pgx.Identifier{s.schema, s.table}.Sanitize() }

// Write adds or overwrites a row for each message, in one statement. Its error is
// PermanentAt for a message that doesn't fit the columns' types, else Postgres' own.
func (s *Sink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	if len(msgs) == 0 {
		return nil
	}
	if err := s.tombstones(msgs); err != nil {
		return err
	}
	p := s.current.Load()
	if p == nil {
		var err error
		if p, err = s.prepare(ctx, tx); err != nil {
			return err
		}
	}
	if err := s.send(ctx, tx, p, batch); err != nil {
		return fmt.Errorf("write to %s: %w", s, err)
	}
	return nil
}

// NeedsOrder is an error for a mode by which an older message would undo a newer one.
func (s *Sink) NeedsOrder() error { return s.mode.needsOrder() }

// NeedsID is an error for a mode whose rows remember their messages.
func (s *Sink) NeedsID() error {
	if _, ok := s.mode.(*remembering); !ok {
		return nil
	}
	return errors.New("history: rows know copies by their ids, and without id.from the id is the strategy's own, which tells them nothing new; say where the producer's id is as id.from, such as header:message-id")
}

// Overwrites is an error for a mode by which an older message would undo a newer one.
func (s *Sink) Overwrites(*message.Message) error {
	if !s.mode.undoes() {
		return nil
	}
	return fmt.Errorf("it would write its old state over what newer messages may have written to %s; look at the row first", s)
}

// keeps and undoes are mode's methods for those that write every column, and for those that
// compare first.
func (s *Sink) keeps(columns.Column) bool { return false }
func (s *Sink) undoes() bool              { return false }

// fillsItself and reads are mode's methods for those that write what places in messages hold,
// and nothing else.
func (s *Sink) fillsItself() []string          { return nil }
func (s *Sink) reads(*target) []columns.Column { return nil }

// tombstones refuses messages without a value if NULL would be written over a row. Such
// a message asks to delete the row, which no mode does. An empty value is no
// tombstone, nor is JSON's null. NATS can't tell empty from absent, and so has none.
func (s *Sink) tombstones(msgs []message.Message) error {
	if !s.mode.overwrites() || !slices.ContainsFunc(s.cols, func(c columns.Column) bool {
		return c.Field.Kind == message.FieldValue || c.Field.Kind == message.FieldJSON
	}) {
		return nil
	}
	var bad []error
	for i := range msgs {
		if msgs[i].Value == nil {
			bad = append(bad, sinks.PermanentAt(i, errTombstone))
		}
	}
	return errors.Join(bad...)
}

var errTombstone = errors.New("it is a tombstone (its value is null): NULL would be written over the row's columns, and no row is deleted; " +
	"use sink.statement to delete what tombstones name, or sink.table.mode insert to keep them as rows")
