package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestMain(m *testing.M) {
	if os.Getenv("PGTEST_HELPER") != "" {
		helper()
	}
	Main(m)
}

func TestEachTestHasItsOwnDatabase(t *testing.T) {
	names := map[string]bool{}
	for range 3 {
		db := New(t)
		if names[db.Name] {
			t.Errorf("database %s was given twice", db.Name)
		}
		names[db.Name] = true
		var current string
		pool := db.Pool(t)
		if err := pool.QueryRow(t.Context(), "SELECT current_database()").Scan(&current); err != nil {
			t.Fatal(err)
		}
		if current != db.Name {
			t.Errorf("connected to %s, want %s", current, db.Name)
		}
		if _, err := pool.Exec(t.Context(), "CREATE TABLE here (x int)"); err != nil {
			t.Error(err)
		}
	}
}

func TestDatabaseIsDropped(t *testing.T) {
	var name string
	t.Run("with connections left open", func(t *testing.T) {
		db := New(t)
		name = db.Name
		conn, err := pgx.Connect(t.Context(), db.URL)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
		if err := conn.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	var n int
	err := New(t).Pool(t).QueryRow(t.Context(), "SELECT count(*) FROM pg_database WHERE datname = $1", name).Scan(&n)
	if err != nil || n != 0 {
		t.Errorf("%d databases named %s (%v), want none", n, name, err)
	}
}

func TestNewFromPreparesOnce(t *testing.T) {
	connect(t) // skips the whole test under -short, not just its parts
	var prepared atomic.Int32
	prepare := func(ctx context.Context, url string) error {
		prepared.Add(1)
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			return err
		}
		_, err = conn.Exec(ctx, "CREATE TABLE filled AS SELECT 42 AS x")
		return errors.Join(err, conn.Close(ctx))
	}
	t.Run("group", func(t *testing.T) {
		for i := range 4 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				pool := NewFrom(t, "filled", prepare).Pool(t)
				var x int
				if err := pool.QueryRow(t.Context(), "DELETE FROM filled RETURNING x").Scan(&x); err != nil || x != 42 {
					t.Errorf("got %d, %v; want 42", x, err)
				}
			})
		}
	})
	if prepared.Load() != 1 {
		t.Errorf("prepared %d times", prepared.Load())
	}
}

func TestDatabaseURL(t *testing.T) {
	for _, form := range []string{"%s", "%s&application_name=x", "keywords"} {
		admin := connect(t).Config().ConnConfig
		address := fmt.Sprintf(form, admin.ConnString())
		if form == "keywords" {
			address = fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=postgres sslmode=disable",
				admin.Host, admin.Port, admin.User, admin.Password)
		}
		got, err := pgx.ParseConfig(withDatabase(address, "other"))
		if err != nil {
			t.Fatal(err)
		}
		if got.Database != "other" || got.Host != admin.Host || got.Password != admin.Password {
			t.Errorf("%s: got database %q on %q", strings.ReplaceAll(form, "%s", "url"), got.Database, got.Host)
		}
	}
}

func BenchmarkNew(b *testing.B) {
	for b.Loop() {
		New(b)
	}
}
