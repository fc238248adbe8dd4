package dedup

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/message"
)

var beginStep = step{name: "dedupd_begin", sql: "begin isolation level read committed", tag: "BEGIN"}

func (s *Store) enterStep(c *catalog) step {
	return step{
		name:   "dedupd_enter_3",
		sql:    `SELECT ` + s.name("enter") + `($1::integer, $2::uuid, $3::text, $4::text, $5::text), ` + hearWarnings,
		oids:   []uint32{pgtype.Int4OID, pgtype.UUIDOID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID},
		params: [][]byte{int4(c.scopeID), c.identity[:], []byte(lockTimeout), []byte(statementTimeout), []byte(idleTimeout)},
	}
}

// claim opens the transaction, claims the group's keys, looks at what the losers
// lost to, and gives every message its outcome.
func (p *Processor) claim(ctx context.Context, conn *pgx.Conn, c *catalog, g *group) error {
	values, err := p.claimValues(g)
	if err != nil {
		return err
	}
	rows, counts, err := p.Store.claimKeys(ctx, conn, p.Store.prepare, c, g, []step{beginStep, p.Store.enterStep(c)}, values)
	p.Metrics.probed(counts)
	if err != nil {
		return err
	}
	return p.settle(ctx, conn, g, rows)
}

// claimKeys claims the keys of a group, whose items then tell which are won, and
// gives the claims that the others lost to. The steps before are sent along with
// the first round trip; the last of them must be enter().
//
// A sealed generation is never written again, and under the rotation lock none
// is sealed or dropped, so a key that a sealed table doesn't hold now is in none
// of them when the open one takes it. In the open table a key that another
// transaction holds makes the statement wait for that one's end. No row back
// means that the other has committed, so that a duplicate may be dropped; had it
// rolled back, the row would be ours.
//
// When the values say ahead, the open table is looked through as well before
// anything is claimed, and what it lacks is copied into it. Then a twin that is
// committed after the look fails the copy: errTwin, and nothing was done.
func (s *Store) claimKeys(ctx context.Context, conn *pgx.Conn, prepare bool, c *catalog, g *group, before []step, values claimValues) (map[Key]*claimRow, probeResult, error) {
	steps := before
	rows := make(map[Key]*claimRow)
	probes, result := g.probes(c)
	var looks []step
	for _, p := range probes {
		looks = append(looks, s.lookupStep(p.generation, len(p.firsts), func(i int) *Key { return &g.keys[p.firsts[i]] }, rows))
	}
	if values.ahead {
		looks = append(looks, s.lookupStep(c.open, len(g.firsts), func(i int) *Key { return &g.items[g.firsts[i]].key }, rows))
	}
	g.claims = g.firsts
	if len(looks) > 0 {
		if err := roundTrip(ctx, conn, prepare, append(steps, byIndex(looks)...)); err != nil {
			return nil, result, fmt.Errorf("look for claims: %w", err)
		}
		steps = nil
		result.settle(g, probes, rows)
		if len(rows) > 0 {
			g.claims = make([]int32, 0, len(g.firsts))
			for _, at := range g.firsts {
				if rows[g.items[at].key] == nil {
					g.claims = append(g.claims, at)
				}
			}
		}
	}
	if values.ahead {
		return rows, result, values.copy(ctx, conn, c.open, g)
	}
	if len(g.claims) > 0 {
		steps = append(steps, values.step(c.open, g))
	}
	if err := roundTrip(ctx, conn, prepare, steps); err != nil {
		return nil, result, err
	}
	lost := g.losers()
	if len(lost) == 0 {
		return rows, result, nil
	}
	// A statement of its own: the claims that won against ours are newer than
	// the snapshot of the statement that lost to them.
	lookup := s.lookupStep(c.open, len(lost), func(i int) *Key { return &g.items[lost[i]].key }, rows)
	if err := roundTrip(ctx, conn, prepare, byIndex([]step{lookup})); err != nil {
		return nil, result, fmt.Errorf("look up duplicates: %w", err)
	}
	return rows, result, nil
}

