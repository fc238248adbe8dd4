package generations

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/admin"
)

// clockGrace is how far a generation's clock may be ahead of the database's:
// transactions that overlap commit in another order than they take their times.
const clockGrace = time.Minute

// ClockSetting is the time that somebody sets a clock to.
type ClockSetting struct {
	// To is the time; zero: not known.
	To time.Time
	// Now sets the clock to the database's instead.
	Now bool
	// Earlier allows a time that makes claims expire earlier.
	Earlier bool
}

// ErrClockAhead refuses to set a clock ahead of the database's.
var ErrClockAhead = errors.New("that is ahead of the database's clock")

// ErrExpireEarlier refuses a time that makes claims expire earlier: copies that come
// after that would be applied again.
var ErrExpireEarlier = errors.New("claims may expire earlier, and later copies of their messages be applied again: insist with --expire-earlier")

// UTC is how errors write a time.
func UTC(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Resolve returns the time that a clock is set to. now is the database's.
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
var ErrNoGeneration = errors.New("no such generation; `dedupd retention status` shows them")

// ClockChange tells how a generation's clock was set. The clock is when the
// generation was sealed or, while it is open, opened.
type ClockChange struct {
	Number int    `json:"generation"`
	State  string `json:"state"`
	// From is what the clock was, To what it is.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Now is the database's clock.
	Now time.Time `json:"now"`
}

// SetClock corrects when a generation was sealed, or when the open one was opened. It is
// for generations that the database timed by a wrong clock. Claims are kept for a window
// from the seal on, so an earlier time may expire them earlier, and has to be allowed.
// The exception: a clock in the future may be set to the present, since all claims were
// made by now.
func (s *Set) SetClock(ctx context.Context, actor string, generation int, set ClockSetting) (c ClockChange, err error) {
	subject := fmt.Sprint("generation ", generation)
	err = admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
		c = ClockChange{Number: generation}
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
		// An open generation will be sealed later than now, whenever it was opened.
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
		return ClockChange{}, fmt.Errorf("set the clock of %s: %w", subject, err)
	}
	return c, nil
}

// Ahead reports whether the generation's clock is ahead of the database's, which says now.
func (g *Generation) Ahead(now time.Time) bool {
	t := g.OpenedAt
	if g.SealedAt != nil {
		t = g.SealedAt
	}
	return t != nil && t.Sub(now) > clockGrace
}
