package dedup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/admin"
)

// LaneState is the state of a lane.
type LaneState struct {
	Source  string `json:"source"`
	Lane    string `json:"lane"`
	Ordered bool   `json:"ordered"`
	Epoch   int64  `json:"epoch"`
	Owner   string `json:"owner"`
	// NextPosition is where reading goes on; for a queue it only tells how far the queue
	// has come.
	NextPosition   int64  `json:"next_position"`
	BrokerPosition *int64 `json:"broker_position"` // the broker's copy, as last confirmed; nil: none
	Lag            *int64 `json:"lag"`             // nil: not known
	// StreamTime is the lane's clock, StreamAge how many seconds it is behind the
	// database's; nil: not known.
	StreamTime *time.Time `json:"stream_time"`
	StreamAge  *float64   `json:"stream_age_seconds"`
	// ClockAhead is set if the lane's clock is ahead of the database's. Such a clock
	// isn't believed: nothing expires by it, as if it weren't known.
	ClockAhead bool      `json:"clock_ahead"`
	UpdatedAt  time.Time `json:"updated_at"`
	// LogID is the broker's own id of the log that the lane reads: a Kafka
	// topic's id, or the creation time of a NATS stream; nil: it has none.
	LogID *string `json:"log_id"`
	// GapFrom and GapNext are what the broker of a queue has discarded unread, for which
	// the queue is held: the first position, and the one after the last. Nil: nothing.
	GapFrom *int64 `json:"gap_from"`
	GapNext *int64 `json:"gap_next"`
	// CutAt is where the log was found cut, below NextPosition: the lane is held until
	// its position is set. Nil: it wasn't cut.
	CutAt *int64 `json:"cut_at"`
	// HoldsUpExpiry marks the lane that is furthest behind: claims expire by its
	// clock.
	HoldsUpExpiry bool `json:"holds_up_expiry"`
}

// LaneStates lists the scope's lanes, by source and lane.
func (s *Store) LaneStates(ctx context.Context) ([]LaneState, error) {
	rows, _ := s.pool.Query(ctx, `
		SELECT source, l.lane, ordered, epoch, owner, next_position, broker_position, lag, stream_time,
		       CASE WHEN stream_time IS NOT NULL THEN greatest(0, extract(epoch FROM `+s.name("clock")+`() - stream_time))::float8 END,
		       coalesce(`+s.clockAhead()+`, false), updated_at, log_id, g.first, g.next, l.cut_at,
		       row_number() OVER (ORDER BY `+s.laneClock()+` NULLS FIRST, source, l.lane) = 1
		FROM `+s.name("lanes")+` l LEFT JOIN `+s.name("gaps")+` g ON g.lane = l.id AND g.next > g.accepted WHERE scope = $1 ORDER BY source, l.lane`, s.scope)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[LaneState])
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	return all, nil
}

// ErrNoLane says that the scope has no such lane.
var ErrNoLane = errors.New("no such lane")

// ErrUnorderedLane says that a lane has no position to move.
var ErrUnorderedLane = errors.New("it is a queue, whose broker knows what is left to do: there is no position to move")

// ErrReapplies says that messages would be applied again.
var ErrReapplies = errors.New("with dedup.strategy position no ids are kept, so what is read again is applied again: insist with --reapply")

// LaneMove is a lane that an operator has moved.
type LaneMove struct {
	Source string `json:"source"`
	Lane   string `json:"lane"`
	From   int64  `json:"from"`
	To     int64  `json:"to"`
	// Epoch is the new one: the owner is fenced.
	Epoch int64  `json:"epoch"`
	Owner string `json:"owner"`
	// Queue is set for a queue that was held for a gap: it goes on with what is left, and
	// nothing else was changed.
	Queue bool `json:"queue,omitempty"`
	// ClaimsSince is since when claims are kept. An id that was claimed before,
	// and comes again, is applied again.
	ClaimsSince time.Time `json:"claims_since"`
}