// probe is what has to be looked up in the table of a sealed generation: indexes
// of a group's firsts. Those before unfiltered have passed a filter.
type probe struct {
	generation *generation
	firsts     []int32
	unfiltered int
}

// probeResult counts pairs of an id and a sealed generation whose zone it falls
// into, each under one name.
type probeResult struct {
	excluded      int64 // the filter said no
	found         int64 // the table holds it
	falsePositive int64 // the filter said maybe, the table no
	unfiltered    int64 // no filter was loaded, and the table said no
}

// probes finds out which keys have to be looked up in which sealed generation.
func (g *group) probes(c *catalog) (probes []probe, result probeResult) {
	if len(c.sealed) == 0 {
		return nil, result
	}
	g.hash()
	for _, gen := range c.sealed {
		firsts, unfiltered, excluded := gen.candidates(g.keys, g.hashes)
		result.excluded += int64(excluded)
		if len(firsts) > 0 {
			probes = append(probes, probe{gen, firsts, unfiltered})
		}
	}
	return probes, result
}

// settle counts the answers of the tables. A key is in one of them at most: where
// it was found, the others' maybe was as wrong as if it were in none.
func (r *probeResult) settle(g *group, probes []probe, rows map[Key]*claimRow) {
	for _, p := range probes {
		for i, first := range p.firsts {
			switch row := rows[g.keys[first]]; {
			case row != nil && row.generation == p.generation:
				r.found++
			case i < p.unfiltered:
				r.falsePositive++
			default:
				r.unfiltered++
			}
		}
	}
}

// claimValues is what is stored with a claim besides its key.
type claimValues struct {
	// lanes are the batches' numbers; nil: the claims come by no lane.
	lanes       []int32
	fingerprint bool
	// ahead has the claims looked up first and then copied. Only with lanes.
	ahead bool
}

func (p *Processor) claimValues(g *group) (v claimValues, err error) {
	v.fingerprint = !p.Fingerprint.none()
	v.ahead = p.looksAhead(g)
	g.lanes = make([]int32, len(g.batches))
	for i := range g.batches {
		if g.lanes[i], err = p.Store.laneID(g.batches[i].Lane); err != nil {
			return v, err
		}
	}
	v.lanes = g.lanes
	return v, nil
}

// step is the statement that claims, in one go, what is left to claim.
func (v claimValues) step(open *generation, g *group) step {
	n := len(g.claims)
	claim := func(i int) *item { return &g.items[g.claims[i]] }
	next := 0
	st := step{
		generation: open,
		oids:       []uint32{pgtype.UUIDArrayOID},
		params:     [][]byte{appendKeys(make([]byte, 0, 20*n+20), n, func(i int) *Key { return &claim(i).key })},
		row: func(row [][]byte) error {
			key, err := readKey(row[0])
			if err != nil {
				return err
			}
			next, err = g.won(key, next)
			return err
		},
	}
	// Arrays unnested in the select list are read off one by one; in FROM, each
	// would be written to a store of its own before.
	kind, columns, values := "bare", "key", "unnest($1::uuid[])"
	add := func(column, value string, oid uint32, param []byte) {
		st.oids, st.params = append(st.oids, oid), append(st.params, param)
		columns, values = columns+", "+column, values+", "+fmt.Sprintf(value, len(st.params))
	}
	if v.lanes != nil {
		kind = "none"
		if v.fingerprint {
			kind = "value"
			add("fingerprint", "unnest($%d::bigint[])", pgtype.Int8ArrayOID, appendInt8s(make([]byte, 0, 12*n+20), n, func(i int) int64 { return claim(i).fingerprint }))
		}
		add("position", "unnest($%d::bigint[])", pgtype.Int8ArrayOID, appendInt8s(make([]byte, 0, 12*n+20), n, func(i int) int64 { return g.message(claim(i)).Position.Offset }))
		if len(slices.Compact(slices.Clone(v.lanes))) == 1 {
			kind += "_lane"
			add("lane", "$%d::integer", pgtype.Int4OID, int4(v.lanes[0]))
		} else {
			add("lane", "unnest($%d::integer[])", pgtype.Int4ArrayOID, appendInt4s(make([]byte, 0, 8*n+20), n, func(i int) int32 { return v.lanes[claim(i).batch] }))
		}
	}
	st.name = "dedupd_claim_" + kind + "_" + open.identity.String()
	st.sql = `INSERT INTO ` + open.table + ` (` + columns + `) SELECT ` + values + ` ON CONFLICT (key) DO NOTHING RETURNING key`
	return st
}

