package dedup_test

import (
	"context"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/pgtest"
)

// encoded makes a database of an encoding, and connects to it.
func encoded(t *testing.T, encoding string) *pgxpool.Pool {
	t.Helper()
	db := pgtest.New(t)
	admin := db.Pool(t)
	name := db.Name + "_" + encoding
	if _, err := admin.Exec(t.Context(), `CREATE DATABASE "`+name+`" TEMPLATE template0 LOCALE 'C' ENCODING '`+encoding+`'`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if _, err := admin.Exec(ctx, `DROP DATABASE "`+name+`" WITH (FORCE)`); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	pool, err := pgxpool.New(t.Context(), u.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// In another encoding than UTF8 a message's text silently becomes other text.
func TestOtherEncodingsAreRefused(t *testing.T) {
	t.Parallel()
	for encoding, want := range map[string]bool{"UTF8": true, "LATIN1": false, "SQL_ASCII": false} {
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			store, err := dedup.NewStore(dedup.StoreConfig{Pool: encoded(t, encoding), Scope: "test"})
			if err != nil {
				t.Fatal(err)
			}
			server, err := store.Schema().Server(t.Context())
			if err != nil || server.UTF8() != want || server.Encoding != encoding {
				t.Errorf("%v; the server reports %q, and that it is UTF8: %t", err, server.Encoding, server.UTF8())
			}
			for name, do := range map[string]func() error{
				"migrate": func() error { _, err := store.Schema().Migrate(t.Context()); return err },
				"load":    func() error { return store.Load(t.Context()) },
			} {
				err := do()
				var refused *schema.EncodingError
				if want && errors.As(err, &refused) || !want && (!errors.As(err, &refused) || refused.Encoding != encoding) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if version, err := store.Schema().Version(t.Context()); err != nil || (version > 0) != want {
				t.Errorf("the schema has version %d, %v", version, err)
			}
		})
	}
}
