package dedup

import (
	"context"
	"errors"
	"time"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/internal/wait"
)

// tries is how often an operator's command is tried when others stand in its way.
const tries = 10

// retry tries work until nothing transient stands in its way: the generations have
// changed, a lock was held for too long, a deadlock. Only an error that the server sent
// counts: behind any other a COMMIT may have landed.
func (s *Store) retry(ctx context.Context, work func() error) error {
	l := 50 * time.Millisecond
	for n := 1; ; n++ {
		err := work()
		stale, reaction := sqlstate.Of(err) == sqlstate.CatalogChanged, react(err)
		if err == nil || n == tries || answer(err) == nil || !stale && reaction != retry && reaction != internal {
			return err
		}
		if stale {
			if _, failed := s.generations.Refresh(ctx); failed != nil {
				return errors.Join(err, failed)
			}
		}
		if !wait.For(ctx, l) {
			return err
		}
		l = min(2*l, 2*time.Second)
	}
}
