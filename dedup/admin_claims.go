package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/dedup/internal/admin"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/sqlstate"
)

// Claim is what is stored about an id that was claimed.
type Claim struct {
	Generation int       `json:"generation"`
	State      string    `json:"state"` // of the generation: open or sealed
	ClaimedAt  time.Time `json:"claimed_at"`
	AgeSeconds float64   `json:"age_seconds"`
	// Source and Lane are nil for a claim without a lane, and for one whose lane was
	// forgotten; LaneNumber is left of the latter.
	Source     *string `json:"source"`
	Lane       *string `json:"lane"`
	LaneNumber *int32  `json:"lane_number"`
	Position   *int64  `json:"position"`
	// Fingerprint is a string in JSON, whose numbers can't have that many digits. nil:
	// payloads were not compared.
	Fingerprint *int64 `json:"fingerprint,string"`
	// Result is what is kept for duplicates; nil: nothing.
	Result *ClaimResult `json:"result"`
}

// ClaimResult is the result that is kept with a claim. One that was too large has only its
// size.
type ClaimResult struct {
	Bytes int64 `json:"bytes"`
	Kept  bool  `json:"kept"`
}

// ClaimAnswer is what there is to say about an id.
type ClaimAnswer struct {
	Key   claimkey.Key `json:"key"`
	Found bool         `json:"found"`
	Claim *Claim       `json:"claim"` // nil: not found
	// ClaimsSince is since when claims are kept: nothing is known of what was claimed
	// before.
	ClaimsSince time.Time `json:"claims_since"`
	// DeadLetters are those that carry the id, or claimed it.
	DeadLetters []DeadLetterRef `json:"dead_letters"`
}

// DeadLetterRef names a dead letter.
type DeadLetterRef struct {
	ID    int64  `json:"id"`
	Class string `json:"class"`
}

// FindClaim looks for the claim of an id in every generation of the catalog.
func (s *Store) FindClaim(ctx context.Context, id string) (a ClaimAnswer, err error) {
	err = s.withCatalog(ctx, func(ctx context.Context, tx pgx.Tx, c *generations.Catalog) error {
		a = ClaimAnswer{Key: claimkey.Of(id)}
		for _, g := range c.OldestFirst() {
			if a.Claim, err = s.readClaim(ctx, tx, g, a.Key, false); err != nil {
				return err
			}
			if a.Found = a.Claim != nil; a.Found {
				break
			}
		}
		if a.ClaimsSince, err = s.claimsSince(ctx, tx); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, `SELECT id, class FROM `+s.name("dead_letters")+` WHERE scope = $1 AND claim_key = $2::uuid ORDER BY id`, s.scope, a.Key.String())
		a.DeadLetters, err = pgx.CollectRows(rows, pgx.RowToStructByPos[DeadLetterRef])
		return err
	})
	if err != nil {
		return a, fmt.Errorf("look for the claim of %q: %w", id, err)
	}
	return a, nil
}

// ForgetClaim deletes the claim of an id with its result, so that the next copy of the
// message is applied again. It returns what the claim was; nil: there was none. Filters may still hold the
// key: they only say where a look-up is worth it.
func (s *Store) ForgetClaim(ctx context.Context, actor, id string) (forgotten *Claim, err error) {
	key := claimkey.Of(id)
	err = s.withCatalog(ctx, func(ctx context.Context, tx pgx.Tx, c *generations.Catalog) error {
		forgotten = nil
		for _, g := range c.OldestFirst() {
			gone, err := s.readClaim(ctx, tx, g, key, true)
			if err != nil {
				return err
			}
			if gone == nil {
				continue
			}
			forgotten = gone
			detail := struct {
				Key claimkey.Key `json:"key"`
				*Claim
			}{key, gone}
			if err := admin.Audit(ctx, tx, s.schema, actor, "claims forget", id, detail); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("forget the claim of %q: %w", id, err)
	}
	return forgotten, nil
}

// withCatalog does work in a transaction that enter() has opened, like a claim's: while
// it runs, no generation is sealed, and none leaves the catalog.
func (s *Store) withCatalog(ctx context.Context, work func(ctx context.Context, tx pgx.Tx, c *generations.Catalog) error) error {
	return admin.Hint(s.retry(ctx, func() error {
		c, err := s.generations.Loaded(ctx)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		return pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `SELECT `+s.name("enter")+`($1, $2::uuid, $3, $4, $5)`,
				c.ScopeID, c.Identity.String(), pipeline.LockTimeout, pipeline.StatementTimeout, pipeline.IdleTimeout); err != nil {
				return err
			}
			return work(ctx, tx, c)
		})
	}))
}

// readClaim reads the claim of a key from a generation's table, and deletes it there if
// it is to be forgotten; nil: there is none.
func (s *Store) readClaim(ctx context.Context, tx pgx.Tx, g *generations.Table, key claimkey.Key, forget bool) (*Claim, error) {
	claim := &Claim{Generation: g.Number, State: "sealed"}
	if g.Open {
		claim.State = "open"
	}
	with, from := "", g.Name
	if forget {
		with, from = `WITH gone AS (DELETE FROM `+g.Name+` WHERE key = $1::uuid RETURNING *)`, "gone"
	}
	err := tx.QueryRow(ctx, with+`
		SELECT c.claimed_at, greatest(0, extract(epoch FROM `+s.name("clock")+`() - c.claimed_at))::float8, l.source, l.lane, c.lane, c.position, c.fingerprint
		FROM `+from+` c LEFT JOIN `+s.name("lanes")+` l ON l.id = c.lane WHERE c.key = $1::uuid`, key.String()).
		Scan(&claim.ClaimedAt, &claim.AgeSeconds, &claim.Source, &claim.Lane, &claim.LaneNumber, &claim.Position, &claim.Fingerprint)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, nil
	case sqlstate.Of(err) == sqlstate.UndefinedTable:
		// Under the rotation lock none of the catalog's tables is dropped.
		return nil, fmt.Errorf("the table %s of generation %d is gone, and with it its claims, so that the answer is not known: bring it back from a backup: %w", g.Name, g.Number, err)
	case err != nil:
		return nil, err
	}
	claim.Result, err = s.readResult(ctx, tx, g, key, forget)
	return claim, err
}

// readResult reads the result of a claim, and deletes it if it is to be forgotten; nil: there
// is none. It looks in all tables of results and takes the generation's: that one may have
// been lost, and the claim is there nevertheless.
func (s *Store) readResult(ctx context.Context, tx pgx.Tx, g *generations.Table, key claimkey.Key, forget bool) (*ClaimResult, error) {
	sql := `SELECT size, result IS NOT NULL FROM ` + s.name("results_root") + ` WHERE key = $1::uuid AND tableoid = pg_catalog.to_regclass($2::text)`
	if forget {
		sql = `DELETE FROM ` + s.name("results_root") + ` WHERE key = $1::uuid AND tableoid = pg_catalog.to_regclass($2::text) RETURNING size, result IS NOT NULL`
	}
	r := new(ClaimResult)
	err := tx.QueryRow(ctx, sql, key.String(), g.Results).Scan(&r.Bytes, &r.Kept)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return r, err
}

// claimsSince is since when claims are kept.
func (s *Store) claimsSince(ctx context.Context, tx pgx.Tx) (at time.Time, err error) {
	err = tx.QueryRow(ctx, `SELECT min(opened_at) FROM `+s.name("generations")+` WHERE scope = $1 AND state IN ('open', 'sealed')`, s.scope).Scan(&at)
	return at, err
}
