package generations

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/claimkey"
)

// Generation is a generation as people see it.
type Generation struct {
	Number int `json:"generation"`
	// State is next, open, sealed or dropping.
	State    string     `json:"state"`
	OpenedAt *time.Time `json:"opened_at"` // nil: not yet
	SealedAt *time.Time `json:"sealed_at"` // nil: not yet
	// Claims is exact once the filter is complete. Until then it is estimated from the
	// table's size.
	Claims int64 `json:"claims"`
	Exact  bool  `json:"claims_exact"`
	// Bytes is the size on disk, with the index and the claims' results; FilterBytes is what
	// the filter takes in memory once it is loaded.
	Bytes       int64 `json:"bytes"`
	FilterBytes int64 `json:"filter_bytes"`
	// FilterComplete: the stored filter covers all claims.
	FilterComplete bool `json:"filter_complete"`
	// Missing: the catalog has the generation, but the database has no such table. Its
	// claims are lost.
	Missing bool `json:"missing"`

	Identity claimkey.Key `json:"-"`
	// FirstKey and LastKey are the zone map; nil: there is none.
	FirstKey *claimkey.Key `json:"first_key"`
	LastKey  *claimkey.Key `json:"last_key"`
}

// bytesPerClaim is the least that a claim takes in the table, without the index: tuple
// header, columns, and the pointer to the tuple.
const bytesPerClaim = 76

// List returns the scope's generations, oldest first.
func (s *Set) List(ctx context.Context) ([]Generation, error) {
	sql, args := s.ListQuery()
	rows, _ := s.schema.Pool.Query(ctx, sql, args...)
	all, err := pgx.CollectRows(rows, ScanGeneration)
	if err != nil {
		return nil, fmt.Errorf("list generations: %w", err)
	}
	return all, nil
}

// ListQuery is List's query, for a caller that sends it with others. ScanGeneration
// reads its rows.
func (s *Set) ListQuery() (sql string, args []any) {
	return `
		SELECT g.generation, g.state, CASE WHEN g.state <> 'next' THEN g.opened_at END, g.sealed_at,
		       coalesce(f.claims, pg_catalog.pg_relation_size(t.oid) / $3, 0), coalesce(f.complete, g.sealed_at IS NOT NULL AND g.first_key IS NULL),
		       coalesce(pg_catalog.pg_total_relation_size(t.oid), 0) + CASE WHEN pg_catalog.pg_relation_size(r.oid) > 0 THEN pg_catalog.pg_total_relation_size(r.oid) ELSE 0 END, coalesce(f.bytes, 0), coalesce(f.complete, false), t.oid IS NULL,
		       g.identity, g.first_key, g.last_key
		FROM ` + s.name("generations") + ` g
		LEFT JOIN pg_catalog.pg_class t ON t.relname = g.table_name
		     AND t.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $2)
		LEFT JOIN pg_catalog.pg_class r ON r.relname = 'results' || substr(g.table_name, 7)
		     AND r.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $2)
		LEFT JOIN LATERAL (
			SELECT sum(claims) FILTER (WHERE complete) AS claims, sum(bytes)::bigint AS bytes, complete
			FROM (SELECT claims, pg_catalog.octet_length(data) AS bytes, bool_or(last) OVER () AS complete FROM ` + s.name("filters") + ` WHERE identity = g.identity) c
			GROUP BY complete) f ON true
		WHERE g.scope = $1 ORDER BY g.generation`, []any{s.schema.Scope, s.schema.Name, bytesPerClaim}
}

// ScanGeneration reads a row of ListQuery.
func ScanGeneration(row pgx.CollectableRow) (g Generation, err error) {
	var first, last *[16]byte
	err = row.Scan(&g.Number, &g.State, &g.OpenedAt, &g.SealedAt, &g.Claims, &g.Exact, &g.Bytes, &g.FilterBytes, &g.FilterComplete, &g.Missing,
		(*[16]byte)(&g.Identity), &first, &last)
	g.FirstKey, g.LastKey = (*claimkey.Key)(first), (*claimkey.Key)(last)
	return g, err
}
