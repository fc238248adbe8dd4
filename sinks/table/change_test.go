package table

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// A column that gets another type under a running worker takes what that type takes
// from then on: nothing is cast to the old one first, and nothing is refused for it.
func TestInsertFollowsAChangedColumn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ before, after, value, want string }{
		"more digits":          {"numeric(10,0)", "numeric(10,2)", `1.25`, "1.25"},
		"fractions":            {"int", "numeric", `1.25`, "1.25"},
		"larger numbers":       {"int", "bigint", `5000000000`, "5000000000"},
		"leading zeros":        {"int", "text", `"007"`, "007"},
		"the time of the day":  {"date", "timestamp", `"2026-03-04 05:06:07"`, "2026-03-04 05:06:07"},
		"parts of a second":    {"timestamp(0)", "timestamp(3)", `"2026-03-04 05:06:07.891"`, "2026-03-04 05:06:07.891"},
		"what is no document":  {"jsonb", "text", `"plain"`, "plain"},
		"what is no UUID":      {"uuid", "text", `"6BA7B810-9DAD-11D1-80B4-00C04FD430C8"`, "6BA7B810-9DAD-11D1-80B4-00C04FD430C8"},
		"another name of true": {"bool", "text", `"yes"`, "yes"},
		"what has no cast":     {"text", "jsonb", `{"a":1}`, `{"a": 1}`},
		"the length of a list": {"int", "int[]", `[1,2]`, "{1,2}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, fmt.Sprintf(`CREATE TABLE t (id text, v %s)`, c.before))
			s := build(t, Config{Name: "public.t", Columns: map[string]string{"id": "id", "v": "json:v"}})
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			exec(t, pool, fmt.Sprintf(`ALTER TABLE t ALTER v TYPE %s USING NULL`, c.after))
			m := msg("a", `{"v":`+c.value+`}`)
			err := write(t, pool, s, m)
			if _, permanent := sinks.AsPermanent(err); permanent || sqlstate.Means(sqlstate.Of(err), sqlstate.Unreadable) {
				t.Fatalf("a changed table is called the message's fault: %v", err)
			}
			if err == nil {
				t.Fatalf("written by a statement for the old type, as %q", rows(t, pool, `SELECT v::text FROM t`))
			}
			if err := write(t, pool, s, m); err != nil {
				t.Fatal(err)
			}
			wantRows(t, pool, `SELECT v::text FROM t`, c.want)
		})
	}
}

