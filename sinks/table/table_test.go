package table

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// at is a time with microseconds, all that Postgres keeps.
var at = time.Date(2026, 3, 4, 5, 6, 7, 891011000, time.UTC)

// msg is a message with a JSON value.
func msg(id, value string) message.Message {
	return message.Message{
		ID: id, Topic: "orders", Key: []byte("k-" + id), Value: []byte(value), Time: at,
		Position: message.Position{Lane: message.Lane{Source: "main", Name: "orders/3"}, Offset: 42},
	}
}

// build makes a sink, or ends the test.
func build(t testing.TB, c Config) *Sink {
	t.Helper()
	s, err := c.Sink()
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

const nullsNotDistinct = "NULLS NOT DISTINCT"

// skipUnknown skips a part of a test whose SQL the server doesn't know.
func skipUnknown(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if !strings.Contains(sql, nullsNotDistinct) {
		return
	}
	var version int
	if err := pool.QueryRow(t.Context(), `SELECT current_setting('server_version_num')::int`).Scan(&version); err != nil {
		t.Fatal(err)
	}
	if version < 150000 {
		t.Skip(nullsNotDistinct + " came with Postgres 15")
	}
}

// prepare and write run the sink in a transaction of its own, which they commit
// unless it fails.
func prepare(t testing.TB, pool *pgxpool.Pool, s *Sink) error {
	return inTx(t, pool, func(tx pgx.Tx) error { return s.Prepare(t.Context(), tx) })
}

func write(t testing.TB, pool *pgxpool.Pool, s *Sink, msgs ...message.Message) error {
	return inTx(t, pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, sinks.NewBatch(msgs)) })
}

func inTx(t testing.TB, pool *pgxpool.Pool, f func(pgx.Tx) error) error {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit(t.Context())
}

// rows reads a query of one text column. NULL reads as "NULL".
func rows(t testing.TB, pool *pgxpool.Pool, sql string) []string {
	t.Helper()
	r, err := pool.Query(t.Context(), sql)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(r, func(row pgx.CollectableRow) (string, error) {
		var s *string
		if err := row.Scan(&s); err != nil || s == nil {
			return "NULL", err
		}
		return *s, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func wantRows(t testing.TB, pool *pgxpool.Pool, sql string, want ...string) {
	t.Helper()
	if d := cmp.Diff(want, rows(t, pool, sql)); d != "" {
		t.Errorf("%s (-want +got):\n%s", sql, d)
	}
}

func TestInsertFillsEveryKindOfPlace(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE all_places (i text, k bytea, v jsonb, topic text, lane text, pos bigint, at timestamptz, h text, j int, n timestamptz, c text)`)
	s := build(t, Config{Name: "public.all_places", Columns: map[string]string{
		"i": "id", "k": "key", "v": "value", "topic": "topic", "lane": "lane", "pos": "position", "at": "time",
		"h": "header:h", "j": "json:a.b", "n": "now", "c": "const:it's $1",
	}})
	m := msg("x", `{"a":{"b":7}}`)
	m.Headers = []message.Header{{Key: "h", Value: []byte("old")}, {Key: "h", Value: []byte("né 🎈")}}
	if err := write(t, pool, s, m); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT concat_ws('|', i, convert_from(k, 'UTF8'), v, topic, lane, pos, at AT TIME ZONE 'UTC', h, j, n > '2020-01-01', c) FROM all_places`,
		`x|k-x|{"a": {"b": 7}}|orders|orders/3|42|2026-03-04 05:06:07.891011|né 🎈|7|t|it's $1`)
}

func TestInsertKeepsLaneOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE seq (n int GENERATED ALWAYS AS IDENTITY, id text)`)
	s := build(t, Config{Name: "public.seq", Columns: map[string]string{"id": "id"}})
	var msgs []message.Message
	var want []string
	for i := range 3000 {
		id := strings.Repeat("z", i%7) + string(rune('a'+i%26))
		msgs, want = append(msgs, msg(id, "{}")), append(want, id)
	}
	if err := write(t, pool, s, msgs...); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT id FROM seq ORDER BY n`, want...)
}

func TestOnlyConstants(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE ticks (c int, n timestamptz)`)
	s := build(t, Config{Name: "public.ticks", Columns: map[string]string{"c": "const:5", "n": "now"}})
	if err := write(t, pool, s, msg("a", ""), msg("b", "")); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT c::text FROM ticks`, "5", "5")
}

