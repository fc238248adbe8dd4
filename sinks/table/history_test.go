package table

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func historyConfig(size int) Config {
	return Config{
		Name: "public.t", Mode: ModeUpsert, Key: []string{"k"}, History: History{"ops", size}, Absent: policy.AbsentNull,
		Columns: map[string]string{"k": "json:k", "v": "json:v"},
	}
}

// change is a message that sets the row of a key.
func change(id, key, value string) message.Message {
	return msg(id, fmt.Sprintf(`{"k":%q,"v":%q}`, key, value))
}

func TestHistory(t *testing.T) {
	t.Parallel()
	const w, p = sinks.Written, sinks.AlreadyPresent
	for name, c := range map[string]struct {
		msgs []message.Message
		want []sinks.Outcome
		rows []string
	}{
		"a new row":           {[]message.Message{change("1", "new", "one")}, []sinks.Outcome{w}, []string{"new one {1}", "old 0 {x,y,z}"}},
		"one more":            {[]message.Message{change("1", "old", "one")}, []sinks.Outcome{w}, []string{"old one {y,z,1}"}},
		"remembered":          {[]message.Message{change("y", "old", "again"), change("y", "new", "first")}, []sinks.Outcome{p, w}, []string{"new first {y}", "old 0 {x,y,z}"}},
		"forgotten":           {[]message.Message{change("w", "old", "again")}, []sinks.Outcome{w}, []string{"old again {y,z,w}"}},
		"the last one is old": {[]message.Message{change("1", "old", "one"), change("x", "old", "again")}, []sinks.Outcome{w, p}, []string{"old one {y,z,1}"}},
		"the same id twice":   {[]message.Message{change("1", "new", "one"), change("2", "new", "two"), change("1", "new", "one")}, []sinks.Outcome{w, w, p}, []string{"new two {1,2}", "old 0 {x,y,z}"}},
		"an old one before more than it has room": {
			[]message.Message{change("x", "old", "again"), change("1", "old", "i"), change("2", "old", "ii"), change("3", "old", "iii")},
			[]sinks.Outcome{p, w, w, w},
			[]string{"old iii {1,2,3}"},
		},
		"more than it has room": {
			[]message.Message{change("1", "old", "i"), change("1", "new", "i"), change("2", "old", "ii"), change("2", "new", "ii"), change("3", "old", "iii"), change("3", "new", "iii"), change("4", "old", "iv"), change("4", "new", "iv")},
			[]sinks.Outcome{w, w, w, w, w, w, w, w},
			[]string{"new iv {2,3,4}", "old iv {2,3,4}"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v text, ops text[]); INSERT INTO t VALUES ('old', '0', '{x,y,z}')`)
			got, err := outcomes(t, pool, build(t, historyConfig(3)), c.msgs...)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("outcomes %v, want %v: %v", got, c.want, err)
			}
			wantRows(t, pool, `SELECT concat_ws(' ', k, v, ops) FROM t ORDER BY k`, c.rows...)
		})
	}
}

// Whatever the rows have: nothing, an empty history, one that counts from elsewhere, that is
// longer than it may be by now, that has NULLs.
func TestHistoryThatIsThere(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ create, index, want string }{
		"nothing":        {`text[]`, `NULL`, "{a,b}"},
		"an empty one":   {`text[] NOT NULL`, `'{}'`, "{a,b}"},
		"from elsewhere": {`text[]`, `'[5:6]={x,y}'`, "{y,a,b}"},
		"a longer one":   {`text[]`, `'{u,v,w,x,y}'`, "{y,a,b}"},
		"NULLs":          {`text[]`, `'{NULL,x,NULL}'`, "{NULL,a,b}"},
		"a collation":    {`text[] COLLATE ci`, `'{A,B}'`, "{B,a,b}"},
		"with a default": {`text[] DEFAULT '{x}'`, `'{y}'`, "{y,a,b}"},
		"of domains":     {`ids`, `'{x}'`, "{x,a,b}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, `CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false); CREATE DOMAIN ids AS text[];
				CREATE TABLE t (k text PRIMARY KEY, v text, ops `+c.create+`); INSERT INTO t VALUES ('old', '0', `+c.index+`)`)
			got, err := outcomes(t, pool, build(t, historyConfig(3)), change("a", "old", "1"), change("b", "old", "2"), change("n", "new", "3"))
			if want := []sinks.Outcome{sinks.Written, sinks.Written, sinks.Written}; err != nil || !slices.Equal(got, want) {
				t.Errorf("outcomes %v: %v", got, err)
			}
			wantRows(t, pool, `SELECT ops::text FROM t ORDER BY k DESC`, c.want, "{n}")
			got, err = outcomes(t, pool, build(t, historyConfig(3)), change("a", "old", "1"), change("n", "new", "3"))
			if want := []sinks.Outcome{sinks.AlreadyPresent, sinks.AlreadyPresent}; err != nil || !slices.Equal(got, want) {
				t.Errorf("again: outcomes %v: %v", got, err)
			}
		})
	}
}

func TestHistoryOfUUIDs(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE t (k ext.citext PRIMARY KEY, v text, ops uuid[])`)
	s := build(t, historyConfig(3))
	const id = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
	if err := write(t, pool, s, change(id, "a", "1")); err != nil {
		t.Fatal(err)
	}
	got, err := outcomes(t, pool, s, change(strings.ToUpper(strings.ReplaceAll(id, "-", "")), "A", "2"))
	if err != nil || got[0] != sinks.AlreadyPresent {
		t.Errorf("outcomes %v: %v", got, err)
	}
	_, err = outcomes(t, pool, s, change(id, "a", "1"), change("x", "a", "1"))
	if bad := sinks.AllPermanent(err); len(bad) != 1 || bad[1] == nil || !strings.Contains(err.Error(), `column "ops" from id: "x" is no UUID`) {
		t.Error(err)
	}
}

