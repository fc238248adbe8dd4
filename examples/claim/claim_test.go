package claim

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestPay(t *testing.T) {
	pool := pgtest.New(t).Pool(t)
	if _, err := pool.Exec(t.Context(), `CREATE TABLE public.payments (id text, cents bigint NOT NULL CHECK (cents > 0))`); err != nil {
		t.Fatal(err)
	}
	store, err := Open(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	// A payment that fails leaves no claim behind.
	var pg *pgconn.PgError
	if isNew, err := Pay(t.Context(), pool, store, "p-1", -1); isNew || !errors.As(err, &pg) || pg.Code != "23514" {
		t.Fatalf("a payment that the table refuses gives %v, %v", isNew, err)
	}
	var wins atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			isNew, err := Pay(t.Context(), pool, store, "p-1", 100)
			if err != nil {
				t.Error(err)
			}
			if isNew {
				wins.Add(1)
			}
		})
	}
	all.Wait()
	var rows int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM public.payments`).Scan(&rows); err != nil || rows != 1 || wins.Load() != 1 {
		t.Errorf("%d rows, %d wins, %v", rows, wins.Load(), err)
	}
}
