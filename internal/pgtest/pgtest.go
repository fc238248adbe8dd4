// Package pgtest gives tests, and the programs under e2e, a real Postgres: the
// promise of dedupd is a property of commits, so nothing stands in for one.
//
// A test asks for a database of its own:
//
//	db := pgtest.New(t)
//	pool := db.Pool(t)
//
// The first call in a test binary starts a server on 127.0.0.1, which ends with
// the binary, even by kill -9. DEDUPD_TEST_POSTGRES_URL names another server to
// use instead; its role must be allowed to create databases.
// DEDUPD_TEST_POSTGRES_VERSION selects the version of the started one, such as
// 16.10. The binaries are downloaded once and kept in the temporary folder.
// A test that gets no database fails; it doesn't skip. The one exception is
// go test -short, which is for tests that need no services.
//
// It knows nothing of dedupd's own tables: who needs them migrates. The product
// doesn't import it.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DB is a database that belongs to one test.
type DB struct {
	// Name of the database; also a plain SQL identifier.
	Name string
	// URL connects to it as the server's superuser.
	URL string
}

// Main runs a package's tests and stops the server they started. It is called
// by TestMain and doesn't return. Each check runs after the server has ended,
// such as one for leaked goroutines; its error fails the tests.
//
// A package can do without Main: the server then ends with the process, and its
// folder is removed by the next one that starts. On a server given by URL the
// originals of NewFrom are left then.
func Main(m *testing.M, checks ...func() error) {
	code := m.Run()
	Shutdown()
	for _, check := range checks {
		if err := check(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// Shutdown ends the server of this test binary, if there is one, and closes the
// connections to it. For a TestMain that can't use Main.
func Shutdown() {
	shared.Lock()
	defer shared.Unlock()
	if shared.admin != nil {
		if shared.server == nil { // the server stays, so nothing of ours may
			for _, tmpl := range shared.templates {
				if err := drop(shared.admin, tmpl.name); err != nil {
					fmt.Fprintln(os.Stderr, "pgtest:", err)
				}
			}
		}
		shared.admin.Close()
		shared.admin = nil
	}
	if shared.server != nil {
		if err := shared.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
		}
		shared.server = nil
	}
	shared.err = nil
	shared.templates = nil
}

// New makes an empty database that is dropped when the test ends. It may be
// called by parallel tests, and several times by one.
func New(t testing.TB) *DB {
	t.Helper()
	return create(t, "template0")
}

// NewFrom makes a database that is a copy of one that prepare has filled. The
// original is made once per key and test binary; prepare is given its URL and
// must leave no connection open. It costs as much as New after the first time.
func NewFrom(t testing.TB, key string, prepare func(ctx context.Context, url string) error) *DB {
	t.Helper()
	admin := connect(t)
	shared.Lock()
	tmpl := shared.templates[key]
	if tmpl == nil {
		tmpl = &template{name: newName(), err: errors.New("its first use didn't come to an end")}
		if shared.templates == nil {
			shared.templates = map[string]*template{}
		}
		shared.templates[key] = tmpl
	}
	shared.Unlock()
	tmpl.once.Do(func() {
		if tmpl.err = createDatabase(t.Context(), admin, tmpl.name, "template0"); tmpl.err == nil {
			tmpl.err = prepare(t.Context(), databaseURL(admin, tmpl.name))
		}
	})
	if tmpl.err != nil {
		t.Fatalf("pgtest: prepare database %q: %v", key, tmpl.err)
	}
	return create(t, tmpl.name)
}

// Pool connects to the database with pgx's default settings. The pool is closed
// when the test ends, before the database is dropped.
func (db *DB) Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), db.URL)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// shared is the server that all tests of a binary use, and what belongs to it.
var shared struct {
	sync.Mutex
	admin     *pgxpool.Pool
	server    *Server // nil when another server is used
	err       error   // of the first try; a second one would fail as slowly
	templates map[string]*template
	fileCopy  atomic.Bool // the server is ours, and has CREATE DATABASE … STRATEGY
}

type template struct {
	once sync.Once
	name string
	err  error
}

const advice = `
These tests need Postgres. Either let pgtest start one (Linux; the binaries are downloaded once,
so the first run needs the network), or name a server whose role may create databases:
    DEDUPD_TEST_POSTGRES_URL=postgres://user:password@127.0.0.1:5432/postgres go test ./...`

// connect starts the server if need be, and returns the pool for work on
// databases as a whole.
func connect(t testing.TB) *pgxpool.Pool {
	t.Helper()
	if testing.Short() {
		t.Skip("needs Postgres, and -short asks for tests without services")
	}
	shared.Lock()
	defer shared.Unlock()
	if shared.err == nil && shared.admin == nil {
		shared.err = open()
	}
	if shared.err != nil {
		t.Fatalf("pgtest: no database: %v\n%s", shared.err, advice)
	}
	return shared.admin
}

func open() error {
	address := os.Getenv("DEDUPD_TEST_POSTGRES_URL")
	var server *Server
	if address == "" {
		var err error
		if server, err = StartServer(Options{}); err != nil {
			return err
		}
		address = server.URL("postgres")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	admin, err := pgxpool.New(ctx, address)
	if err == nil {
		var version int // such as 180004
		err = admin.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&version)
		if err == nil {
			shared.admin, shared.server = admin, server
			shared.fileCopy.Store(server != nil && version >= 150000)
			return nil
		}
		admin.Close()
	}
	if server != nil {
		_ = server.Stop()
	}
	return err
}

func create(t testing.TB, from string) *DB {
	t.Helper()
	admin := connect(t)
	db := &DB{Name: newName()}
	db.URL = databaseURL(admin, db.Name)
	if err := createDatabase(t.Context(), admin, db.Name, from); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() {
		if err := drop(admin, db.Name); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	return db
}

func drop(admin *pgxpool.Pool, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if _, err := admin.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

func createDatabase(ctx context.Context, admin *pgxpool.Pool, name, from string) error {
	// The file copy needs a checkpoint, which is cheap where nothing is synced:
	// measured at about half the time of the copy by way of the log.
	sql := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize() + " TEMPLATE " + pgx.Identifier{from}.Sanitize()
	if shared.fileCopy.Load() {
		sql += " STRATEGY file_copy"
	}
	_, err := admin.Exec(ctx, sql)
	if err != nil {
		return fmt.Errorf("create database %s from %s: %w", name, from, err)
	}
	return nil
}

var databases atomic.Int64

// newName is unique among the test binaries that share a server given by URL.
func newName() string {
	return fmt.Sprintf("pgtest_%s_%d_%d", strconv.FormatInt(processStart.UnixNano(), 36), os.Getpid(), databases.Add(1))
}

var processStart = time.Now()

// databaseURL is the admin pool's address with another database.
func databaseURL(admin *pgxpool.Pool, name string) string {
	return withDatabase(admin.Config().ConnConfig.ConnString(), name)
}

func withDatabase(address, name string) string {
	if u, err := url.Parse(address); err == nil && strings.HasPrefix(u.Scheme, "postgres") {
		u.Path = "/" + name
		q := u.Query()
		q.Del("dbname")
		q.Del("database")
		u.RawQuery = q.Encode()
		return u.String()
	}
	// Keyword form: of two settings the last one counts.
	return address + " dbname=" + name
}
