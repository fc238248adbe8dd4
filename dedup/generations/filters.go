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

// filterCache holds the loaded filters by their generations' identities. A chunk is never
// changed, so whoever has a catalog reads its chunks without a lock.
type filterCache struct {
	mu     sync.Mutex
	chunks map[claimkey.Key][]*chunk
	bytes  int64
	// behind: a generation's filter isn't loaded, though there may be room for it.
	behind bool

	loading sync.Mutex // held by the goroutine that loads
}

// keepOnlyLocked drops the filters of all other generations.
func (f *filterCache) keepOnlyLocked(sealed []*Table) {
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

// equipLocked returns a copy of the catalog with the loaded filters.
func (f *filterCache) equipLocked(c *Catalog) *Catalog {
	with := *c
	with.Sealed = make([]*Table, len(c.Sealed))
	for i, g := range c.Sealed {
		equipped := *g
		equipped.chunks = f.chunks[g.Identity]
		with.Sealed[i] = &equipped
	}
	return &with
}

// makeRoomLocked drops chunks of generations older than sealed[at], oldest first, until
// size more bytes fit into the budget. It reports whether they do.
func (f *filterCache) makeRoomLocked(sealed []*Table, at int, size, budget int64) bool {
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

// FilterBytes returns the size of the loaded filters.
func (s *Set) FilterBytes() int64 {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	return s.filters.bytes
}

// FiltersBehind reports whether LoadFilters may have something to do.
func (s *Set) FiltersBehind() bool {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	return s.filters.behind
}

// LoadFilters reads the filters of sealed generations into memory, newest first, up to
// the budget. A damaged filter is deleted and built again; until then, keys are looked up
// in its generation's index.
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
				break // forgotten or expired meanwhile
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

// addChunk publishes one more chunk of c.Sealed[at]. It is false if the budget has no
// room for it. If the generation is gone meanwhile, so is its filter.
func (s *Set) addChunk(c *Catalog, at int, next *chunk) bool {
	s.filters.mu.Lock()
	defer s.filters.mu.Unlock()
	id := c.Sealed[at].Identity
	if len(s.filters.chunks[id]) != int(next.number) {
		return true // the chunks before it were forgotten meanwhile: it must not cover their keys
	}
	if !s.filters.makeRoomLocked(c.Sealed, at, next.bytes(), s.FilterMemory) {
		return false
	}
	// A new slice: the old one may be in use.
	s.filters.chunks[id] = append(slices.Clone(s.filters.chunks[id]), next)
	s.republishLocked()
	return true
}

// republishLocked gives the current catalog the filters that are loaded now, and drops
// those of generations that it doesn't have.
func (s *Set) republishLocked() {
	now := s.catalog.Load()
	if now == nil {
		s.filters.keepOnlyLocked(nil)
		return
	}
	s.filters.keepOnlyLocked(now.Sealed)
	s.catalog.CompareAndSwap(now, s.filters.equipLocked(now)) // it may just have been forgotten
}

// readChunk reads the chunk that follows the loaded ones; nil: there is none.
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
		// As a rule it isn't built yet. But chunks are built in order, and one behind a
		// gap would keep the gap from being filled.
		if _, err := s.schema.Pool.Exec(ctx, `DELETE FROM `+s.name("filters")+` f WHERE identity = $1::uuid AND chunk > $2
			AND NOT EXISTS (SELECT FROM `+s.name("filters")+` WHERE identity = f.identity AND chunk = $2)`, g.Identity.String(), c.number); err != nil {
			return nil, fmt.Errorf("delete the chunks behind a gap in the filter of generation %d: %w", g.Number, err)
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
		err = errors.New("wrong checksum")
	case c.claims <= 0 || len(have) > 0 && c.lastKey.Compare(&above) <= 0:
		err = errFilter
	default:
		err = c.decode(data)
	}
	if err == nil {
		return c, nil
	}
	s.log.Warn("a stored filter is damaged and will be built again", "generation", g.Number, "chunk", c.number, "error", err)
	// The loaded chunks before it may be the wrong ones: perhaps they aren't stored any more.
	s.filters.mu.Lock()
	delete(s.filters.chunks, g.Identity)
	s.republishLocked()
	s.filters.mu.Unlock()
	if _, err := s.schema.Pool.Exec(ctx, `DELETE FROM `+s.name("filters")+` WHERE identity = $1::uuid AND chunk >= $2`, g.Identity.String(), c.number); err != nil {
		return nil, fmt.Errorf("delete the broken filter of generation %d: %w", g.Number, err)
	}
	return nil, nil
}

// missingChunk is the next chunk to build of a sealed generation's filter.
type missingChunk struct {
	identity, first, last claimkey.Key // the generation's
	table                 string
	generation            int
	number                int32
	after                 *[16]byte // the last key of the chunk before; nil: there is none
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// findMissing returns the next chunk to build, of the newest generation that lacks one;
// pgx.ErrNoRows: all filters are complete.
func (s *Set) findMissing(ctx context.Context, db querier) (m missingChunk, err error) {
	err = db.QueryRow(ctx, `
		SELECT g.identity, g.first_key, g.last_key, g.table_name, g.generation, coalesce(f.chunk + 1, 0), f.last_key
		FROM `+s.name("generations")+` g
		LEFT JOIN LATERAL (SELECT chunk, last_key, last FROM `+s.name("filters")+` WHERE identity = g.identity ORDER BY chunk DESC LIMIT 1) f ON true
		WHERE g.scope = $1 AND g.state = 'sealed' AND g.first_key IS NOT NULL AND f.last IS NOT TRUE
		ORDER BY g.generation DESC LIMIT 1`, s.schema.Scope).Scan(
		(*[16]byte)(&m.identity), (*[16]byte)(&m.first), (*[16]byte)(&m.last), &m.table, &m.generation, &m.number, &m.after)
	return m, err
}

// BuildFilter builds and stores the next missing chunk of the scope's filters, newest
// generation first. claims is how many keys the chunk holds; 0: nothing is missing. Each
// chunk is a transaction, so another leader can go on where this one stopped.
func (s *Set) BuildFilter(ctx context.Context) (claims int, led bool, err error) {
	missing, err := s.findMissing(ctx, s.schema.Pool)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, true, nil
	case err != nil:
		return 0, false, fmt.Errorf("find missing filters: %w", err)
	}
	if missing.number == 0 {
		s.vacuum(ctx, missing.table)
	}
	led, err = s.AsLeader(ctx, func(ctx context.Context, tx pgx.Tx) error {
		m, err := s.findMissing(ctx, tx)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // another leader was faster
		}
		if err == nil {
			claims, err = s.buildChunk(ctx, tx, m)
		}
		return err
	})
	if err != nil {
		return 0, led, fmt.Errorf("build the filter of generation %d: %w", missing.generation, err)
	}
	return claims, led, nil
}

