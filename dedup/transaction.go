package dedup

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Time-outs within a claim transaction. A transaction that holds a key makes its
// twin elsewhere wait, so none of them may be long; and one whose worker is gone
// must end by itself, or its lanes' next owner waits with it.
const (
	lockTimeout      = "5s"
	statementTimeout = "20s"
	idleTimeout      = "10s"
	// commitTimeout bounds COMMIT from outside: statement_timeout does not (a
	// COMMIT that waited for an absent standby was seen to hang for ten minutes).
	commitTimeout = 10 * time.Second
)

// transact runs one claim transaction over the group: claim, write, bury, move
// the lanes, commit. Locks are taken in one order by everyone: the rotation
// lock, claims by key, whatever the sink locks, dead letters, lane rows by name.
// Lane rows come last: the books need the counts, and the lock is short.
//
// Nil means durable, and gives the outcomes by batch. A *commitError means that
// nobody knows; any other error that nothing was done.
func (p *Processor) transact(ctx context.Context, g *group) (all []tally, err error) {
	catalog, err := p.Store.loaded(ctx)
	if err != nil {
		return nil, &ownError{err}
	}
	g.catalog = catalog
	begun := false
	err = p.Store.onConnection(ctx, catalog, func(conn *pgx.Conn) error {
		begun = true
		all, err = p.transactOn(ctx, conn, catalog, g)
		return err
	})
	if err != nil && !begun {
		err = &ownError{err}
	}
	return all, err
}

func (p *Processor) transactOn(ctx context.Context, conn *pgx.Conn, catalog *catalog, g *group) (all []tally, err error) {
	start := time.Now()
	g.reset()
	g.began = p.doubts.now.Load()
	if err := p.claim(ctx, conn, catalog, g); err != nil {
		return nil, &ownError{fmt.Errorf("claim: %w", err)}
	}
	claimed := time.Now()
	p.Metrics.claim.Observe(claimed.Sub(start).Seconds())

	if err := p.write(ctx, conn, g); err != nil {
		return nil, &sinkError{err}
	}
	p.Metrics.sink.Observe(time.Since(claimed).Seconds())

	all, err = g.tallies()
	if err != nil {
		return nil, err
	}
	if err := p.prove(g); err != nil {
		return nil, err
	}
	if err := p.guard.check(ctx, conn, p.Store, g, all); err != nil {
		return nil, err
	}
	if err := p.commit(ctx, conn, g, all); err != nil {
		return all, err
	}
	p.Metrics.transaction.Observe(time.Since(start).Seconds())
	return all, nil
}

// onConnection does work on a connection of its own, which has no statement about
// generations that the catalog doesn't have. A transaction that the work left
// open when it failed is rolled back.
func (s *Store) onConnection(ctx context.Context, c *catalog, work func(conn *pgx.Conn) error) (err error) {
	pooled, err := s.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	conn := pooled.Conn()
	defer func() {
		if err != nil {
			err = abort(conn, err)
		}
		pooled.Release()
	}()
	if err := deallocate(ctx, conn, c); err != nil {
		return err
	}
	return work(conn)
}

// abort ends a failed transaction. A connection that can't be brought back into
// order is closed by the pool when it is released.
func abort(conn *pgx.Conn, err error) error {
	if conn.IsClosed() {
		if sqlstate(err) == "" {
			return fmt.Errorf("%w: %w", errConnection, err)
		}
		return err
	}
	if conn.PgConn().TxStatus() != 'I' && !conn.PgConn().IsBusy() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, _ = conn.Exec(ctx, "rollback") // its failure leaves the connection to the pool, which closes it
	}
	return err
}

// ownError came of a statement of dedupd's own, or of the connection: no message's
// data is at fault, whatever the SQLSTATE's class says.
type ownError struct{ error }

func (e *ownError) Unwrap() error { return e.error }

// sinkError came of the sink's code or SQL.
type sinkError struct{ error }

func (e *sinkError) Error() string { return "write: " + e.error.Error() }
func (e *sinkError) Unwrap() error { return e.error }

// commitError says that COMMIT was sent, and that its answer was lost or leaves open
// whether it is durable.
type commitError struct{ error }

func (e *commitError) Error() string { return "commit, whose outcome is unknown: " + e.error.Error() }
func (e *commitError) Unwrap() error { return e.error }
