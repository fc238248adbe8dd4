package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
)

// database is one test's, on a server that syncs its log as in production.
type database struct {
	t    *testing.T
	url  string
	pool *pgxpool.Pool
}

const postgresAdvice = `
pgtest starts Postgres itself (Linux; its binaries are downloaded once, so the first run needs the network).`

func newDatabase(t *testing.T) *database {
	t.Helper()
	needServices(t)
	postgres.Lock()
	defer postgres.Unlock()
	if postgres.server == nil && postgres.err == nil {
		postgres.server, postgres.err = pgtest.StartServer(pgtest.Options{Fsync: true})
	}
	if postgres.err != nil {
		t.Fatal("Postgres: ", postgres.err, postgresAdvice)
	}
	postgres.databases++
	return createDatabase(t, postgres.server, fmt.Sprintf("e2e_%d", postgres.databases))
}

// bouncerEnv has every worker reach its database through a PgBouncer.
const bouncerEnv = "DEDUPD_TEST_PGBOUNCER"

// bouncers are in front of the servers that tests use, by their addresses.
var bouncers struct {
	sync.Mutex
	servers map[string]*pgtest.Server
	all     map[string]*pgtest.Bouncer
}

// bounced is the way to a database through the PgBouncer in front of its server,
// which is started when it is first asked for.
func bounced(t *testing.T, address string) string {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	bouncers.Lock()
	defer bouncers.Unlock()
	b := bouncers.all[u.Host]
	if b == nil {
		server := bouncers.servers[u.Host]
		if server == nil {
			return address // none of ours: nobody may be there
		}
		if b, err = pgtest.StartBouncer(server, "", 5); err != nil {
			t.Fatal(err)
		}
		if bouncers.all == nil {
			bouncers.all = map[string]*pgtest.Bouncer{}
		}
		bouncers.all[u.Host] = b
	}
	return b.URL(strings.TrimPrefix(u.Path, "/"))
}

func createDatabase(t *testing.T, server *pgtest.Server, name string) *database {
	t.Helper()
	admin, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(context.Background())
	if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	db := &database{t: t, url: server.URL(name)}
	if u, err := url.Parse(db.url); err == nil {
		bouncers.Lock()
		if bouncers.servers == nil {
			bouncers.servers = map[string]*pgtest.Server{}
		}
		bouncers.servers[u.Host] = server
		bouncers.Unlock()
	}
	if db.pool, err = pgxpool.New(t.Context(), db.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.pool.Close)
	return db
}

func (db *database) exec(sql string, args ...any) {
	db.t.Helper()
	if _, err := db.pool.Exec(db.t.Context(), sql, args...); err != nil {
		db.t.Fatalf("%s: %v", sql, err)
	}
}

// one reads one row of one column.
func one[T any](db *database, sql string, args ...any) T {
	db.t.Helper()
	all := column[T](db, sql, args...)
	if len(all) != 1 {
		db.t.Fatalf("%s: %d rows, want 1", sql, len(all))
	}
	return all[0]
}

// column reads rows of one column.
func column[T any](db *database, sql string, args ...any) []T {
	db.t.Helper()
	rows, err := db.pool.Query(db.t.Context(), sql, args...)
	if err != nil {
		db.t.Fatalf("%s: %v", sql, err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[T])
	if err != nil {
		db.t.Fatalf("%s: %v", sql, err)
	}
	return all
}

// page is one lane's line in the books.
type page struct {
	Source, Lane                     string
	Fetched, Applied, Duplicates     int64
	Redelivered, Resent, CrossSource int64
	Conflicts, Dead, Filtered        int64
	NextPosition                     int64
	Owner                            string
}

// books are dedupd's own, by lane. There are none while the worker hasn't made
// its schema.
func (db *database) books(ctx context.Context, scope string) (map[string]page, error) {
	rows, err := db.pool.Query(ctx, `SELECT source, lane, fetched, applied, duplicates, redelivered, resent, cross_source, conflicts, dead, filtered,
		next_position, owner FROM dedupd.books WHERE scope = $1`, scope)
	var all []page
	if err == nil {
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[page])
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == "42P01" || pg.Code == "3F000") { // no such table, no such schema
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the books: %w", err)
	}
	byLane := make(map[string]page, len(all))
	for _, p := range all {
		byLane[p.Lane] = p
	}
	return byLane, nil
}

// settledBooks are books of which every lane balances.
func (db *database) settledBooks(scope string) (lanes map[string]page, sum page) {
	db.t.Helper()
	lanes, err := db.books(db.t.Context(), scope)
	if err != nil {
		db.t.Fatal(err)
	}
	for _, p := range lanes {
		if p.Fetched != p.Applied+p.Duplicates+p.Conflicts+p.Dead+p.Filtered || p.Duplicates != p.Redelivered+p.Resent+p.CrossSource {
			db.t.Errorf("the books of %s don't balance: %+v", p.Lane, p)
		}
		sum.Fetched += p.Fetched
		sum.Applied += p.Applied
		sum.Duplicates += p.Duplicates
		sum.Redelivered += p.Redelivered
		sum.Resent += p.Resent
		sum.CrossSource += p.CrossSource
		sum.Conflicts += p.Conflicts
		sum.Dead += p.Dead
		sum.Filtered += p.Filtered
	}
	return lanes, sum
}

// fetched is how many messages all lanes have read so far.
func (db *database) fetched() (n int64) {
	// Before a worker has made the schema, there are none.
	_ = db.pool.QueryRow(db.t.Context(), `SELECT coalesce(sum(fetched), 0)::bigint FROM dedupd.lanes`).Scan(&n)
	return n
}

// awaitRows waits until the sink holds so many rows.
func (db *database) awaitRows(table string, want int64, within time.Duration) time.Duration {
	db.t.Helper()
	return await(db.t, fmt.Sprintf("%d rows in %s", want, table), within, func() error {
		if n := one[int64](db, "SELECT count(*) FROM "+table); n != want {
			return fmt.Errorf("it holds %d", n)
		}
		return nil
	})
}

// ownerOf is how a worker's process is named in the lanes it owns.
func ownerOf(pid int) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d", host, pid)
}
