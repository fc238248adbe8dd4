package dedup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/message"
)

var beginStep = step{name: "dedupd_begin", sql: "begin isolation level read committed", tag: "BEGIN"}

func (s *Store) enterStep(c *catalog) step {
	return step{
		name:   "dedupd_enter",
		sql:    `SELECT ` + s.name("enter") + `($1::integer, $2::bigint, $3::text, $4::text, $5::text)`,
		oids:   []uint32{pgtype.Int4OID, pgtype.Int8OID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID},
		params: [][]byte{int4(c.scopeID), int8b(c.epoch), []byte(lockTimeout), []byte(statementTimeout), []byte(idleTimeout)},
	}
}

// claim opens the transaction, claims the group's keys in one statement, looks
// at what the losers lost to, and gives every message its outcome.
//
// A key that another transaction holds makes the statement wait for that one's
// end. No row back means that the other has committed, so that a duplicate may
// be dropped; had it rolled back, the row would be ours.
func (p *Processor) claim(ctx context.Context, conn *pgx.Conn, c *catalog, g *group) error {
	steps := []step{beginStep, p.Store.enterStep(c)}
	if len(g.firsts) > 0 {
		claim, err := p.claimStep(c, g)
		if err != nil {
			return err
		}
		steps = append(steps, claim)
	}
	if err := roundTrip(ctx, conn, p.Store.prepare, steps); err != nil {
		return err
	}
	lost := g.losers()
	var rows map[Key]*claimRow
	if len(lost) > 0 {
		rows = make(map[Key]*claimRow, len(lost))
		// A statement of its own: the claims that won against ours are newer than
		// the snapshot of the statement that lost to them.
		if err := roundTrip(ctx, conn, p.Store.prepare, []step{lookupStep(c, g, lost, rows)}); err != nil {
			return fmt.Errorf("look up duplicates: %w", err)
		}
	}
	return p.settle(ctx, conn, g, rows)
}

func (p *Processor) claimStep(c *catalog, g *group) (step, error) {
	n := len(g.firsts)
	first := func(i int) *item { return &g.items[g.firsts[i]] }
	lanes := make([]int32, len(g.batches))
	for i := range g.batches {
		var err error
		if lanes[i], err = p.Store.laneID(g.batches[i].Lane); err != nil {
			return step{}, err
		}
	}
	fingerprint := "u.fingerprint"
	if p.Fingerprint.none() {
		fingerprint = "NULL"
	}
	next := 0
	return step{
		name: "dedupd_claim_" + c.identity + "_" + fingerprint,
		sql: `INSERT INTO ` + c.table + ` (key, fingerprint, position, lane)
			SELECT u.key, ` + fingerprint + `, u.position, u.lane
			FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::integer[]) AS u (key, fingerprint, position, lane)
			ON CONFLICT (key) DO NOTHING RETURNING key`,
		oids: []uint32{pgtype.UUIDArrayOID, pgtype.Int8ArrayOID, pgtype.Int8ArrayOID, pgtype.Int4ArrayOID},
		params: [][]byte{
			appendKeys(make([]byte, 0, 20*n+20), n, func(i int) *Key { return &first(i).key }),
			appendInt8s(make([]byte, 0, 12*n+20), n, func(i int) int64 { return first(i).fingerprint }),
			appendInt8s(make([]byte, 0, 12*n+20), n, func(i int) int64 { return g.message(first(i)).Position.Offset }),
			appendInt4s(make([]byte, 0, 8*n+20), n, func(i int) int32 { return lanes[first(i).batch] }),
		},
		row: func(v [][]byte) error {
			key, err := readKey(v[0])
			if err != nil {
				return err
			}
			next, err = g.won(key, next)
			return err
		},
	}, nil
}

// losers are the firsts whose key was claimed before.
func (g *group) losers() []int32 {
	var lost []int32
	for _, at := range g.firsts {
		if !g.items[at].wins {
			lost = append(lost, at)
		}
	}
	return lost
}