// Batches in any shape end as messages one by one would.
func TestHistoryFoldsAsOneByOne(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v text, ops text[])`)
	const keys, ids, size, batches = 4, 200, 12, 150
	s := build(t, historyConfig(size))
	random := rand.New(rand.NewPCG(5, 6))
	type row struct {
		value string
		ops   []string
	}
	model := map[string]row{}
	for b := range batches {
		var msgs []message.Message
		var want []sinks.Outcome
		// A row remembers its last ids, and all that came before in the batch.
		before := map[string][]string{}
		for k, r := range model {
			before[k] = slices.Clone(r.ops)
		}
		for n := range 1 + random.IntN(20) {
			k, value := fmt.Sprint("k", random.IntN(keys)), fmt.Sprint(b, ".", n)
			id := fmt.Sprint("id", min(ids-1, b+random.IntN(20)))
			msgs = append(msgs, change(id, k, value))
			if slices.Contains(before[k], id) {
				want = append(want, sinks.AlreadyPresent)
				continue
			}
			before[k] = append(before[k], id)
			all := append(slices.Clone(model[k].ops), id)
			model[k] = row{value, all[max(0, len(all)-size):]}
			want = append(want, sinks.Written)
		}
		got, err := outcomes(t, pool, s, msgs...)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("batch %d: outcomes %v, want %v: %v", b, got, want, err)
		}
	}
	var want []string
	for k, r := range model {
		want = append(want, fmt.Sprintf("%s %s {%s}", k, r.value, strings.Join(r.ops, ",")))
	}
	slices.Sort(want)
	wantRows(t, pool, `SELECT concat_ws(' ', k, v, ops) FROM t ORDER BY k`, want...)
}

// Somebody else adds the row of a key, or changes it, while we write.
func TestHistoryOfARowThatChangesMeanwhile(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		theirs string
		want   []sinks.Outcome
		row    string
	}{
		"added, with one of the ids":   {`INSERT INTO t VALUES ('new', 'theirs', '{b}')`, []sinks.Outcome{sinks.Written, sinks.AlreadyPresent}, "new ours {b,a}"},
		"added, with other ids":        {`INSERT INTO t VALUES ('new', 'theirs', '{x}')`, []sinks.Outcome{sinks.Written, sinks.Written}, "new last {x,a,b}"},
		"added, without":               {`INSERT INTO t VALUES ('new', 'theirs')`, []sinks.Outcome{sinks.Written, sinks.Written}, "new last {a,b}"},
		"changed, with one of the ids": {`UPDATE t SET v = 'theirs', ops = '{b}' WHERE k = 'old'`, []sinks.Outcome{sinks.Written, sinks.AlreadyPresent}, "old ours {b,a}"},
		"deleted":                      {`DELETE FROM t`, []sinks.Outcome{sinks.Written, sinks.Written}, "old last {a,b}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v text, ops text[]); INSERT INTO t VALUES ('old', '0', '{}')`)
			s := build(t, historyConfig(3))
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			other, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := other.Exec(t.Context(), c.theirs); err != nil {
				t.Fatal(err)
			}
			k := strings.Fields(c.row)[0]
			msgs := []message.Message{change("a", k, "ours"), change("b", k, "last")}
			type result struct {
				got []sinks.Outcome
				err error
			}
			done := make(chan result, 1)
			go func() {
				got, err := outcomes(t, pool, s, msgs...)
				done <- result{got, err}
			}()
			awaitWaiting(t, pool)
			if err := other.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			r := <-done
			if r.err != nil || !slices.Equal(r.got, c.want) {
				t.Errorf("outcomes %v, want %v: %v", r.got, c.want, r.err)
			}
			wantRows(t, pool, `SELECT concat_ws(' ', k, v, ops) FROM t WHERE k = '`+k+`'`, c.row)
		})
	}
}

