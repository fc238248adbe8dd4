package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// IDSource is where the ids of a scope come from, as its workers were last configured.
type IDSource struct {
	// From is id.from, as one text; empty: no worker has recorded it yet.
	From string
	// Since is when a worker first recorded it, by the database's clock.
	Since time.Time
	// Before is what it was until then; empty: nothing else.
	Before string
}

// RecordIDSource records where this worker finds ids. changed is set if it was another
// place until now. Then a copy of an earlier message has another id than its claim, and
// is applied again; nothing else shows that.
func (s *Store) RecordIDSource(ctx context.Context, from string) (source IDSource, changed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	source.From = from
	err = s.pool.QueryRow(ctx, `UPDATE `+s.name("scopes")+` SET id_from = $2, id_from_before = id_from, id_from_since = `+s.name("clock")+`()
		WHERE scope = $1 AND id_from IS DISTINCT FROM $2 RETURNING coalesce(id_from_before, ''), id_from_since`, s.scope, from).Scan(&source.Before, &source.Since)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return source, false, nil
	case err != nil:
		return source, false, fmt.Errorf("record where ids come from: %w", err)
	}
	return source, source.Before != "", nil
}

// IDSource is what the scope's workers last recorded.
func (s *Store) IDSource(ctx context.Context) (source IDSource, err error) {
	var since *time.Time
	err = s.pool.QueryRow(ctx, `SELECT coalesce(id_from, ''), coalesce(id_from_before, ''), id_from_since FROM `+s.name("scopes")+` WHERE scope = $1`, s.scope).
		Scan(&source.From, &source.Before, &since)
	if err != nil {
		return IDSource{}, fmt.Errorf("read where ids come from: %w", err)
	}
	if since != nil {
		source.Since = *since
	}
	return source, nil
}
