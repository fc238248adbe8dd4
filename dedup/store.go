// Package dedup is the half of dedupd that knows Postgres: it claims message ids,
// has the sink write the winners, books every message's outcome and moves the
// lanes, all in one transaction. All SQL on dedupd's own tables stands here.
//
// It knows no broker.
package dedup

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
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
	pool       *pgxpool.Pool
	schema     string // as given
	scope      string
	owner      string
	acceptLoss bool
	prepare    bool
	log        *slog.Logger

	// process is this store among all there ever were, in any process.
	process    string
	suspicions suspicions
	wrong      wrongNotes

	filterMemory int64
	chunkClaims  int

	refreshing sync.Mutex
	catalog    atomic.Pointer[catalog]
	filters    filterCache
	// outlasted is when a rotation last gave up its longest wait, in Unix nanoseconds.
	outlasted atomic.Int64

	mu      sync.RWMutex
	laneIDs map[message.Lane]int32
	lanes   map[int32]message.Lane
}

// StoreConfig says where a Store lives.
type StoreConfig struct {
	// Pool's connections must hear warnings (HearWarnings) where commits wait for a
	// synchronous standby: without, a commit whose wait somebody cancels on the server
	// passes for durable. That goes for Processor. Whoever claims in a transaction of
	// their own (Claim) commits it themselves, and has to see to the warning themselves.
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
	var process Key
	_, _ = rand.Read(process[:]) // it never fails
	return &Store{
		process: process.String(),
		pool:    c.Pool, schema: c.Schema, scope: c.Scope, owner: c.Owner,
		prepare: !c.TransactionPooler, log: c.Logger, filterMemory: c.FilterMemory, chunkClaims: chunkClaims,
		laneIDs: make(map[message.Lane]int32), lanes: make(map[int32]message.Lane),
	}, nil
}

// AcceptLoss lets queues be taken whose broker deletes what is acknowledged,
// though the database may lose commits in a failover. It must be called before
// Take.
func (s *Store) AcceptLoss() { s.acceptLoss = true }

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

// Load checks the database's encoding and the schema's version, and reads the scope's
// catalog. The error is an *EncodingError, or a *SchemaError where the schema or the
// scope isn't there as it must be.
func (s *Store) Load(ctx context.Context) error {
	if err := s.checkEncoding(ctx); err != nil {
		return err
	}
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

// Ping tells whether the database answers.
func (s *Store) Ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return s.pool.Ping(ctx)
}