// losers are what was to be claimed, and had been before.
func (g *group) losers() []int32 {
	var lost []int32
	for _, at := range g.claims {
		if !g.items[at].wins {
			lost = append(lost, at)
		}
	}
	return lost
}

// claimRow is a claim that was there before us.
type claimRow struct {
	generation  *generation
	fingerprint *int64
	lane        *int32 // nil: claimed by no lane
	position    *int64
	age         float64 // seconds since it was claimed
}

func (r *claimRow) laneParam() []byte {
	if r == nil || r.lane == nil {
		return nil
	}
	return int4(*r.lane)
}

func (r *claimRow) positionParam() []byte {
	if r == nil || r.position == nil {
		return nil
	}
	return int8b(*r.position)
}

// byIndex holds look-ups to the index. By the planner's reckoning many keys are
// best found by reading a table of up to a few million rows whole. That would be
// right once; but there is a group every few milliseconds, and a connection that
// has made such a plan keeps it while the table grows.
func byIndex(looks []step) []step {
	all := append(make([]step, 0, len(looks)+2), step{name: "dedupd_seqscan_off", sql: "SET LOCAL enable_seqscan = off"})
	return append(append(all, looks...), step{name: "dedupd_seqscan", sql: "SET LOCAL enable_seqscan = DEFAULT"})
}

// lookupStep reads n claims of a generation into rows, as far as they are there.
// Its statement goes by byIndex only: a plan made without it would be kept.
func (s *Store) lookupStep(g *generation, n int, key func(i int) *Key, rows map[Key]*claimRow) step {
	return step{
		name:       "dedupd_lookup_" + g.identity.String(),
		generation: g,
		sql: `SELECT key, fingerprint, lane, position, extract(epoch FROM ` + s.name("clock") + `() - claimed_at)::float8
			FROM ` + g.table + ` WHERE key = ANY ($1::uuid[])`,
		oids:   []uint32{pgtype.UUIDArrayOID},
		params: [][]byte{appendKeys(make([]byte, 0, 20*n+20), n, key)},
		row: func(v [][]byte) error {
			key, err := readKey(v[0])
			if err != nil {
				return err
			}
			r := &claimRow{generation: g}
			if v[1] != nil {
				n, err := readInt8(v[1])
				if err != nil {
					return err
				}
				r.fingerprint = &n
			}
			if len(v[2]) == 4 {
				r.lane = new(int32(binary.BigEndian.Uint32(v[2])))
			}
			if v[3] != nil {
				n, err := readInt8(v[3])
				if err != nil {
					return err
				}
				r.position = &n
			}
			age, err := readInt8(v[4])
			if err != nil {
				return err
			}
			// A twin that began after us may have claimed before us.
			r.age = max(0, math.Float64frombits(uint64(age)))
			rows[key] = r
			return nil
		},
	}
}

