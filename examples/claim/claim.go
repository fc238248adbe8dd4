// Package claim is an example of dedupd as a library: a service that takes orders
// by HTTP, by a queue of its own or however else, and deduplicates them in its
// own transaction, without dedupd's worker.
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

// Open makes the store of one scope. Migrate needs the rights of the schema's
// owner; a service that hasn't got them leaves it to `dedupd migrate up`.
func Open(ctx context.Context, pool *pgxpool.Pool) (*dedup.Store, error) {
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "payments"})
	if err != nil {
		return nil, err
	}
	_, err = store.Schema().Migrate(ctx)
	return store, err
}

// Pay books a payment once, however often it is asked to. isNew is false when the
// payment was booked before.
func Pay(ctx context.Context, pool *pgxpool.Pool, store *dedup.Store, id string, cents int64) (isNew bool, err error) {
	err = retry(func() error {
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			won, err := store.Claim(ctx, tx, []string{id})
			if err != nil {
				return err
			}
			if isNew = won[0]; !isNew {
				return nil // whoever claimed the id has committed
			}
			_, err = tx.Exec(ctx, `INSERT INTO public.payments (id, cents) VALUES ($1, $2)`, id, cents)
			return err
		})
	})
	return isNew && err == nil, err
}

// retry tries again what ended by the claims' generations having changed, or by a
// twin that held the id for too long.
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
