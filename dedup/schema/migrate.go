package schema

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/internal/wait"
)

// migrationFiles are the schema's versions: numbered files, applied in order. Once released,
// a file is never edited or reverted.
//
//go:embed migrations/*.sql
var migrationFiles embed.FS

// migrationLock is the class of the advisory lock that a migration holds ("dedm").
const migrationLock = 0x6465646d

// Migration is one version of the schema.
type Migration struct {
	Version   int        `json:"version"`
	Name      string     `json:"name"`
	AppliedAt *time.Time `json:"applied_at"` // nil: pending
	sql       string
}

// migrations reads the numbered files: from 1, without gaps. An error panics: no test would
// pass if the program's own files were wrong.
func (s *Schema) migrations() []Migration {
	var files fs.FS = migrationFiles
	if s.Files != nil {
		files = s.Files
	}
	names, err := fs.Glob(files, "migrations/*.sql")
	if err != nil {
		panic(err)
	}
	slices.Sort(names)
	var all []Migration
	for _, file := range names {
		number, name, ok := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(file, "migrations/"), ".sql"), "_")
		version, err := strconv.Atoi(number)
		if !ok || err != nil || version != len(all)+1 {
			panic("schema: migration " + file + " does not follow number " + strconv.Itoa(len(all)))
		}
		sql, err := fs.ReadFile(files, file)
		if err != nil {
			panic(err)
		}
		all = append(all, Migration{Version: version, Name: name, sql: string(sql)})
	}
	return all
}

// latest is the version that this program works with.
func (s *Schema) latest() int { return len(s.migrations()) }

// sqlFor fills in a migration's placeholders.
func (s *Schema) sqlFor(m Migration) string {
	return strings.NewReplacer(
		"{{schema}}", pgx.Identifier{s.Name}.Sanitize(),
		"{{rotation_lock}}", strconv.Itoa(RotationLock),
	).Replace(m.sql)
}

// createMigrations is SQL for the table that records the schema's version.
func (s *Schema) createMigrations() string {
	return `CREATE TABLE IF NOT EXISTS ` + s.Object("migrations") + ` (
    version    integer CONSTRAINT migrations_pkey PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)`
}

// createScope is SQL for the scope and its first generation.
func (s *Schema) createScope() []string {
	scope := quoteLiteral(s.Scope)
	return []string{
		`INSERT INTO ` + s.Object("scopes") + ` (scope) VALUES (` + scope + `) ON CONFLICT DO NOTHING`,
		`SELECT ` + s.Object("prepare_generation") + `(` + scope + `)`,
		`UPDATE ` + s.Object("generations") + ` SET state = 'open' WHERE scope = ` + scope + ` AND state = 'next'`,
	}
}

// quoteLiteral quotes names that matched ScopePattern; it doubles quotes all the same.
func quoteLiteral(v string) string { return "'" + strings.ReplaceAll(v, "'", "''") + "'" }

