package generations

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/admin"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/internal/wait"
)

// retentionLock is the class of the advisory lock that the leader holds during a step
// ("dedr").
const retentionLock = 0x64656472

// AsLeader runs one step of retention in a transaction that holds the scope's retention
// lock. led is false, and nothing done, if another process holds it. The lock ends with
// the step and each step leaves things in order, so the leader may change between any two.
func (s *Set) AsLeader(ctx context.Context, work func(ctx context.Context, tx pgx.Tx) error) (led bool, err error) {
	c, err := s.Loaded(ctx)
	if err != nil {
		return false, err
	}
	err = pgx.BeginTxFunc(ctx, s.schema.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('lock_timeout', '1s', true), set_config('statement_timeout', '60s', true),
			set_config('idle_in_transaction_session_timeout', $1, true)`, pipeline.IdleTimeout); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT pg_catalog.pg_try_advisory_xact_lock($1, $2)`, retentionLock, c.ScopeID).Scan(&led); err != nil || !led {
			return err
		}
		return work(ctx, tx)
	})
	return led, err
}

// Prepare makes the table that the next rotation opens, and any generation's table of
// results that was lost, unless they are there.
func (s *Set) Prepare(ctx context.Context) (led bool, err error) {
	led, err = s.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT `+s.name("prepare_generation")+`($1)`, s.schema.Scope)
		return err
	})
	if err != nil {
		err = fmt.Errorf("prepare the next generation: %w", err)
	}
	return led, err
}

// A change of the catalog waits for the rotation lock, and all new claims wait with it. So
// the first wait is short. Each further try waits twice as long: where transactions last
// for seconds, claims wait for each other anyway, and a rotation that never comes is worse.
//
// The longest wait outlasts every transaction of a worker, which gives up after 25 s. If
// that one fails too, somebody else holds claims open for longer, such as a service that
// claims in its own transactions. That isn't worth stalling everybody: for shortFor only
// short waits are tried. A late rotation costs no more than a larger generation.
const (
	firstWait   = 100 * time.Millisecond
	longestWait = 30 * time.Second
	shortWait   = time.Second
	shortFor    = 10 * time.Minute
)

// dropWait is how long each of dropTries waits for the readers of a table. Others wait
// behind it.
const (
	dropWait  = 200 * time.Millisecond
	dropTries = 5
)

// withRotationLock tries a step that waits for the rotation lock; each try waits longer.
func (s *Set) withRotationLock(ctx context.Context, try func(wait string) error) error {
	longest := longestWait
	if time.Since(time.Unix(0, s.outlasted.Load())) < shortFor {
		longest = shortWait
	}
	var waits []time.Duration
	for wait := firstWait; wait < longest/2; wait *= 2 {
		waits = append(waits, wait)
	}
	err := withLock(ctx, append(waits, longest), try)
	if sqlstate.Of(err) == sqlstate.LockNotAvailable && longest == longestWait && ctx.Err() == nil {
		s.outlasted.Store(time.Now().UnixNano())
	}
	return err
}

// withLock tries a step that waits for a lock, once for each wait. The pauses between the
// tries are random and longer than the waits: most of the time nobody waits behind it.
func withLock(ctx context.Context, waits []time.Duration, try func(wait string) error) error {
	for i, l := range waits {
		err := try(fmt.Sprintf("%dms", l.Milliseconds()))
		if sqlstate.Of(err) != sqlstate.LockNotAvailable || i == len(waits)-1 {
			return err
		}
		if !wait.For(ctx, l+rand.N(5*l)) {
			return err
		}
	}
	return nil
}

// Rotate seals the open generation, if it has that number, and opens the prepared one.
// took bounds how long claims were held up: it is the time of the last try, its wait for
// the lock included.
func (s *Set) Rotate(ctx context.Context, generation int) (rotated, led bool, took time.Duration, err error) {
	err = s.withRotationLock(ctx, func(wait string) error {
		start := time.Now()
		led, err = s.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, `SELECT coalesce((SELECT `+s.name("rotate")+`($1, identity, $3) FROM `+s.name("generations")+`
				WHERE scope = $1 AND generation = $2 AND state = 'open'), false)`, s.schema.Scope, generation, wait).Scan(&rotated)
		})
		took = time.Since(start)
		return err
	})
	if err != nil {
		return false, led, took, fmt.Errorf("rotate generation %d: %w", generation, err)
	}
	if rotated {
		// Other processes find out at their next transaction.
		if _, err := s.Refresh(ctx); err != nil {
			return true, led, took, err
		}
	}
	return rotated, led, took, nil
}

// Expire takes generations out of the catalog: those that every lane's clock has passed
// by the window, and those that were held for maxHold. Drop drops their tables.
func (s *Set) Expire(ctx context.Context, window, maxHold time.Duration) (n int, led bool, err error) {
	err = s.withRotationLock(ctx, func(wait string) error {
		led, err = s.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, `SELECT `+s.name("expire")+`($1, make_interval(secs => $2), make_interval(secs => $3), $4)`,
				s.schema.Scope, window.Seconds(), maxHold.Seconds(), wait).Scan(&n)
		})
		return err
	})
	if err != nil {
		return 0, led, fmt.Errorf("expire generations: %w", err)
	}
	return n, led, nil
}

// Drop drops the table of one expired generation.
func (s *Set) Drop(ctx context.Context, generation int) (led bool, err error) {
	err = withLock(ctx, slices.Repeat([]time.Duration{dropWait}, dropTries), func(wait string) error {
		led, err = s.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT `+s.name("drop_generation")+`($1, $2, $3)`, s.schema.Scope, generation, wait)
			return err
		})
		return err
	})
	if err != nil {
		err = fmt.Errorf("drop generation %d: %w", generation, err)
	}
	return led, err
}

