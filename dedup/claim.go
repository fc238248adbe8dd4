package dedup

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/sinks"
)

var beginStep = pipeline.Step{Name: "dedupd_begin", SQL: "begin isolation level read committed", Tag: "BEGIN"}

// enterStep is enter(): see the schema.
func (t *txn) enterStep() pipeline.Step {
	return pipeline.Step{
		Name:   "dedupd_enter_3",
		SQL:    `SELECT ` + t.store.name("enter") + `($1::integer, $2::uuid, $3::text, $4::text, $5::text), ` + sendWarnings,
		OIDs:   []uint32{pgtype.Int4OID, pgtype.UUIDOID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID},
		Params: [][]byte{pipeline.Int4(t.catalog.ScopeID), t.catalog.Identity[:], []byte(pipeline.LockTimeout), []byte(pipeline.StatementTimeout), []byte(pipeline.IdleTimeout)},
	}
}

// claim claims the keys of the group, marks the items that are new, and finds the claims
// that the others have met. The steps are sent with the first round trip; the last of
// them must be enter().
//
// A sealed generation is never written again, and under the rotation lock none is sealed
// or dropped. So a key that no sealed table holds now is in none of them when the open
// one takes it. In the open table the statement waits for another transaction that holds
// a key. No row back means that the other has committed, so that a duplicate may be
// dropped; had it rolled back, the row would be ours.
//
// To claim by copy, the open table is looked through as well before anything is claimed,
// and what it lacks is copied into it. A concurrent duplicate that commits after the
// look-up then fails the copy: errConcurrentDuplicate, and nothing was done.
func (t *txn) claim(ctx context.Context, steps ...pipeline.Step) error {
	t.found = make(map[claimkey.Key]*claimRow)
	t.claims, t.claimed = t.unique, true
	probes := t.probes()
	if lookups := t.lookups(probes); len(lookups) > 0 {
		if err := t.send(ctx, append(steps, byIndex(lookups)...)...); err != nil {
			return fmt.Errorf("look for claims: %w", err)
		}
		steps = nil
		t.countProbes(probes)
		if len(t.found) > 0 {
			t.claims = t.which(t.unique, func(it *item) bool { return t.found[it.key] == nil })
		}
	}
	if t.byCopy {
		return t.copy(ctx)
	}
	if len(t.claims) > 0 {
		if t.guest != nil {
			steps = append(steps, t.guest.waitStep())
		}
		steps = append(steps, t.insertStep())
	}
	if t.guest != nil {
		if steps = append(steps, restoreStep); !t.undoable() {
			steps = append(steps, releaseStep)
		}
	}
	if err := t.send(ctx, steps...); err != nil {
		return err
	}
	lost := t.which(t.claims, func(it *item) bool { return !it.isNew }) // claimed before
	if len(lost) == 0 {
		return nil
	}
	// A statement of its own: those claims are newer than the snapshot of the statement
	// that met them.
	lookup := t.lookupStep(t.catalog.Open, len(lost), func(i int) *claimkey.Key { return &t.items[lost[i]].key })
	if err := t.send(ctx, byIndex([]pipeline.Step{lookup})...); err != nil {
		return fmt.Errorf("look up duplicates: %w", err)
	}
	return nil
}

// lookups are the look-ups to make before anything is claimed.
func (t *txn) lookups(probes []probe) (lookups []pipeline.Step) {
	for _, p := range probes {
		lookups = append(lookups, t.lookupStep(p.table, len(p.unique), func(i int) *claimkey.Key { return &t.keys[p.unique[i]] }))
	}
	if t.byCopy {
		lookups = append(lookups, t.lookupStep(t.catalog.Open, len(t.unique), func(i int) *claimkey.Key { return &t.items[t.unique[i]].key }))
	}
	return lookups
}

// probe is a look-up in the table of a sealed generation: indexes of a group's unique
// items. Those before unfiltered have passed a filter.
type probe struct {
	table      *generations.Table
	unique     []int32
	unfiltered int
}

// probeResult counts pairs of an id and a sealed generation whose zone it is in, each
// under one name.
type probeResult struct {
	excluded      int64 // the filter said no
	found         int64 // the table holds it
	falsePositive int64 // the filter said maybe, the table no
	unfiltered    int64 // no filter was loaded, and the table said no
}

// probes finds out which keys have to be looked up in which sealed generation.
func (t *txn) probes() (probes []probe) {
	if len(t.catalog.Sealed) == 0 {
		return nil
	}
	t.hash()
	for _, table := range t.catalog.Sealed {
		candidates, unfiltered, excluded := table.Candidates(t.keys, t.hashes)
		t.probed.excluded += int64(excluded)
		if len(candidates) > 0 {
			probes = append(probes, probe{table, candidates, unfiltered})
		}
	}
	return probes
}

// countProbes counts the answers of the tables. A key is in one of them at most: if one
// holds it, the others' maybe was as wrong as if none did.
func (t *txn) countProbes(probes []probe) {
	for _, p := range probes {
		for i, at := range p.unique {
			switch row := t.found[t.keys[at]]; {
			case row != nil && row.table == p.table:
				t.probed.found++
			case i < p.unfiltered:
				t.probed.falsePositive++
			default:
				t.probed.unfiltered++
			}
		}
	}
}

