package table

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
)

// Where NULLs of a key are equal, no statement compares each message of a batch with each
// other one, or with all rows that have a NULL.
func TestNULLsAreLookedUp(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	var version int
	if err := pool.QueryRow(t.Context(), `SELECT current_setting('server_version_num')::int`).Scan(&version); err != nil || version < 150000 {
		t.Skip("NULLS NOT DISTINCT came with Postgres 15")
	}
	exec(t, pool, `CREATE TABLE t (a int, b int, c int, UNIQUE NULLS NOT DISTINCT (a, b));
		INSERT INTO t SELECT CASE WHEN n % 2 = 0 THEN n END, CASE WHEN n % 2 = 1 THEN n END, 0 FROM generate_series(1, 20000) AS n; ANALYZE t`)
	const n = 500
	msgs := make([]message.Message, n)
	for i := range msgs {
		msgs[i] = msg(fmt.Sprint(i), fmt.Sprintf(`{"%c":%d,"c":0}`, "ab"[i%2], 19700+i))
	}
	for name, c := range map[string]Config{
		"insert":    {OnPresent: policy.PresentCompare},
		"versioned": {Mode: ModeVersioned, Version: "c"},
		"update":    {Mode: ModeUpdate, Expect: map[string]string{"c": "const:0"}},
	} {
		c.Name, c.Key, c.Columns = "public.t", []string{"a", "b"}, map[string]string{"a": "json:a", "b": "json:b", "c": "json:c"}
		s := build(t, c)
		if err := prepare(t, pool, s); err != nil {
			t.Fatal(err)
		}
		p := s.current.Load()
		values, err := p.set.Encode(msgs)
		if err != nil {
			t.Fatal(err)
		}
		none, all := []int64{}, make([]int64, n)
		for i := range all {
			all[i] = int64(i + 1)
		}
		for i, q := range p.statements(values) {
			for j := range q.args {
				if fmt.Sprintf("%T%[1]v", q.args[j]) == fmt.Sprintf("%T%[1]v", none) {
					q.args[j] = all
				}
			}
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err = tx.Exec(t.Context(), `SET LOCAL enable_seqscan = off; SET LOCAL plan_cache_mode = force_custom_plan`); err != nil {
				t.Fatal(err)
			}
			var explained []byte
			if err := tx.QueryRow(t.Context(), "EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) "+q.sql, q.args...).Scan(&explained); err != nil {
				t.Fatal(err)
			}
			_ = tx.Rollback(t.Context())
			if handled := rowsHandled(t, explained); handled > 100*n {
				t.Errorf("%s, statement %d: %.0f rows for %d messages: %s\n%s", name, i, handled, n, q.sql, explained)
			}
		}
	}
}

// rowsHandled is the most rows that a node of a plan has made or thrown away.
func rowsHandled(t *testing.T, explained []byte) (most float64) {
	t.Helper()
	type node struct {
		Rows    float64 `json:"Actual Rows"`
		Loops   float64 `json:"Actual Loops"`
		Filter  float64 `json:"Rows Removed by Filter"`
		Join    float64 `json:"Rows Removed by Join Filter"`
		Recheck float64 `json:"Rows Removed by Index Recheck"`
		Plans   []node
	}
	var plans []struct{ Plan node }
	if err := json.Unmarshal(explained, &plans); err != nil {
		t.Fatal(err)
	}
	var walk func(node)
	walk = func(n node) {
		most = max(most, (n.Rows+n.Filter+n.Join+n.Recheck)*n.Loops)
		for _, below := range n.Plans {
			walk(below)
		}
	}
	for _, p := range plans {
		walk(p.Plan)
	}
	return most
}
