package generations

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/schema"
)

// Set has the generations of one scope: the catalog as this process last read it, and
// the loaded filters. It may be used by many goroutines.
type Set struct {
	schema *schema.Schema
	log    *slog.Logger
	forgot func()

	// FilterMemory bounds the bytes of the loaded filters. ChunkClaims is the most keys
	// that a filter's chunk may have. Both are set before the first call.
	FilterMemory int64
	ChunkClaims  int

	refreshing sync.Mutex
	catalog    atomic.Pointer[Catalog]
	filters    filterCache
	// outlasted is when a step last waited for the rotation lock in vain for as long as
	// any may, in Unix nanoseconds.
	outlasted atomic.Int64
}

// NewSet makes the set for the schema's scope. Forget calls forgot.
func NewSet(schema *schema.Schema, filterMemory int64, log *slog.Logger, forgot func()) *Set {
	return &Set{schema: schema, log: log, forgot: forgot, FilterMemory: filterMemory, ChunkClaims: chunkClaims}
}

func (s *Set) name(object string) string { return s.schema.Object(object) }

// Refresh reads the catalog anew. One caller reads at a time, so that none mistakes an
// older state for a database that went back.
func (s *Set) Refresh(ctx context.Context) (*Catalog, error) {
	s.refreshing.Lock()
	defer s.refreshing.Unlock()
	return s.refreshLocked(ctx, s.schema.Pool)
}

// reader is a pool or a transaction.
type reader interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// refreshLocked needs refreshing.
func (s *Set) refreshLocked(ctx context.Context, db reader) (*Catalog, error) {
	c, err := s.read(ctx, db)
	if err != nil {
		return nil, err
	}
	if old := s.catalog.Load(); old != nil && (c.ScopeID != old.ScopeID || c.epoch < old.epoch || c.epoch == old.epoch && c.Identity != old.Identity) {
		s.Forget("the catalog of generations went back")
	}
	s.publish(c)
	return c, nil
}

// read reads the catalog.
func (s *Set) read(ctx context.Context, db reader) (*Catalog, error) {
	rows, _ := db.Query(ctx, `
		SELECT s.id, s.catalog, s.catalog_epoch, g.generation, g.identity, g.table_name, g.state = 'open', g.first_key, g.last_key
		FROM `+s.name("scopes")+` s
		JOIN `+s.name("generations")+` g ON g.scope = s.scope AND g.state IN ('open', 'sealed')
		WHERE s.scope = $1 ORDER BY g.generation DESC`, s.schema.Scope)
	c := new(Catalog)
	var (
		g           Table
		table       string
		open        bool
		first, last *[16]byte
	)
	_, err := pgx.ForEachRow(rows, []any{&c.ScopeID, (*[16]byte)(&c.Identity), &c.epoch, &g.Number, (*[16]byte)(&g.Identity), &table, &open, &first, &last}, func() error {
		at := g
		at.Name, at.Results, at.Open = s.name(table), s.name("results"+strings.TrimPrefix(table, "claims")), open
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
	return c, nil
}

// publish makes c the current catalog, with the loaded filters.
func (s *Set) publish(c *Catalog) {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	s.filters.keepOnlyLocked(c.Sealed)
	s.catalog.Store(s.filters.equipLocked(c))
}

// Loaded returns the current catalog. It reads one if there is none.
func (s *Set) Loaded(ctx context.Context) (*Catalog, error) {
	if c := s.catalog.Load(); c != nil {
		return c, nil
	}
	return s.Refresh(ctx)
}

// LoadedBy is Loaded for a caller whose transaction may have the pool's last connection: it
// reads over that transaction, and waits for nobody who may wait for a connection.
func (s *Set) LoadedBy(ctx context.Context, tx pgx.Tx) (*Catalog, error) {
	if c := s.catalog.Load(); c != nil {
		return c, nil
	}
	if s.refreshing.TryLock() {
		defer s.refreshing.Unlock()
		if c := s.catalog.Load(); c != nil { // the transaction may have an older snapshot
			return c, nil
		}
		return s.refreshLocked(ctx, tx)
	}
	c, err := s.read(ctx, tx)
	if err != nil {
		return nil, err
	}
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	return s.filters.equipLocked(c), nil
}

// Outdate makes the next Loaded read the catalog anew, if c is still the current one.
func (s *Set) Outdate(c *Catalog) {
	if now := s.catalog.Load(); now != nil && now.Identity == c.Identity {
		s.catalog.CompareAndSwap(now, nil)
	}
}

// Forget drops everything remembered of the database: the catalog, the filters, and
// what forgot drops. It is called when the database may have changed under us, such as
// after a failover. All of it is read again when it is needed.
//
// It is a precaution: each transaction names its catalog by a random identity, and a
// filter belongs to one seal of one table.
func (s *Set) Forget(why string) {
	s.filters.mu.Lock()
	s.catalog.Store(nil)
	n := len(s.filters.chunks)
	s.filters.keepOnlyLocked(nil)
	s.filters.mu.Unlock()
	s.forgot()
	s.log.Warn("forgetting what was remembered of the database", "why", why, "filters", n)
}
