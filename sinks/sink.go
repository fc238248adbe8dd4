// Package sinks holds the contract between dedupd and the code that has the
// effect of a message: Sink, the narrow Tx it writes through, the errors it may
// answer with, and the registry by which configuration finds it.
//
// It knows no broker and nothing of claims. A custom binary registers its own
// sink in an init function and is a copy of cmd/dedupd/main.go with one more
// import; sinks/sinktest proves that the sink keeps its promises.
package sinks

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/message"
)

// Tx is the transaction that holds the claims of the messages a sink is given.
// It can't be committed or rolled back: whoever opened it does that, once. It is
// an interface because it is a part of pgx.Tx, and because tests wrap it.
//
// It is valid only until Write or Prepare returns and belongs to the goroutine
// that called them. All SQL should name its schema: the search path may be
// anything.
type Tx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error)
}

// Sink has the effect of messages, each id once.
type Sink interface {
	// Write has the effect of msgs inside tx. Messages of one lane stand in lane
	// order; each of them has won its claim in this very transaction, and its ID
	// is filled in. Either all of them take effect or Write returns an error, and
	// then none does: the transaction is rolled back.
	//
	// What the error means:
	//   - Permanent or PermanentAt, or a Postgres error that says the data is at
	//     fault (SQLSTATE classes 21, 22, 23, and 54000): the message at fault is
	//     found and dead-lettered; the others are written.
	//   - a Postgres error that may be the data's fault or the table's, such as a
	//     trigger's exception (class P0, 42501, 42601, 42P01, 44000, XX000 and some
	//     more): the same, but the message is dead-lettered only once another one
	//     was written. Until then the lane is held.
	//   - a Postgres or network error that passes by itself: tried again, as often
	//     as it takes.
	//   - any other error: the lane is held and tried again with backoff.
	//
	// Write may be called by several goroutines at a time, each with its own tx.
	// ctx ends with the transaction's deadline; a Write that goes on for 10 s
	// more is taken to hang, and the worker ends. msgs and all that they point to
	// must not be kept or changed. An effect outside tx is not covered by the
	// promise: it happens again whenever the transaction is tried again.
	Write(ctx context.Context, tx Tx, msgs []message.Message) error
}

// OrderSensitive is a Sink whose effect may depend on the order of messages. A queue
// has none: there an older message may come after a newer one, and undo it.
type OrderSensitive interface {
	// NeedsOrder says why messages out of order do harm and what to set if they may;
	// nil if they don't. It is asked when the configuration has such a source.
	NeedsOrder() error
}

// Preparer is a Sink that has to look at the database before its first Write,
// such as at the types of its table's columns.
type Preparer interface {
	// Prepare is called at start, and again after a Write failed because the
	// database's objects were not as it knew them. Its error keeps the worker
	// from starting, or the lanes held, so it should say what is missing and
	// what to do. It may run while other goroutines are in Write.
	Prepare(ctx context.Context, tx Tx) error
}
