package table

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/sinktest"
)

func TestConfigErrors(t *testing.T) {
	t.Parallel()
	ok := map[string]string{"id": "id"}
	for name, c := range map[string]struct {
		config Config
		want   []string
	}{
		"empty":          {Config{}, []string{"name: ", "columns: none are given"}},
		"no schema":      {Config{Name: "orders", Columns: ok}, []string{"public.orders"}},
		"three parts":    {Config{Name: "a.b.c", Columns: ok}, []string{"public.orders"}},
		"open quote":     {Config{Name: `a."b`, Columns: ok}, []string{"public.orders"}},
		"quote too soon": {Config{Name: `"a"b.c`, Columns: ok}, []string{"public.orders"}},
		"long name":      {Config{Name: "a." + strings.Repeat("b", 64), Columns: ok}, []string{"63 bytes"}},
		"unknown mode":   {Config{Name: "a.b", Mode: "merge", Columns: ok}, []string{`mode: "merge" is none`}},
		"version":        {Config{Name: "a.b", Version: "v", Columns: ok}, []string{"only mode versioned"}},
		"upsert, no key": {Config{Name: "a.b", Mode: "upsert", Columns: ok}, []string{"key: mode upsert needs"}},
		"reordering":     {Config{Name: "a.b", AcceptReordering: true, Columns: ok}, []string{"accept_reordering: only mode upsert"}},
		"key elsewhere":  {Config{Name: "a.b", Key: []string{"x"}, Columns: ok}, []string{`key: "x" is not among`}},
		"key twice":      {Config{Name: "a.b", Key: []string{"id", "id"}, Columns: ok}, []string{"is there twice"}},
		"bad places": {
			Config{Name: "a.b", Columns: map[string]string{"a": "nope", "b": "json:", "c": "cloudevent", "": "id"}},
			[]string{`columns.a: "nope" is no place`, "columns.b: ", "columns.c: ", "columns: a name is empty"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.config.Sink()
			if err == nil {
				t.Fatal("it is taken")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error is %q, want something with %q", err, want)
				}
			}
		})
	}
}

func TestRegistered(t *testing.T) {
	t.Parallel()
	s, err := sinks.Default.New("table", func(into any) error {
		*into.(*Config) = Config{Name: "a.b", Columns: map[string]string{"id": "id"}}
		return nil
	})
	if err != nil || fmt.Sprint(s) != "a.b" {
		t.Errorf("got %v, %v", s, err)
	}
	if _, err := sinks.Default.New("table", func(any) error { return fmt.Errorf("line 3") }); err == nil || err.Error() != "line 3" {
		t.Errorf("the decoder's error becomes %v", err)
	}
}

