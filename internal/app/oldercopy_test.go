package app

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/natstest"
)

// TestAnOlderCopyUnderAQueue lands a queue with whole workers and replaces the database
// by an older copy, which has another name until then. What was acknowledged since is
// landed again, and nothing twice.
func TestAnOlderCopyUnderAQueue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		workers int
		stopped bool
	}{
		"of a worker that runs on":   {workers: 1},
		"of workers that run on":     {workers: 2},
		"of workers that start then": {workers: 2, stopped: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, js := natstest.Start(t)
			q := &queueRig{newRig(t, fmt.Sprintf("{nats: {servers: %q, stream: ORDERS}}", url)), js}
			q.exec(t, `ALTER TABLE public.orders DROP CONSTRAINT orders_pkey`)
			var stop []func()
			run := func() {
				for range c.workers {
					stop = append(stop, q.run(t))
				}
			}
			run()
			q.publishAll(t, 0, 200)
			q.acknowledged(t, 200)
			putBack := q.copy(t)
			q.publishAll(t, 200, 300)
			q.acknowledged(t, 500)
			if c.stopped {
				for _, stop := range stop {
					stop()
				}
			}
			putBack()
			if c.stopped {
				run()
			}
			q.publishAll(t, 500, 50)
			q.settle(t, func() error {
				var rows, ids int
				err := q.pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT id) FROM public.orders`).Scan(&rows, &ids)
				if err == nil && (rows != 550 || ids != 550) {
					err = fmt.Errorf("%d rows of %d ids, want 550", rows, ids)
				}
				return err
			})
			q.acknowledged(t, 550)
		})
	}
}

func (q *queueRig) publishAll(t *testing.T, from, n int) {
	t.Helper()
	for i := range n {
		q.publish(t, fmt.Sprint("m", from+i))
	}
}

// run runs a worker until stop or the test's end.
func (q *queueRig) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := q.begin(ctx, t, slog.DiscardHandler)
	done := false
	stop = func() {
		if done {
			return
		}
		done = true
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// acknowledged waits until all messages up to that one are acknowledged.
func (q *queueRig) acknowledged(t *testing.T, last uint64) {
	t.Helper()
	q.settle(t, func() error {
		durable, err := q.js.Consumer(t.Context(), "ORDERS", "orders")
		if err != nil {
			return err
		}
		if at := durable.CachedInfo().AckFloor.Stream; at != last {
			return fmt.Errorf("acknowledged up to %d, want %d", at, last)
		}
		return nil
	})
}

func (q *queueRig) settle(t *testing.T, ok func() error) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// copy copies the database as it is now; putBack gives the copy the database's name.
// Both end all connections.
func (q *queueRig) copy(t *testing.T) (putBack func()) {
	t.Helper()
	config := q.pool.Config().ConnConfig.Copy()
	name := config.Database
	config.Database = "postgres"
	admin, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	exec := func(format string, names ...any) {
		t.Helper()
		if _, err := admin.Exec(context.Background(), fmt.Sprintf(format, names...)); err != nil {
			t.Fatal(err)
		}
	}
	older, lost := name+"_older", name+"_lost"
	t.Cleanup(func() {
		exec(`DROP DATABASE IF EXISTS %q WITH (FORCE)`, older)
		exec(`DROP DATABASE IF EXISTS %q WITH (FORCE)`, lost)
		_ = admin.Close(context.Background())
	})
	alone := func(do func()) {
		exec(`ALTER DATABASE %q ALLOW_CONNECTIONS false`, name)
		exec(`SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '%s'`, name)
		do()
	}
	alone(func() {
		exec(`CREATE DATABASE %q TEMPLATE %q`, older, name)
		exec(`ALTER DATABASE %q ALLOW_CONNECTIONS true`, name)
	})
	return func() {
		alone(func() {
			exec(`ALTER DATABASE %q RENAME TO %q`, name, lost)
			exec(`ALTER DATABASE %q RENAME TO %q`, older, name)
		})
	}
}
