package dedup

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/policy"
)

// settle gives every message its outcome. The sink may still refuse those that are
// applied.
func (p *Processor) settle(ctx context.Context, t *txn) error {
	for i := range t.items {
		it := &t.items[i]
		if it.unwanted {
			continue
		}
		root := it
		if it.duplicateOf >= 0 {
			root = &t.items[it.duplicateOf]
		}
		switch {
		case root.isNew && root == it:
			it.outcome = written
			if it.reject != nil {
				it.outcome = dead
			}
		case root.isNew:
			it.original = &claimRow{fingerprint: &root.fingerprint, lane: &t.lanes[root.batch], position: &t.message(root).Position.Offset}
		default:
			if it.original = t.found[root.key]; it.original == nil {
				return errVanished()
			}
		}
		if it.outcome == pending {
			if err := p.settleDuplicate(ctx, t, it); err != nil {
				return err
			}
		}
	}
	return nil
}

// errVanished says that a claim was there a moment ago: somebody has forgotten it since.
func errVanished() error {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40001", Message: "a claim vanished while it was looked at"}
}

// settleDuplicate finds out what kind of copy a message is of the one that claimed its
// id.
func (p *Processor) settleDuplicate(ctx context.Context, t *txn, it *item) error {
	original := it.original
	if !p.Fingerprint.None() && original.fingerprint != nil && claimkey.Differ(*original.fingerprint, it.fingerprint) {
		it.outcome = conflict
		if p.OnConflict == policy.ConflictStop {
			const why = "was claimed with another payload, and dedup.on_conflict is stop"
			return t.heldAt(it, fmt.Errorf("id %q "+why, t.message(it).ID), "its id "+why)
		}
		return nil
	}
	it.outcome = resent
	if original.lane != nil {
		source, err := p.Store.sourceOf(ctx, t.conn, *original.lane)
		if err != nil {
			return err
		}
		switch {
		case *original.lane == t.lanes[it.batch] && original.position != nil && *original.position == t.message(it).Position.Offset:
			it.outcome = redelivered
		case source != "" && source != t.batches[it.batch].Lane.Source:
			it.outcome = crossSource
		}
	}
	t.ages = append(t.ages, original.age)
	return nil
}
