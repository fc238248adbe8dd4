package cli

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
)

// withStore runs work with the store of the configured database and scope. It doesn't
// check the schema.
func (c *command) withStore(ctx context.Context, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	cfg, logger, err := c.loadOne()
	if err != nil {
		return err
	}
	return c.withStoreOf(ctx, cfg, logger, work)
}

// withStoreOf is withStore for a configuration that was read.
func (c *command) withStoreOf(ctx context.Context, cfg *config.Config, logger *slog.Logger, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	const connections = 2 // one works, one asks whether another process is done
	pool, store, err := app.OpenDatabase(ctx, cfg, connections, logger)
	if err != nil {
		return err
	}
	defer pool.Close()
	return work(ctx, store, cfg)
}

// eachStore is withStoreOf for each scope of the file, or for the one that --scope names.
// heading says of which, if there are several.
func (c *command) eachStore(ctx context.Context, heading bool, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	cfg, logger, err := c.loadAndWarn()
	if err != nil {
		return err
	}
	all, err := c.picked(cfg)
	if err != nil {
		return err
	}
	for i, one := range all {
		if len(all) == 1 {
			return c.withStoreOf(ctx, one, logger, work)
		}
		if heading {
			fmt.Fprintf(c.stdout, "%sscope %s\n", strings.Repeat("\n", min(i, 1)), one.Scope)
		}
		if err := c.withStoreOf(ctx, one, logger, work); err != nil {
			return &app.PipelineError{Scope: one.Scope, Err: err}
		}
	}
	return nil
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
