package generations

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
)

// filterCache holds the filters that are loaded, by the identity of their
// generation. Chunks are never changed, so that whoever has a catalog may read
// them without a lock.
type filterCache struct {
	mu     sync.Mutex
	chunks map[claimkey.Key][]*chunk
	bytes  int64
	// behind tells that a generation's filter isn't loaded though there may be
	// room for it.
	behind bool

	loading sync.Mutex // held by the one that loads
}

// keepOnly drops the filters of all other generations.
func (f *filterCache) keepOnly(sealed []*Table) {
	keep := make(map[claimkey.Key][]*chunk, len(sealed))
	f.bytes, f.behind = 0, false
	for _, g := range sealed {
		chunks := f.chunks[g.Identity]
		if len(chunks) > 0 {
			keep[g.Identity] = chunks
		}
		for _, c := range chunks {
			f.bytes += c.bytes()
		}
		f.behind = f.behind || !complete(chunks)
	}
	f.chunks = keep
}

func complete(chunks []*chunk) bool { return len(chunks) > 0 && chunks[len(chunks)-1].last }

// equip is the catalog with the filters that are loaded.
func (f *filterCache) equip(c *Catalog) *Catalog {
	with := *c
	with.Sealed = make([]*Table, len(c.Sealed))
	for i, g := range c.Sealed {
		equipped := *g
		equipped.chunks = f.chunks[g.Identity]
		with.Sealed[i] = &equipped
	}
	return &with
}

// makeRoom drops chunks of generations older than sealed[at], oldest first,
// until size more bytes fit into the budget, and tells whether they do.
func (f *filterCache) makeRoom(sealed []*Table, at int, size, budget int64) bool {
	for old := len(sealed) - 1; old > at && f.bytes+size > budget; old-- {
		chunks := f.chunks[sealed[old].Identity]
		for len(chunks) > 0 && f.bytes+size > budget {
			f.bytes -= chunks[len(chunks)-1].bytes()
			chunks = slices.Clone(chunks[:len(chunks)-1])
		}
		f.chunks[sealed[old].Identity] = chunks
	}
	return f.bytes+size <= budget
}

// FilterBytes is the memory that the loaded filters take.
func (s *Set) FilterBytes() int64 {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	return s.filters.bytes
}

// FiltersBehind tells that LoadFilters may have something to do.
func (s *Set) FiltersBehind() bool {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	return s.filters.behind
}

// LoadFilters reads the filters of sealed generations into memory, newest first,
// as far as the budget goes. A filter that isn't what was stored is deleted, to
// be built again; until then its generation is looked up through its index.
func (s *Set) LoadFilters(ctx context.Context) error {
	s.filters.loading.Lock()
	defer s.filters.loading.Unlock()
	c, err := s.Loaded(ctx)
	if err != nil {
		return err
	}
	waiting := false
	for at, g := range c.Sealed {
		for {
			if now := s.catalog.Load(); now == nil || !now.Has(g.Identity) {
				break // forgotten or expired meanwhile: there is nothing to load it into
			}
			s.filters.mu.Lock()
			have := s.filters.chunks[g.Identity]
			s.filters.mu.Unlock()
			if complete(have) {
				break
			}
			next, err := s.readChunk(ctx, g, have)
			if err != nil {
				return err
			}
			if next == nil {
				waiting = true // not built yet
				break
			}
			if !s.addChunk(c, at, next) {
				s.filters.mu.Lock()
				if now := s.catalog.Load(); now != nil && now.Identity == c.Identity {
					s.filters.behind = waiting // the rest is beyond the budget
				}
				s.filters.mu.Unlock()
				return nil
			}
		}
	}
	return nil
}

