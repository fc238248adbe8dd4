package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/lane"
)

// nextVersion is a made-up second version of the schema, of the kinds of change that a
// release may bring: a column, a table, and a function that is replaced in place.
func nextVersion(t *testing.T) fstest.MapFS {
	t.Helper()
	first, err := os.ReadFile("schema/migrations/0001_initial.sql")
	if err != nil {
		t.Fatal(err)
	}
	text := string(first)
	from := strings.Index(text, "CREATE FUNCTION {{schema}}.advance(")
	to := from + strings.Index(text[from:], "END $$;")
	advance := strings.Replace(text[from:to]+"END $$;", "CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
	second := `ALTER TABLE {{schema}}.lanes ADD COLUMN moves bigint NOT NULL DEFAULT 0;
		CREATE TABLE {{schema}}.made_up (lane integer);
		` + strings.Replace(advance, "acquisitions    = 0,", "acquisitions    = 0, moves = moves + 1,", 1)
	if strings.Count(second, "moves = moves + 1") != 1 {
		t.Fatal("advance() isn't what this test changes")
	}
	return fstest.MapFS{
		"migrations/0001_initial.sql": {Data: first},
		"migrations/0002_made_up.sql": {Data: []byte(second)},
	}
}

// TestAnUpgradeUnderRunningWorkers brings the schema to its next version while workers of
// the present one are at work. They go on; one that starts later is refused; those of
// the next version work beside them.
func TestAnUpgradeUnderRunningWorkers(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const workers, batches = 3, 60
	upgraded := make(chan struct{})
	failed := make(chan error, workers)
	for w := range workers {
		worker := attach(t, f.db)
		l := worker.acquire("kafka", fmt.Sprint("orders/", w))
		go func() {
			failed <- func() error {
				for i := range batches {
					if i == batches/2 {
						<-upgraded // the rest comes after it
					}
					b := l.batch(fmt.Sprint("id-", w, "-", i), fmt.Sprint("shared-", i))
					if err := worker.Handle(context.WithoutCancel(t.Context()), []lane.Batch{b}); err != nil {
						return fmt.Errorf("worker %d, batch %d: %w", w, i, err)
					}
				}
				return nil
			}()
		}()
	}
	next := newStore(t, f.db.Pool(t), "dedupd", "test")
	next.Schema().Files = nextVersion(t)
	applied, err := next.Schema().Migrate(t.Context())
	close(upgraded)
	if err != nil || len(applied) != 1 || applied[0].Version != 2 {
		t.Errorf("applied %v, %v; want version 2", applied, err)
	}
	for range workers {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	if err := next.Load(t.Context()); err != nil {
		t.Errorf("the next version's worker: %v", err)
	}
	var newer *schema.Error
	if err := newStore(t, f.db.Pool(t), "dedupd", "test").Load(t.Context()); !errors.As(err, &newer) || newer.Have != 2 || newer.Want != 1 {
		t.Errorf("a worker of the present version starts: %v", err)
	}
	if got, want := len(f.landed()), workers*batches+batches; got != want {
		t.Errorf("%d rows landed, want %d", got, want)
	}
	var moves int64
	if err := f.pool.QueryRow(t.Context(), `SELECT sum(moves)::bigint FROM dedupd.lanes`).Scan(&moves); err != nil || moves < workers*batches/2 {
		t.Errorf("the new function counted %d moves, %v; want %d at least", moves, err, workers*batches/2)
	}
}
