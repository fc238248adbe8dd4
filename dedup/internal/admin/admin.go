// Package admin runs what people do by hand: in one transaction with the audit's line of
// it, and with errors that say what helps.
package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/sqlstate"
)

// Tx does what a person asked for in one transaction, so that it and its line in the audit
// are committed together or not at all. It waits for a worker's transaction that holds the
// same row.
func Tx(ctx context.Context, s *schema.Schema, work func(ctx context.Context, tx pgx.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return Hint(pgx.BeginTxFunc(ctx, s.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, pipeline.SetLimits, pipeline.LockTimeout, pipeline.StatementTimeout, pipeline.IdleTimeout); err != nil {
			return err
		}
		return work(ctx, tx)
	}))
}

// Audit records what a person did. The database adds its role and the time.
func Audit(ctx context.Context, tx pgx.Tx, s *schema.Schema, actor, action, subject string, detail any) error {
	text, err := json.Marshal(detail)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `INSERT INTO `+s.Object("audit")+` (scope, actor, action, subject, detail) VALUES ($1, $2, $3, $4, $5::text::jsonb)`,
		s.Scope, actor, action, string(pipeline.CleanText(subject)), string(text))
	return err
}

// Hint adds to an error what a person can do about it, if anything.
func Hint(err error) error {
	switch sqlstate.Of(err) {
	case sqlstate.InsufficientPrivilege:
		return fmt.Errorf("%w: this needs the rights of the schema's owner, so run it with a database.url of that role", err)
	case sqlstate.LockNotAvailable:
		return fmt.Errorf("%w: another transaction has held it for %s; try again", err, pipeline.LockTimeout)
	}
	return err
}
