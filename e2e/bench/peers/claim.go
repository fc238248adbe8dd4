package main

// This file stands for what every peer with a transaction a message does in
// Postgres: the claim and the row in one transaction, tried again until it is
// known to have been committed.

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// idHeader names the Kafka header with the message's id.
const idHeader = "id"

// pause is how long a peer waits before it tries again what failed.
const pause = 500 * time.Millisecond

// id is a plain array: pgx sends one in binary, but a uuid.UUID as text.
type id = [16]byte

// parseID fails only where trying again can't help: the message has no usable
// id.
func parseID(header []byte) (id, error) {
	u, err := uuid.ParseBytes(header)
	if err != nil {
		return id{}, fmt.Errorf("header %s: %w", idHeader, err)
	}
	return id(u), nil
}

// land writes the row, unless its id has been claimed before. After an error the
// transaction may have been committed all the same; landing it again is safe,
// since the claim then stands.
func land(ctx context.Context, pool *pgxpool.Pool, id id, payload []byte) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `INSERT INTO claims (id) VALUES ($1) ON CONFLICT DO NOTHING`, id)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO rows (id, payload) VALUES ($1, $2)`, id, payload)
		return err
	})
}

// untilDone tries again until it works; its error is the context's.
func untilDone(ctx context.Context, what string, try func() error) error {
	for {
		err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		log.Printf("%s: %v", what, err)
		if err := sleep(ctx); err != nil {
			return err
		}
	}
}

// sleep waits for the pause, or for the end of the context, whose error it
// returns.
func sleep(ctx context.Context) error {
	select {
	case <-time.After(pause):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
