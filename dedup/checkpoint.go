package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// placeQueue decides where a queue begins that was just acquired, and what of it is lost:
// see Acquire. The offset metadata shows it:
//
//   - It has a checkpoint of this row above the row's own: the database went back. All
//     below the row's broker position was acknowledged before the copy was made, so the
//     copy has it.
//   - It has a checkpoint of another row, which nobody forgot: that row is lost, with all
//     that it ever committed.
//
// Both stay so until the broker keeps the offset metadata that is returned, and the row
// has its checkpoint (ConfirmRewind): whoever acquires the queue in between finds the
// same.
func (s *Store) placeQueue(ctx context.Context, tx pgx.Tx, row *laneRow, a lane.Acquire) error {
	if a.Consumed {
		if err := s.refuseLoss(ctx, tx); err != nil {
			return err
		}
	}
	if other, ok := parseOffsetMetadata(a.OffsetMetadata); ok && other.Scope != s.scope {
		return &lane.HoldError{Lane: a.Lane, Err: fmt.Errorf("scope %q reads the same durable, so that each of the two would get only a part of the messages: give this scope a durable of its own; or delete the durable, if that scope no longer reads it", other.Scope)}
	}
	assigned := &row.assigned
	was, ours := s.ownOffsetMetadata(a.Lane, a.OffsetMetadata)
	ours = ours && (was.LogID == "" || a.LogID == "" || was.LogID == a.LogID)
	behind := ours && was.Epoch == assigned.Epoch && was.Checkpoint > assigned.Checkpoint.Number
	lost := false
	if ours && was.Epoch != assigned.Epoch {
		forgotten, err := s.forgotten(ctx, tx, a.Lane, was.Epoch)
		if err != nil {
			return err
		}
		lost = !forgotten
	}
	assigned.Rewound = behind || lost
	position := assigned.BrokerPosition
	switch {
	case lost && (position < 0 || was.Start < position), behind && position < 0:
		position = was.Start
	case !assigned.Rewound && position < 0:
		position = a.Committed // nothing of ours is acknowledged yet
	}
	if ours && was.Epoch == assigned.Epoch && !behind {
		position = max(position, a.Acknowledged) // all that was acknowledged is in this database
	}
	if position >= 0 && (row.start == nil || *row.start > position) {
		row.start = &position
	}
	assigned.BrokerPosition = position
	_, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET broker_position = nullif($2::bigint, -1), start_position = $3
		WHERE id = $1 AND (broker_position, start_position) IS DISTINCT FROM (nullif($2, -1), $3)`, row.id, position, row.start)
	if err != nil {
		return err
	}
	if assigned.Rewound {
		assigned.Checkpoint.Number = max(assigned.Checkpoint.Number, was.Checkpoint) + 1 // until ConfirmRewind, the lane doesn't move
	}
	assigned.OffsetMetadata = s.queueMetadata(a.Lane, row)
	return nil
}

// queueMetadata is the offset metadata that the broker is to keep for a queue.
func (s *Store) queueMetadata(lane message.Lane, row *laneRow) string {
	m := offsetMetadata{Scope: s.scope, Source: lane.Source, Start: -1, Epoch: row.assigned.Epoch, Checkpoint: row.assigned.Checkpoint.Number, LogID: row.logID}
	if row.start != nil {
		m.Start = *row.start
	}
	return m.String()
}

// confirmTimeout bounds Confirm, which waits for a transaction that is moving the lane.
const confirmTimeout = 5 * time.Second

// Confirm reports whether the database is the one that a queue was committed in, and has
// not gone back. If so, what was committed before may be acknowledged once the broker
// keeps the offset metadata that is returned. If not, the error is a *lane.FencedError.
//
// docs/decisions/0029 says why that is exact.
func (s *Store) Confirm(ctx context.Context, c lane.Confirm) (lane.Confirmation, error) {
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	fenced := &lane.FencedError{Lanes: []message.Lane{c.Lane}}
	least := c.Checkpoint.Number
	if was, ours := s.ownOffsetMetadata(c.Lane, c.OffsetMetadata); ours {
		if was.Epoch != c.Epoch {
			return lane.Confirmation{}, fenced // the next acquisition finds out what it means
		}
		least = max(least, was.Checkpoint)
	}
	const where = ` WHERE scope = $1 AND source = $2 AND lane = $3 AND NOT ordered AND epoch = $4 AND checkpoint >= $5 AND `
	sql := `SELECT checkpoint, start_position, coalesce(log_id, ''), '' FROM ` + s.name("lanes") + where + s.name("instance") + `(tableoid) = $6`
	if c.Raise {
		// It must be durable: if a crash took it back, the queue would be read again for
		// nothing.
		sql = `UPDATE ` + s.name("lanes") + ` SET checkpoint = checkpoint + 1` + where + s.name("instance") + `(tableoid) = $6
			RETURNING checkpoint, start_position, coalesce(log_id, ''), CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END`
	}
	row := laneRow{assigned: lane.Assignment{Epoch: c.Epoch, Checkpoint: c.Checkpoint}}
	err := s.pool.QueryRow(ctx, sql, s.scope, c.Lane.Source, c.Lane.Name, c.Epoch, least, c.Checkpoint.Instance).
		Scan(&row.assigned.Checkpoint.Number, &row.start, &row.logID, nil)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return lane.Confirmation{}, fenced
	case err != nil:
		return lane.Confirmation{}, fmt.Errorf("confirm what lane %s has committed: %w", c.Lane, err)
	}
	return lane.Confirmation{Checkpoint: row.assigned.Checkpoint, OffsetMetadata: s.queueMetadata(c.Lane, &row)}, nil
}

// ConfirmRewind records that the broker delivers again what a queue may have lost with
// the database, or that nothing can be done about it (0), and that it keeps the offset
// metadata of the acquisition that asked for it. From now on the row counts as having all
// that is acknowledged.
//
// from is where the broker begins again. The database may have gone back once more since
// it told the worker so, and lost what was sure then. So from is compared with the row as
// it is now. If it lies beyond, nothing changes: sure is where to begin. Otherwise the
// row has it from then on: another worker may have put a later one there. The
// lane's clock isn't known any more: claims must not expire before what comes again has
// passed them.
func (s *Store) ConfirmRewind(ctx context.Context, lane message.Lane, assigned lane.Assignment, from int64) (sure int64, err error) {
	to, ours := s.ownOffsetMetadata(lane, assigned.OffsetMetadata)
	if !ours {
		return 0, fmt.Errorf("confirm the rewind of lane %s: the offset metadata is not the lane's", lane)
	}
	err = s.pool.QueryRow(ctx, `
		WITH l AS (SELECT id, coalesce(broker_position, 1) AS sure FROM `+s.name("lanes")+` WHERE scope = $1 AND source = $2 AND lane = $3 AND NOT ordered AND epoch = $4 FOR UPDATE),
			resumed AS (UPDATE `+s.name("lanes")+` SET checkpoint = greatest(checkpoint, $6), broker_position = coalesce(nullif($5, 0), broker_position), stream_time = NULL FROM l WHERE lanes.id = l.id AND $5 <= l.sure)
		SELECT sure FROM l`, s.scope, lane.Source, lane.Name, assigned.Epoch, from, to.Checkpoint).Scan(&sure)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // the row was forgotten, or is lost: the next acquisition begins a new one
		return from, nil
	case err != nil:
		return 0, fmt.Errorf("confirm the rewind of lane %s: %w", lane, err)
	}
	return sure, nil
}