// claimRow is a claim that was there before us.
type claimRow struct {
	fingerprint *int64
	lane        *int32 // nil: claimed by no lane
	position    *int64
	age         float64 // seconds since it was claimed
}

func (r *claimRow) laneParam() []byte {
	if r.lane == nil {
		return nil
	}
	return int4(*r.lane)
}

func (r *claimRow) positionParam() []byte {
	if r.position == nil {
		return nil
	}
	return int8b(*r.position)
}

func lookupStep(c *catalog, g *group, lost []int32, rows map[Key]*claimRow) step {
	return step{
		name: "dedupd_lookup_" + c.identity,
		sql: `SELECT key, fingerprint, lane, position, extract(epoch FROM now() - claimed_at)::float8
			FROM ` + c.table + ` WHERE key = ANY ($1::uuid[])`,
		oids: []uint32{pgtype.UUIDArrayOID},
		params: [][]byte{
			appendKeys(make([]byte, 0, 20*len(lost)+20), len(lost), func(i int) *Key { return &g.items[lost[i]].key }),
		},
		row: func(v [][]byte) error {
			key, err := readKey(v[0])
			if err != nil {
				return err
			}
			r := new(claimRow)
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
			lane, err := p.Store.laneID(g.batches[root.batch].Lane)
			if err != nil {
				return err
			}
			it.original = &claimRow{fingerprint: &root.fingerprint, lane: &lane, position: &g.message(root).Position.Offset}
		default:
			if it.original = rows[root.key]; it.original == nil {
				// The claim was there a moment ago: it has been forgotten since.
				return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "40001", Message: "a claim vanished while it was looked at"}
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
	if !p.Fingerprint.none() && original.fingerprint != nil && *original.fingerprint != it.fingerprint {
		it.outcome = conflict
		if p.OnConflict == ConflictStop {
			m := g.message(it)
			return &message.HoldError{Lane: lane, Err: fmt.Errorf("position %d: id %q was claimed with another payload, and dedup.on_conflict is stop", m.Position.Offset, m.ID)}
		}
		return nil
	}
	it.outcome = resent
	if original.lane != nil {
		source, err := p.Store.sourceOf(ctx, conn, *original.lane)
		if err != nil {
			return err
		}
		id, err := p.Store.laneID(lane)
		if err != nil {
			return err
		}
		switch {
		case *original.lane == id && original.position != nil && *original.position == g.message(it).Position.Offset:
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
// be READ COMMITTED. Another transaction that holds one of the ids is waited for.
// Ids must be 1 byte long at least.
//
// A refused catalog (SQLSTATE DD002) means that the scope's generations have
// changed: roll back and try again.
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
	if _, err := tx.Exec(ctx, `SELECT `+s.name("enter")+`($1, $2, $3, $4, $5)`, c.scopeID, c.epoch, lockTimeout, statementTimeout, idleTimeout); err != nil {
		var pg *pgconn.PgError
		if errors.As(err, &pg) && pg.Code == stateCatalog {
			s.catalog.CompareAndSwap(c, nil) // read anew by the next call
		}
		return nil, fmt.Errorf("claim: %w", err)
	}
	keys := make([][16]byte, len(g.firsts))
	for i, at := range g.firsts {
		keys[i] = g.items[at].key
	}
	rows, err := tx.Query(ctx, `INSERT INTO `+c.table+` (key) SELECT * FROM unnest($1::uuid[]) ON CONFLICT (key) DO NOTHING RETURNING key`, keys)
	if err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	var key [16]byte
	next := 0
	if _, err := pgx.ForEachRow(rows, []any{&key}, func() error {
		next, err = g.won(key, next)
		return err
	}); err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	won = make([]bool, len(ids))
	for i := range g.items {
		won[i] = g.items[i].wins
	}
	return won, nil
}
