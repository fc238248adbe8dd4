package table

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/pgtest"
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
