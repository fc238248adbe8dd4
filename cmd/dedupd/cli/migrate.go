package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/config"
)

func (c *command) migrate() *cobra.Command {
	return group("migrate", "Creates, upgrades and shows the database schema", c.migrateUp(), c.migrateStatus(), c.migrateSQL())
}

func (c *command) migrateUp() *cobra.Command {
	var worker string
	up := &cobra.Command{
		Use:   "up",
		Short: "Creates or upgrades the schema, and creates the scope",
		Long: `Creates or upgrades the schema, and creates the scope, with the rights of the
schema's owner. Several may run at a time: one works, the others wait. --grants
gives the worker's role the rights that it needs on the schema, even if there is
nothing to upgrade. If the file has several pipelines, it does all of them, unless
--scope names one.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.migrateAll(cmd.Context(), worker)
		},
	}
	up.Flags().StringVar(&worker, "grants", "", "give the worker's `ROLE` its rights")
	return c.withPipeline(c.withOutput(up))
}

func (c *command) migrateAll(ctx context.Context, worker string) error {
	var applied []schema.Migration
	err := c.eachStore(ctx, false, func(ctx context.Context, s *dedup.Store, _ *config.Config) error {
		some, err := s.Schema().Migrate(ctx)
		if err == nil && worker != "" {
			err = s.Schema().Grant(ctx, worker)
		}
		applied = append(applied, some...)
		return err
	})
	if err != nil {
		return err
	}
	return c.showApplied(applied)
}

func (c *command) migrateStatus() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "status",
		Short: "Shows the schema's versions: applied and pending",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.withStore(cmd.Context(), func(ctx context.Context, s *dedup.Store, _ *config.Config) error {
				all, err := s.Schema().Migrations(ctx)
				if err != nil {
					return err
				}
				return c.showMigrations(all)
			})
		},
	}))
}

func (c *command) migrateSQL() *cobra.Command {
	var role string
	sql := &cobra.Command{
		Use:   "sql",
		Short: "Prints the SQL that creates schema and scope, for a DBA to run",
		Long: `Prints the SQL that creates schema and scope in an empty database, for a DBA to run.
It connects to nothing. --grants adds what the worker's role needs. For an existing
schema, or a further scope, use dedupd migrate up.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			cfg, _, err := c.loadOne()
			if err != nil {
				return err
			}
			s, err := dedup.NewStore(dedup.StoreConfig{Schema: cfg.Database.Schema, Scope: cfg.Scope})
			if err != nil {
				return exitError{exitUsage, err}
			}
			_, err = io.WriteString(c.stdout, s.Schema().SQL(role))
			return err
		},
	}
	sql.Flags().StringVar(&role, "grants", "", "add the grants for the worker's `ROLE`")
	return c.withPipeline(sql)
}

func (c *command) showApplied(applied []schema.Migration) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, append([]schema.Migration{}, applied...))
	}
	for _, m := range applied {
		fmt.Fprintf(c.stdout, "applied version %d: %s\n", m.Version, m.Name)
	}
	if len(applied) == 0 {
		fmt.Fprintln(c.stdout, "the schema is up to date")
	}
	return nil
}

func (c *command) showMigrations(all []schema.Migration) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, all)
	}
	t := table{columns: []column{right("VERSION"), left("NAME"), left("APPLIED")}}
	for _, m := range all {
		at := "pending"
		if m.AppliedAt != nil {
			at = timestamp(m.AppliedAt)
		}
		t.add(m.Version, m.Name, at)
	}
	return t.write(c.stdout)
}