// addChunk publishes one more chunk of c.sealed[at], and tells whether to go on
// from what is loaded then: not when the budget has no room for it. A generation
// that is gone meanwhile takes its filter along.
func (s *Set) addChunk(c *Catalog, at int, next *chunk) bool {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	id := c.Sealed[at].Identity
	if len(s.filters.chunks[id]) != int(next.number) {
		return true // those before it were forgotten meanwhile: it must not stand for their keys
	}
	if !s.filters.makeRoom(c.Sealed, at, next.bytes(), s.FilterMemory) {
		return false
	}
	// A new slice: the old one may be in use.
	s.filters.chunks[id] = append(slices.Clone(s.filters.chunks[id]), next)
	s.republish()
	return true
}

// republish gives the current catalog the filters that are loaded now, and drops
// those that it has no generation for. The filters' lock is held.
func (s *Set) republish() {
	now := s.catalog.Load()
	if now == nil {
		s.filters.keepOnly(nil)
		return
	}
	s.filters.keepOnly(now.Sealed)
	s.catalog.CompareAndSwap(now, s.filters.equip(now)) // it may just have been forgotten
}

// readChunk reads the chunk that follows those that are loaded; nil: it isn't
// there.
func (s *Set) readChunk(ctx context.Context, g *Table, have []*chunk) (*chunk, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	c := &chunk{number: int32(len(have))}
	var checksum int64
	var data []byte
	err := s.schema.Pool.QueryRow(ctx, `SELECT claims, last_key, last, checksum, data FROM `+s.name("filters")+` WHERE identity = $1::uuid AND chunk = $2`,
		g.Identity.String(), c.number).Scan(&c.claims, (*[16]byte)(&c.lastKey), &c.last, &checksum, &data)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		// Mostly it isn't built yet. But chunks are built in their order: one that
		// follows a missing one would keep it from being built again.
		if _, err := s.schema.Pool.Exec(ctx, `DELETE FROM `+s.name("filters")+` f WHERE identity = $1::uuid AND chunk > $2
			AND NOT EXISTS (SELECT FROM `+s.name("filters")+` WHERE identity = f.identity AND chunk = $2)`, g.Identity.String(), c.number); err != nil {
			return nil, fmt.Errorf("delete what follows a gap in the filter of generation %d: %w", g.Number, err)
		}
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("load the filter of generation %d: %w", g.Number, err)
	}
	var above claimkey.Key // zero for the first
	if len(have) > 0 {
		above = have[len(have)-1].lastKey
	}
	switch {
	case c.checksum(g.Identity, above, data) != checksum:
		err = errors.New("its checksum is wrong")
	case c.claims <= 0 || len(have) > 0 && c.lastKey.Compare(&above) <= 0:
		err = errFilter
	default:
		err = c.decode(data)
	}
	if err == nil {
		return c, nil
	}
	s.log.Warn("a stored filter can't be trusted: it will be built again", "generation", g.Number, "chunk", c.number, "error", err)
	// Perhaps it is what we have loaded before that isn't stored any more.
	s.filters.mu.Lock()
	delete(s.filters.chunks, g.Identity)
	s.republish()
	s.filters.mu.Unlock()
	return nil, s.deleteChunks(ctx, g, c.number)
}

func (s *Set) deleteChunks(ctx context.Context, g *Table, from int32) error {
	if _, err := s.schema.Pool.Exec(ctx, `DELETE FROM `+s.name("filters")+` WHERE identity = $1::uuid AND chunk >= $2`, g.Identity.String(), from); err != nil {
		return fmt.Errorf("delete the broken filter of generation %d: %w", g.Number, err)
	}
	return nil
}

