package dedup

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/sqlstate"
)

// commitTimeout bounds COMMIT from outside: statement_timeout does not (a
// COMMIT that waited for an absent standby was seen to hang for ten minutes).
const commitTimeout = 10 * time.Second

// txn is one claim transaction on one connection: it claims a group's keys, and what
// the caller does with the new ones stands or falls with the claims. Workers, replay,
// import and Store.Claim are scripts of it.
//
// Everyone takes locks in one order: the rotation lock, claims or marks by key, whatever the sink
// locks, dead letters, lane rows by name. Lane rows come last: the books need the counts,
// and the lock is short.
type txn struct {
	store   *Store
	conn    *pgx.Conn
	catalog *generations.Catalog
	*group
	// prepare has statements prepared; not on a caller's connection.
	prepare bool
	// fingerprint has the messages' fingerprints stored with their claims.
	fingerprint bool
	// byCopy has the claims looked up first and then copied. Only for lanes' batches.
	byCopy bool
	// found are the claims that were there before, by their keys.
	found map[claimkey.Key]*claimRow
	// probed counts what the look-ups in sealed generations have found.
	probed probeResult
	// claimedIn is the generation of the claim that a replay found to be its dead letter's
	// own; nil: new claims are in the open one.
	claimedIn *generations.Table
	// guest is set in a transaction of somebody else's.
	guest *guest
}

// begin runs work with a transaction over a group, on a connection of its own without
// statements about generations that the catalog lacks. If work fails, what it left open
// is rolled back. An error before that is an *ownError.
func (s *Store) begin(ctx context.Context, g *group, work func(t *txn) error) (err error) {
	catalog, err := s.generations.Loaded(ctx)
	if err != nil {
		return &ownError{err}
	}
	g.catalog = catalog
	pooled, err := s.pool.Acquire(ctx)
	if err != nil {
		return &ownError{fmt.Errorf("connect to the database: %w", err)}
	}
	conn := pooled.Conn()
	defer func() {
		if err != nil {
			err = abort(conn, err)
		}
		pooled.Release()
	}()
	if err := pipeline.Deallocate(ctx, conn, catalog.Identity, catalog.Has); err != nil {
		return &ownError{err}
	}
	return work(&txn{store: s, conn: conn, catalog: catalog, group: g, prepare: s.prepare})
}

// send sends steps in one round trip.
func (t *txn) send(ctx context.Context, steps ...pipeline.Step) error {
	return pipeline.RoundTrip(ctx, t.conn, t.prepare, steps)
}

// abort ends a failed transaction. If it can't bring the connection back into order, the
// pool closes that when it is released.
func abort(conn *pgx.Conn, err error) error {
	if conn.IsClosed() {
		if sqlstate.Of(err) == "" {
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

// ownError came from a statement of dedupd's own, or from the connection: no message's
// data is at fault, whatever the SQLSTATE's class says.
type ownError struct{ error }

func (e *ownError) Unwrap() error { return e.error }

// sinkError came from the sink's code or SQL.
type sinkError struct{ error }

func (e *sinkError) Error() string { return "write: " + e.error.Error() }
func (e *sinkError) Unwrap() error { return e.error }

// commitError says that COMMIT was sent, and that its answer was lost or leaves open
// whether it is durable.
type commitError struct{ error }

func (e *commitError) Error() string { return "commit, whose outcome is unknown: " + e.error.Error() }
func (e *commitError) Unwrap() error { return e.error }