func TestPrepareSaysWhatToDo(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t)
	role := "clerk_" + db.Name
	exec(t, pool, `CREATE ROLE `+role+`; CREATE SCHEMA hidden; CREATE TABLE hidden.t (id text);
		CREATE TABLE orders (id text PRIMARY KEY, payload jsonb, n int NOT NULL DEFAULT 1, twice int GENERATED ALWAYS AS (n * 2) STORED,
			seq int GENERATED ALWAYS AS IDENTITY, odd "char", part text, later text UNIQUE DEFERRABLE, j jsonb);
		CREATE UNIQUE INDEX ON orders (part) WHERE n > 0;
		CREATE TABLE strict (id text, must int NOT NULL); CREATE INDEX an_index ON orders (n);
		CREATE TABLE readonly (id text PRIMARY KEY, v text); GRANT SELECT ON readonly TO `+role+`;
		CREATE TABLE halfway (id text PRIMARY KEY, v text); GRANT INSERT ON halfway TO `+role+`;
		CREATE TABLE blind (id text PRIMARY KEY, v text); GRANT INSERT, UPDATE ON blind TO `+role+``)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = pool.Exec(ctx, "DROP OWNED BY "+role+"; DROP ROLE "+role)
	})
	cols := func(pairs ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return m
	}
	for name, c := range map[string]struct {
		config Config
		as     string
		want   []string
	}{
		"no such table":   {Config{Name: "public.order", Columns: cols("id", "id")}, "", []string{"does not exist", "did you mean public.orders?"}},
		"nothing like it": {Config{Name: "public.zzzzzzzz", Columns: cols("id", "id")}, "", []string{"does not exist (create it"}},
		"capitals":        {Config{Name: "public.Orders", Columns: cols("id", "id")}, "", []string{"did you mean public.orders?"}},
		"no such column":  {Config{Name: "public.orders", Columns: cols("paylod", "value", "qqqqqqqqqqqqqqqqqqqqqqqqqq", "id")}, "", []string{`did you mean "payload"?`, "the columns are id, payload"}},
		"generated":       {Config{Name: "public.orders", Columns: cols("twice", "position")}, "", []string{`"twice" is generated`}},
		"identity":        {Config{Name: "public.orders", Columns: cols("seq", "position")}, "", []string{"GENERATED ALWAYS AS IDENTITY"}},
		"cutting type":    {Config{Name: "public.orders", Columns: cols("odd", "id", "id", "id")}, "", []string{"cuts longer values"}},
		"id into jsonb":   {Config{Name: "public.orders", Columns: cols("payload", "id", "j", "time", "id", "id")}, "", []string{`"payload" is of type jsonb, but "id" is plain text`, "point in time"}},
		"now into jsonb":  {Config{Name: "public.orders", Columns: cols("payload", "now", "id", "id")}, "", []string{"the server refuses", "42804"}},
		"no unique index": {
			Config{Name: "public.orders", Mode: "upsert", Key: []string{"id", "n"}, Columns: cols("id", "id", "n", "position")},
			"",
			[]string{`no unique index on just ("id", "n")`, "on (id)", `CREATE UNIQUE INDEX ON "public"."orders" ("id", "n")`},
		},
		"partial index":     {Config{Name: "public.orders", Key: []string{"part"}, Columns: cols("part", "id", "id", "id")}, "", []string{"no unique index"}},
		"deferrable":        {Config{Name: "public.orders", Key: []string{"later"}, Columns: cols("later", "id", "id", "id")}, "", []string{"no unique index"}},
		"never filled":      {Config{Name: "public.strict", Columns: cols("id", "id")}, "", []string{`"must" is NOT NULL`}},
		"an index":          {Config{Name: "public.an_index", Columns: cols("n", "position")}, "", []string{"no table"}},
		"no usage":          {Config{Name: "hidden.t", Columns: cols("id", "id")}, role, []string{`GRANT USAGE ON SCHEMA "hidden"`, "GRANT INSERT"}},
		"no insert":         {Config{Name: "public.readonly", Columns: cols("id", "id", "v", "topic")}, role, []string{`GRANT INSERT ("id", "v") ON "public"."readonly"`}},
		"no update":         {Config{Name: "public.halfway", Mode: "upsert", Key: []string{"id"}, Columns: cols("id", "id", "v", "topic")}, role, []string{`GRANT UPDATE ("v")`, `GRANT SELECT ("id", "v")`}},
		"no select":         {Config{Name: "public.blind", Mode: "insert", Key: []string{"id"}, Columns: cols("id", "id", "v", "topic")}, role, []string{`GRANT SELECT ("id")`}},
		"insert is enough":  {Config{Name: "public.halfway", Columns: cols("id", "id", "v", "topic")}, role, nil},
		"all there":         {Config{Name: "public.orders", Key: []string{"id"}, Columns: cols("id", "id", "payload", "value")}, "", nil},
		"bad constant type": {Config{Name: "public.strict", Columns: cols("must", "const:many")}, "", []string{"the server refuses", "22P02"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := inTx(t, pool, func(tx pgx.Tx) error {
				if c.as != "" {
					if _, err := tx.Exec(t.Context(), "SET LOCAL ROLE "+c.as); err != nil {
						return err
					}
				}
				return build(t, c.config).Prepare(t.Context(), tx)
			})
			if len(c.want) == 0 && err != nil {
				t.Fatal(err)
			}
			for _, want := range c.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("the error is %v, want something with %q", err, want)
				}
			}
		})
	}
}

