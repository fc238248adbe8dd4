package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// A Setting decides which messages are known. Its scope records it: nothing else shows that
// it has changed.
type Setting string

const (
	// IDSource is id.from, as one text. After a change a copy of an earlier message has
	// another id than its claim, and is applied again.
	IDSource Setting = "id_from"
	// Strategy is dedup.strategy. Each one forgets what another has kept.
	Strategy Setting = "strategy"
)

// Recorded is a setting as a scope's workers were last configured.
type Recorded struct {
	// Value is empty if no worker has recorded it yet.
	Value string
	// Since is when a worker first recorded it, by the database's clock.
	Since time.Time
	// Before is what it was until then; empty: nothing else.
	Before string
}

// Record records a setting of this worker. changed is set if it was another one until now.
func (s *Store) Record(ctx context.Context, what Setting, value string) (r Recorded, changed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r.Value = value
	column := string(what)
	err = s.pool.QueryRow(ctx, `UPDATE `+s.name("scopes")+` SET `+column+` = $2, `+column+`_before = `+column+`, `+column+`_since = `+s.name("clock")+`()
		WHERE scope = $1 AND `+column+` IS DISTINCT FROM $2 RETURNING coalesce(`+column+`_before, ''), `+column+`_since`, s.scope, value).Scan(&r.Before, &r.Since)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return r, false, nil
	case err != nil:
		return r, false, fmt.Errorf("record %s: %w", what, err)
	}
	return r, r.Before != "", nil
}

// Recorded is what the scope's workers last recorded of a setting.
func (s *Store) Recorded(ctx context.Context, what Setting) (r Recorded, err error) {
	var since *time.Time
	column := string(what)
	err = s.pool.QueryRow(ctx, `SELECT coalesce(`+column+`, ''), coalesce(`+column+`_before, ''), `+column+`_since FROM `+s.name("scopes")+` WHERE scope = $1`, s.scope).
		Scan(&r.Value, &r.Before, &since)
	if err != nil {
		return Recorded{}, fmt.Errorf("read the recorded %s: %w", what, err)
	}
	if since != nil {
		r.Since = *since
	}
	return r, nil
}
