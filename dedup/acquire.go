package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/lane"
)

// acquireGrace is how long after its last commit an owner of a newer group generation
// counts as active. Group generations start again at 1 when a group is deleted; this
// grace is the way out. It is more than twice the session time-out.
const acquireGrace = 25 * time.Second

// Acquire makes this worker the owner of a lane, under a new epoch, in a small
// transaction of its own. It waits for a transaction in which the last owner is moving
// the lane, and then sees what that one committed.
//
// Reading starts at the position in the lane's row; without a row, where the source says.
// The broker's position never wins by being ahead: it is ahead when the database lost
// commits, and then claims and effects are lost with the position, so that reading again
// is right. It wins by being behind what the broker once confirmed: somebody moved it
// back on purpose. Unless a worker wrote it: then it is an earlier copy of the lane's.
// The offset metadata also shows that the database has lost a row: see restart.
//
// A queue has no position to compare. It notices that the database went back by its
// checkpoint, which the broker keeps too. Its source then has the broker deliver again:
// from the last broker-confirmed position, or from where the broker was when the row was
// made, before anything of ours was acknowledged. See placeQueue.
//
// The error is lane.ErrStale if a newer owner is active, lane.ErrLoss if the database may
// lose what its broker can't deliver again, lane.ErrNoStart if neither the database nor
// the source knows where the lane begins, and a *lane.HoldError if the lane's log isn't
// the one it was.
func (s *Store) Acquire(ctx context.Context, a lane.Acquire) (assigned lane.Assignment, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var row laneRow
	err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
		if a.Ordered {
			row, err = s.acquireLane(ctx, tx, a)
		} else {
			row, err = s.acquireQueue(ctx, tx, a)
		}
		if err != nil {
			return err
		}
		row.attempted, err = s.openAttempts(ctx, tx, row.id, row.assigned.Next)
		return err
	})
	if err != nil {
		return lane.Assignment{}, fmt.Errorf("acquire lane %s: %w", a.Lane, err)
	}
	s.remember(a.Lane, row.id)
	s.quarantine.set(a.Lane, a.Ordered && (row.acquisitions > quarantineAcquisitions || row.attempted))
	if row.assigned.Rewound {
		s.generations.Forget("lane " + a.Lane.String() + " went back")
	}
	s.forgetAttempts(ctx, a.Lane, a.Ordered, row.assigned.Next)
	return row.assigned, nil
}

// laneRow is a lane's row as acquire_lane() or acquire_queue() has left it.
type laneRow struct {
	assigned     lane.Assignment
	id           int32
	made         bool // it wasn't there
	acquisitions int
	logID        string // empty: not known
	start        *int64 // the lowest position that the lane has begun at; nil: not known
	attempted    bool   // attempts at messages that are still to come are on record
}

// laneColumns are what scan reads.
const laneColumns = `r_how, (r_lane).id, (r_lane).epoch, (r_lane).next_position, coalesce((r_lane).broker_position, -1), (r_lane).stream_id,
	(r_lane).acquisitions, (r_lane).checkpoint, coalesce((r_lane).log_id, ''), (r_lane).start_position, (r_lane).leader_epochs, coalesce((r_lane).cut_at, -1)`

func (r *laneRow) scan(row pgx.Row, more ...any) error {
	var how string
	var epochs []int64
	a := &r.assigned
	err := row.Scan(append([]any{
		&how, &r.id, &a.Epoch, &a.Next, &a.BrokerPosition, &a.StreamID,
		&r.acquisitions, &a.Checkpoint.Number, &r.logID, &r.start, &epochs, &a.Cut,
	}, more...)...)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return lane.ErrNoStart
	case err != nil:
		return err
	case how == "stale":
		return lane.ErrStale
	}
	a.LeaderEpochs, a.Reached, r.made = leaderEpochs(epochs), a.Next, how == "made"
	return nil
}

