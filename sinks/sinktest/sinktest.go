// Package sinktest proves that a sink keeps the promises of sinks.Sink: that its
// effect stands and falls with the transaction it is handed, that a batch has
// its effect as a whole, that a bad message is named rather than hung on, and
// that many may call it at a time.
//
// It is for everybody's sinks. It needs a Postgres to which the sink's effect can
// be committed, and a way to count that effect:
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
// Run it with -race: some of what a sink may not do shows only there.
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

// Querier reads from the database: the pool sees what is committed, a
// transaction also what is its own.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Config says what is tested and how its effect is seen.
type Config struct {
	// Pool is a database that nobody else writes to meanwhile. It needs five
	// connections or more.
	Pool *pgxpool.Pool
	// New makes the sink. Each rule asks for one of its own.
	New func() sinks.Sink
	// Message gives a message that the sink can write. Different n must give
	// different ids and different effects; the same n the same message, in
	// memory of its own.
	Message func(n int) message.Message
	// Count counts the effects that db sees: how many messages have had theirs.
	Count func(ctx context.Context, db Querier) (int, error)
	// Poison gives a message that the sink can never write. Nil where there is
	// none: a sink that takes anything.
	Poison func() message.Message
	// Timeout is how long one call of the sink may take. Default 30 s.
	Timeout time.Duration
}

// Rows is a Count for sinks that make one row of each message in a table, whose
// name is given as SQL.
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
	{"WritesAgainAfterARollback", writesAgainAfterARollback},
	{"NamesThePoison", namesThePoison},
	{"TransactionsAreApart", transactionsAreApart},
	{"ManyWriteAtATime", manyWriteAtATime},
	{"EndsWithItsContext", endsWithItsContext},
	{"LeavesMessagesAlone", leavesMessagesAlone},
	{"PreparesMoreThanOnce", preparesMoreThanOnce},
}

// Run tests a sink against every rule, one subtest for each.
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