// BuildFilter builds and stores the next missing chunk of the scope's filters,
// newest generation first. claims is how many keys it holds: 0 means that
// nothing is missing. led is false, and nothing done, while another process is
// at it. Each chunk is a transaction of its own, so that whoever comes next goes
// on where the last one ended.
func (s *Set) BuildFilter(ctx context.Context) (claims int, led bool, err error) {
	var (
		identity, first, last claimkey.Key
		table                 string
		number                int
		missing               chunk
		after                 *[16]byte
	)
	find := func(q interface {
		QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	}) error {
		return q.QueryRow(ctx, `
			SELECT g.identity, g.first_key, g.last_key, g.table_name, g.generation, coalesce(f.chunk + 1, 0), f.last_key
			FROM `+s.name("generations")+` g
			LEFT JOIN LATERAL (SELECT chunk, last_key, last FROM `+s.name("filters")+` WHERE identity = g.identity ORDER BY chunk DESC LIMIT 1) f ON true
			WHERE g.scope = $1 AND g.state = 'sealed' AND g.first_key IS NOT NULL AND f.last IS NOT TRUE
			ORDER BY g.generation DESC LIMIT 1`, s.schema.Scope).Scan(
			(*[16]byte)(&identity), (*[16]byte)(&first), (*[16]byte)(&last), &table, &number, &missing.number, &after)
	}
	switch err := find(s.schema.Pool); {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, true, nil
	case err != nil:
		return 0, false, fmt.Errorf("find missing filters: %w", err)
	}
	if missing.number == 0 {
		s.vacuum(ctx, table)
	}
	led, err = s.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
		missing.claims = 0
		if err := find(tx); errors.Is(err, pgx.ErrNoRows) {
			return nil // another was faster
		} else if err != nil {
			return err
		}
		from, than := first, ">="
		var above claimkey.Key
		if after != nil {
			from, than, above = *after, ">", *after
		}
		keys, more, err := s.readKeys(ctx, tx.Conn(), table, than, from)
		if err != nil {
			return err
		}
		if len(keys) == 0 {
			// Whatever was there has been forgotten. A filter may hold keys that
			// the table doesn't.
			keys = []claimkey.Key{last}
		}
		data, err := buildFilter(keys)
		if err != nil {
			return err
		}
		missing.claims, missing.lastKey, missing.last = int32(len(keys)), keys[len(keys)-1], !more
		_, err = tx.Exec(ctx, `INSERT INTO `+s.name("filters")+` (identity, chunk, claims, last_key, last, checksum, data) VALUES ($1::uuid, $2, $3, $4::uuid, $5, $6, $7)`,
			identity.String(), missing.number, missing.claims, missing.lastKey.String(), missing.last, missing.checksum(identity, above, data), data)
		return err
	})
	if err != nil {
		return 0, led, fmt.Errorf("build the filter of generation %d: %w", number, err)
	}
	return int(missing.claims), led, nil
}

// readKeys reads a table's keys from one on, in their order, as many as a chunk
// holds, and tells whether there are more.
func (s *Set) readKeys(ctx context.Context, conn *pgx.Conn, table, than string, from claimkey.Key) (keys []claimkey.Key, more bool, err error) {
	limit := s.ChunkClaims
	err = pipeline.RoundTrip(ctx, conn, false, []pipeline.Step{{
		SQL:  `SELECT key FROM ` + s.name(table) + ` WHERE key ` + than + ` $1::uuid ORDER BY key LIMIT $2::bigint`,
		OIDs: []uint32{pgtype.UUIDOID, pgtype.Int8OID}, Params: [][]byte{from[:], pipeline.Int8(int64(limit + 1))},
		Row: func(v [][]byte) error {
			key, err := pipeline.ReadKey(v[0])
			keys = append(keys, key)
			return err
		},
	}})
	if err != nil || len(keys) <= limit {
		return keys, false, err
	}
	return keys[:limit], true, nil
}

// vacuum makes a sealed table quick to read: its pages are marked visible to
// all, once, so that the index alone tells its keys; and frozen, so that no
// later vacuum has to come and stand in the way of its end. A role that may not
// do it gets a warning of the server, and everything works, a little slower.
func (s *Set) vacuum(ctx context.Context, table string) {
	if _, err := s.schema.Pool.Exec(ctx, `VACUUM (FREEZE, TRUNCATE false, SKIP_LOCKED) `+s.name(table)); err != nil {
		s.log.Debug("vacuum of a sealed generation failed", "table", table, "error", err)
	}
}
