package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/dedup/internal/admin"
	"github.com/dedupd/dedupd/message"
)

// clockAhead is SQL for whether a lane's clock is ahead of the database's: the latter was
// ahead when the lane's was set, or is behind now. NULL: not known.
func (s *Store) clockAhead() string {
	return `stream_time >= ` + s.name("clock") + `() + interval '1 minute'`
}

// laneClock is SQL for a lane's clock if it is believed, else NULL.
func (s *Store) laneClock() string {
	return `CASE WHEN NOT ` + s.clockAhead() + ` THEN stream_time END`
}

// LaneClock is a lane's clock that was set by hand.
type LaneClock struct {
	Source string `json:"source"`
	Lane   string `json:"lane"`
	// From and To are what it was and is; nil: not known.
	From *time.Time `json:"from"`
	To   *time.Time `json:"to"`
	// Now is the database's clock.
	Now time.Time `json:"now"`
}

// SetLaneClock sets a lane's clock, by which claims expire. The lane's next batch or
// heartbeat moves it on from there. A time that is later than the lane's may have claims
// expire earlier; so may any time if the lane's isn't known or isn't believed.
func (s *Store) SetLaneClock(ctx context.Context, actor string, lane message.Lane, set generations.ClockSetting) (c LaneClock, err error) {
	err = admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
		c = LaneClock{Source: lane.Source, Lane: lane.Name}
		var id int32
		var believed *time.Time
		err := tx.QueryRow(ctx, `SELECT id, stream_time, `+s.laneClock()+`, `+s.name("clock")+`() FROM `+s.name("lanes")+`
			WHERE scope = $1 AND source = $2 AND lane = $3 FOR UPDATE`, s.scope, lane.Source, lane.Name).Scan(&id, &c.From, &believed, &c.Now)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return s.noLane(ctx, tx)
		case err != nil:
			return err
		}
		if set.Now || !set.To.IsZero() {
			to, err := set.Resolve(c.Now)
			if err != nil {
				return err
			}
			if !set.Earlier && (believed == nil || to.After(*believed)) {
				return fmt.Errorf("its clock is %s: %w", c.was(believed), generations.ErrExpireEarlier)
			}
			c.To = &to
		}
		if _, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET stream_time = $2 WHERE id = $1`, id, c.To); err != nil {
			return err
		}
		return admin.Audit(ctx, tx, s.schema, actor, "lanes set-clock", laneSubject(lane.Source, lane.Name), c)
	})
	if err != nil {
		return LaneClock{}, fmt.Errorf("set the clock of %s: %w", laneSubject(lane.Source, lane.Name), err)
	}
	return c, nil
}

func (c *LaneClock) was(believed *time.Time) string {
	switch {
	case c.From == nil:
		return "not known, so that nothing expires"
	case believed == nil:
		return "at " + generations.UTC(*c.From) + ", ahead of the database's, so that nothing expires"
	}
	return "at " + generations.UTC(*c.From)
}
