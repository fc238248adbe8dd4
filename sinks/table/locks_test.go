package table

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Workers whose batches have keys in common, of which half are there already, lock the rows in
// one order, whatever their modes. So they wait for each other and never deadlock, and only an
// update has to be tried again.
func TestSharedKeysDoNotDeadlock(t *testing.T) {
	t.Parallel()
	v := map[string]string{"k": "json:k", "v": "json:v"}
	whole := Config{Mode: ModeUpsert, Absent: policy.AbsentNull, Columns: v}
	modes := map[string]Config{
		"insert":    {Mode: ModeInsert, Columns: v},
		"upsert":    whole,
		"parts":     {Mode: ModeUpsert, Columns: map[string]string{"k": "json:k", "v": "json:v", "n": "json:absent"}},
		"versioned": {Mode: ModeVersioned, Version: "n", Columns: map[string]string{"k": "json:k", "n": "json:n"}},
		"history":   {Mode: ModeUpsert, Absent: policy.AbsentNull, History: History{"ops", 5}, Columns: v},
		"update":    {Mode: ModeUpdate, Expect: map[string]string{"v": "json:v"}, OnMismatch: policy.MismatchIgnore, Columns: map[string]string{"k": "json:k", "n": "json:n"}},
	}
	all := make([]string, 0, len(modes))
	for mode := range modes {
		all = append(all, mode)
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			shareKeys(t, modes, mode, mode, mode, mode)
		})
	}
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		shareKeys(t, modes, all...)
	})
}

// shareKeys runs a worker for each of some modes.
func shareKeys(t *testing.T, modes map[string]Config, workers ...string) {
	t.Helper()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE hot (k int PRIMARY KEY, v text, n bigint DEFAULT 1, ops text[])`)
	const rounds, keys = 30, 200
	var together [rounds]sync.WaitGroup // each round begins for all at once
	for i := range together {
		together[i].Add(len(workers))
	}
	var group sync.WaitGroup
	for w, mode := range workers {
		c := modes[mode]
		c.Name, c.Key = "public.hot", []string{"k"}
		s := build(t, c)
		if err := prepare(t, pool, s); err != nil {
			t.Fatal(err)
		}
		group.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(w)))
			for i := range rounds {
				msgs := make([]message.Message, 0, keys+keys/4)
				for _, k := range random.Perm(cap(msgs)) {
					k = k%keys + i*keys/2 // some of them twice
					msgs = append(msgs, msg(fmt.Sprint(k+random.IntN(3)), fmt.Sprintf(`{"k":%d,"v":"v","n":%d}`, k, random.IntN(9))))
				}
				together[i].Done()
				together[i].Wait()
				for {
					err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, sinks.NewBatch(msgs)) })
					if mode == "update" && sqlstate.Of(err) == sqlstate.SerializationFailure {
						continue // a row that it didn't find is there by now
					}
					if err != nil {
						t.Errorf("%s: %v", mode, err)
					}
					break
				}
			}
		})
	}
	group.Wait()
}
