package statement

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/sinktest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func msg(id, value string) message.Message {
	return message.Message{
		ID: id, Topic: "orders", Key: []byte("k"), Value: []byte(value),
		Position: message.Position{Lane: message.Lane{Source: "main", Name: "orders/3"}, Offset: 42},
	}
}

func build(t testing.TB, sql string, columns map[string]string) *Sink {
	t.Helper()
	s, err := Config{SQL: sql, Columns: columns}.Sink()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func inTx(t testing.TB, pool *pgxpool.Pool, f func(pgx.Tx) error) error {
	t.Helper()
	return pgx.BeginFunc(t.Context(), pool, f)
}

func write(t testing.TB, pool *pgxpool.Pool, s *Sink, msgs ...message.Message) error {
	return inTx(t, pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, sinks.NewBatch(msgs)) })
}

func wantRows(t testing.TB, pool *pgxpool.Pool, sql string, want ...string) {
	t.Helper()
	r, err := pool.Query(t.Context(), sql)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(r, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", sql, d)
	}
}

func TestStatements(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE balance (account text PRIMARY KEY, cents bigint NOT NULL); CREATE TABLE log (n int GENERATED ALWAYS AS IDENTITY, line text);
		CREATE FUNCTION note(text) RETURNS void LANGUAGE sql AS 'INSERT INTO log (line) VALUES ($1)'`)
	account := map[string]string{"account": "json:a", "cents": "json:c::bigint"}
	account["account"] += "::text"
	msgs := []message.Message{msg("1", `{"a":"x","c":5}`), msg("2", `{"a":"y","c":7}`), msg("3", `{"a":"x","c":-1}`)}
	for _, c := range []struct {
		name, sql string
		columns   map[string]string
		want      []string
	}{
		{"an upsert that adds up", `INSERT INTO public.balance AS b SELECT account, sum(cents) FROM batch GROUP BY 1 ORDER BY 1
			ON CONFLICT (account) DO UPDATE SET cents = b.cents + EXCLUDED.cents;`, account, []string{"x=4", "y=7"}},
		{"with", `/* the newest */ WITH last AS (SELECT DISTINCT ON (account) * FROM batch ORDER BY account, ord DESC)
			INSERT INTO public.balance SELECT account, cents FROM last -- done`, account, []string{"x=-1", "y=7"}},
		{"with recursive", `with RECURSIVE run(ord, total) AS (SELECT 0::bigint, 0::bigint UNION ALL
			SELECT b.ord, run.total + b.cents FROM run JOIN "batch" b ON b.ord = run.ord + 1)
			INSERT INTO public.balance SELECT 'total' || ord, total FROM run WHERE ord > 0`, account, []string{"total1=5", "total2=12", "total3=11"}},
		{"several in one", `WITH a AS (INSERT INTO public.balance SELECT account || ord, cents FROM batch RETURNING *)
			INSERT INTO public.log (line) SELECT account FROM a ORDER BY 1`, account, []string{"x1=5", "x3=-1", "y2=7", "log x1", "log x3", "log y2"}},
		{"a function call", `SELECT public.note(id) FROM batch ORDER BY ord;;`, nil, []string{"log 1", "log 2", "log 3"}},
		{"update", `UPDATE public.balance SET cents = 0 FROM batch WHERE account = batch.id`, nil, nil},
		{"delete", `DELETE FROM public.balance USING batch WHERE account = batch.id`, nil, nil},
		{"merge", `MERGE INTO public.balance b USING (SELECT account, sum(cents) c FROM batch GROUP BY 1) s ON b.account = s.account
			WHEN MATCHED THEN UPDATE SET cents = s.c WHEN NOT MATCHED THEN INSERT VALUES (s.account, s.c)`, account, []string{"x=4", "y=7"}},
		{"parentheses", `(SELECT public.note(id) FROM batch WHERE ord = 1)`, nil, []string{"log 1"}},
		{
			"names and constants", `INSERT INTO public.log (line) SELECT format('%s %s %s', "a ""b""", c, now > '2020-01-01') FROM batch ORDER BY ord LIMIT 1`,
			map[string]string{`a "b"`: "lane", "c": "const:x::y::text", "now": "now"},
			[]string{"log orders/3 x::y t"},
		},
		{
			"default columns", `INSERT INTO public.log (line) SELECT concat_ws(' ', id, pg_typeof(key), encode(value, 'escape'), topic, lane, position, time IS NULL, ord) FROM batch WHERE ord = 2`,
			nil,
			[]string{`log 2 bytea {"a":"y","c":7} orders orders/3 42 t 2`},
		},
		{
			"a string with all the traps", `INSERT INTO public.log (line) SELECT $x$; $1 -- $x$ || E'\';' || '''; /*' || "id" /* ; /* nested */ $2 */ FROM batch WHERE ord=1 -- ; $1`,
			nil,
			[]string{`log ; $1 -- ';'; /*1`},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			exec(t, pool, `TRUNCATE balance, log RESTART IDENTITY`)
			s := build(t, c.sql, c.columns)
			if err := inTx(t, pool, func(tx pgx.Tx) error { return s.Prepare(t.Context(), tx) }); err != nil {
				t.Fatal(err)
			}
			wantRows(t, pool, `SELECT line FROM log UNION ALL SELECT account FROM balance`, []string{}...)
			if err := write(t, pool, s, msgs...); err != nil {
				t.Fatal(err)
			}
			want := c.want
			if want == nil {
				want = []string{}
			}
			wantRows(t, pool, `SELECT * FROM ((SELECT account || '=' || cents FROM balance ORDER BY 1) UNION ALL (SELECT 'log ' || line FROM log ORDER BY n)) x`, want...)
		})
	}
}

func TestRefusedAtConstruction(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]string{
		"":                                          "there is no statement",
		" ; -- nothing":                             "there is no statement",
		"INSERT INTO t SELECT 1":                    "doesn't mention batch",
		"SELECT 'batch' -- batch":                   "doesn't mention batch",
		"SELECT $$batch$$":                          "doesn't mention batch",
		"SELECT 1 FROM batches":                     "doesn't mention batch",
		"DELETE FROM t; SELECT * FROM batch":        "more than one statement",
		"SELECT * FROM batch; COMMIT":               "more than one statement",
		"COMMIT":                                    "COMMIT is not for a sink",
		"begin /* batch */":                         "BEGIN is not for a sink",
		"ROLLBACK TO batch":                         "ROLLBACK is not for a sink",
		"SET x = batch":                             "SET is not for a sink",
		"SAVEPOINT batch":                           "SAVEPOINT is not for a sink",
		"DO $$ batch $$":                            `begins with "do"`,
		"CALL f(batch)":                             `begins with "call"`,
		"COPY batch TO STDOUT":                      `begins with "copy"`,
		"TRUNCATE batch":                            `begins with "truncate"`,
		"SELECT * FROM batch WHERE id = $1":         "$1: parameters are dedupd's",
		"SELECT 'a FROM batch":                      "a string doesn't end",
		"SELECT E'a\\' FROM batch":                  "a string doesn't end",
		"SELECT e'\\' FROM batch'":                  "doesn't mention batch",
		"SELECT E'\\' FROM batch'":                  "doesn't mention batch",
		"SELECT e'\\\\' FROM t; FROM batch":         "more than one statement",
		"SELECT \"a FROM batch":                     "a quoted name doesn't end",
		"SELECT 1 /* /* */ FROM batch":              "comment /* doesn't end",
		"SELECT $a$ FROM batch $b$":                 "a dollar-quoted string doesn't end",
		"EXPLAIN ANALYZE DELETE FROM t USING batch": `begins with "explain"`,
		"PREPARE TRANSACTION 'x' -- \n batch":       "PREPARE is not for a sink",
		"VACUUM batch":                              `begins with "vacuum"`,
		"\x00SELECT * FROM batch":                   "begins with",
	} {
		if _, err := (Config{SQL: sql}).Sink(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: the error is %v, want something with %q", sql, err, want)
		}
	}
	for spec, want := range map[string]string{
		"nope": "is no place", "id::": "lacks the type", "id::varchar(3)": "has a length", "cloudevent": "a way to find an id", "json:a..b::int": "empty part",
	} {
		if _, err := (Config{SQL: "SELECT * FROM batch", Columns: map[string]string{"c": spec}}).Sink(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("column %q: the error is %v, want something with %q", spec, err, want)
		}
	}
	for _, name := range []string{"ord", "", strings.Repeat("x", 64)} {
		if _, err := (Config{SQL: "SELECT * FROM batch", Columns: map[string]string{name: "id"}}).Sink(); err == nil {
			t.Errorf("a column of the name %q is taken", name)
		}
	}
}

// A backslash hides a quote in e'…' and E'…' alone.
func TestBackslashesInStrings(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{
		`SELECT e'\'' FROM batch`, `SELECT E'\'' FROM batch`, `SELECT e'a''\'b\\' FROM batch`, `SELECT '\' FROM batch`, `SELECT n'\' FROM batch`,
		`SELECT ee'\' FROM batch`, `SELECT e '\' FROM batch`, `SELECT e, '\' FROM batch`, `SELECT 1 AS e'\'' FROM batch`,
	} {
		if _, err := (Config{SQL: sql}).Sink(); err != nil {
			t.Errorf("%s is refused: %v", sql, err)
		}
	}
}

func TestPrepareRefusesWhatTheServerRefuses(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (a int)`)
	for name, c := range map[string]struct {
		sql     string
		columns map[string]string
		want    string
	}{
		"no such table":  {"INSERT INTO public.nowhere SELECT id FROM batch", nil, "42P01"},
		"no such column": {"INSERT INTO public.t SELECT nope FROM batch", nil, "42703"},
		"wrong type":     {"INSERT INTO public.t SELECT id FROM batch", nil, "42804"},
		"syntax":         {"INSERT INTO public.t SELEC id FROM batch", nil, "42601"},
		"no such type":   {"SELECT * FROM batch", map[string]string{"c": "json:a::public.nope"}, "there is no type public.nope"},
		"not a type":     {"SELECT * FROM batch", map[string]string{"c": "json:a::int; DROP TABLE t"}, "sink.statement.columns"},
		"pseudo-type":    {"SELECT * FROM batch", map[string]string{"c": "json:a::anyarray"}, "there is no type anyarray"},
		"id as jsonb":    {"SELECT * FROM batch", map[string]string{"c": "id::jsonb"}, "is plain text"},
		"its own batch":  {"WITH batch AS (SELECT 1) SELECT * FROM batch", nil, "42712"},
	} {
		t.Run(name, func(t *testing.T) {
			s := build(t, c.sql, c.columns)
			err := inTx(t, pool, func(tx pgx.Tx) error { return s.Prepare(t.Context(), tx) })
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, want something with %q", err, c.want)
			}
		})
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (a int CHECK (a > 0)); CREATE DOMAIN short AS varchar(3)`)
	s := build(t, "INSERT INTO public.t SELECT a FROM batch", map[string]string{"a": "json:a::int4"})
	err := write(t, pool, s, msg("1", `{"a":1}`), msg("2", `{"a":`))
	if index, ok := sinks.AsPermanent(err); !ok || index != 1 {
		t.Errorf("bad JSON gives %v", err)
	}
	var pg *pgconn.PgError
	if err = write(t, pool, s, msg("1", `{"a":0}`)); !errors.As(err, &pg) || pg.Code != "23514" {
		t.Errorf("a violated check gives %v", err)
	}
	if err = write(t, pool, s, msg("1", `{"a":"x"}`)); !errors.As(err, &pg) || pg.Code != "22P02" {
		t.Errorf("a text for an int gives %v", err)
	}
	wantRows(t, pool, `SELECT a::text FROM t`, []string{}...)

	// A type whose cast would cut comes without its length.
	exec(t, pool, `CREATE TABLE w (a text)`)
	s = build(t, "INSERT INTO public.w SELECT a FROM batch", map[string]string{"a": "id::public.short"})
	if err := write(t, pool, s, msg("longer", "")); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT a FROM w`, "longer")
}

func TestConformance(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE effects (id text PRIMARY KEY, n int NOT NULL)`)
	sinktest.Run(t, sinktest.Config{
		Pool: pool,
		New: func() sinks.Sink {
			return build(t, "INSERT INTO public.effects SELECT id, n FROM batch ORDER BY id", map[string]string{"id": "id", "n": "json:n::int"})
		},
		Message: func(n int) message.Message { return msg(fmt.Sprint(n), fmt.Sprintf(`{"n":%d}`, n)) },
		Poison:  func() message.Message { return msg("p", `{"n":"x"}`) },
		Count:   sinktest.Rows("public.effects"),
	})
}

func TestRegistered(t *testing.T) {
	t.Parallel()
	s, err := sinks.Default.New("statement", func(into any) error {
		*into.(*Config) = Config{SQL: "SELECT * FROM batch"}
		return nil
	})
	if _, ok := s.(*Sink); !ok || err != nil {
		t.Errorf("got %T, %v", s, err)
	}
}

// Whatever the lexer takes for one statement, the server must take for one too.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"SELECT 1 FROM batch", "WITH a AS (SELECT ';') SELECT * FROM batch;", `SELECT E'\';' FROM batch`, "SELECT $a$;$a$ FROM batch",
		`SELECT U&"d\0061" FROM batch`, "SELECT 1;;--\n", "/*/**/*/select batch", "select 1e5 from batch", "select a$b$c from batch", "SELECT '' ';' FROM batch",
	} {
		f.Add(s)
	}
	db := pgtest.New(f)
	conn, err := pgx.Connect(context.Background(), db.URL)
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	f.Fuzz(func(t *testing.T, sql string) {
		p, err := parse(sql)
		if err != nil || strings.ContainsRune(sql, 0) {
			return
		}
		joined := p.join("batch(id) AS (SELECT 1)")
		_, err = conn.Prepare(context.Background(), "", joined)
		var pg *pgconn.PgError
		if errors.As(err, &pg) && strings.Contains(pg.Message, "multiple commands") {
			t.Errorf("%q passes as one statement; the server sees several", joined)
		}
	})
}

// EXPLAIN must not run anything: a trigger for each statement would fire even
// for an empty batch.
func TestPrepareHasNoEffect(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE watched (id text); CREATE TABLE fired (x int);
		CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO fired VALUES (1); RETURN NULL; END $$;
		CREATE TRIGGER f BEFORE INSERT ON watched FOR EACH STATEMENT EXECUTE FUNCTION fire()`)
	s := build(t, "INSERT INTO public.watched SELECT id FROM batch", nil)
	if err := inTx(t, pool, func(tx pgx.Tx) error { return s.Prepare(t.Context(), tx) }); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT count(*)::text FROM fired`, "0")
}