func (s *Set) buildChunk(ctx context.Context, tx pgx.Tx, m missingChunk) (claims int, err error) {
	from, than := m.first, ">="
	var above claimkey.Key
	if m.after != nil {
		from, than, above = *m.after, ">", *m.after
	}
	keys, more, err := s.readKeys(ctx, tx.Conn(), m.table, than, from)
	if err != nil {
		return 0, err
	}
	if len(keys) == 0 {
		// All of them were forgotten. A filter may hold keys that the table doesn't.
		keys = []claimkey.Key{m.last}
	}
	data, err := buildFilter(keys)
	if err != nil {
		return 0, err
	}
	c := chunk{number: m.number, claims: int32(len(keys)), lastKey: keys[len(keys)-1], last: !more}
	_, err = tx.Exec(ctx, `INSERT INTO `+s.name("filters")+` (identity, chunk, claims, last_key, last, checksum, data) VALUES ($1::uuid, $2, $3, $4::uuid, $5, $6, $7)`,
		m.identity.String(), c.number, c.claims, c.lastKey.String(), c.last, c.checksum(m.identity, above, data), data)
	return len(keys), err
}

// readKeys reads the keys of one chunk: in order, those ">" or ">=" (than) from. more
// reports whether the table has others behind them.
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

// vacuum prepares a sealed table for its life: pages are marked visible to all, so that
// keys are read from the index alone, and frozen, so that no later vacuum holds up the
// DROP. For a role that may not vacuum the table, the server only warns, and everything
// works a little slower.
func (s *Set) vacuum(ctx context.Context, table string) {
	if _, err := s.schema.Pool.Exec(ctx, `VACUUM (FREEZE, TRUNCATE false, SKIP_LOCKED) `+s.name(table)); err != nil {
		s.log.Debug("vacuum of a sealed generation failed", "table", table, "error", err)
	}
}