// SetPosition moves an ordered lane to a position. A worker that owns it is fenced at its
// next batch or heartbeat, and begins there when it acquires the lane anew. A queue that
// is held for a gap can only go on behind it. Without reapply, a lane doesn't go
// back: ErrReapplies.
func (s *Store) SetPosition(ctx context.Context, actor, source, lane string, position int64, reapply bool) (m LaneMove, err error) {
	if position < 0 {
		return m, fmt.Errorf("position %d is below 0", position)
	}
	err = admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
		m = LaneMove{Source: source, Lane: lane, To: position}
		var id int32
		var ordered bool
		err := tx.QueryRow(ctx, `SELECT id, ordered, next_position, owner FROM `+s.name("lanes")+`
			WHERE scope = $1 AND source = $2 AND lane = $3 FOR UPDATE`, s.scope, source, lane).Scan(&id, &ordered, &m.From, &m.Owner)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return s.noLane(ctx, tx)
		case err != nil:
			return err
		case !ordered:
			m.Queue = true
			if err := s.skipGap(ctx, tx, &m); err != nil {
				return err
			}
			return admin.Audit(ctx, tx, s.schema, actor, "lanes set-position", laneSubject(source, lane), m)
		}
		if position < m.From && !reapply {
			return ErrReapplies
		}
		// The epoch as acquire_lane() makes it. No broker position is known any more: a
		// group's offset below a confirmed one passes for an operator's reset, and would
		// move the lane back from where it is put now. If the lane goes back, its clock
		// isn't known: claims must not expire before what is read again has passed them.
		// updated_at stays, since it reports whether the owner is active.
		err = tx.QueryRow(ctx, `UPDATE `+s.name("lanes")+` SET
				epoch           = greatest(epoch + 1, (extract(epoch FROM clock_timestamp()) * 1e6)::bigint),
				next_position   = $2,
				broker_position = NULL,
				repositioned    = true,
				`+lowerStart+`,
				lag             = NULL,
				leader_epochs   = NULL,
				stream_time     = CASE WHEN $2 < next_position THEN NULL ELSE stream_time END
			WHERE id = $1 RETURNING epoch`, id, position).Scan(&m.Epoch)
		if err != nil {
			return err
		}
		if m.ClaimsSince, err = s.claimsSince(ctx, tx); err != nil {
			return err
		}
		return admin.Audit(ctx, tx, s.schema, actor, "lanes set-position", laneSubject(source, lane), m)
	})
	if err != nil {
		return LaneMove{}, fmt.Errorf("set the position of %s: %w", laneSubject(source, lane), err)
	}
	return m, nil
}

// ErrLaneInUse says that somebody may be using a lane.
var ErrLaneInUse = errors.New("it was acquired, moved or caught up in the last 5 minutes, so a worker may be using it: stop the worker, or insist with --force")

// ForgetLane deletes a lane with its books, which the audit keeps. Its claims stay. A
// lane in use is kept, unless force is given. Acquired again, the lane begins like a new
// one.
func (s *Store) ForgetLane(ctx context.Context, actor, source, lane string, force bool) (row json.RawMessage, err error) {
	err = admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
		var id int32
		var inUse bool
		// A lane that has nothing to read doesn't move, but its clock does.
		err := tx.QueryRow(ctx, `
			SELECT id, greatest(updated_at, acquired_at) > now() - interval '5 minutes' OR coalesce(`+s.laneClock()+` > `+s.name("clock")+`() - interval '5 minutes', false)
			FROM `+s.name("lanes")+` WHERE scope = $1 AND source = $2 AND lane = $3 FOR UPDATE`, s.scope, source, lane).Scan(&id, &inUse)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return s.noLane(ctx, tx)
		case err != nil:
			return err
		case inUse && !force:
			return ErrLaneInUse
		}
		var text string
		if err := tx.QueryRow(ctx, `DELETE FROM `+s.name("lanes")+` l WHERE id = $1 RETURNING to_jsonb(l)::text`, id).Scan(&text); err != nil {
			return err
		}
		row = json.RawMessage(text)
		return admin.Audit(ctx, tx, s.schema, actor, "lanes forget", laneSubject(source, lane), row)
	})
	if err != nil {
		return nil, fmt.Errorf("forget %s: %w", laneSubject(source, lane), err)
	}
	return row, nil
}

func laneSubject(source, lane string) string { return "lane " + lane + " of source " + source }

// noLane is ErrNoLane with the lanes there are.
func (s *Store) noLane(ctx context.Context, tx pgx.Tx) error {
	rows, _ := tx.Query(ctx, `SELECT source || ' ' || lane FROM `+s.name("lanes")+` WHERE scope = $1 ORDER BY source, lane`, s.scope)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	const shown = 10
	switch n := len(names); {
	case n == 0:
		return fmt.Errorf("%w: scope %s has none yet", ErrNoLane, s.scope)
	case n > shown:
		names = append(names[:shown], fmt.Sprintf("and %d more, which dedupd lanes list shows", n-shown))
	}
	return fmt.Errorf("%w; scope %s has %s", ErrNoLane, s.scope, strings.Join(names, ", "))
}
