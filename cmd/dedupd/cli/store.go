package cli

import (
	"context"
	"fmt"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
)

// withStore runs work with the store of the configured database and scope. It doesn't
// check the schema.
func (c *command) withStore(ctx context.Context, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	cfg, logger, err := c.loadAndWarn()
	if err != nil {
		return err
	}
	const connections = 2 // one works, one asks whether another process is done
	pool, store, err := app.OpenDatabase(ctx, cfg, connections, logger)
	if err != nil {
		return err
	}
	defer pool.Close()
	return work(ctx, store, cfg)
}

// withScope is withStore for work that needs the schema and the scope.
func (c *command) withScope(ctx context.Context, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	return c.withStore(ctx, func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
		if err := s.Load(ctx); err != nil {
			return err
		}
		return work(ctx, s, cfg)
	})
}

// withClaims is withScope for commands about claims, which only strategy claim makes.
func (c *command) withClaims(ctx context.Context, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	return c.withScope(ctx, func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
		if cfg.Dedup.Strategy != policy.StrategyClaim {
			return usageError{fmt.Errorf("dedup.strategy is %s, which claims no ids", cfg.Dedup.Strategy)}
		}
		return work(ctx, s, cfg)
	})
}