// settle gives every message its outcome but those that the sink still refuses.
func (p *Processor) settle(ctx context.Context, conn *pgx.Conn, g *group, rows map[Key]*claimRow) error {
	for i := range g.items {
		it := &g.items[i]
		root := it
		if it.twin >= 0 {
			root = &g.items[it.twin]
		}
		switch {
		case root.wins && root == it:
			it.outcome = applied
			if it.reject != nil {
				it.outcome = dead
			}
		case root.wins:
			it.original = &claimRow{fingerprint: &root.fingerprint, lane: &g.lanes[root.batch], position: &g.message(root).Position.Offset}
		default:
			if it.original = rows[root.key]; it.original == nil {
				// The claim was there a moment ago: it has been forgotten since.
				return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40001", Message: "a claim vanished while it was looked at"}
			}
		}
		if it.outcome == pending {
			if err := p.settleLoser(ctx, conn, g, it); err != nil {
				return err
			}
		}
	}
	return nil
}

// settleLoser tells what kind of copy a message is of the one that has claimed
// its id.
func (p *Processor) settleLoser(ctx context.Context, conn *pgx.Conn, g *group, it *item) error {
	original, lane := it.original, g.batches[it.batch].Lane
	if !p.Fingerprint.none() && original.fingerprint != nil && differ(*original.fingerprint, it.fingerprint) {
		it.outcome = conflict
		if p.OnConflict == ConflictStop {
			m := g.message(it)
			return &message.HoldError{
				Lane: lane, Err: fmt.Errorf("position %d: id %q was claimed with another payload, and dedup.on_conflict is stop", m.Position.Offset, m.ID),
				Summary: fmt.Sprintf("position %d: its id was claimed with another payload, and dedup.on_conflict is stop", m.Position.Offset),
			}
		}
		return nil
	}
	it.outcome = resent
	if original.lane != nil {
		source, err := p.Store.sourceOf(ctx, conn, *original.lane)
		if err != nil {
			return err
		}
		switch {
		case *original.lane == g.lanes[it.batch] && original.position != nil && *original.position == g.message(it).Position.Offset:
			it.outcome = redelivered
		case source != "" && source != lane.Source:
			it.outcome = crossSource
		}
	}
	g.ages = append(g.ages, original.age)
	return nil
}

// Claim claims ids within a transaction of the caller's own, for services that
// deduplicate without dedupd's worker. won tells for each id whether it is new;
// an id that stands twice wins once. The claims stand or fall with tx, which must
// be READ COMMITTED (SQLSTATE DD005 if not). Another transaction that holds one
// of the ids is waited for. Ids must be 1 byte long at least.
//
// Ids are claimed in one order by everyone; two calls in one transaction aren't,
// and may deadlock with another's (40P01: roll back and try again). From the
// first call until tx ends its time-outs are those of a claim transaction:
// lock_timeout 5 s, statement_timeout 20 s, and 10 s of idleness; and
// enable_seqscan is the session's. Whoever needs others sets them with SET LOCAL
// after the call.
//
// A refused catalog (SQLSTATE DD002) means that the scope's generations have
// changed: roll back and try again.
//
// Sealed generations are looked through in their tables unless LoadFilters was
// called, which is worth it for more than a few ids now and then. Workers of the
// scope keep house; without any, generations stay as they are.
func (s *Store) Claim(ctx context.Context, tx pgx.Tx, ids []string) (won []bool, err error) {
	c, err := s.loaded(ctx)
	if err != nil {
		return nil, err
	}
	g := &group{items: make([]item, len(ids))}
	for i, id := range ids {
		if id == "" {
			return nil, fmt.Errorf("claim: id %d is empty", i)
		}
		g.items[i] = item{key: KeyOf(id), twin: -1}
	}
	g.fold()
	// Nothing is prepared: the connection is the caller's.
	if _, _, err := s.claimKeys(ctx, tx.Conn(), false, c, g, []step{s.enterStep(c)}, claimValues{}); err != nil {
		if sqlstate(err) == stateCatalog {
			if now := s.catalog.Load(); now != nil && now.identity == c.identity {
				s.catalog.CompareAndSwap(now, nil) // read anew by the next call
			}
		}
		return nil, fmt.Errorf("claim: %w", err)
	}
	won = make([]bool, len(ids))
	for i := range g.items {
		won[i] = g.items[i].wins
	}
	return won, nil
}
