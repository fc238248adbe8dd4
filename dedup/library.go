package dedup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/sinks"
)

// Claims in the transaction of a service, which deduplicates without dedupd's worker.

var (
	// ErrInFlight says that another transaction has claimed the id and has not ended yet:
	// whether the id is a duplicate isn't known. Nothing was claimed, and the caller's
	// transaction goes on. Try again later, or tell whoever asks to.
	ErrInFlight = errors.New("another transaction is at work on the id")
	// ErrNotClaimed says that there is no claim to keep a result with.
	ErrNotClaimed = errors.New("the id isn't claimed by this transaction, or not any more")
	// ErrResultTooLarge says that a result is longer than sinks.MaxResult.
	ErrResultTooLarge = errors.New("the result is too large")
)

// MaxWait is the longest that Claim waits. Meanwhile it holds a connection and keeps the
// claims' generations from rotating. Who holds an id in good order ends sooner: the server
// ends its transaction after 10 s of idleness.
const MaxWait = 15 * time.Second

// ClaimOptions say how to claim.
type ClaimOptions struct {
	// Wait is for how long to wait, for each of the ids, until the transaction that holds it
	// ends; MaxWait at most. If that one commits, the id is a duplicate; if it rolls back or
	// dies, the id is new, and ours. Zero: don't wait.
	Wait time.Duration
}

// Claimed is what Claim has found out about an id.
type Claimed struct {
	// IsNew: this transaction has claimed the id. False: a transaction that has committed
	// did, or this one before, or the id is in the call twice.
	IsNew bool
	// Result is what was kept for the id; nil: nothing, or it was too large, and ResultSize
	// is above sinks.MaxResult.
	Result     []byte
	ResultSize int

	store      *Store
	key        claimkey.Key
	generation claimkey.Key
	claimant   claimant
}

// claimant is who has made a claim: a transaction, and the part of it that the claim's xmin
// names. That is the savepoint's: another one if the caller rolls back and claims again.
type claimant struct{ xmin, transaction []byte }

// Claim claims ids within a transaction of the caller's own. The claims stand or fall with
// tx, which must be READ COMMITTED (SQLSTATE DD005 if not). Ids must be 1 byte long at least.
// Of an id that is there twice, the first is new.
//
// After any error nothing is claimed. After ErrInFlight, and after most others, the
// transaction is as it was before the call and may go on. Behind SQLSTATE 40001 (a claim was
// forgotten in that moment), try again; behind 40P01 (two calls in one transaction don't claim
// in one order, and may deadlock with another's), roll back first.
//
// Claim restores lock_timeout. A transaction that holds an id makes others wait; so until it
// ends its statement_timeout is 20 s and its idle_in_transaction_session_timeout 10 s, if
// they weren't lower; synchronous_commit is not off; and enable_seqscan is the session's. Set
// others with SET LOCAL after the call.
//
// Sealed generations are looked through in their tables unless LoadFilters was called,
// which is worth it for more than a few ids now and then. Workers of the scope run
// retention; without any, generations stay as they are.
func (s *Store) Claim(ctx context.Context, tx pgx.Tx, ids []string, o ClaimOptions) ([]Claimed, error) {
	if o.Wait < 0 || o.Wait > MaxWait {
		return nil, fmt.Errorf("claim: the wait is %v, but must be 0 to %v", o.Wait, MaxWait)
	}
	g := &group{items: make([]item, len(ids))}
	for i, id := range ids {
		if id == "" {
			return nil, fmt.Errorf("claim: id %d is empty", i)
		}
		g.items[i] = item{key: claimkey.Of(id), duplicateOf: -1}
	}
	g.fold()
	if err := checkOpen(ctx, tx); err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	// Nothing is prepared: the connection is the caller's.
	t := &txn{store: s, conn: tx.Conn(), group: g, guest: new(guest)}
	if err := t.claimAsGuest(ctx, tx, o.Wait); err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	all := make([]Claimed, len(ids))
	for i := range g.items {
		it := &g.items[i]
		c := &all[i]
		c.IsNew = it.isNew
		if row := t.found[it.key]; row != nil && row.result != nil {
			c.Result, c.ResultSize = row.result.Bytes, row.result.Size
		}
		if c.IsNew {
			c.store, c.key, c.generation, c.claimant = s, it.key, t.catalog.Open.Identity, t.guest.claimant
		}
	}
	return all, nil
}

