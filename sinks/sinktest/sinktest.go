// Package sinktest proves that a sink keeps the contract of sinks.Sink: what it writes is
// committed or rolled back with the transaction that it is given, a batch is applied as a
// whole, a bad message is named instead of tried for ever, and many goroutines may call it at
// a time.
//
// It is for everybody's sinks. It needs a Postgres that the sink can write to, and a way to
// count what it wrote:
//
//	func TestSink(t *testing.T) {
//		sinktest.Run(t, sinktest.Config{
//			Pool:    pool,
//			New:     func() sinks.Sink { return mysink.New() },
//			Message: func(n int) message.Message { ... },
//			Count:   sinktest.Rows("public.orders"),
//			Poison:  func() message.Message { ... },
//		})
//	}
//
// Run it with -race: some violations show only there.
package sinktest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Querier reads from the database. The pool sees what is committed, a transaction also its
// own writes.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Config says what is tested, and how its writes are counted.
type Config struct {
	// Pool is a database that nobody else writes to meanwhile. It needs at least five
	// connections.
	Pool *pgxpool.Pool
	// New makes the sink. Each rule makes its own.
	New func() sinks.Sink
	// Message returns a message that the sink can write. Different n must have different
	// ids and different effects. The same n must return the same message, in memory of its
	// own.
	Message func(n int) message.Message
	// Count counts the messages that are applied, as db sees it.
	Count func(ctx context.Context, db Querier) (int, error)
	// Poison returns a message that the sink can never write. Nil: the sink takes any.
	Poison func() message.Message
	// Timeout is how long one call of the sink may take. Default 30 s.
	Timeout time.Duration
}

// Rows is a Count for sinks that write a row for each message. table is SQL.
func Rows(table string) func(ctx context.Context, db Querier) (int, error) {
	return func(ctx context.Context, db Querier) (n int, err error) {
		err = db.QueryRow(ctx, "SELECT count(*) FROM "+table).Scan(&n)
		return n, err
	}
}

// rule is one promise of a sink.
type rule struct {
	name string
	test func(h *harness)
}

var rules = []rule{
	{"WritesWithinTheTransaction", writesWithinTheTransaction},
	{"LeavesTheTransactionOpen", leavesTheTransactionOpen},
	{"AllOfABatchOrAnError", allOfABatch},
	{"SaysWhatItWrote", saysWhatItWrote},
	{"WritesAgainAfterARollback", writesAgainAfterARollback},
	{"GivesResultsThatAreKept", givesResultsThatAreKept},
	{"NamesThePoison", namesThePoison},
	{"TransactionsAreApart", transactionsAreApart},
	{"ManyWriteAtATime", manyWriteAtATime},
	{"EndsWithItsContext", endsWithItsContext},
	{"LeavesMessagesAlone", leavesMessagesAlone},
	{"PreparesMoreThanOnce", preparesMoreThanOnce},
}

// Run tests a sink against each rule in a subtest.
func Run(t *testing.T, c Config) {
	t.Helper()
	if err := c.check(); err != nil {
		t.Fatalf("sinktest: %v", err)
	}
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) { runRule(t, c, r) })
	}
}

func (c Config) check() error {
	for name, missing := range map[string]bool{
		"Pool": c.Pool == nil, "New": c.New == nil, "Message": c.Message == nil, "Count": c.Count == nil,
	} {
		if missing {
			return fmt.Errorf("the Config lacks %s", name)
		}
	}
	return nil
}

func runRule(t testing.TB, c Config, r rule) {
	t.Helper()
	if c.Timeout == 0 {
		c.Timeout = 30 * time.Second
	}
	h := &harness{TB: t, Config: c, sink: c.New()}
	h.prepare()
	r.test(h)
}