func TestInsertWithKeyKeepsTheFirst(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE firsts (id text PRIMARY KEY, v jsonb)`)
	s := build(t, Config{Name: "public.firsts", Key: []string{"id"}, Columns: map[string]string{"id": "id", "v": "value"}})
	for _, msgs := range [][]message.Message{{msg("a", "1"), msg("b", "2"), msg("a", "3")}, {msg("b", "4"), msg("c", "5")}} {
		if err := write(t, pool, s, msgs...); err != nil {
			t.Fatal(err)
		}
	}
	wantRows(t, pool, `SELECT id || v FROM firsts ORDER BY id`, "a1", "b2", "c5")
}

func TestUpsertLastMessageWins(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE lasts (a text, b int, v text, UNIQUE (b, a))`)
	s := build(t, Config{
		Name: "public.lasts", Mode: "upsert", Key: []string{"a", "b"},
		Columns: map[string]string{"a": "json:a", "b": "json:b", "v": "json:v"},
	})
	if err := write(t, pool, s, msg("1", `{"a":"x","b":1,"v":"old"}`), msg("2", `{"a":"x","b":1,"v":"new"}`),
		msg("3", `{"a":"y","b":1,"v":"y1"}`), msg("4", `{"b":1,"v":"null1"}`), msg("5", `{"b":1,"v":"null2"}`)); err != nil {
		t.Fatal(err)
	}
	if err := write(t, pool, s, msg("6", `{"a":"y","b":1,"v":"y2"}`), msg("7", `{"a":"y","b":1,"v":null}`)); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT concat_ws(',', coalesce(a, '-'), b, coalesce(v, '-')) FROM lasts ORDER BY 1`,
		"-,1,null1", "-,1,null2", "x,1,new", "y,1,-")
}

// A tombstone would write NULL over the row.
func TestTombstones(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE rows (id text PRIMARY KEY, v text); CREATE TABLE seen (id text PRIMARY KEY, topic text); CREATE TABLE log (id text, v text)`)
	upsert := build(t, Config{Name: "public.rows", Mode: "upsert", Key: []string{"id"}, Columns: map[string]string{"id": "id", "v": "value"}})
	if err := write(t, pool, upsert, msg("a", `{"n":1}`), msg("b", ""), msg("c", "null")); err != nil {
		t.Fatal(err)
	}
	tombstone := msg("a", "")
	tombstone.Value = nil
	err := write(t, pool, upsert, msg("d", "4"), tombstone, msg("e", "5"), tombstone)
	all := sinks.AllPermanent(err)
	if len(all) != 2 || all[1] == nil || all[3] == nil || !strings.Contains(all[1].Error(), "tombstone") || !strings.Contains(all[1].Error(), "sink.statement") {
		t.Errorf("two tombstones give %v", err)
	}
	wantRows(t, pool, `SELECT concat_ws(',', id, coalesce(v, '-')) FROM rows ORDER BY 1`, `a,{"n":1}`, "b,", "c,null")
	// One that nothing is read of overwrites nothing.
	if err := write(t, pool, build(t, Config{Name: "public.seen", Mode: "upsert", Key: []string{"id"}, Columns: map[string]string{"id": "id", "topic": "topic"}}), tombstone); err != nil {
		t.Error(err)
	}
	if err := write(t, pool, build(t, Config{Name: "public.log", Columns: map[string]string{"id": "id", "v": "value"}}), tombstone); err != nil {
		t.Error(err)
	}
	wantRows(t, pool, `SELECT id || coalesce(v, ' has none') FROM log`, "a has none")
}