// SetResult keeps a result with a new claim, in the transaction that made it: what a
// duplicate of the id is given from then on, until the claim expires or is forgotten. The
// last result counts. It may have sinks.MaxResult bytes (ErrResultTooLarge).
//
// The error is ErrNotClaimed if the id wasn't new, if tx is another transaction, or if the claim
// is gone because tx was rolled back to a savepoint before it.
func (c *Claimed) SetResult(ctx context.Context, tx pgx.Tx, result []byte) error {
	switch {
	case !c.IsNew:
		return fmt.Errorf("set a result: %w", ErrNotClaimed)
	case len(result) > sinks.MaxResult:
		return fmt.Errorf("set a result: %w: it has %d bytes, and may have %d", ErrResultTooLarge, len(result), sinks.MaxResult)
	}
	if err := checkOpen(ctx, tx); err != nil {
		return fmt.Errorf("set a result: %w", err)
	}
	r := sinks.Result{Size: len(result), Bytes: nonNil(result)}
	step := c.store.keepResultsStep(c.generation, c.claimant, 1, func(int) (*claimkey.Key, sinks.Result) { return &c.key, r })
	if err := pipeline.RoundTrip(ctx, tx.Conn(), false, []pipeline.Step{step}); err != nil {
		return fmt.Errorf("set a result: %w", err)
	}
	return nil
}

// checkOpen makes sure that a transaction can be worked in. The connection of one that has
// ended may be somebody else's by now. pgx tells that it has ended when something is sent,
// even if there is nothing to send.
func checkOpen(ctx context.Context, tx pgx.Tx) error {
	if err := tx.SendBatch(ctx, new(pgx.Batch)).Close(); err != nil {
		return err
	}
	if tx.Conn().PgConn().TxStatus() != 'T' {
		return errors.New("the transaction has failed before")
	}
	return nil
}

// guest is a claim in somebody else's transaction. It happens behind a savepoint, so that
// its failure isn't the transaction's.
type guest struct {
	// lockWait is for how long the claim waits for each lock.
	lockWait time.Duration
	// claimant is who has made the new claims.
	claimant claimant
}

// uncertainWait bounds the waits for locks that no other claim holds.
const uncertainWait = 5 * time.Second

// claimAsGuest claims the group's keys behind a savepoint.
//
// Only the unique index knows that another transaction holds a key: its row can't be seen.
// The claim's INSERT waits for that transaction, for lock_timeout, and this is exact. If it
// commits, the INSERT finds its row; if it ends in any other way, it goes on as if that had
// never been. A rotation can't come in between, since both hold the rotation lock. If it
// comes between an ErrInFlight and the next call, that one has another catalog, in which the
// key is in a sealed generation; enter() refuses one that is older.
//
// lock_timeout also ends other waits, such as that for room at the end of the table. Only the
// wait for another transaction's key has a context in the server's error (which tuple of
// which index). Without one nothing is known, so the claim is tried again.
func (t *txn) claimAsGuest(ctx context.Context, tx pgx.Tx, wait time.Duration) (err error) {
	began := time.Now()
	least := time.Millisecond // 0 would be to wait for ever
	for changes := 0; ; {
		if t.catalog, err = t.store.generations.LoadedBy(ctx, tx); err != nil {
			return err
		}
		t.reset()
		t.guest.lockWait = max(wait-time.Since(began), least)
		err = t.claim(ctx, savepointStep, rememberStep, t.enterStep())
		undoable := err == nil && t.undoable()
		if err == nil {
			err = t.checkFound()
		}
		if err == nil && undoable {
			err = t.send(ctx, releaseStep)
		}
		if err == nil {
			return nil
		}
		t.rollBackToSavepoint(undoable)
		var (
			failed *pipeline.StepError
			pg     *pgconn.PgError
		)
		switch {
		case sqlstate.Of(err) == sqlstate.CatalogChanged && changes < tries:
			t.store.generations.Outdate(t.catalog)
			changes++
		case sqlstate.Of(err) != sqlstate.LockNotAvailable || !errors.As(err, &failed) || failed.Name != t.claimName("bare") || !errors.As(err, &pg):
			return err
		case len(pg.Where) > 0: // whatever it says
			return ErrInFlight
		case time.Since(began) > wait+uncertainWait:
			return err
		default:
			least = min(2*least, time.Second)
		}
	}
}