// Whoever changes a column holds its lock: the statement waits, and finds another
// column than the look before it did.
func TestInsertFollowsAColumnThatChangesMeanwhile(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (v numeric(10,0))`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{"v": "json:v"}})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	ddl, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ddl.Rollback(t.Context()) }()
	if _, err := ddl.Exec(t.Context(), `ALTER TABLE t ALTER v TYPE numeric(10,2)`); err != nil {
		t.Fatal(err)
	}
	m := msg("a", `{"v":1.25}`)
	written := make(chan error, 1)
	go func() {
		written <- pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, sinks.NewBatch([]message.Message{m})) })
	}()
	for waits := 0; waits == 0; {
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass`).Scan(&waits); err != nil {
			t.Fatal(err)
		}
	}
	if err := ddl.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-written; !errors.Is(err, errChanged) {
		t.Fatalf("the error is %v; the table has %q", err, rows(t, pool, `SELECT v::text FROM t`))
	}
	if err := write(t, pool, s, m); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT v::text FROM t`, "1.25")
}

// What isn't filled may change without a word: no lane is held for a new column.
func TestInsertMindsNoOtherColumn(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (v text, other int)`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{"v": "id"}})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t ALTER other TYPE text, ADD more int DEFAULT 1, ALTER v TYPE text`)
	if err := write(t, pool, s, msg("a", "")); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t DROP other`)
	if err := write(t, pool, s, msg("b", "")); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT v || more FROM t ORDER BY v`, "a1", "b1")
}

// Not every insert tells by its count of rows that it was for the columns as they are.
func TestInsertFollowsAChangedColumnWithoutACount(t *testing.T) {
	t.Parallel()
	before := func(body string) string {
		return `CREATE TABLE t (id text PRIMARY KEY, v numeric(10,0)); CREATE TABLE elsewhere (id text, v numeric);
			CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN ` + body + ` END $$;
			CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()`
	}
	for name, c := range map[string]struct {
		create, table string
		key           []string
	}{
		"a trigger":                   {before(`RETURN NEW;`), "t", nil},
		"a trigger that puts it away": {before(`INSERT INTO elsewhere VALUES (NEW.id, NEW.v); RETURN NULL;`), "elsewhere", nil},
		"nothing new":                 {`CREATE TABLE t (id text PRIMARY KEY, v numeric(10,0))`, "t", []string{"id"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, c.create)
			s := build(t, Config{Name: "public.t", Key: c.key, Columns: map[string]string{"id": "id", "v": "json:v"}})
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			if err := write(t, pool, s, msg("a", `{"v":7}`)); err != nil {
				t.Fatal(err)
			}
			if c.key != nil { // no row is written, and that is fine
				if err := write(t, pool, s, msg("a", `{"v":7}`)); err != nil {
					t.Fatal(err)
				}
			}
			exec(t, pool, `ALTER TABLE t ALTER v TYPE numeric(10,2)`)
			if err := write(t, pool, s, msg("b", `{"v":1.25}`)); !errors.Is(err, errChanged) {
				t.Fatalf("the error is %v", err)
			}
			if err := write(t, pool, s, msg("b", `{"v":1.25}`)); err != nil {
				t.Fatal(err)
			}
			wantRows(t, pool, `SELECT id || trim_scale(v) FROM `+c.table+` ORDER BY id`, "a7", "b1.25")
		})
	}
}

// The server may cast a constant while it plans the statement, before the statement looks
// at the columns: an error of that says nothing of the message.
func TestInsertFollowsAChangedColumnOfAConstant(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (id text, v int)`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{"id": "id", "v": "const:100000"}})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	if err := write(t, pool, s, msg("a", `{}`)); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t ALTER v TYPE smallint USING 1`)
	if err := write(t, pool, s, msg("b", `{}`)); !errors.Is(err, errChanged) {
		t.Fatalf("the error is %v", err)
	}
	exec(t, pool, `ALTER TABLE t ALTER v TYPE bigint`)
	if err := write(t, pool, s, msg("b", `{}`)); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT id || v FROM t ORDER BY id`, "a1", "b100000")
}

