package dedup

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// catalog is what a claim transaction is built for: the scope's generations, as
// they stood under one random identity. enter() refuses a transaction whose
// catalog isn't the database's any more, so that nothing a process remembers can
// outlive the database it speaks of: neither a rotation nor a restore of an
// older copy. A catalog is never changed, only replaced.
type catalog struct {
	scopeID  int32
	identity Key
	epoch    int64
	open     *generation
	sealed   []*generation // newest first, without those that hold no claim
}

// generation is one table of claims.
type generation struct {
	number int
	// identity is new with each seal; prepared statements and filters belong to
	// it, since after a restore the same table name may mean other claims.
	identity Key
	table    string // quoted, with its schema
	// first and last are the smallest and the largest key of a sealed generation:
	// its zone map.
	first, last Key
	// chunks are the filters that are loaded, in the order of their keys, without
	// a gap from the first on. Keys above the last one's are probed in the table.
	chunks []*chunk
}

// has tells whether a generation of that identity takes claims or is looked
// through.
func (c *catalog) has(identity Key) bool {
	return c.open.identity == identity || slices.ContainsFunc(c.sealed, func(g *generation) bool { return g.identity == identity })
}

// refresh reads the catalog anew. One reads at a time, so that none takes an
// older state for a database that went back.
func (s *Store) refresh(ctx context.Context) (*catalog, error) {
	s.refreshing.Lock()
	defer s.refreshing.Unlock()
	rows, err := s.pool.Query(ctx, `
		SELECT s.id, s.catalog, s.catalog_epoch, g.generation, g.identity, g.table_name, g.state = 'open', g.first_key, g.last_key
		FROM `+s.name("scopes")+` s
		JOIN `+s.name("generations")+` g ON g.scope = s.scope AND g.state IN ('open', 'sealed')
		WHERE s.scope = $1 ORDER BY g.generation DESC`, s.scope)
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	c := new(catalog)
	var (
		g           generation
		table       string
		open        bool
		first, last *[16]byte
	)
	_, err = pgx.ForEachRow(rows, []any{&c.scopeID, (*[16]byte)(&c.identity), &c.epoch, &g.number, (*[16]byte)(&g.identity), &table, &open, &first, &last}, func() error {
		at := g
		at.table = s.name(table)
		switch {
		case open:
			c.open = &at
		case first != nil && last != nil:
			at.first, at.last = *first, *last
			c.sealed = append(c.sealed, &at)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	if c.open == nil {
		return nil, &SchemaError{Reason: fmt.Sprintf("the database has no scope %q yet: run `dedupd migrate up` with this configuration and the owner's rights (or set database.migrate: true)", s.scope)}
	}
	if old := s.catalog.Load(); old != nil && (c.scopeID != old.scopeID || c.epoch < old.epoch || c.epoch == old.epoch && c.identity != old.identity) {
		s.Forget("the catalog of generations went back")
	}
	s.publish(c)
	return c, nil
}

// publish makes a catalog the current one, with the filters that are loaded.
func (s *Store) publish(c *catalog) {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	s.filters.keepOnly(c.sealed)
	s.catalog.Store(s.filters.equip(c))
}

// loaded is the catalog, read at the latest now.
func (s *Store) loaded(ctx context.Context) (*catalog, error) {
	if c := s.catalog.Load(); c != nil {
		return c, nil
	}
	return s.refresh(ctx)
}

// Forget throws away whatever is remembered of the database: the catalog, the
// filters, the lanes' numbers. It is called when the database may not be what it
// was, as after a failover. Everything is read again when it is needed next.
//
// It is a precaution: each transaction names its catalog by a random identity,
// and a filter belongs to the seal of one table.
func (s *Store) Forget(why string) {
	s.filters.mu.Lock()
	s.catalog.Store(nil)
	n := len(s.filters.chunks)
	s.filters.keepOnly(nil)
	s.filters.mu.Unlock()
	s.forgetLanes()
	s.log.Warn("forgetting what was remembered of the database", "why", why, "filters", n)
}

// Generation is one table of claims.
type Generation struct {
	Generation int `json:"generation"`
	// State is next, open, sealed or dropping.
	State    string     `json:"state"`
	OpenedAt *time.Time `json:"opened_at"` // nil: not yet
	SealedAt *time.Time `json:"sealed_at"` // nil: not yet
	// Claims is exact once the filter is complete; until then it is estimated
	// from the table's size.
	Claims int64 `json:"claims"`
	Exact  bool  `json:"claims_exact"`
	// Bytes on disk, with the index; FilterBytes in memory, where it is loaded.
	Bytes       int64 `json:"bytes"`
	FilterBytes int64 `json:"filter_bytes"`
	// FilterComplete tells that the filter covers all claims; FilterLoaded, that
	// this process has all of it in memory.
	FilterComplete bool `json:"filter_complete"`
	// Missing tells that the catalog has the generation, and the database no such
	// table: its claims are lost.
	Missing bool `json:"missing"`

	Identity Key `json:"-"`
	// FirstKey and LastKey are the zone map; nil where there is none.
	FirstKey *Key `json:"first_key"`
	LastKey  *Key `json:"last_key"`
}

// bytesPerClaim is what a claim takes in the table at least, without its index:
// tuple header, the columns, and the pointer to the tuple.
const bytesPerClaim = 76

// Generations lists the scope's generations, oldest first.
func (s *Store) Generations(ctx context.Context) ([]Generation, error) {
	sql, args := s.generationsQuery()
	rows, err := s.pool.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("list generations: %w", err)
	}
	all, err := pgx.CollectRows(rows, scanGeneration)
	if err != nil {
		return nil, fmt.Errorf("list generations: %w", err)
	}
	return all, nil
}

func (s *Store) generationsQuery() (sql string, args []any) {
	return `
		SELECT g.generation, g.state, CASE WHEN g.state <> 'next' THEN g.opened_at END, g.sealed_at,
		       coalesce(f.claims, pg_catalog.pg_relation_size(t.oid) / $3, 0), coalesce(f.complete, g.sealed_at IS NOT NULL AND g.first_key IS NULL),
		       coalesce(pg_catalog.pg_total_relation_size(t.oid), 0), coalesce(f.bytes, 0), coalesce(f.complete, false), t.oid IS NULL,
		       g.identity, g.first_key, g.last_key
		FROM ` + s.name("generations") + ` g
		LEFT JOIN pg_catalog.pg_class t ON t.relname = g.table_name
		     AND t.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $2)
		LEFT JOIN LATERAL (
			SELECT sum(claims) FILTER (WHERE complete) AS claims, sum(bytes)::bigint AS bytes, complete
			FROM (SELECT claims, pg_catalog.octet_length(data) AS bytes, bool_or(last) OVER () AS complete FROM ` + s.name("filters") + ` WHERE identity = g.identity) c
			GROUP BY complete) f ON true
		WHERE g.scope = $1 ORDER BY g.generation`, []any{s.scope, s.schema, bytesPerClaim}
}

func scanGeneration(row pgx.CollectableRow) (g Generation, err error) {
	var first, last *[16]byte
	err = row.Scan(&g.Generation, &g.State, &g.OpenedAt, &g.SealedAt, &g.Claims, &g.Exact, &g.Bytes, &g.FilterBytes, &g.FilterComplete, &g.Missing,
		(*[16]byte)(&g.Identity), &first, &last)
	g.FirstKey, g.LastKey = (*Key)(first), (*Key)(last)
	return g, err
}

// MarshalText writes a key as Postgres writes a uuid.
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// compare orders keys as Postgres orders uuids: by their bytes.
func (k *Key) compare(o *Key) int {
	kh, oh := binary.BigEndian.Uint64(k[:8]), binary.BigEndian.Uint64(o[:8])
	if kh == oh {
		kh, oh = binary.BigEndian.Uint64(k[8:]), binary.BigEndian.Uint64(o[8:])
	}
	switch {
	case kh < oh:
		return -1
	case kh > oh:
		return 1
	}
	return 0
}