// checkFound makes sure that every id is new or was claimed by somebody: between the claim
// and the look-up somebody may have forgotten it.
func (t *txn) checkFound() error {
	for _, at := range t.unique {
		if it := &t.items[at]; !it.isNew && t.found[it.key] == nil {
			return errVanished()
		}
	}
	return nil
}

var (
	savepointStep = pipeline.Step{SQL: "SAVEPOINT dedupd_claim"}
	releaseStep   = pipeline.Step{SQL: "RELEASE SAVEPOINT dedupd_claim"}
	// rememberStep keeps the caller's time-outs in the transaction, where a savepoint undoes
	// them with all else.
	rememberStep = pipeline.Step{SQL: `SELECT pg_catalog.set_config('dedupd.lock_timeout', pg_catalog.current_setting('lock_timeout'), true),
		pg_catalog.set_config('dedupd.statement_timeout', pg_catalog.current_setting('statement_timeout'), true),
		pg_catalog.set_config('dedupd.idle_timeout', pg_catalog.current_setting('idle_in_transaction_session_timeout'), true)`}
	// restoreStep gives the caller its time-outs back; the latter two as far as they aren't
	// above those of a claim transaction.
	restoreStep = pipeline.Step{
		SQL: `SELECT pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('dedupd.lock_timeout'), true),
			pg_catalog.set_config(name, CASE WHEN before::interval > '0' AND before::interval < most::interval THEN before ELSE most END, true)
			FROM (VALUES ('statement_timeout', pg_catalog.current_setting('dedupd.statement_timeout'), $1::text),
				('idle_in_transaction_session_timeout', pg_catalog.current_setting('dedupd.idle_timeout'), $2::text)) AS t (name, before, most)`,
		OIDs: []uint32{pgtype.TextOID, pgtype.TextOID}, Params: [][]byte{[]byte(pipeline.StatementTimeout), []byte(pipeline.IdleTimeout)},
	}
)

// waitStep bounds the wait for each of the locks that the claim needs.
func (g *guest) waitStep() pipeline.Step {
	return pipeline.Step{
		SQL: `SELECT pg_catalog.set_config('lock_timeout', $1::text, true)`, OIDs: []uint32{pgtype.TextOID},
		Params: [][]byte{fmt.Appendf(nil, "%dms", max(1, g.lockWait.Milliseconds()))},
	}
}

// undoable reports whether the savepoint is kept until the duplicates are looked up, which may
// fail: there may be new claims to undo then. One id is either new or a duplicate.
func (t *txn) undoable() bool { return len(t.claims) > 1 }

// rollBackToSavepoint undoes a claim that has failed, if its savepoint is still there. If not,
// nothing was claimed: only the look-up of a duplicate comes after it, which fails with the
// transaction. claimed: that has not failed, but finds nothing.
func (t *txn) rollBackToSavepoint(claimed bool) {
	if t.conn.IsClosed() || t.conn.PgConn().IsBusy() || t.conn.PgConn().TxStatus() != 'E' && !claimed {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = pipeline.RoundTrip(ctx, t.conn, false, []pipeline.Step{{SQL: "ROLLBACK TO SAVEPOINT dedupd_claim"}, releaseStep}) // its failure leaves the transaction failed
}

// resultOf reads what a look-up with results has found behind the claim's columns.
func resultOf(v [][]byte) *sinks.Result {
	if len(v) < 2 || v[0] == nil {
		return nil
	}
	r := &sinks.Result{Size: int(binary.BigEndian.Uint32(v[0]))}
	if v[1] != nil {
		r.Bytes = append([]byte{}, v[1]...)
	}
	return r
}
