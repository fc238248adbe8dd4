// Package dedup is the half of dedupd that knows Postgres: it claims message ids, has the
// sink write the new messages, books every message's outcome and moves the lanes, all in
// one transaction. All SQL on dedupd's own tables is in it and its sub-packages.
//
// It knows no broker.
//
// A service may use a Store by itself: Store.Claim claims ids in the service's own
// transaction, says whether they are new, duplicates or in flight elsewhere, and keeps what
// duplicates are to be told (Claimed.SetResult). The package examples/claim is such a
// service.
package dedup

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/message"
)

// Store is the claims, lanes and dead letters of one scope in one database. It is safe
// for concurrent use.
type Store struct {
	pool        *pgxpool.Pool
	schema      *schema.Schema
	generations *generations.Set
	scope       string
	owner       string
	acceptLoss  bool
	prepare     bool
	log         *slog.Logger

	// process identifies this store among all there ever were, in any process.
	process    string
	quarantine quarantine
	uncleared  unclearedAttempts

	mu      sync.RWMutex
	numbers map[message.Lane]int32
	lanes   map[int32]message.Lane
}

// StoreConfig configures a Store.
type StoreConfig struct {
	// Pool's connections must hear warnings (HearWarnings) where commits wait for a
	// synchronous standby: without, a commit whose wait somebody cancels on the server
	// passes for durable. That goes for Processor. Whoever claims in a transaction of
	// their own (Claim) commits it themselves, and has to check for the warning
	// themselves.
	Pool *pgxpool.Pool
	// Schema holds dedupd's tables; default: dedupd.
	Schema string
	// Scope is the consumer's name; ids are unique within it.
	Scope string
	// Owner names this process in the lanes it acquires.
	Owner string
	// TransactionPooler says that a pooler such as PgBouncer stands in between and gives
	// each transaction another connection: statements are then not prepared.
	TransactionPooler bool
	// FilterMemory bounds the bytes of filters that are kept in memory. Beyond it
	// sealed generations are looked up through their index.
	FilterMemory int64
	Logger       *slog.Logger
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
	if strings.ContainsAny(c.Schema, `'%$`) {
		return nil, fmt.Errorf("schema %q must contain none of ' %% $", c.Schema)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	var process claimkey.Key
	_, _ = rand.Read(process[:]) // it never fails
	tables := &schema.Schema{Pool: c.Pool, Name: c.Schema, Scope: c.Scope}
	s := &Store{
		process: process.String(),
		pool:    c.Pool, schema: tables, scope: c.Scope, owner: c.Owner,
		prepare: !c.TransactionPooler, log: c.Logger,
		numbers: make(map[message.Lane]int32), lanes: make(map[int32]message.Lane),
	}
	s.generations = generations.NewSet(tables, c.FilterMemory, c.Logger, s.forgetLanes)
	return s, nil
}

// AcceptLoss allows acquiring queues whose broker deletes what is acknowledged, though
// the database may lose commits in a failover. Call it before Acquire.
func (s *Store) AcceptLoss() { s.acceptLoss = true }

// Schema is dedupd's schema of the database.
func (s *Store) Schema() *schema.Schema { return s.schema }

// Generations are the scope's.
func (s *Store) Generations() *generations.Set { return s.generations }

// name quotes one of dedupd's own names with its schema.
func (s *Store) name(object string) string { return s.schema.Object(object) }

// Load checks the database's encoding and the schema's version, and reads the scope's
// catalog. The error is a *schema.EncodingError, or a *schema.Error if the schema or the
// scope isn't there as it must be.
func (s *Store) Load(ctx context.Context) error {
	if err := s.schema.Check(ctx); err != nil {
		return err
	}
	_, err := s.generations.Refresh(ctx)
	return err
}

// Ping reports whether the database answers.
func (s *Store) Ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return s.pool.Ping(ctx)
}
