package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
)

// connectTimeout is how long a command waits for the database, unless the URL
// says otherwise: somebody sits in front of it.
const connectTimeout = 10 * time.Second

// withStore gives a command's work the store of the configured database and
// scope. It does not look whether the schema is there.
func (c *command) withStore(ctx context.Context, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	cfg, logger, err := c.loadAndWarn()
	if err != nil {
		return err
	}
	dsn, err := cfg.Database.Connection()
	if err != nil {
		return exitError{exitUsage, fmt.Errorf("database.url_file: %w", err)}
	}
	pc, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return exitError{exitUsage, fmt.Errorf("database.url: %w", err)}
	}
	pc.MaxConns = 2
	if pc.ConnConfig.ConnectTimeout == 0 {
		pc.ConnConfig.ConnectTimeout = connectTimeout
	}
	if pc.ConnConfig.RuntimeParams["application_name"] == "" {
		pc.ConnConfig.RuntimeParams["application_name"] = "dedupd " + cfg.Scope
	}
	pooler := cfg.Database.Pooler != "none"
	if pooler {
		pc.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer pool.Close()
	store, err := dedup.NewStore(dedup.StoreConfig{
		Pool: pool, Schema: cfg.Database.Schema, Scope: cfg.Scope, TransactionPooler: pooler, Logger: logger,
	})
	if err != nil {
		return exitError{exitUsage, err}
	}
	return work(ctx, store, cfg)
}

// withScope is withStore for work that needs the schema and the scope to be there.
func (c *command) withScope(ctx context.Context, work func(ctx context.Context, s *dedup.Store, cfg *config.Config) error) error {
	return c.withStore(ctx, func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
		if err := s.Load(ctx); err != nil {
			return err
		}
		return work(ctx, s, cfg)
	})
}
