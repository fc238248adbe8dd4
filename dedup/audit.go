package dedup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// byHand does what a person asked for, in one transaction, so that it and the
// line of the audit that tells of it stand or fall together. It waits for a
// worker's transaction that holds the same row.
func (s *Store) byHand(ctx context.Context, work func(ctx context.Context, tx pgx.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return cure(pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, setLimits, lockTimeout, statementTimeout, idleTimeout); err != nil {
			return err
		}
		return work(ctx, tx)
	}))
}

// setLimits sets a transaction's time-outs. What was told to have been done must
// survive a crash.
const setLimits = `SELECT set_config('lock_timeout', $1, true), set_config('statement_timeout', $2, true),
	set_config('idle_in_transaction_session_timeout', $3, true), set_config('synchronous_commit', CASE c WHEN 'off' THEN 'on' ELSE c END, true) FROM current_setting('synchronous_commit') c`

// audit notes what a person did. The database adds its role and the time.
func (s *Store) audit(ctx context.Context, tx pgx.Tx, actor, action, subject string, detail any) error {
	text, err := json.Marshal(detail)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `INSERT INTO `+s.name("audit")+` (scope, actor, action, subject, detail) VALUES ($1, $2, $3, $4, $5::text::jsonb)`,
		s.scope, actor, action, string(cleanText(subject)), string(text))
	return err
}

// cure adds to an error what helps against it, where a person can do something.
func cure(err error) error {
	switch sqlstate(err) {
	case "42501":
		return fmt.Errorf("%w: this needs the rights of the schema's owner, so run it with a database.url of that role", err)
	case "55P03":
		return fmt.Errorf("%w: another transaction has held it for %s; try again", err, lockTimeout)
	}
	return err
}

// tries is how often the work of a person's command is begun anew when others
// stood in its way.
const tries = 10

// again tries work until nothing passing stands in its way: the generations
// have changed, a lock was held for too long, a deadlock. Only an error that
// the server has told counts, since behind any other a COMMIT may have landed.
func (s *Store) again(ctx context.Context, work func() error) error {
	wait := 50 * time.Millisecond
	for n := 1; ; n++ {
		err := work()
		stale, reaction := sqlstate(err) == stateCatalog, react(err)
		if err == nil || n == tries || answer(err) == nil || !stale && reaction != retry && reaction != internal {
			return err
		}
		if stale {
			if _, failed := s.refresh(ctx); failed != nil {
				return errors.Join(err, failed)
			}
		}
		if !pause(ctx, wait) {
			return err
		}
		wait = min(2*wait, 2*time.Second)
	}
}
