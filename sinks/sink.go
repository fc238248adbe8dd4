// Package sinks is the contract between dedupd and the code that applies messages: Sink, the
// narrow Tx that it writes through, the errors that it may return, and the registry where the
// configuration finds it.
//
// A custom binary is a copy of cmd/dedupd/main.go with one more import: a package that
// registers its sink in an init function. sinks/sinktest proves that a sink keeps the
// contract.
package sinks

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/message"
)

// Tx is the transaction that holds the claims of a sink's messages. It is the part of pgx.Tx
// that doesn't commit or roll back: dedupd does that, once.
//
// It is valid until Write or Prepare returns, and belongs to the goroutine that called them.
// All SQL should name its schema: the search path may be anything.
type Tx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error)
}

// Sink applies messages, each id once.
type Sink interface {
	// Write applies the batch's messages inside tx. Those of one lane are in lane order; each
	// is new, claimed in this very transaction, and its ID is set. Either Write applies all
	// of them or it returns an error, and the transaction is rolled back. A message whose
	// effect the target doesn't need counts as applied, and Batch.Outcome says why. What a
	// duplicate is to be told is a message's Batch.Result.
	//
	// What the error means:
	//   - Permanent or PermanentAt, or a Postgres error that blames the data (SQLSTATE
	//     classes 21, 22, 23, and 54000 and 54001): the message at fault is found and
	//     dead-lettered; the others are written.
	//   - a Postgres error that may blame the data or the table, such as a trigger's
	//     exception (class P0, 42501, 42601, 42P01, 44000, XX000 and some more): the same,
	//     but the message is dead-lettered only once another one was written. Until then
	//     the lane is held.
	//   - a Postgres or network error that passes by itself: tried again, as often as it
	//     takes.
	//   - HoldAt: what comes before that message in its lane is written, then the lane is held
	//     and tried again with backoff.
	//   - any other error: the lane is held and tried again with backoff.
	//
	// Several goroutines may call Write at a time, each with its own tx. ctx ends with the
	// transaction's deadline; a Write that goes on for 10 s more is taken to hang, and the
	// worker ends. A write outside tx isn't covered: it happens again whenever the
	// transaction is tried again.
	Write(ctx context.Context, tx Tx, batch *Batch) error
}

// OrderSensitive is a Sink whose result may depend on the order of messages. A queue has no
// order: an older message may come after a newer one, and undo it.
type OrderSensitive interface {
	// NeedsOrder says why messages out of order do harm, and what to set if that is
	// accepted; nil: they do none. It is called if the configuration has a queue.
	NeedsOrder() error
}

// Remembering is a Sink that knows messages again by their ids itself.
type Remembering interface {
	// NeedsID says what knows messages by their ids; nil: nothing does. It is called if the
	// configuration doesn't say where the id is, and the strategy needs none.
	NeedsID() error
}

// ReplaySensitive is a Sink in which a dead letter that is replayed may do harm: it comes after
// messages that are newer.
type ReplaySensitive interface {
	// Overwrites says what the message would write over, and what to look at first; nil:
	// nothing. If it isn't nil, the message is replayed only if its operator says so.
	Overwrites(m *message.Message) error
}

// Preparer is a Sink that has to look at the database before its first Write, such as at the
// types of its table's columns.
type Preparer interface {
	// Prepare is called at start, and again after a Write failed because the database's
	// objects had changed. Its error keeps the worker from starting, or the lanes held, so
	// it should say what is missing and what to do. It may run while other goroutines are
	// in Write.
	Prepare(ctx context.Context, tx Tx) error
}

// Selective is a Sink that doesn't want every message. What it doesn't want is counted as
// filtered: nothing is claimed for it, and Write doesn't get it.
type Selective interface {
	// Wants is asked before the message's id is looked at: ID isn't set. It decides by the
	// message alone, so that copies are treated alike. The error says why it can't tell: the
	// message becomes a dead letter. Several goroutines may call it at a time.
	Wants(m *message.Message) (bool, error)
}
