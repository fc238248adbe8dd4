package dedup

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/message"
)

// commit buries the dead, forgets attempts that have their answer by this, moves
// the lanes and commits, in one round trip: the
// server skips COMMIT when a lane doesn't move.
func (p *Processor) commit(ctx context.Context, conn *pgx.Conn, g *group, all []tally) error {
	steps := p.burySteps(g)
	if g.noted {
		passed, err := p.Store.passSteps(g.batches)
		if err != nil {
			return err
		}
		steps = append(steps, passed...)
	}
	moves, err := p.Store.advanceSteps(g.batches, g.clocks, all, p.guard.steps(p.Store, g, all))
	if err != nil {
		return err
	}
	return p.Store.commit(ctx, conn, append(steps, moves...))
}

// checkStep checks what the sink's constraints and triggers have put off, in a
// statement of its own: what fails here is the sink's, and what fails after it is
// dedupd's own, which has no deferred constraint. (Names don't tell them apart: both
// may share a schema.)
var checkStep = step{name: "dedupd_check", sql: "SET CONSTRAINTS ALL IMMEDIATE", ofSink: true}

// commit sends a transaction's last steps and COMMIT in one round trip. The error
// is a *commitError when nobody knows what became of it; after any other nothing
// was done.
//
// Nobody knows it, either, when COMMIT succeeds and warns: its wait for a synchronous
// standby was cancelled, so that it stands, but here only.
func (s *Store) commit(ctx context.Context, conn *pgx.Conn, steps []step) error {
	steps = append(append([]step{checkStep}, steps...), step{name: "dedupd_commit", sql: "commit", tag: "COMMIT", ofSink: true})

	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	_ = takeWarning(conn) // of an earlier statement
	err := roundTrip(ctx, conn, s.prepare, steps)
	if err == nil {
		if w := takeWarning(conn); w != nil {
			return &commitError{w}
		}
		return nil
	}
	if answer(err) != nil {
		var failed *stepError
		if errors.As(err, &failed) && failed.ofSink {
			return fmt.Errorf("commit: %w", err)
		}
		return &ownError{fmt.Errorf("move the lanes: %w", err)}
	}
	if pgconn.SafeToRetry(err) {
		return fmt.Errorf("commit: %w", err)
	}
	return &commitError{err}
}

// answer is an error that the server sent and survived: it says that nothing was
// committed. Anything else, for which it is nil, may have hidden a success. The
// severity comes in two forms, one of them in the server's language.
func answer(err error) *pgconn.PgError {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR" {
		return pg
	}
	return nil
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
// What else is to be done to a lane's row comes right before: rows are locked in
// one order.
func (s *Store) advanceSteps(batches []message.Batch, clocks clocks, all []tally, before map[message.Lane]step) ([]step, error) {
	var steps []step
	for i := 0; i < len(batches); {
		b, sum := batches[i], all[i]
		j := i + 1
		// What belongs to another row, or to another instance of the database, is held
		// against that by itself.
		for ; j < len(batches) && batches[j].Lane == b.Lane && batches[j].Epoch == b.Epoch && batches[j].Checkpoint.Instance == b.Checkpoint.Instance; j++ {
			if b.Ordered {
				return nil, fmt.Errorf("bug: two batches of the ordered lane %s in one group", b.Lane)
			}
			for o, n := range all[j] {
				sum[o] += n
			}
			b.Next, b.Lag = max(b.Next, batches[j].Next), batches[j].Lag
			b.Checkpoint.Number = max(b.Checkpoint.Number, batches[j].Checkpoint.Number)
		}
		i = j
		lane, err := s.laneID(b.Lane)
		if err != nil {
			return nil, err
		}
		var from, checkpoint, instance []byte
		if b.Ordered {
			from = int8b(b.From)
		} else {
			checkpoint, instance = int8b(b.Checkpoint.Number), []byte(b.Checkpoint.Instance)
		}
		if first, ok := before[b.Lane]; ok {
			steps = append(steps, first)
		}
		steps = append(steps, step{
			name: "dedupd_advance",
			sql:  `SELECT ` + s.name("advance") + `(` + advanceParams + `)`,
			oids: advanceOIDs,
			params: [][]byte{
				int4(lane), int8b(b.Epoch), from, checkpoint, instance, int8b(b.Next), optional(b.BrokerPosition), timestamptz(clocks[b.Lane]), optional(b.Lag),
				int8b(sum[applied]), int8b(sum[redelivered]), int8b(sum[resent]), int8b(sum[crossSource]), int8b(sum[conflict]), int8b(sum[dead]),
				epochPairs(message.EpochsBelow(b.LeaderEpochs, b.Next)),
			},
		})
	}
	return steps, nil
}

// epochPairs is how the lane's row has them: NULL where none is known, since what was
// known of an earlier position says nothing of this one.
func epochPairs(all []message.LeaderEpoch) []byte {
	if len(all) == 0 {
		return nil
	}
	return appendInt8s(nil, 2*len(all), func(i int) int64 {
		if e := all[i/2]; i%2 == 0 {
			return int64(e.Epoch)
		} else {
			return e.From
		}
	})
}

// leaderEpochs reads them.
func leaderEpochs(pairs []int64) (all []message.LeaderEpoch) {
	for i := 0; i+1 < len(pairs); i += 2 {
		all = append(all, message.LeaderEpoch{Epoch: int32(pairs[i]), From: pairs[i+1]})
	}
	return all
}

var advanceOIDs = []uint32{
	pgtype.Int4OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TextOID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TimestamptzOID, pgtype.Int8OID,
	pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID,
	pgtype.Int8ArrayOID,
}

// advanceParams is "$1::integer, $2::bigint, …", as advance() declares them.
var advanceParams = func() string {
	list := ""
	for i, oid := range advanceOIDs {
		typ := map[uint32]string{pgtype.Int4OID: "integer", pgtype.Int8OID: "bigint", pgtype.TextOID: "text", pgtype.TimestamptzOID: "timestamptz", pgtype.Int8ArrayOID: "bigint[]"}[oid]
		if i > 0 {
			list += ", "
		}
		list += "$" + strconv.Itoa(i+1) + "::" + typ
	}
	return list
}()