// acquireLane acquires an ordered lane.
func (s *Store) acquireLane(ctx context.Context, tx pgx.Tx, a lane.Acquire) (row laneRow, err error) {
	var partitions *int
	if a.Partition != nil {
		partitions = &a.Partition.Of
	}
	err = row.scan(tx.QueryRow(ctx, `SELECT `+laneColumns+` FROM `+s.name("acquire_lane")+`($1, $2, $3, nullif($4, ''), $5, $6, $7, make_interval(secs => $8), $9)`,
		s.scope, a.Lane.Source, a.Lane.Name, a.LogID, partitions, a.GroupGeneration, s.owner, acquireGrace.Seconds(), a.Start))
	if err != nil {
		return row, s.explainNoNumber(err)
	}
	assigned := &row.assigned
	if a.LogID != "" && row.logID != a.LogID {
		return row, &lane.HoldError{Lane: a.Lane, Err: fmt.Errorf("it was created anew (its id is %s, the lane's was %s), so its positions mean other messages: \"dedupd lanes set-position %s %s 0\" has it read from its beginning",
			a.LogID, row.logID, a.Lane.Source, a.Lane.Name)}
	}
	if row.made {
		if err := s.restart(ctx, tx, &row, a); err != nil {
			return row, err
		}
		if err := s.startAdded(ctx, tx, &row, a); err != nil {
			return row, err
		}
		row.start = &assigned.Next
	}
	writer, byWorker := parseOffsetMetadata(a.OffsetMetadata) // a person's offset has none of ours
	if byWorker && writer.Scope != s.scope {
		assigned.GroupOf = writer.Scope
	}
	if !row.made && a.Committed >= 0 {
		if err := s.compareWithBroker(ctx, tx, &row, a, byWorker); err != nil {
			return row, err
		}
	}
	if row.start != nil {
		assigned.OffsetMetadata = offsetMetadata{Scope: s.scope, Source: a.Lane.Source, Start: *row.start, Epoch: assigned.Epoch, LogID: row.logID}.String()
	}
	return row, nil
}

// compareWithBroker compares an ordered lane's position with the group's offset.
func (s *Store) compareWithBroker(ctx context.Context, tx pgx.Tx, row *laneRow, a lane.Acquire, byWorker bool) error {
	assigned := &row.assigned
	switch {
	case a.Committed > assigned.Next:
		assigned.Rewound = true
	case a.Committed < assigned.BrokerPosition && byWorker:
		assigned.Outdated = true
	case a.Committed < assigned.BrokerPosition && a.HonourReset:
		// Both columns, or the next start sees the same reset again. The lane's clock
		// isn't known any more: claims must not expire before what is read again has
		// passed them. A log that was cut above that position is read again from there.
		err := tx.QueryRow(ctx, `UPDATE `+s.name("lanes")+` SET next_position = $2, broker_position = $2, stream_time = NULL, `+lowerStart+`,
			stream_id = CASE WHEN cut_at >= $2 THEN `+newStreamID+` ELSE stream_id END, cut_at = CASE WHEN cut_at < $2 THEN cut_at END
			WHERE id = $1 RETURNING start_position, stream_id, coalesce(cut_at, -1)`,
			row.id, a.Committed).Scan(&row.start, &assigned.StreamID, &assigned.Cut)
		if err != nil {
			return err
		}
		assigned.Reset, assigned.Next, assigned.BrokerPosition = true, a.Committed, a.Committed
	case a.Committed > assigned.BrokerPosition:
		// The last owner may have ended before it could record it.
		if _, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET broker_position = $2 WHERE id = $1`, row.id, a.Committed); err != nil {
			return err
		}
		assigned.BrokerPosition = a.Committed
	}
	return nil
}

func (s *Store) acquireQueue(ctx context.Context, tx pgx.Tx, a lane.Acquire) (row laneRow, err error) {
	if err := s.forgetGaps(ctx, tx, a); err != nil {
		return row, err
	}
	err = row.scan(tx.QueryRow(ctx, `SELECT `+laneColumns+`, r_instance FROM `+s.name("acquire_queue")+`($1, $2, $3, nullif($4, ''), $5, $6)`,
		s.scope, a.Lane.Source, a.Lane.Name, a.LogID, s.owner, a.Start), &row.assigned.Checkpoint.Instance)
	if err != nil {
		return row, s.explainNoNumber(err)
	}
	return row, s.placeQueue(ctx, tx, &row, a)
}

// explainNoNumber says what to do once the numbers for lanes have run out.
func (s *Store) explainNoNumber(err error) error {
	if sqlstate.Of(err) != sqlstate.SequenceExhausted {
		return err
	}
	return fmt.Errorf("no number is left for a new lane; the schema's owner restarts the sequence at the first number of a range that no lane uses: ALTER TABLE %s ALTER COLUMN id RESTART WITH …: %w", s.name("lanes"), err)
}

// newStreamID is a new stream id for the same log.
const newStreamID = `left(stream_id, -36) || gen_random_uuid()`

// lowerStart goes with an update that sets a lane's position to $2. A start that isn't
// known stays unknown.
const lowerStart = `start_position = CASE WHEN $2 < start_position THEN $2 ELSE start_position END`
