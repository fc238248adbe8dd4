package dedup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Time-outs within a claim transaction. A transaction that holds a key makes its
// twin elsewhere wait, so none of them may be long; and one whose worker is gone
// must end by itself, or its lanes' next owner waits with it.
const (
	lockTimeout      = "5s"
	statementTimeout = "20s"
	idleTimeout      = "10s"
	// commitTimeout bounds COMMIT from outside: statement_timeout does not (a
	// COMMIT that waited for an absent standby was seen to hang for ten minutes).
	commitTimeout = 10 * time.Second
)

// transact runs one claim transaction over the group: claim, write, bury, move
// the lanes, commit. Locks are taken in one order by everyone: the rotation
// lock, claims by key, whatever the sink locks, dead letters, lane rows by name.
// Lane rows come last: the books need the counts, and the lock is short.
//
// Nil means durable, and gives the outcomes by batch. A *commitError means that
// nobody knows; any other error that nothing was done.
func (p *Processor) transact(ctx context.Context, g *group) (all []tally, err error) {
	catalog, err := p.Store.loaded(ctx)
	if err != nil {
		return nil, err
	}
	pooled, err := p.Store.pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	conn := pooled.Conn()
	defer func() {
		if err != nil {
			err = abort(conn, err)
		}
		pooled.Release()
	}()

	start := time.Now()
	g.reset()
	if err := p.claim(ctx, conn, catalog, g); err != nil {
		return nil, &ownError{fmt.Errorf("claim: %w", err)}
	}
	claimed := time.Now()
	p.Metrics.claim.Observe(claimed.Sub(start).Seconds())

	if err := p.write(ctx, conn, g); err != nil {
		return nil, &sinkError{err}
	}
	p.Metrics.sink.Observe(time.Since(claimed).Seconds())

	all, err = g.tallies()
	if err != nil {
		return nil, err
	}
	if err := p.poison.check(g); err != nil {
		return nil, err
	}
	if err := p.commit(ctx, conn, g, all); err != nil {
		return all, err
	}
	p.Metrics.transaction.Observe(time.Since(start).Seconds())
	return all, nil
}

// abort ends a failed transaction. A connection that can't be brought back into
// order is closed by the pool when it is released.
func abort(conn *pgx.Conn, err error) error {
	if conn.IsClosed() {
		if sqlstate(err) == "" {
			return fmt.Errorf("%w: %w", errConnection, err)
		}
		return err
	}
	if conn.PgConn().TxStatus() != 'I' && !conn.PgConn().IsBusy() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, _ = conn.Exec(ctx, "rollback") // its failure leaves the connection to the pool, which closes it
	}
	return err
}

// ownError came of a statement of dedupd's own: no message's data is at fault,
// whatever the SQLSTATE's class says.
type ownError struct{ error }

func (e *ownError) Unwrap() error { return e.error }

// sinkError came of the sink's code or SQL.
type sinkError struct{ error }

func (e *sinkError) Error() string { return "write: " + e.error.Error() }
func (e *sinkError) Unwrap() error { return e.error }

// commitError says that COMMIT was sent, and its answer was lost.
type commitError struct{ error }

func (e *commitError) Error() string { return "commit, whose outcome is unknown: " + e.error.Error() }
func (e *commitError) Unwrap() error { return e.error }

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
				return &pgconn.PgError{Severity: "ERROR", Code: "40001", Message: "a claim vanished while it was looked at"}
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

// write gives the winners to the sink, in lane order.
func (p *Processor) write(ctx context.Context, conn *pgx.Conn, g *group) (err error) {
	winners := g.winners()
	if len(winners) == 0 {
		return nil
	}
	defer func() {
		if r := recover(); r != nil {
			err = sinks.Recovered(r)
		}
	}()
	if err := p.Sink.Write(ctx, sinkTx{conn}, winners); err != nil {
		return err
	}
	switch status := conn.PgConn().TxStatus(); {
	case conn.PgConn().IsBusy():
		return errors.New("the sink left a query open: it must close its rows and batch results")
	case status == 'E':
		return errors.New("the sink hid an error of the database: the transaction has failed, yet Write returned nil")
	case status != 'T':
		return errors.New("the sink ended the transaction it was given: its effect may stand without its claims; it must neither commit nor roll back")
	}
	return nil
}

// winners are the messages for the sink.
func (g *group) winners() []message.Message {
	n := 0
	for i := range g.items {
		if g.items[i].outcome == applied {
			n++
		}
	}
	if len(g.batches) == 1 && n == len(g.items) {
		return g.batches[0].Messages
	}
	winners := make([]message.Message, 0, n)
	for i := range g.items {
		if it := &g.items[i]; it.outcome == applied {
			winners = append(winners, *g.message(it))
		}
	}
	return winners
}

