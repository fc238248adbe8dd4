// Package dedup is the half of dedupd that knows Postgres: it claims message ids,
// has the sink write the winners, books every message's outcome and moves the
// lanes, all in one transaction. All SQL on dedupd's own tables stands here.
//
// It knows no broker.
package dedup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/message"
)

// rotationLock is the class of the advisory lock, taken shared by each claim
// transaction with the scope's number as second key, and exclusively by whoever
// changes the scope's generations. ("dedu"; advisory locks share one space in a
// database.)
const rotationLock = 0x64656475

// Store is the claims, lanes and dead letters of one scope in one database. It
// may be used by many goroutines.
type Store struct {
	pool    *pgxpool.Pool
	schema  string // as given
	scope   string
	owner   string
	prepare bool
	log     *slog.Logger

	catalog atomic.Pointer[catalog]

	mu      sync.RWMutex
	laneIDs map[message.Lane]int32
	lanes   map[int32]message.Lane
}

// StoreConfig says where a Store lives.
type StoreConfig struct {
	Pool *pgxpool.Pool
	// Schema holds dedupd's tables; default: dedupd.
	Schema string
	// Scope is the consumer's name; ids are unique within it.
	Scope string
	// Owner names this process in the lanes it takes.
	Owner string
	// TransactionPooler tells that a pooler such as PgBouncer stands in between
	// and gives each transaction another connection: statements are then not
	// prepared.
	TransactionPooler bool
	Logger            *slog.Logger
}

// catalog is what a claim transaction is built for.
type catalog struct {
	scopeID int32
	epoch   int64
	// table is the quoted name of the open generation's table; statements are
	// prepared under names that contain its identity, since after a restore the
	// same table name may mean another table.
	table    string
	identity string
}

// ScopePattern is what a scope's name must match: it is a part of table names.
var ScopePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,39}$`)

// NewStore checks the configuration. It does not connect.
func NewStore(c StoreConfig) (*Store, error) {
	if !ScopePattern.MatchString(c.Scope) {
		return nil, fmt.Errorf("scope %q must be 1 to 40 of a-z, 0-9, _ and -, and begin with a letter or digit", c.Scope)
	}
	if c.Schema == "" {
		c.Schema = "dedupd"
	}
	if len(c.Schema) > 63 {
		return nil, fmt.Errorf("schema %q is longer than the 63 bytes a name may have", c.Schema)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return &Store{
		pool: c.Pool, schema: c.Schema, scope: c.Scope, owner: c.Owner,
		prepare: !c.TransactionPooler, log: c.Logger,
		laneIDs: make(map[message.Lane]int32), lanes: make(map[int32]message.Lane),
	}, nil
}

// Scope is the store's scope.
func (s *Store) Scope() string { return s.scope }

// name quotes one of dedupd's own names with its schema.
func (s *Store) name(object string) string { return pgx.Identifier{s.schema, object}.Sanitize() }

// claimsTable is the name of a generation's table, without its schema.
func claimsTable(scope string, generation int) string {
	return fmt.Sprintf("claims_%s_%d", scope, generation)
}

// SchemaError says that the database's schema isn't the one this program works
// with, or lacks the scope. The cure is part of the text.
type SchemaError struct {
	// Have and Want are schema versions; Have is 0 where there is no schema.
	Have, Want int
	Reason     string
}

func (e *SchemaError) Error() string {
	if e.Reason != "" {
		return e.Reason
	}
	if e.Have > e.Want {
		return fmt.Sprintf("the database's schema has version %d, but this dedupd knows only versions up to %d: run the newer dedupd that upgraded it", e.Have, e.Want)
	}
	return fmt.Sprintf("the database's schema has version %d, but this dedupd needs version %d: run `dedupd migrate up` with the owner's rights (or set database.migrate: true)", e.Have, e.Want)
}

// Load checks the schema's version and reads the scope's catalog. The error is a
// *SchemaError where the schema or the scope isn't there as it must be.
func (s *Store) Load(ctx context.Context) error {
	have, err := s.SchemaVersion(ctx)
	if err != nil {
		return err
	}
	if have != latestVersion() {
		return &SchemaError{Have: have, Want: latestVersion()}
	}
	_, err = s.refresh(ctx)
	return err
}

// refresh reads the catalog anew.
func (s *Store) refresh(ctx context.Context) (*catalog, error) {
	var c catalog
	var table string
	err := s.pool.QueryRow(ctx, `
		SELECT s.id, s.catalog_epoch, g.table_name, g.identity::text
		FROM `+s.name("scopes")+` s
		JOIN `+s.name("generations")+` g ON g.scope = s.scope AND g.state = 'open'
		WHERE s.scope = $1`, s.scope).Scan(&c.scopeID, &c.epoch, &table, &c.identity)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, &SchemaError{Reason: fmt.Sprintf("the database has no scope %q yet: run `dedupd migrate up` with this configuration and the owner's rights (or set database.migrate: true)", s.scope)}
	}
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	c.table = s.name(table)
	s.catalog.Store(&c)
	return &c, nil
}

// loaded is the catalog, read at the latest now.
func (s *Store) loaded(ctx context.Context) (*catalog, error) {
	if c := s.catalog.Load(); c != nil {
		return c, nil
	}
	return s.refresh(ctx)
}

// Ping tells whether the database answers.
func (s *Store) Ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return s.pool.Ping(ctx)
}

// Generation is one table of claims.
type Generation struct {
	Scope      string    `json:"scope"`
	Generation int       `json:"generation"`
	State      string    `json:"state"`
	OpenedAt   time.Time `json:"opened_at"`
	// Claims is the planner's estimate; -1 where it has none yet.
	Claims int64 `json:"claims_estimate"`
	// Bytes on disk, with index and all.
	Bytes int64 `json:"bytes"`
}

// Generations lists the scope's generations, oldest first.
func (s *Store) Generations(ctx context.Context) ([]Generation, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT g.scope, g.generation, g.state, g.opened_at,
		       coalesce(st.n_live_tup, -1), coalesce(pg_catalog.pg_total_relation_size(t.oid), 0)
		FROM `+s.name("generations")+` g
		LEFT JOIN pg_catalog.pg_class t ON t.relname = g.table_name
		     AND t.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $2)
		LEFT JOIN pg_catalog.pg_stat_all_tables st ON st.relid = t.oid
		WHERE g.scope = $1 ORDER BY g.generation`, s.scope, s.schema)
	if err != nil {
		return nil, fmt.Errorf("list generations: %w", err)
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Generation])
}
