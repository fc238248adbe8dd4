package generations

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/schema"
)

// catalog is what a claim transaction is built for: the scope's generations, as
// they stood under one random identity. enter() refuses a transaction whose
// catalog isn't the database's any more, so that nothing a process remembers can
// outlive the database it speaks of: neither a rotation nor a restore of an
// older copy. A catalog is never changed, only replaced.
type Catalog struct {
	ScopeID  int32
	Identity claimkey.Key
	epoch    int64
	Open     *Table
	Sealed   []*Table // newest first, without those that hold no claim
}

// generation is one table of claims.
type Table struct {
	Number int
	// identity is new with each seal; prepared statements and filters belong to
	// it, since after a restore the same table name may mean other claims.
	Identity claimkey.Key
	Name     string // quoted, with its schema
	Open     bool   // it takes claims; else it is sealed
	// first and last are the smallest and the largest key of a sealed generation:
	// its zone map.
	first, last claimkey.Key
	// chunks are the filters that are loaded, in the order of their keys, without
	// a gap from the first on. Keys above the last one's are probed in the table.
	chunks []*chunk
}

// has tells whether a generation of that identity takes claims or is looked
// through.
func (c *Catalog) Has(identity claimkey.Key) bool {
	return c.Open.Identity == identity || slices.ContainsFunc(c.Sealed, func(g *Table) bool { return g.Identity == identity })
}

// Set is the generations of one scope: their catalog, as this process last read it,
// and the filters that are loaded. It may be used by many goroutines.
type Set struct {
	schema *schema.Schema
	log    *slog.Logger
	// forgot is told when what was remembered of the database is thrown away.
	forgot func()

	// FilterMemory bounds the bytes of filters that are kept in memory. ChunkClaims is
	// how many keys a chunk of a filter has at most. Both are set before the first call.
	FilterMemory int64
	ChunkClaims  int

	refreshing sync.Mutex
	catalog    atomic.Pointer[Catalog]
	filters    filterCache
	// outlasted is when a rotation last gave up its longest wait, in Unix nanoseconds.
	outlasted atomic.Int64
}

// NewSet is the generations of a schema's scope. forgot is called by Forget.
func NewSet(schema *schema.Schema, filterMemory int64, log *slog.Logger, forgot func()) *Set {
	return &Set{schema: schema, log: log, forgot: forgot, FilterMemory: filterMemory, ChunkClaims: chunkClaims}
}

func (s *Set) name(object string) string { return s.schema.Object(object) }

// Refresh reads the catalog anew. One reads at a time, so that none takes an
// older state for a database that went back.
func (s *Set) Refresh(ctx context.Context) (*Catalog, error) {
	s.refreshing.Lock()
	defer s.refreshing.Unlock()
	rows, err := s.schema.Pool.Query(ctx, `
		SELECT s.id, s.catalog, s.catalog_epoch, g.generation, g.identity, g.table_name, g.state = 'open', g.first_key, g.last_key
		FROM `+s.name("scopes")+` s
		JOIN `+s.name("generations")+` g ON g.scope = s.scope AND g.state IN ('open', 'sealed')
		WHERE s.scope = $1 ORDER BY g.generation DESC`, s.schema.Scope)
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	c := new(Catalog)
	var (
		g           Table
		table       string
		open        bool
		first, last *[16]byte
	)
	_, err = pgx.ForEachRow(rows, []any{&c.ScopeID, (*[16]byte)(&c.Identity), &c.epoch, &g.Number, (*[16]byte)(&g.Identity), &table, &open, &first, &last}, func() error {
		at := g
		at.Name, at.Open = s.name(table), open
		switch {
		case open:
			c.Open = &at
		case first != nil && last != nil:
			at.first, at.last = *first, *last
			c.Sealed = append(c.Sealed, &at)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	if c.Open == nil {
		return nil, &schema.Error{Reason: fmt.Sprintf("the database has no scope %q yet: run `dedupd migrate up` with this configuration and the owner's rights (or set database.migrate: true)", s.schema.Scope)}
	}
	if old := s.catalog.Load(); old != nil && (c.ScopeID != old.ScopeID || c.epoch < old.epoch || c.epoch == old.epoch && c.Identity != old.Identity) {
		s.Forget("the catalog of generations went back")
	}
	s.publish(c)
	return c, nil
}

// publish makes a catalog the current one, with the filters that are loaded.
func (s *Set) publish(c *Catalog) {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	s.filters.keepOnly(c.Sealed)
	s.catalog.Store(s.filters.equip(c))
}

// Loaded is the catalog, read at the latest now.
func (s *Set) Loaded(ctx context.Context) (*Catalog, error) {
	if c := s.catalog.Load(); c != nil {
		return c, nil
	}
	return s.Refresh(ctx)
}

// Outdate has the next call of Loaded read the catalog anew, if this one is the
// current one still.
func (s *Set) Outdate(c *Catalog) {
	if now := s.catalog.Load(); now != nil && now.Identity == c.Identity {
		s.catalog.CompareAndSwap(now, nil)
	}
}

// Forget throws away whatever is remembered of the database: the catalog, the
// filters, the lanes' numbers. It is called when the database may not be what it
// was, as after a failover. Everything is read again when it is needed next.
//
// It is a precaution: each transaction names its catalog by a random identity,
// and a filter belongs to the seal of one table.
func (s *Set) Forget(why string) {
	s.filters.mu.Lock()
	s.catalog.Store(nil)
	n := len(s.filters.chunks)
	s.filters.keepOnly(nil)
	s.filters.mu.Unlock()
	s.forgot()
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

	Identity claimkey.Key `json:"-"`
	// FirstKey and LastKey are the zone map; nil where there is none.
	FirstKey *claimkey.Key `json:"first_key"`
	LastKey  *claimkey.Key `json:"last_key"`
}

// bytesPerClaim is what a claim takes in the table at least, without its index:
// tuple header, the columns, and the pointer to the tuple.
const bytesPerClaim = 76

// List tells the scope's generations, oldest first.
func (s *Set) List(ctx context.Context) ([]Generation, error) {
	sql, args := s.ListQuery()
	rows, err := s.schema.Pool.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("list generations: %w", err)
	}
	all, err := pgx.CollectRows(rows, ScanGeneration)
	if err != nil {
		return nil, fmt.Errorf("list generations: %w", err)
	}
	return all, nil
}

func (s *Set) ListQuery() (sql string, args []any) {
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
		WHERE g.scope = $1 ORDER BY g.generation`, []any{s.schema.Scope, s.schema.Name, bytesPerClaim}
}

func ScanGeneration(row pgx.CollectableRow) (g Generation, err error) {
	var first, last *[16]byte
	err = row.Scan(&g.Generation, &g.State, &g.OpenedAt, &g.SealedAt, &g.Claims, &g.Exact, &g.Bytes, &g.FilterBytes, &g.FilterComplete, &g.Missing,
		(*[16]byte)(&g.Identity), &first, &last)
	g.FirstKey, g.LastKey = (*claimkey.Key)(first), (*claimkey.Key)(last)
	return g, err
}

// oldestFirst are the generations that may hold claims. An id that was claimed
// twice, by whatever hand, was seen first in the oldest.
func (c *Catalog) OldestFirst() []*Table {
	all := make([]*Table, 0, len(c.Sealed)+1)
	for i := len(c.Sealed) - 1; i >= 0; i-- {
		all = append(all, c.Sealed[i])
	}
	return append(all, c.Open)
}
