package table

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// state is a message with a key, a version and what it is about.
func state(key, version, text string) message.Message {
	return msg(text, fmt.Sprintf(`{"k":%q,"v":%s}`, key, version))
}

func versionedConfig(t *testing.T, c Config) *Sink {
	t.Helper()
	c.Name, c.Mode, c.Key, c.Version = "public.t", ModeVersioned, []string{"k"}, "v"
	c.Columns = map[string]string{"k": "json:k", "v": "json:v", "text": "id", "by": "const:dedupd"}
	return build(t, c)
}

func TestVersioned(t *testing.T) {
	t.Parallel()
	const w, x = sinks.Written, sinks.Stale
	for name, c := range map[string]struct {
		typ  string
		msgs []message.Message
		want []sinks.Outcome
		rows []string
	}{
		"alone": {"bigint", []message.Message{state("a", "6", "6"), state("b", "1", "1"), state("c", "7", "7")}, []sinks.Outcome{w, x, w}, []string{"a6", "b5", "c7"}},
		"several of a row": {
			"bigint",
			[]message.Message{state("b", "4", "i"), state("b", "6", "ii"), state("b", "8", "iii"), state("b", "7", "iv"), state("b", "8", "v")},
			[]sinks.Outcome{x, w, w, x, x},
			[]string{"a5", "biii"},
		},
		"of a new row":      {"bigint", []message.Message{state("c", "2", "2"), state("c", "1", "1"), state("c", "3", "3")}, []sinks.Outcome{w, x, w}, []string{"a5", "b5", "c3"}},
		"no version":        {"bigint", []message.Message{state("a", "null", "none"), state("c", "null", "none"), state("c", "null", "again"), state("c", "0", "0")}, []sinks.Outcome{x, w, x, w}, []string{"a5", "b5", "c0"}},
		"numbers as such":   {"numeric", []message.Message{state("a", "5.0", "same"), state("b", "10", "10")}, []sinks.Outcome{x, w}, []string{"a5", "b10"}},
		"text as such":      {"text", []message.Message{state("a", "10", "10"), state("b", `"6"`, "6")}, []sinks.Outcome{x, w}, []string{"a5", "b6"}},
		"times":             {"timestamptz", []message.Message{state("a", `"2026-01-01T00:00:00Z"`, "new"), state("a", `"2026-01-01T01:00:00+01:00"`, "same")}, []sinks.Outcome{w, x}, []string{"anew", "b5"}},
		"a row without one": {"bigint", []message.Message{state("null", "0", "0"), state("null", "null", "none")}, []sinks.Outcome{w, x}, []string{"a5", "b5", "null0"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			five := "5"
			if c.typ == "timestamptz" {
				five = "2025-01-01"
			}
			exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v `+c.typ+`, text text, by text); INSERT INTO t VALUES ('a', '`+five+`', '5'), ('b', '`+five+`', '5')`)
			if strings.Contains(name, "a row without") {
				exec(t, pool, `INSERT INTO t VALUES ('null', NULL, 'old')`)
			}
			got, err := outcomes(t, pool, versionedConfig(t, Config{}), c.msgs...)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("outcomes %v, want %v", got, c.want)
			}
			wantRows(t, pool, `SELECT k || text FROM t ORDER BY k`, c.rows...)
		})
	}
}

func TestOnStale(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v bigint, text text, by text); INSERT INTO t VALUES ('a', 5, 'old')`)
	s := versionedConfig(t, Config{OnStale: policy.StaleDeadLetter})
	_, err := outcomes(t, pool, s, state("b", "1", "new"), state("a", "5", "stale"), state("a", "6", "new"))
	if bad := sinks.AllPermanent(err); len(bad) != 1 || bad[1] == nil || !strings.Contains(err.Error(), "on_stale is dead_letter") {
		t.Errorf("the error is %v", err)
	}
	wantRows(t, pool, `SELECT k || text FROM t`, "aold")
}

// Whatever the order in which workers write, and though they share all messages, each row ends
// with its highest version, no version is written twice, and no batch is tried again.
func TestVersionedInAnyOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v bigint, text text, by text)`)
	s := versionedConfig(t, Config{})
	const rows, versions, workers = 20, 60, 4
	var all []message.Message
	for k := range rows {
		for v := range versions {
			m := state(fmt.Sprint("k", k), fmt.Sprint(v), fmt.Sprint(v))
			all = append(all, m, m)
		}
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	batches := slices.Collect(slices.Chunk(all, 50))
	written := map[string]int{}
	var mu sync.Mutex
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() {
			for i := w; i < len(batches); i += workers {
				batch := sinks.NewBatch(batches[i])
				if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, batch) }); err != nil {
					t.Error(err)
				}
				mu.Lock()
				for j, m := range batches[i] {
					if batch.OutcomeOf(j) == sinks.Written {
						written[string(m.Value)]++
					}
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	for version, n := range written {
		if n > 1 {
			t.Errorf("%s was written %d times", version, n)
		}
	}
	var want []string
	for k := range rows {
		want = append(want, fmt.Sprintf("k%d %d %[2]d", k, versions-1))
	}
	slices.Sort(want)
	wantRows(t, pool, `SELECT k || ' ' || v || ' ' || text FROM t ORDER BY k COLLATE "C"`, want...)
}

// Somebody else adds the row of a key while we write.
func TestARowAddedMeanwhile(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v bigint, text text, by text)`)
	s := versionedConfig(t, Config{})
	err := inTx(t, pool, func(other pgx.Tx) error {
		if _, err := other.Exec(t.Context(), `INSERT INTO t VALUES ('a', 9, 'other', 'us')`); err != nil {
			return err
		}
		type result struct {
			got []sinks.Outcome
			err error
		}
		done := make(chan result, 1)
		go func() {
			got, err := outcomes(t, pool, s, state("a", "5", "ours"), state("a", "9", "same"), state("a", "10", "last"))
			done <- result{got, err}
		}()
		awaitWaiting(t, pool)
		if err := other.Commit(t.Context()); err != nil {
			return err
		}
		if r := <-done; r.err != nil || !slices.Equal(r.got, []sinks.Outcome{sinks.Stale, sinks.Stale, sinks.Written}) {
			t.Errorf("outcomes %v: %v", r.got, r.err)
		}
		return nil
	})
	if err != nil && !strings.Contains(err.Error(), "closed") {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT v || text FROM t`, "10last")
}

func TestVersionedConfig(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]Config{
		"version: mode versioned needs":                   {Mode: ModeVersioned, Key: []string{"k"}},
		"key: mode versioned needs":                       {Mode: ModeVersioned, Version: "v"},
		"is part of the key":                              {Mode: ModeVersioned, Key: []string{"k", "v"}, Version: "v"},
		"is not among the columns":                        {Mode: ModeVersioned, Key: []string{"k"}, Version: "w"},
		"version: only mode versioned or append reads it": {Mode: ModeUpsert, Key: []string{"k"}, Version: "v"},
		"on_stale: only mode":                             {Mode: ModeUpsert, Key: []string{"k"}, OnStale: policy.StaleIgnore},
		"on_stale: \"x\" is not":                          {Mode: ModeVersioned, Key: []string{"k"}, Version: "v", OnStale: "x"},
	} {
		c.Name, c.Columns = "public.t", map[string]string{"k": "id", "v": "json:v"}
		if _, err := c.Sink(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// A type that can't be ordered is no version, which shows at the start.
func TestAVersionThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v json, text text, by text)`)
	if err := prepare(t, pool, versionedConfig(t, Config{})); err == nil || !strings.Contains(err.Error(), "json") {
		t.Errorf("the error is %v", err)
	}
}

// awaitWaiting waits until a statement waits for another transaction.
func awaitWaiting(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	for waiting := false; !waiting; {
		if err := pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid')`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
}