// Version returns the version of the database's schema; 0: there is none.
func (s *Schema) Version(ctx context.Context) (int, error) {
	return s.version(ctx, s.Pool)
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func (s *Schema) version(ctx context.Context, q querier) (int, error) {
	var version int
	err := q.QueryRow(ctx, `SELECT coalesce(max(version), 0) FROM `+s.Object("migrations")).Scan(&version)
	switch code := sqlstate.Of(err); {
	case err == nil:
		return version, nil
	case code == sqlstate.UndefinedTable, code == sqlstate.UndefinedSchema:
		return 0, nil
	}
	return 0, fmt.Errorf("read the schema's version: %w", err)
}

// Migrations lists the versions that this program knows or the database has, and when each
// was applied.
func (s *Schema) Migrations(ctx context.Context) ([]Migration, error) {
	have, err := s.Version(ctx)
	if err != nil {
		return nil, err
	}
	all := s.migrations()
	if have == 0 {
		return all, nil
	}
	rows, _ := s.Pool.Query(ctx, `SELECT version, applied_at FROM `+s.Object("migrations")+` ORDER BY version`)
	var version int
	var at time.Time
	_, err = pgx.ForEachRow(rows, []any{&version, &at}, func() error {
		if version <= len(all) {
			all[version-1].AppliedAt = new(at)
		} else {
			all = append(all, Migration{Version: version, Name: "unknown to this dedupd", AppliedAt: new(at)})
		}
		return nil
	})
	return all, err
}

// Migrate brings the schema to this program's version and makes the scope, in one
// transaction. It returns the versions that it applied. Many processes may call it at once:
// one migrates, and the others ask again until it is done. They don't block inside the
// database: a blocked statement's snapshot holds up the one that migrates (measured: CREATE
// INDEX CONCURRENTLY deadlocks with it). For a newer schema the error is an *Error, for a
// database that isn't UTF8 an *EncodingError.
func (s *Schema) Migrate(ctx context.Context) (applied []Migration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if err := s.checkEncoding(ctx); err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	for {
		done, applied, err := s.tryMigrate(ctx)
		if err != nil {
			return nil, fmt.Errorf("migrate: %w", err)
		}
		if done {
			return applied, nil
		}
		if !wait.For(ctx, 100*time.Millisecond+rand.N(200*time.Millisecond)) {
			return nil, fmt.Errorf("migrate: another process has held the migration lock for too long: %w", ctx.Err())
		}
	}
}

// tryMigrate migrates, unless another process is at it: then done is false.
func (s *Schema) tryMigrate(ctx context.Context) (done bool, applied []Migration, err error) {
	if have, err := s.Version(ctx); err != nil {
		return false, nil, err
	} else if have > s.latest() {
		return false, nil, &Error{Have: have, Want: s.latest()}
	} else if have == s.latest() {
		if there, err := s.hasScope(ctx); err != nil || there {
			return there, nil, err // then no rights are needed either
		}
	}
	err = pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('lock_timeout', '5s', true), set_config('statement_timeout', '60s', true)`); err != nil {
			return err
		}
		// One lock for the whole database, whatever the schema: migrations are rare.
		if err := tx.QueryRow(ctx, `SELECT pg_catalog.pg_try_advisory_xact_lock($1, 0)`, migrationLock).Scan(&done); err != nil || !done {
			return err
		}
		applied, err = s.migrate(ctx, tx)
		return err
	})
	return done, applied, err
}

// hasScope reports whether the scope has an open generation.
func (s *Schema) hasScope(ctx context.Context) (there bool, err error) {
	err = s.Pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.Object("scopes")+` s JOIN `+s.Object("generations")+` g ON g.scope = s.scope AND g.state = 'open' WHERE s.scope = $1)`, s.Scope).Scan(&there)
	if err != nil {
		return false, fmt.Errorf("look for the scope: %w", err)
	}
	return there, nil
}

// migrate runs inside the transaction that holds the migration lock.
func (s *Schema) migrate(ctx context.Context, tx pgx.Tx) (applied []Migration, err error) {
	var exists bool
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)`, s.Name).Scan(&exists); err != nil {
		return nil, err
	}
	if !exists {
		// Not IF NOT EXISTS: that needs the right to create schemas even if there is
		// nothing to create.
		if _, err := tx.Exec(ctx, `CREATE SCHEMA `+pgx.Identifier{s.Name}.Sanitize()); err != nil {
			return nil, err
		}
	}
	if _, err := tx.Exec(ctx, s.createMigrations()); err != nil {
		return nil, err
	}
	have, err := s.version(ctx, tx)
	if err != nil {
		return nil, err
	}
	for _, m := range s.migrations()[min(have, s.latest()):] {
		if _, err := tx.Exec(ctx, s.sqlFor(m)); err != nil {
			return nil, fmt.Errorf("version %d (%s): %w", m.Version, m.Name, err)
		}
		if _, err := tx.Exec(ctx, `INSERT INTO `+s.Object("migrations")+` (version, name) VALUES ($1, $2)`, m.Version, m.Name); err != nil {
			return nil, err
		}
		applied = append(applied, m)
	}
	var open bool
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.Object("generations")+` WHERE scope = $1)`, s.Scope).Scan(&open); err != nil {
		return nil, err
	}
	if !open {
		for _, sql := range s.createScope() {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return nil, fmt.Errorf("create scope %s: %w", s.Scope, err)
			}
		}
	}
	return applied, nil
}

// SQL returns what Migrate would run on an empty database, for a DBA to read and run. If a
// worker's role is named, its grants follow.
func (s *Schema) SQL(workerRole string) string {
	var b strings.Builder
	schema := pgx.Identifier{s.Name}.Sanitize()
	fmt.Fprintf(&b, "BEGIN;\nCREATE SCHEMA IF NOT EXISTS %s;\n%s;\n", schema, s.createMigrations())
	for _, m := range s.migrations() {
		fmt.Fprintf(&b, "\n-- version %d: %s\n%s\nINSERT INTO %s (version, name) VALUES (%d, %s);\n",
			m.Version, m.Name, strings.TrimSpace(s.sqlFor(m)), s.Object("migrations"), m.Version, quoteLiteral(m.Name))
	}
	fmt.Fprintf(&b, "\n-- scope %s\n", s.Scope)
	for _, sql := range s.createScope() {
		b.WriteString(sql + ";\n")
	}
	if workerRole != "" {
		b.WriteString("\n" + s.GrantSQL(workerRole))
	}
	b.WriteString("COMMIT;\n")
	return b.String()
}
