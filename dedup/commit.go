package dedup

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// commit writes dead letters, clears attempts, moves the lanes and commits, in one round
// trip. If a lane doesn't move, the server skips COMMIT.
func (p *Processor) commit(ctx context.Context, t *txn, all []tally) error {
	steps := p.deadLetterSteps(t.group)
	if t.recorded {
		passed, err := p.Store.clearAttemptSteps(t.batches)
		if err != nil {
			return err
		}
		steps = append(steps, passed...)
	}
	moves, err := p.Store.advanceSteps(t.batches, t.clocks, all, p.guard.steps(p.Store, t.group, all))
	if err != nil {
		return err
	}
	return t.commit(ctx, append(steps, moves...)...)
}

// checkStep runs the sink's deferred constraints and triggers in a statement of its own.
// An error here is the sink's; an error after it is dedupd's, which has no deferred
// constraint. Names don't tell them apart: both may share a schema.
var checkStep = pipeline.Step{Name: "dedupd_check", SQL: "SET CONSTRAINTS ALL IMMEDIATE", OfSink: true}

// commit sends a transaction's last steps and COMMIT in one round trip. The error is a
// *commitError if the outcome is unknown. After any other error nothing was done.
//
// The outcome is also unknown when COMMIT succeeds with a warning: somebody cancelled its
// wait for a synchronous standby, so the commit stands on this server only.
func (t *txn) commit(ctx context.Context, steps ...pipeline.Step) error {
	steps = append(append([]pipeline.Step{checkStep}, steps...), pipeline.Step{Name: "dedupd_commit", SQL: "commit", Tag: "COMMIT", OfSink: true})

	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	_ = takeWarning(t.conn) // of an earlier statement
	err := t.send(ctx, steps...)
	if err == nil {
		if w := takeWarning(t.conn); w != nil {
			return &commitError{w}
		}
		return nil
	}
	if answer(err) != nil {
		var failed *pipeline.StepError
		if errors.As(err, &failed) && failed.OfSink {
			return fmt.Errorf("commit: %w", err)
		}
		return &ownError{fmt.Errorf("move the lanes: %w", err)}
	}
	if pgconn.SafeToRetry(err) {
		return fmt.Errorf("commit: %w", err)
	}
	return &commitError{err}
}

// answer returns an error that the server sent and survived: nothing was committed. It
// returns nil for any other error, which may hide a success. The server sends the
// severity in two forms, one of them in its own language.
func answer(err error) *pgconn.PgError {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR" {
		return pg
	}
	return nil
}

// rejection says why a message becomes a dead letter; nil: it doesn't.
func (p *Processor) rejection(it *item) *rejection {
	switch {
	case it.outcome == dead:
		return it.reject
	case it.outcome == conflict && p.OnConflict == policy.ConflictDeadLetter:
		return &rejection{class: classConflict, reason: "the id was claimed with another payload"}
	case (it.outcome == resent || it.outcome == crossSource) && p.OnDuplicate == policy.DuplicateDeadLetter:
		return &rejection{class: classDuplicate, reason: "the id was claimed before"}
	}
	return nil
}

// advanceSteps moves each lane once; several batches of a queue share its row. A step of
// before runs right before its lane's: everyone locks rows in one order.
func (s *Store) advanceSteps(batches []lane.Batch, clocks clocks, all []tally, before map[message.Lane]pipeline.Step) ([]pipeline.Step, error) {
	var steps []pipeline.Step
	for i := 0; i < len(batches); {
		b, sum := batches[i], all[i]
		j := i + 1
		// A batch of another epoch, or of another instance of the database, gets a step
		// of its own, which compares it with that.
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
		l, err := s.laneID(b.Lane)
		if err != nil {
			return nil, err
		}
		var from, checkpoint, instance []byte
		if b.Ordered {
			from = pipeline.Int8(b.From)
		} else {
			checkpoint, instance = pipeline.Int8(b.Checkpoint.Number), []byte(b.Checkpoint.Instance)
		}
		if first, ok := before[b.Lane]; ok {
			steps = append(steps, first)
		}
		steps = append(steps, pipeline.Step{
			Name: "dedupd_advance",
			SQL:  `SELECT ` + s.name("advance") + `(` + advanceParams + `)`,
			OIDs: advanceOIDs,
			Params: [][]byte{
				pipeline.Int4(l), pipeline.Int8(b.Epoch), from, checkpoint, instance, pipeline.Int8(b.Next), pipeline.OptionalInt8(b.BrokerPosition), pipeline.Timestamptz(clocks[b.Lane]), pipeline.OptionalInt8(b.Lag),
				pipeline.Int8(sum[applied]), pipeline.Int8(sum[redelivered]), pipeline.Int8(sum[resent]), pipeline.Int8(sum[crossSource]), pipeline.Int8(sum[conflict]), pipeline.Int8(sum[dead]),
				epochPairs(lane.EpochsBelow(b.LeaderEpochs, b.Next)),
			},
		})
	}
	return steps, nil
}

// epochPairs encodes leader epochs as the lane's row stores them: NULL if none is known,
// since the epochs of an earlier position say nothing about this one.
func epochPairs(all []lane.LeaderEpoch) []byte {
	if len(all) == 0 {
		return nil
	}
	return pipeline.AppendInt8s(nil, 2*len(all), func(i int) int64 {
		if e := all[i/2]; i%2 == 0 {
			return int64(e.Epoch)
		} else {
			return e.From
		}
	})
}

// leaderEpochs decodes them.
func leaderEpochs(pairs []int64) (all []lane.LeaderEpoch) {
	for i := 0; i+1 < len(pairs); i += 2 {
		all = append(all, lane.LeaderEpoch{Epoch: int32(pairs[i]), From: pairs[i+1]})
	}
	return all
}

var advanceOIDs = []uint32{
	pgtype.Int4OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TextOID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TimestamptzOID, pgtype.Int8OID,
	pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID,
	pgtype.Int8ArrayOID,
}

// advanceParams has the same types, for the server that prepares the statement.
const advanceParams = `$1::integer, $2::bigint, $3::bigint, $4::bigint, $5::text, $6::bigint, $7::bigint, $8::timestamptz, $9::bigint,
	$10::bigint, $11::bigint, $12::bigint, $13::bigint, $14::bigint, $15::bigint, $16::bigint[]`