// insertStep claims what is left to claim, in one statement.
func (t *txn) insertStep() pipeline.Step {
	open := t.catalog.Open
	n := len(t.claims)
	claim := func(i int) *item { return &t.items[t.claims[i]] }
	next := 0
	st := pipeline.Step{
		Generation: &open.Identity,
		OIDs:       []uint32{pgtype.UUIDArrayOID},
		Params:     [][]byte{pipeline.AppendKeys(make([]byte, 0, 20*n+20), n, func(i int) *claimkey.Key { return &claim(i).key })},
		Row: func(row [][]byte) error {
			key, err := pipeline.ReadKey(row[0])
			if err != nil {
				return err
			}
			if t.guest != nil {
				t.guest.claimant = claimant{slices.Clone(row[1]), slices.Clone(row[2])}
			}
			next, err = t.markNew(key, next)
			return err
		},
	}
	// Arrays unnested in the select list are read one by one; in FROM, each would first
	// be written to a store of its own.
	kind, columns, values := "bare", "key", "unnest($1::uuid[])"
	add := func(column, value string, oid uint32, param []byte) {
		st.OIDs, st.Params = append(st.OIDs, oid), append(st.Params, param)
		columns, values = columns+", "+column, values+", "+fmt.Sprintf(value, len(st.Params))
	}
	if t.lanes != nil {
		kind = "none"
		if t.fingerprint {
			kind = "value"
			add("fingerprint", "unnest($%d::bigint[])", pgtype.Int8ArrayOID, pipeline.AppendInt8s(make([]byte, 0, 12*n+20), n, func(i int) int64 { return claim(i).fingerprint }))
		}
		add("position", "unnest($%d::bigint[])", pgtype.Int8ArrayOID, pipeline.AppendInt8s(make([]byte, 0, 12*n+20), n, func(i int) int64 { return t.message(claim(i)).Position.Offset }))
		if len(slices.Compact(slices.Clone(t.lanes))) == 1 {
			kind += "_lane"
			add("lane", "$%d::integer", pgtype.Int4OID, pipeline.Int4(t.lanes[0]))
		} else {
			add("lane", "unnest($%d::integer[])", pgtype.Int4ArrayOID, pipeline.AppendInt4s(make([]byte, 0, 8*n+20), n, func(i int) int32 { return t.lanes[claim(i).batch] }))
		}
	}
	st.Name = t.claimName(kind)
	st.SQL = `INSERT INTO ` + open.Name + ` (` + columns + `) SELECT ` + values + ` ON CONFLICT (key) DO NOTHING RETURNING key`
	if t.guest != nil {
		st.SQL += `, xmin, pg_catalog.pg_current_xact_id()`
	}
	return st
}

// claimName names the statement that claims in the open generation.
func (t *txn) claimName(kind string) string {
	return "dedupd_claim_" + kind + "_" + t.catalog.Open.Identity.String()
}

// which are those of some items.
func (g *group) which(of []int32, is func(it *item) bool) []int32 {
	all := make([]int32, 0, len(of))
	for _, at := range of {
		if is(&g.items[at]) {
			all = append(all, at)
		}
	}
	return all
}

// claimRow is a claim that was there before ours.
type claimRow struct {
	table       *generations.Table
	fingerprint *int64
	lane        *int32 // nil: claimed by no lane
	position    *int64
	age         float64 // seconds since it was claimed
	result      *sinks.Result
}

func (r *claimRow) laneParam() []byte {
	if r == nil || r.lane == nil {
		return nil
	}
	return pipeline.Int4(*r.lane)
}

func (r *claimRow) positionParam() []byte {
	if r == nil || r.position == nil {
		return nil
	}
	return pipeline.Int8(*r.position)
}

// byIndex makes look-ups use the index. The planner estimates that many keys are best
// found by reading a table of up to a few million rows whole. That would be right once;
// but there is a group every few milliseconds, and a connection that has made such a plan
// keeps it while the table grows.
func byIndex(lookups []pipeline.Step) []pipeline.Step {
	all := append(make([]pipeline.Step, 0, len(lookups)+2), pipeline.Step{Name: "dedupd_seqscan_off", SQL: "SET LOCAL enable_seqscan = off"})
	return append(append(all, lookups...), pipeline.Step{Name: "dedupd_seqscan", SQL: "SET LOCAL enable_seqscan = DEFAULT"})
}

// lookupStep reads n claims of a generation into found, as far as they exist. Send it by
// byIndex only: a plan made without it would be kept.
func (t *txn) lookupStep(table *generations.Table, n int, key func(i int) *claimkey.Key) pipeline.Step {
	results, from := "", ""
	if t.guest != nil {
		results, from = ", r.size::integer, r.result::bytea", ` c LEFT JOIN LATERAL (SELECT size, result FROM `+table.Results+` WHERE key = c.key LIMIT 1) r ON true`
	}
	return pipeline.Step{
		Name:       "dedupd_lookup_" + table.Identity.String(),
		Generation: &table.Identity,
		SQL: `SELECT key, fingerprint::bigint, lane::integer, position::bigint, extract(epoch FROM ` + t.store.name("clock") + `() - claimed_at)::float8` + results + `
			FROM ` + table.Name + from + ` WHERE key = ANY ($1::uuid[])`,
		OIDs:   []uint32{pgtype.UUIDArrayOID},
		Params: [][]byte{pipeline.AppendKeys(make([]byte, 0, 20*n+20), n, key)},
		Row: func(v [][]byte) error {
			key, err := pipeline.ReadKey(v[0])
			if err != nil {
				return err
			}
			r := &claimRow{table: table}
			if v[1] != nil {
				r.fingerprint = new(int64(binary.BigEndian.Uint64(v[1])))
			}
			if v[2] != nil {
				r.lane = new(int32(binary.BigEndian.Uint32(v[2])))
			}
			if v[3] != nil {
				r.position = new(int64(binary.BigEndian.Uint64(v[3])))
			}
			// A concurrent duplicate that began after us may have claimed before us.
			r.age = max(0, math.Float64frombits(binary.BigEndian.Uint64(v[4])))
			r.result = resultOf(v[5:])
			t.found[key] = r
			return nil
		},
	}
}
