package table

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Workers whose batches have keys in common lock the rows in one order, so they
// wait for each other and never deadlock.
func TestSharedKeysDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE hot (k int PRIMARY KEY, v text)`)
	for _, mode := range []string{ModeInsert, ModeUpsert, ModeUpdate} {
		t.Run(mode, func(t *testing.T) {
			exec(t, pool, `TRUNCATE hot`)
			c := Config{Name: "public.hot", Mode: mode, Key: []string{"k"}, Columns: map[string]string{"k": "json:k", "v": "id"}}
			if mode == ModeUpdate {
				exec(t, pool, `INSERT INTO hot SELECT i, '' FROM generate_series(0, 9999) i`)
				c.Expect, c.OnMismatch = map[string]string{"v": "const:"}, policy.MismatchIgnore
			}
			s := build(t, c)
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for w := range 4 {
				wg.Go(func() {
					random := rand.New(rand.NewPCG(1, uint64(w)))
					for i := range 40 {
						msgs := make([]message.Message, 200)
						for j, k := range random.Perm(len(msgs)) {
							msgs[j] = msg(fmt.Sprint(w), fmt.Sprintf(`{"k":%d}`, k+i*200))
						}
						err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, sinks.NewBatch(msgs)) })
						var pg *pgconn.PgError
						if errors.As(err, &pg) && pg.Code == "40P01" {
							t.Error("a deadlock")
							return
						} else if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
