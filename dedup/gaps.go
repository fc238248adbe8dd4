package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// ReportGap records what the broker of a queue has discarded unread, beside what is on
// record already, and returns all of it. A gap that may hold none of the queue's messages
// is recorded only if the queue's clock hasn't come so far.
func (s *Store) ReportGap(ctx context.Context, l message.Lane, found lane.Gap) (recorded lane.Gap, err error) {
	err = s.pool.QueryRow(ctx, `
		WITH l AS (SELECT id, stream_time FROM `+s.name("lanes")+` WHERE scope = $1 AND source = $2 AND lane = $3 AND NOT ordered),
		recorded AS (
			INSERT INTO `+s.name("gaps")+` AS g (lane, first, next)
			SELECT id, $4::bigint, $5::bigint FROM l WHERE $4::bigint < $5::bigint AND coalesce(stream_time < $6::timestamptz, true)
			ON CONFLICT (lane) DO UPDATE SET next = greatest(g.next, EXCLUDED.next), found_at = now(),
				first = CASE WHEN g.next > g.accepted THEN least(g.first, greatest(EXCLUDED.first, g.accepted)) ELSE greatest(EXCLUDED.first, g.accepted) END
			RETURNING first, next, accepted)
		SELECT first, next FROM recorded WHERE next > accepted
		UNION ALL
		SELECT g.first, g.next FROM `+s.name("gaps")+` g JOIN l ON l.id = g.lane WHERE g.next > g.accepted AND NOT EXISTS (SELECT FROM recorded)`,
		s.scope, l.Source, l.Name, found.From, found.Next, timestamp(found.Before)).Scan(&recorded.From, &recorded.Next)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return lane.Gap{}, fmt.Errorf("record the gap of lane %s: %w", l, err)
	}
	return recorded, nil
}

// AcceptGap ends the gap on record of a queue. From then on nothing below the position
// counts as missing. Nothing else moves: the queue's broker knows what is left to read.
func (s *Store) AcceptGap(ctx context.Context, lane message.Lane, next int64) error {
	if _, err := s.pool.Exec(ctx, s.acceptGap(), s.scope, lane.Source, lane.Name, next); err != nil {
		return fmt.Errorf("accept the gap of lane %s: %w", lane, err)
	}
	return nil
}

// acceptGap moves the lane no further than the broker's log is known to reach.
func (s *Store) acceptGap() string {
	return `
		WITH moved AS (UPDATE ` + s.name("lanes") + ` l SET next_position = greatest(l.next_position, least($4, g.next)) FROM ` + s.name("gaps") + ` g
			WHERE g.lane = l.id AND l.scope = $1 AND l.source = $2 AND l.lane = $3 AND NOT l.ordered RETURNING l.id)
		UPDATE ` + s.name("gaps") + ` g SET accepted = greatest(accepted, $4) FROM moved WHERE g.lane = moved.id`
}

// forgetGaps forgets the gap of another log than the one that a queue is about to read:
// its positions mean nothing there.
func (s *Store) forgetGaps(ctx context.Context, tx pgx.Tx, t lane.Acquire) error {
	_, err := tx.Exec(ctx, `DELETE FROM `+s.name("gaps")+` g USING `+s.name("lanes")+` l
		WHERE l.id = g.lane AND l.scope = $1 AND l.source = $2 AND l.lane = $3 AND NOT l.ordered AND l.log_id <> nullif($4, '')`,
		s.scope, t.Lane.Source, t.Lane.Name, t.LogID)
	if err != nil {
		return fmt.Errorf("forget the gap of the log before: %w", err)
	}
	return nil
}

// skipGap lets a queue go on that is held for a gap.
func (s *Store) skipGap(ctx context.Context, tx pgx.Tx, m *LaneMove) error {
	var next int64
	err := tx.QueryRow(ctx, `SELECT g.next, l.epoch FROM `+s.name("gaps")+` g JOIN `+s.name("lanes")+` l ON l.id = g.lane WHERE l.scope = $1 AND l.source = $2 AND l.lane = $3 AND g.next > g.accepted FOR UPDATE OF g`,
		s.scope, m.Source, m.Lane).Scan(&next, &m.Epoch)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return ErrUnorderedLane
	case err != nil:
		return err
	case m.To < next:
		return fmt.Errorf("it is a queue, whose messages below %d are gone: the position must be %d or above", next, next)
	}
	_, err = tx.Exec(ctx, s.acceptGap(), s.scope, m.Source, m.Lane, m.To)
	return err
}

// timestamp is NULL for the zero time.
func timestamp(t time.Time) pgtype.Timestamptz {
	return pgtype.Timestamptz{Time: t, Valid: !t.IsZero()}
}