// A plan goes by more than types: what it takes from the table is read again once it changes.
func TestFollowsATableThatChanges(t *testing.T) {
	t.Parallel()
	const (
		partitioned = `CREATE TABLE t (k text PRIMARY KEY, v text, n int) PARTITION BY LIST (k); CREATE TABLE p PARTITION OF t DEFAULT PARTITION BY LIST (k); CREATE TABLE pp PARTITION OF p DEFAULT`
		away        = `CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; `
		upsert      = `{"k":"a","v":"x"}`
	)
	keyed := Config{Key: []string{"k"}, Columns: map[string]string{"k": "json:k", "v": "json:v", "n": "json:n"}}
	mode := func(mode string) Config { c := keyed; c.Mode = mode; return c }
	strict := keyed
	strict.OnPresent = policy.PresentCompare
	history := Config{Mode: ModeUpsert, Key: []string{"k"}, Absent: policy.AbsentNull, Columns: map[string]string{"k": "json:k", "v": "json:v"}, History: History{Column: "h", Size: 3}}
	outcome := map[sinks.Outcome]string{sinks.Written: "written", sinks.AlreadyPresent: "already_present"}
	for name, c := range map[string]struct {
		create, change string
		config         Config
		want           string // of the row, or of the error
	}{
		"a default":              {`CREATE TABLE t (k text PRIMARY KEY, v text, n int)`, `ALTER TABLE t ALTER n SET DEFAULT 7`, mode(ModeUpsert), "axn7"},
		"a default that is gone": {`CREATE TABLE t (k text PRIMARY KEY, v text, n int DEFAULT 7)`, `ALTER TABLE t ALTER n DROP DEFAULT`, mode(ModeUpsert), "axn"},
		"an identity":            {`CREATE TABLE t (k text PRIMARY KEY, v text, n int NOT NULL DEFAULT 3)`, `ALTER TABLE t ALTER n DROP DEFAULT, ALTER n ADD GENERATED BY DEFAULT AS IDENTITY (START 9)`, mode(ModeUpsert), "axn9"},
		"an identity for ever":   {`CREATE TABLE t (k text PRIMARY KEY, v text, n int NOT NULL DEFAULT 3)`, `ALTER TABLE t ALTER n DROP DEFAULT, ALTER n ADD GENERATED ALWAYS AS IDENTITY`, mode(ModeUpsert), "is GENERATED ALWAYS AS IDENTITY"},
		"NULL in a key":          {`CREATE TABLE t (k text NOT NULL UNIQUE, v text, h text[])`, `ALTER TABLE t ALTER k DROP NOT NULL`, history, "of the key may be NULL"},
		"a rule":                 {`CREATE TABLE t (k text PRIMARY KEY, v text, n int)`, `CREATE RULE r AS ON INSERT TO t DO ALSO SELECT 1`, Config{Columns: keyed.Columns}, "written"},
		"row security":           {`CREATE TABLE t (k text PRIMARY KEY, v text, n int)`, `ALTER TABLE t ENABLE ROW LEVEL SECURITY`, strict, "on_present: which rows were there isn't known"},
		"a trigger":              {`CREATE TABLE t (k text PRIMARY KEY, v text, n int)`, away + `CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()`, keyed, "written"},
		"that is gone":           {`CREATE TABLE t (k text PRIMARY KEY, v text, n int); ` + away + `CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()`, `DROP TRIGGER f ON t; INSERT INTO t VALUES ('a', 'x')`, keyed, "already_present"},
		"of a partition":         {partitioned, away + `CREATE TRIGGER f BEFORE INSERT ON pp FOR EACH ROW EXECUTE FUNCTION f()`, keyed, "written"},
		"of all partitions":      {partitioned, away + `CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()`, keyed, "written"},
		"with on_present":        {partitioned, away + `CREATE TRIGGER f BEFORE INSERT ON pp FOR EACH ROW EXECUTE FUNCTION f()`, strict, "on_present: which rows were there isn't known"},
		"below an upsert":        {partitioned, away + `CREATE TRIGGER f BEFORE INSERT ON pp FOR EACH ROW EXECUTE FUNCTION f()`, mode(ModeUpsert), "written"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, c.create)
			c.config.Name = "public.t"
			s := build(t, c.config)
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			if err := write(t, pool, s, msg("first", `{"k":"first","v":"x"}`)); err != nil {
				t.Fatal(err)
			}
			exec(t, pool, `DELETE FROM t; `+c.change)
			if _, err := outcomes(t, pool, s, msg("a", upsert)); !errors.Is(err, errChanged) {
				t.Fatalf("the error is %v; the table has %q", err, rows(t, pool, `SELECT k || v FROM t`))
			}
			got, err := outcomes(t, pool, s, msg("a", upsert))
			text := fmt.Sprint(err)
			if err == nil {
				if text = outcome[got[0]]; strings.Contains(c.want, "n") && strings.HasPrefix(c.want, "ax") {
					text = rows(t, pool, `SELECT concat(k, v, 'n', n) FROM t`)[0]
				}
			}
			if !strings.Contains(text, c.want) {
				t.Errorf("%s, want %s", text, c.want)
			}
		})
	}
}

// A trigger of a partition that was there all the time is no change, whatever the statement.
func TestATriggerOfAPartitionIsNoChange(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v text, h text[]) PARTITION BY LIST (k); CREATE TABLE p PARTITION OF t FOR VALUES IN ('a'); CREATE TABLE rest PARTITION OF t DEFAULT;
		CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; CREATE TRIGGER f BEFORE INSERT ON p FOR EACH ROW EXECUTE FUNCTION f()`)
	for name, c := range map[string]Config{
		"insert": {},
		"keyed":  {Key: []string{"k"}},
		"update": {Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"h": "json:none"}},
		"upsert": {Mode: ModeUpsert, Key: []string{"k"}},
	} {
		exec(t, pool, `TRUNCATE t`)
		c.Name, c.Columns = "public.t", map[string]string{"k": "id", "v": "json:v"}
		s := build(t, c)
		if err := prepare(t, pool, s); err != nil {
			t.Fatal(err)
		}
		if c.Mode == ModeUpdate {
			exec(t, pool, `INSERT INTO t VALUES ('a'), ('b')`)
		}
		if err := write(t, pool, s, msg("a", `{"v":"x"}`), msg("b", `{}`)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		wantRows(t, pool, `SELECT k FROM t WHERE v = 'x'`, "a")
	}
}