// A view has no index of its own: the server finds the one of the table behind it,
// and says so when there is none.
func TestUpsertIntoAView(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE behind (k text UNIQUE, v text, w text); CREATE VIEW seen AS SELECT k, v FROM behind; CREATE VIEW plain AS SELECT v FROM behind`)
	for _, mode := range []string{ModeInsert, ModeUpsert} {
		exec(t, pool, `TRUNCATE behind`)
		s := build(t, Config{Name: "public.seen", Mode: mode, Key: []string{"k"}, Columns: map[string]string{"k": "json:k", "v": "id"}})
		if err := prepare(t, pool, s); err != nil {
			t.Fatal(err)
		}
		if err := write(t, pool, s, msg("1", `{"k":"x"}`), msg("2", `{"k":"x"}`), msg("3", `{}`), msg("4", `{}`)); err != nil {
			t.Fatal(err)
		}
		if err := write(t, pool, s, msg("5", `{"k":"x"}`)); err != nil {
			t.Fatal(err)
		}
		want := map[string]string{ModeInsert: "x=1", ModeUpsert: "x=5"}[mode]
		wantRows(t, pool, `SELECT coalesce(k, '-') || '=' || v FROM behind ORDER BY k NULLS LAST, v`, want, "-=3", "-=4")
	}
	s := build(t, Config{Name: "public.plain", Mode: ModeUpsert, Key: []string{"v"}, Columns: map[string]string{"v": "id"}})
	err := prepare(t, pool, s)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "42P10" || !strings.Contains(err.Error(), "table public.plain") {
		t.Errorf("without a unique index behind it: %v", err)
	}
}

// Keys that differ as text and are one to the index: a statement that sees two
// rows there fails with 21000.
func TestUpsertComparesKeysAsTheIndexDoes(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
		CREATE DOMAIN money2 AS numeric(8,2)`)
	for name, c := range map[string]struct{ typ, first, second string }{
		"nondeterministic collation": {"text COLLATE nocase", `"Ab"`, `"aB"`},
		"numeric":                    {"numeric", "1.0", "1.00"},
		"rounded numeric":            {"numeric(8,2)", "1.001", "1.002"},
		"rounded domain":             {"money2", "1.001", "1.002"},
		"rounded time":               {"timestamptz(0)", `"2026-01-01T00:00:00.1Z"`, `"2026-01-01T00:00:00.2Z"`},
		"time zones":                 {"timestamptz", `"2026-01-01T00:00:00Z"`, `"2026-01-01T01:00:00+01:00"`},
		"padded":                     {"char(5)", `"a"`, `"a  "`},
		"uuid":                       {"uuid", `"6BA7B810-9DAD-11D1-80B4-00C04FD430C8"`, `"{6ba7b8109dad11d180b400c04fd430c8}"`},
		"nulls not distinct":         {"int UNIQUE NULLS NOT DISTINCT", "null", "null"},
		"jsonb":                      {"jsonb", `{"a":1,"b":2}`, `{"b":2, "a":1.0}`},
	} {
		t.Run(name, func(t *testing.T) {
			skipUnknown(t, pool, c.typ)
			exec(t, pool, `DROP TABLE IF EXISTS keys`)
			unique := "UNIQUE"
			if strings.Contains(c.typ, "UNIQUE") {
				unique = ""
			}
			exec(t, pool, `CREATE TABLE keys (k `+c.typ+` `+unique+`, v text)`)
			s := build(t, Config{Name: "public.keys", Mode: "upsert", Key: []string{"k"}, Columns: map[string]string{"k": "json:k", "v": "id"}})
			if err := write(t, pool, s, msg("first", `{"k":`+c.first+`}`), msg("second", `{"k":`+c.second+`}`)); err != nil {
				t.Fatal(err)
			}
			wantRows(t, pool, `SELECT v FROM keys`, "second")
		})
	}
}

func TestUpsertWithNothingButKeys(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE seen (id text PRIMARY KEY)`)
	s := build(t, Config{Name: "public.seen", Mode: "upsert", Key: []string{"id"}, Columns: map[string]string{"id": "id"}})
	for range 2 {
		if err := write(t, pool, s, msg("a", ""), msg("a", "")); err != nil {
			t.Fatal(err)
		}
	}
	wantRows(t, pool, `SELECT id FROM seen`, "a")
}

func TestNamesThatNeedQuotes(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE SCHEMA "My.Schema"; CREATE TABLE "My.Schema"."or""der's" ("Id" text PRIMARY KEY, "select" text, "a ""b""; --" int)`)
	s := build(t, Config{
		Name: `"My.Schema"."or""der's"`, Mode: "upsert", Key: []string{"Id"},
		Columns: map[string]string{"Id": "id", "select": "topic", `a "b"; --`: "position"},
	})
	if err := write(t, pool, s, msg("a", "")); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT concat_ws(',', "Id", "select", "a ""b""; --") FROM "My.Schema"."or""der's"`, "a,orders,42")
}

func TestFollowsAChangedTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE shifts (v int)`)
	s := build(t, Config{Name: "public.shifts", Columns: map[string]string{"v": "json:v"}})
	if err := write(t, pool, s, msg("a", `{"v":1}`)); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE shifts ALTER v TYPE uuid USING NULL`)
	m := msg("b", `{"v":"6ba7b810-9dad-11d1-80b4-00c04fd430c8"}`)
	if err := write(t, pool, s, m); err == nil {
		t.Fatal("the old plan still works")
	} else if _, permanent := sinks.AsPermanent(err); permanent {
		t.Fatalf("a changed table is called the message's fault: %v", err)
	}
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	if err := write(t, pool, s, m); err != nil {
		t.Fatal(err)
	}
}