// What a trigger fills in before the row is checked needs no column here.
func TestTriggersMayFillColumns(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE filled (id text, must int NOT NULL);
		CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.must := 7; RETURN NEW; END $$;
		CREATE TRIGGER f BEFORE INSERT ON filled FOR EACH ROW EXECUTE FUNCTION fill()`)
	if err := write(t, pool, build(t, Config{Name: "public.filled", Columns: map[string]string{"id": "id"}}), msg("a", "")); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT must::text FROM filled`, "7")
}

// EXPLAIN must not run anything.
func TestPrepareHasNoEffect(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE watched (id text PRIMARY KEY); CREATE TABLE fired (x int);
		CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO fired VALUES (1); RETURN NULL; END $$;
		CREATE TRIGGER f BEFORE INSERT ON watched FOR EACH STATEMENT EXECUTE FUNCTION fire()`)
	if err := prepare(t, pool, build(t, Config{Name: "public.watched", Mode: "upsert", Key: []string{"id"}, Columns: map[string]string{"id": "id"}})); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT count(*)::text FROM fired`, "0")
}

// A pooler may keep the server from saying what types it expects.
func TestEveryProtocol(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool(t), `CREATE TABLE t (i text, k bytea, v jsonb, pos bigint, at timestamptz, h text, u uuid, a int[], c int, n timestamptz)`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{
		"i": "id", "k": "key", "v": "value", "pos": "position", "at": "time",
		"h": "header:h", "u": "json:u", "a": "json:a", "c": "const:5", "n": "now",
	}})
	ticks := build(t, Config{Name: "public.t", Columns: map[string]string{"c": "const:6"}})
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			c, err := pgxpool.ParseConfig(db.URL)
			if err != nil {
				t.Fatal(err)
			}
			c.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			exec(t, pool, `TRUNCATE t`)
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			full := msg(`a'b\"`, `{"u":"6ba7b810-9dad-11d1-80b4-00c04fd430c8","a":[1,null],"s":"it's 🎈\\"}`)
			full.Key = []byte{0, 0xff}
			if err := write(t, pool, s, full, message.Message{ID: "none"}); err != nil {
				t.Fatal(err)
			}
			if err := write(t, pool, ticks, full, full); err != nil {
				t.Fatal(err)
			}
			wantRows(t, pool, `SELECT concat_ws('|', i, k, v->>'s', pos, at AT TIME ZONE 'UTC', h, u, a, c, n > '2020-01-01') FROM t ORDER BY i`,
				`a'b\"|\x00ff|it's 🎈\|42|2026-03-04 05:06:07.891011|6ba7b810-9dad-11d1-80b4-00c04fd430c8|{1,NULL}|5|t`, `none|0|5|t`, "6", "6")
		})
	}
}

func TestConformance(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]Config{
		"insert":          {},
		"insert with key": {Key: []string{"id"}},
		"upsert":          {Mode: "upsert", Key: []string{"id"}},
	} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, `CREATE TABLE effects (id text PRIMARY KEY, payload jsonb NOT NULL, n int CHECK (n >= 0))`)
			c.Name, c.Columns = "public.effects", map[string]string{"id": "id", "payload": "value", "n": "json:n"}
			conform := func(t *testing.T, poison string) {
				sinktest.Run(t, sinktest.Config{
					Pool: pool, New: func() sinks.Sink { return build(t, c) }, Count: sinktest.Rows("public.effects"),
					Message: func(n int) message.Message { return msg(fmt.Sprint("id-", n), fmt.Sprintf(`{"n":%d}`, n)) },
					Poison:  func() message.Message { return msg("poison", poison) },
				})
			}
			t.Run("found by us", func(t *testing.T) { conform(t, `{"n":`) })
			t.Run("found by Postgres", func(t *testing.T) { conform(t, `{"n":-1}`) })
		})
	}
}