// candidate is the item behind winners()[index].
func (g *group) candidate(index int) *item {
	for i := range g.items {
		if g.items[i].outcome == applied {
			if index == 0 {
				return &g.items[i]
			}
			index--
		}
	}
	return nil
}

// sinkTx is all that a sink gets of the connection.
type sinkTx struct{ conn *pgx.Conn }

var _ sinks.Tx = sinkTx{}

func (t sinkTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return t.conn.Exec(ctx, sql, args...)
}

func (t sinkTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return t.conn.Query(ctx, sql, args...)
}

func (t sinkTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.conn.QueryRow(ctx, sql, args...)
}

func (t sinkTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.conn.SendBatch(ctx, b)
}

func (t sinkTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	return t.conn.CopyFrom(ctx, table, columns, rows)
}

// commit buries the dead, moves the lanes and commits, in one round trip: the
// server skips COMMIT when a lane doesn't move.
func (p *Processor) commit(ctx context.Context, conn *pgx.Conn, g *group, all []tally) error {
	var steps []step
	for i := range g.items {
		it := &g.items[i]
		if why := p.burial(it); why != nil {
			steps = append(steps, p.Store.buryStep(g, it, why))
		}
	}
	moves, err := p.Store.advanceSteps(g.batches, all)
	if err != nil {
		return err
	}
	steps = append(steps, moves...)
	steps = append(steps, step{name: "dedupd_commit", sql: "commit", tag: "COMMIT"})

	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	err = roundTrip(ctx, conn, p.Store.prepare, steps)
	if err == nil {
		return nil
	}
	// An error that the server sent and survived is an answer: nothing was
	// committed. Anything else may have hidden a success.
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Severity == "ERROR" {
		if pg.SchemaName == p.Store.schema {
			return &ownError{fmt.Errorf("move the lanes: %w", err)}
		}
		return fmt.Errorf("commit: %w", err) // such as a deferred constraint of the sink's table
	}
	if pgconn.SafeToRetry(err) {
		return fmt.Errorf("commit: %w", err)
	}
	return &commitError{err}
}

// burial tells why a message is written to the dead letters; nil: it isn't.
func (p *Processor) burial(it *item) *rejection {
	switch {
	case it.outcome == dead:
		return it.reject
	case it.outcome == conflict && p.OnConflict == ConflictDeadLetter:
		return &rejection{class: classConflict, reason: "the id was claimed with another payload"}
	case (it.outcome == resent || it.outcome == crossSource) && p.OnDuplicate == DuplicateDeadLetter:
		return &rejection{class: classDuplicate, reason: "the id was claimed before"}
	}
	return nil
}

// advanceSteps moves each lane once. Several batches of a queue share its row.
func (s *Store) advanceSteps(batches []message.Batch, all []tally) ([]step, error) {
	var steps []step
	for i := 0; i < len(batches); {
		b, sum := batches[i], all[i]
		j := i + 1
		for ; j < len(batches) && batches[j].Lane == b.Lane; j++ {
			if b.Ordered {
				return nil, fmt.Errorf("bug: two batches of the ordered lane %s in one group", b.Lane)
			}
			for o, n := range all[j] {
				sum[o] += n
			}
			b.Next, b.Lag = max(b.Next, batches[j].Next), batches[j].Lag
			b.Messages = batches[j].Messages
		}
		i = j
		lane, err := s.laneID(b.Lane)
		if err != nil {
			return nil, err
		}
		from := []byte(nil)
		if b.Ordered {
			from = int8b(b.From)
		}
		var streamTime time.Time
		if n := len(b.Messages); n > 0 {
			streamTime = b.Messages[n-1].Time
		}
		steps = append(steps, step{
			name: "dedupd_advance",
			sql:  `SELECT ` + s.name("advance") + `(` + advanceParams + `)`,
			oids: advanceOIDs,
			params: [][]byte{
				int4(lane), int8b(b.Epoch), from, int8b(b.Next), optional(b.BrokerPosition), timestamptz(streamTime), optional(b.Lag),
				int8b(sum[applied]), int8b(sum[redelivered]), int8b(sum[resent]), int8b(sum[crossSource]), int8b(sum[conflict]), int8b(sum[dead]),
			},
		})
	}
	return steps, nil
}

var advanceOIDs = []uint32{
	pgtype.Int4OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TimestamptzOID, pgtype.Int8OID,
	pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID,
}

// advanceParams is "$1::integer, $2::bigint, …", as advance() declares them.
var advanceParams = func() string {
	list := ""
	for i, oid := range advanceOIDs {
		typ := map[uint32]string{pgtype.Int4OID: "integer", pgtype.Int8OID: "bigint", pgtype.TimestamptzOID: "timestamptz"}[oid]
		if i > 0 {
			list += ", "
		}
		list += "$" + strconv.Itoa(i+1) + "::" + typ
	}
	return list
}()