// Sweep drops tables of claims that the catalog doesn't have, and names them.
func (s *Set) Sweep(ctx context.Context) (dropped []string, led bool, err error) {
	led, err = s.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, `SELECT `+s.name("sweep")+`($1, $2)`, s.schema.Scope, fmt.Sprintf("%dms", dropWait.Milliseconds()))
		dropped, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err != nil {
		err = fmt.Errorf("sweep: %w", err)
	}
	return dropped, led, err
}

// AcceptMissing gives up the generations whose tables are gone, and returns their
// numbers: their ids may be applied again. In place of an open one the next is opened. It
// needs the rights of the schema's owner, and is recorded in the audit.
func (s *Set) AcceptMissing(ctx context.Context, actor string) (generations []int, err error) {
	c, err := s.Loaded(ctx)
	if err != nil {
		return nil, err
	}
	err = s.withRotationLock(ctx, func(wait string) error {
		generations, err = s.acceptMissing(ctx, c.ScopeID, actor, wait)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("give up missing generations: %w", err)
	}
	return generations, nil
}

func (s *Set) acceptMissing(ctx context.Context, scopeID int32, actor, wait string) (generations []int, err error) {
	err = admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
		missing := ` scope = $1 AND NOT EXISTS (
			SELECT FROM pg_catalog.pg_class t JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace WHERE t.relname = table_name AND n.nspname = $2)`
		// No leader may be at work. The locks are taken in a leader's order, and no claim
		// waits while a table is made.
		if _, err := tx.Exec(ctx, `SELECT pg_catalog.pg_advisory_xact_lock($1, $2)`, retentionLock, scopeID); err != nil {
			return err
		}
		var open bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.name("generations")+` WHERE state = 'open' AND`+missing+`)`, s.schema.Scope, s.schema.Name).Scan(&open); err != nil {
			return err
		}
		if open {
			if _, err := tx.Exec(ctx, `SELECT `+s.name("prepare_generation")+`($1)`, s.schema.Scope); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, `SELECT set_config('lock_timeout', $1, true)`, wait); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `SELECT pg_catalog.pg_advisory_xact_lock($1, $2)`, schema.RotationLock, scopeID); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, `UPDATE `+s.name("generations")+` SET state = 'dropping', sealed_at = coalesce(sealed_at, `+s.name("clock")+`())
			WHERE (state = 'sealed' OR state = 'open' AND $3) AND`+missing+` RETURNING generation`, s.schema.Scope, s.schema.Name, open)
		if generations, err = pgx.CollectRows(rows, pgx.RowTo[int]); err != nil || len(generations) == 0 {
			return err
		}
		if open {
			// A statement of its own: there must never be two open generations.
			if _, err := tx.Exec(ctx, `UPDATE `+s.name("generations")+` SET state = 'open', opened_at = `+s.name("clock")+`()
				WHERE scope = $1 AND state = 'next' AND NOT EXISTS (SELECT FROM `+s.name("generations")+` WHERE scope = $1 AND state = 'open')`, s.schema.Scope); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, `UPDATE `+s.name("scopes")+` SET catalog_epoch = catalog_epoch + 1, catalog = gen_random_uuid() WHERE scope = $1`, s.schema.Scope); err != nil {
			return err
		}
		for _, g := range generations {
			if err := admin.Audit(ctx, tx, s.schema, actor, "accept missing generation", fmt.Sprint("generation ", g), struct{}{}); err != nil {
				return err
			}
		}
		return nil
	})
	return generations, err
}
