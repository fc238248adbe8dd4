package dedup_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
)

// TestACommitThatNoStandbyHasIsNotAcknowledged takes the synchronous standby
// away: COMMIT waits, our time-out ends the wait, and the transaction is then
// visible on the primary alone. It must not pass for durable before the standby
// is there again.
func TestACommitThatNoStandbyHasIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("runs a Postgres of its own")
	}
	server, err := pgtest.StartServer(pgtest.Options{Settings: map[string]string{"synchronous_commit": "local"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	f := newFixture(t)
	admin, err := pgxpool.New(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(admin.Close)
	exec := func(sql string) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(createRows)
	if _, err := newStore(t, admin, "dedupd", "test").Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	config, err := pgxpool.ParseConfig(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "on"
	worker, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(worker.Close)
	f.pool, f.Store = worker, newStore(t, worker, "dedupd", "test")
	l := f.take("kafka", "orders/0")

	exec(`ALTER SYSTEM SET synchronous_standby_names = 'ghost'`)
	exec(`SELECT pg_reload_conf()`)
	time.Sleep(200 * time.Millisecond)
	b := l.batch("a", "a")
	ctx, cancel := context.WithTimeout(t.Context(), 13*time.Second)
	defer cancel()
	if err := f.Handle(ctx, []message.Batch{b}); err == nil {
		t.Error("a commit that no standby has was taken for durable")
	}
	exec(`ALTER SYSTEM RESET synchronous_standby_names`)
	exec(`SELECT pg_reload_conf()`)
	time.Sleep(200 * time.Millisecond)
	f.handle(b)
	f.wantLanded("a")
	f.wantBooks(l, "1/0/1/0/0/0@2")
}
