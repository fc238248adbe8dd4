package dedup_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/lane"
)

// lonely is a worker on a server of its own, whose synchronous standby goes away and
// comes back.
type lonely struct {
	*fixture
	admin *pgxpool.Pool // whose commits don't wait
}

func newLonely(t *testing.T) *lonely {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a Postgres of its own")
	}
	server, err := pgtest.StartServer(pgtest.Options{Settings: map[string]string{"synchronous_commit": "local"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	f := &lonely{fixture: newFixture(t)}
	if f.admin, err = pgxpool.New(t.Context(), server.URL("postgres")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.admin.Close)
	f.exec(createRows)
	if _, err := newStore(t, f.admin, "dedupd", "test").Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	config, err := pgxpool.ParseConfig(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "on"
	config.ConnConfig.RuntimeParams["client_min_messages"] = "error" // as somebody may have set for the role
	dedup.HearWarnings(config.ConnConfig)
	worker, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(worker.Close)
	f.pool, f.Store = worker, newStore(t, worker, "dedupd", "test")
	return f
}

func (f *lonely) exec(sql string) {
	f.t.Helper()
	if _, err := f.admin.Exec(f.t.Context(), sql); err != nil {
		f.t.Fatal(err)
	}
}

// standbys sets the standbys that commits wait for, and waits until it counts.
func (f *lonely) standbys(names string) {
	f.t.Helper()
	f.exec(`ALTER SYSTEM SET synchronous_standby_names = '` + names + `'`)
	f.exec(`SELECT pg_reload_conf()`)
	time.Sleep(200 * time.Millisecond)
}

// TestACommitThatNoStandbyHasIsNotAcknowledged removes the synchronous standby: COMMIT
// waits, our time-out ends the wait, and the transaction is then visible on the primary
// alone. It must not pass for durable before the standby is back.
func TestACommitThatNoStandbyHasIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	f := newLonely(t)
	l := f.acquire("kafka", "orders/0")

	f.standbys("ghost")
	b := l.batch("a", "a")
	ctx, cancel := context.WithTimeout(t.Context(), 13*time.Second)
	defer cancel()
	if err := f.Handle(ctx, []lane.Batch{b}); err == nil {
		t.Error("a commit that no standby has passed for durable")
	}
	f.standbys("")
	f.handle(b)
	f.wantLanded("a")
	f.wantBooks(l, books{applied: 1, resent: 1, next: 2})
}

// TestACommitWhoseWaitIsCancelledIsNotAcknowledged is the same with somebody who
// cancels each wait for the standby on the server: COMMIT then succeeds, with a
// warning.
func TestACommitWhoseWaitIsCancelledIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	f := newLonely(t)
	l, q := f.acquire("kafka", "orders/0"), f.acquireQueue("nats")

	f.standbys("ghost")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cancelled := make(chan int, 1)
	go func() {
		n := 0
		for ; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
			tag, err := f.admin.Exec(context.Background(), `SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
			if err != nil {
				t.Error(err)
			}
			n += int(tag.RowsAffected())
		}
		cancelled <- n
	}()
	first, second := l.batch("a", "a"), q.batch("b")
	for range 3 { // the second time the lane's row shows it
		if err := f.Handle(t.Context(), []lane.Batch{first}); err == nil {
			t.Error("a commit whose wait was cancelled passed for durable")
		} else if held := (*lane.HoldError)(nil); errors.As(err, &held) {
			t.Errorf("it ends by itself, and is held: %v", err)
		}
	}
	brief, end := context.WithTimeout(t.Context(), 2*time.Second)
	defer end()
	if err := f.Handle(brief, []lane.Batch{second}); err == nil {
		t.Error("a queue's commit whose wait was cancelled passed for durable")
	}
	cancel()
	if n := <-cancelled; n < 5 {
		t.Errorf("only %d waits were cancelled", n)
	}

	// Nobody cancels any more, and so it waits.
	done := make(chan error, 1)
	go func() { done <- f.Handle(t.Context(), []lane.Batch{first}) }()
	select {
	case err := <-done:
		t.Errorf("answered without a standby: %v", err)
	case <-time.After(time.Second):
	}
	f.standbys("")
	if err := <-done; err != nil {
		t.Error(err)
	}
	f.handle(second)
	f.handle(l.batch("c"))
	f.wantLanded("a", "b", "c")
	f.wantBooks(l, books{applied: 2, resent: 1, next: 3})
}
