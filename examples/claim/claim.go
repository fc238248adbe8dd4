// Package claim is an example of dedupd as a library: a service that gets payments by
// HTTP, by its own queue or otherwise, and deduplicates them in its own transaction,
// without dedupd's worker.
package claim

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
)

// Open makes the store of one scope. Migrate needs the rights of the schema's owner. A
// service without them leaves it to `dedupd migrate up`.
func Open(ctx context.Context, pool *pgxpool.Pool) (*dedup.Store, error) {
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "payments"})
	if err != nil {
		return nil, err
	}
	_, err = store.Schema().Migrate(ctx)
	return store, err
}

// Pay books a payment once, however often it is called. isNew is false if the payment
// was booked before.
func Pay(ctx context.Context, pool *pgxpool.Pool, store *dedup.Store, id string, cents int64) (isNew bool, err error) {
	err = retry(func() error {
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			unique, err := store.Claim(ctx, tx, []string{id})
			if err != nil {
				return err
			}
			if isNew = unique[0]; !isNew {
				return nil // the transaction that claimed the id has committed
			}
			_, err = tx.Exec(ctx, `INSERT INTO public.payments (id, cents) VALUES ($1, $2)`, id, cents)
			return err
		})
	})
	return isNew && err == nil, err
}

// retry tries again if the claims' generations have changed, or a concurrent duplicate
// held the id for too long.
func retry(do func() error) error {
	var err error
	for range 5 {
		var pg *pgconn.PgError
		if err = do(); !errors.As(err, &pg) || pg.Code != "DD002" && pg.Code != "55P03" && pg.Code != "40P01" {
			return err
		}
	}
	return fmt.Errorf("given up: %w", err)
}
