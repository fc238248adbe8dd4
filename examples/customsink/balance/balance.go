// Package balance is an example of a custom sink. It adds amounts to the balances of
// accounts. That effect is wrong as soon as a message has it twice, and an upsert by
// message id can't express it.
package balance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/sinks"
)

func init() { sinks.Register("balance", New) }

// Config is the part of the configuration under sink.balance.
type Config struct {
	// Table is schema.table, with account as its primary key:
	//
	//	CREATE TABLE public.balances (account text PRIMARY KEY, cents bigint NOT NULL, entries bigint NOT NULL);
	Table string `yaml:"table"`
}

// Sink writes to one table. It has no state: many may call it at a time.
type Sink struct{ sql string }

// New makes the sink from its part of the configuration. decode refuses unknown keys,
// with their line.
func New(decode func(into any) error) (sinks.Sink, error) {
	var c Config
	if err := decode(&c); err != nil {
		return nil, err
	}
	schema, table, ok := strings.Cut(c.Table, ".")
	if !ok || schema == "" || table == "" {
		return nil, fmt.Errorf("table: %q is not schema.table", c.Table)
	}
	return &Sink{`INSERT INTO ` + pgx.Identifier{schema, table}.Sanitize() + ` AS b (account, cents, entries)
		SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[])
		ON CONFLICT (account) DO UPDATE SET cents = b.cents + excluded.cents, entries = b.entries + excluded.entries`}, nil
}

type entry struct {
	Account string `json:"account"`
	Cents   int64  `json:"cents"`
}

// Write applies the batch with one statement.
func (s *Sink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	cents, count := map[string]int64{}, map[string]int64{}
	for i, m := range batch.Messages() {
		var e entry
		err := json.Unmarshal(m.Value, &e)
		if err == nil && e.Account == "" {
			err = errors.New("the entry names no account")
		}
		if err != nil {
			return sinks.PermanentAt(i, err) // this message becomes a dead letter; the others are written again
		}
		cents[e.Account] += e.Cents
		count[e.Account]++
	}
	// Sorted, so that all workers lock accounts in one order.
	accounts := slices.Sorted(maps.Keys(cents))
	sums, entries := make([]int64, len(accounts)), make([]int64, len(accounts))
	for i, a := range accounts {
		sums[i], entries[i] = cents[a], count[a]
	}
	_, err := tx.Exec(ctx, s.sql, accounts, sums, entries)
	return err
}