// Workers that are given the same messages, in other batches, write each once. They don't
// deadlock, and try no batch again.
func TestHistoryOfTheSameMessages(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	const workers, keys, each = 4, 30, 30
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v text, ops text[])`)
	s := build(t, historyConfig(1000))
	var wg sync.WaitGroup
	written := make([]int, workers)
	for w := range workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(3, uint64(w)))
			var all []message.Message
			for _, n := range random.Perm(keys * each) {
				all = append(all, change(fmt.Sprint("id", n), fmt.Sprint("k", n%keys), fmt.Sprint(w)))
			}
			for msgs := range slices.Chunk(all, 50) {
				batch := sinks.NewBatch(msgs)
				if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, batch) }); err != nil {
					t.Error(err)
					return
				}
				for i := range msgs {
					if batch.OutcomeOf(i) == sinks.Written {
						written[w]++
					}
				}
			}
		})
	}
	wg.Wait()
	sum := 0
	for _, n := range written {
		sum += n
	}
	if sum != keys*each {
		t.Errorf("%d messages were written, want %d", sum, keys*each)
	}
	wantRows(t, pool, `SELECT count(DISTINCT op) || ' of ' || count(op) FROM t, unnest(ops) AS op`, fmt.Sprintf("%d of %[1]d", keys*each))
}

// A trigger keeps rows away, so that the batch is divided until a single message can be blamed.
// With what a trigger fills in, nothing is wrong.
func TestTriggersThatKeepRowsAway(t *testing.T) {
	t.Parallel()
	const fill, skip = "NEW.by = 'trigger'", "IF NEW.text = 'bad' THEN RETURN NULL; END IF"
	written := []sinks.Outcome{sinks.Written, sinks.Written, sinks.Written}
	for _, when := range []string{"INSERT", "UPDATE", "INSERT OR UPDATE"} {
		for mode, s := range map[string]*Sink{"versioned": versionedConfig(t, Config{}), "history": build(t, Config{
			Name: "public.t", Mode: ModeUpsert, Key: []string{"k"}, History: History{"ops", 3}, Absent: policy.AbsentNull,
			Columns: map[string]string{"k": "json:k", "v": "json:v", "text": "id"},
		})} {
			t.Run(mode+" "+when, func(t *testing.T) {
				t.Parallel()
				pool := pgtest.New(t).Pool(t)
				exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v bigint, text text, by text, ops text[]); INSERT INTO t VALUES ('a', 1), ('b', 1)`)
				trigger := func(does string) {
					exec(t, pool, `CREATE OR REPLACE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN `+does+`; RETURN NEW; END$$;
						CREATE OR REPLACE TRIGGER f BEFORE `+when+` ON t FOR EACH ROW EXECUTE FUNCTION f()`)
				}
				trigger(fill)
				if got, err := outcomes(t, pool, s, state("a", "2", "a2"), state("a", "3", "a3"), state("c", "2", "c2")); err != nil || !slices.Equal(got, written) {
					t.Fatalf("outcomes %v: %v", got, err)
				}
				trigger(skip)
				bad := state("b", "5", "bad")
				if when == "INSERT" {
					bad = state("new", "5", "bad")
				}
				_, err := outcomes(t, pool, s, state("a", "6", "a6"), bad)
				if at, ok := sinks.AsPermanent(err); !ok || at != -1 {
					t.Errorf("a batch: %v", err)
				}
				if _, err = outcomes(t, pool, s, bad); !strings.Contains(fmt.Sprint(err), "keeps it away") {
					t.Errorf("the message: %v", err)
				}
				if got, err := outcomes(t, pool, s, state("a", "6", "a6")); err != nil || got[0] != sinks.Written {
					t.Errorf("another one: %v, %v", got, err)
				}
			})
		}
	}
}

func TestHistoryNeedsItsTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text UNIQUE, v text, ops jsonb)`)
	err := prepare(t, pool, build(t, historyConfig(3)))
	for _, want := range []string{`history.column: column "ops" is of type jsonb; make it text[]`, `ALTER TABLE "public"."t" ALTER "k" SET NOT NULL`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	exec(t, pool, `ALTER TABLE t ALTER k SET NOT NULL, ALTER ops TYPE varchar[] USING NULL`)
	if err := prepare(t, pool, build(t, historyConfig(3))); err == nil || !strings.Contains(err.Error(), "character varying[]") {
		t.Error(err)
	}
	exec(t, pool, `ALTER TABLE t DROP ops`)
	if err := prepare(t, pool, build(t, historyConfig(3))); err == nil || !strings.Contains(err.Error(), `it has no column "ops"`) {
		t.Error(err)
	}
	exec(t, pool, `ALTER TABLE t ADD ops text[]; ALTER TABLE t ENABLE ROW LEVEL SECURITY`)
	if err := prepare(t, pool, build(t, historyConfig(3))); err == nil || !strings.Contains(err.Error(), "no row security") {
		t.Error(err)
	}
	// The history's type may change under a running worker.
	exec(t, pool, `ALTER TABLE t DISABLE ROW LEVEL SECURITY`)
	s := build(t, historyConfig(3))
	if err := write(t, pool, s, change("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "a", "1")); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t ALTER ops TYPE uuid[] USING ops::uuid[]`)
	m := change("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "a", "2")
	if err := write(t, pool, s, m); sqlstate.Means(sqlstate.Of(err), sqlstate.Data) {
		t.Errorf("a changed table is called the message's fault: %v", err)
	}
	if got, err := outcomes(t, pool, s, m); err != nil || got[0] != sinks.AlreadyPresent {
		t.Errorf("outcomes %v: %v", got, err)
	}
}

func TestHistoryConfig(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*Config){
		"history.column: name the column":    func(c *Config) { c.History.Column = "" },
		"history.column: dedupd fills":       func(c *Config) { c.History.Column = "v" },
		"history.size: 0 is not from":        func(c *Config) { c.History.Size = 0 },
		"history.size: 1001 is not from":     func(c *Config) { c.History.Size = 1001 },
		"absent: with history":               func(c *Config) { c.Absent = "" },
		"key: mode upsert needs":             func(c *Config) { c.Key = nil },
		"history: only mode upsert reads it": func(c *Config) { c.Mode, c.Key = ModeInsert, nil },
	} {
		c := historyConfig(3)
		change(&c)
		if _, err := c.Sink(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
