package generations

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/admin"
)

// clockGrace is how far a lane's clock, or a generation's, may be ahead of the
// database's: transactions that overlap take their times in another order than they
// commit.
const ClockGrace = time.Minute

// ClockSetting is the time that somebody gives a clock.
type ClockSetting struct {
	// To is the time; zero: not known.
	To time.Time
	// Now takes the database's clock for it instead.
	Now bool
	// Earlier allows a time by which claims may expire earlier than without it.
	Earlier bool
}

// ErrClockAhead says that a clock was to be set ahead of the database's.
var ErrClockAhead = errors.New("that is ahead of the database's clock")

// ErrExpireEarlier says that claims may expire earlier than they would without the
// change: copies that come later would then be applied again.
var ErrExpireEarlier = errors.New("claims may expire earlier by that, and copies of their messages be applied again: insist with --expire-earlier")

// utc is how a time is told.
func UTC(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// resolve gives the time that a clock is set to.
func (set ClockSetting) Resolve(now time.Time) (time.Time, error) {
	if set.Now {
		return now, nil
	}
	if set.To.IsZero() {
		return time.Time{}, errors.New("no time is given")
	}
	if set.To.After(now) {
		return time.Time{}, fmt.Errorf("%s: %w, which is at %s", UTC(set.To), ErrClockAhead, UTC(now))
	}
	return set.To.Truncate(time.Microsecond), nil // as the database has it
}

// ErrNoGeneration says that the scope has no such generation.
var ErrNoGeneration = errors.New("no such generation; dedupd retention status shows them")

// GenerationClock is a generation's clock that was set by hand: when it was sealed, or,
// while it is open, opened.
type GenerationClock struct {
	Generation int    `json:"generation"`
	State      string `json:"state"`
	// From and To are what it was and is.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Now is the database's clock.
	Now time.Time `json:"now"`
}

// SetClock corrects when a generation was sealed, as its claims are kept for a
// window from then on; or when the open one was opened. It is for generations that the
// database timed by a wrong clock. An earlier time may have claims expire earlier. But if
// the generation's lies in the future, the present doesn't: its claims are there by now.
func (s *Set) SetClock(ctx context.Context, actor string, generation int, set ClockSetting) (c GenerationClock, err error) {
	subject := fmt.Sprint("generation ", generation)
	err = admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
		c = GenerationClock{Generation: generation}
		err := tx.QueryRow(ctx, `SELECT state, coalesce(sealed_at, opened_at), `+s.name("clock")+`() FROM `+s.name("generations")+`
			WHERE scope = $1 AND generation = $2 AND state IN ('open', 'sealed') FOR UPDATE`, s.schema.Scope, generation).Scan(&c.State, &c.From, &c.Now)
		if errors.Is(err, pgx.ErrNoRows) {
			return ErrNoGeneration
		}
		if err == nil {
			c.To, err = set.Resolve(c.Now)
		}
		if err != nil {
			return err
		}
		// The open one is sealed later than now, whenever it was opened.
		if c.State == "sealed" && !set.Earlier && c.To.Before(c.From) && c.To.Before(c.Now) {
			return fmt.Errorf("it was sealed at %s: %w", UTC(c.From), ErrExpireEarlier)
		}
		if _, err := tx.Exec(ctx, `UPDATE `+s.name("generations")+` SET opened_at = CASE WHEN state = 'open' THEN $3 ELSE least(opened_at, $3) END,
			sealed_at = CASE WHEN state = 'sealed' THEN $3::timestamptz END WHERE scope = $1 AND generation = $2`, s.schema.Scope, generation, c.To); err != nil {
			return err
		}
		return admin.Audit(ctx, tx, s.schema, actor, "retention set-clock", subject, c)
	})
	if err != nil {
		return GenerationClock{}, fmt.Errorf("set the clock of %s: %w", subject, err)
	}
	return c, nil
}

// Ahead tells whether the generation's times lie ahead of the database's clock.
func (g *Generation) Ahead(now time.Time) bool {
	t := g.OpenedAt
	if g.SealedAt != nil {
		t = g.SealedAt
	}
	return t != nil && t.Sub(now) > ClockGrace
}
