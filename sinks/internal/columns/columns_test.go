package columns

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/tidwall/gjson"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	textType  = Type{Cast: "pg_catalog.text", Name: "text", OID: oidText, Category: 'S'}
	jsonbType = Type{Cast: "pg_catalog.jsonb", Name: "jsonb", OID: oidJSONB, Category: 'U'}
	uuidType  = Type{Cast: "pg_catalog.uuid", Name: "uuid", OID: oidUUID, Category: 'U'}
	timeType  = Type{Cast: "pg_catalog.timestamptz", Name: "timestamptz", OID: oidTimestamptz, Category: 'D'}
)

func set(t testing.TB, cols ...Column) *Set {
	t.Helper()
	s, err := NewSet(cols)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func column(t testing.TB, name, place string, typ Type) Column {
	t.Helper()
	f, err := message.ParseField(place)
	if err != nil {
		t.Fatal(err)
	}
	return Column{name, f, typ}
}

func TestSQL(t *testing.T) {
	s := set(t, column(t, "a", "id", textType), column(t, "n", "now", timeType), column(t, "c", "const:x", textType), column(t, "u", "key", uuidType))
	want := `ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($3::pg_catalog.uuid[])) WITH ORDINALITY AS u(c1, c4, ord)`
	if s.From() != want {
		t.Errorf("From is  %s\nwant it %s", s.From(), want)
	}
	exprs := []string{s.Expr(0), s.Expr(1), s.Expr(2), s.Expr(3), s.Row(0), s.Row(1), s.Row(2)}
	if d := cmp.Diff([]string{"u.c1::pg_catalog.text", "pg_catalog.now()", "$2::pg_catalog.text::pg_catalog.text", "u.c4::pg_catalog.uuid", "u.c1", "", ""}, exprs); d != "" {
		t.Error(d)
	}
	if s.CanCopy() {
		t.Error("COPY can't say now()")
	}
}

func TestTimesBeyondPostgres(t *testing.T) {
	s := set(t, column(t, "at", "time", timeType))
	for when, ok := range map[time.Time]bool{
		{}: true, // NULL
		time.Date(-4712, 1, 1, 0, 0, 0, 0, time.UTC):               true,
		time.Date(294276, 12, 31, 23, 59, 59, 999999000, time.UTC): true,
		time.Date(294277, 1, 1, 0, 0, 0, 0, time.UTC):              false,
		time.Date(-5000, 1, 1, 0, 0, 0, 0, time.UTC):               false,
		time.UnixMilli(1<<63 - 1):                                  false,
		time.UnixMilli(-1 << 63):                                   false,
	} {
		_, err := s.Encode([]message.Message{{}, {Time: when}})
		if index, permanent := sinks.AsPermanent(err); (err == nil) != ok || permanent && index != 1 {
			t.Errorf("%v: %v", when, err)
		}
	}
}

func TestErrorsNameColumnAndPlace(t *testing.T) {
	s := set(t, column(t, "a", "id", textType), column(t, "b", "json:x.y", uuidType))
	_, err := s.Encode([]message.Message{{ID: "ok"}, {ID: "ok", Value: []byte(`{"x":{"y":"` + strings.Repeat("z", 500) + `"}}`)}, {ID: "\xff"}})
	all := sinks.AllPermanent(err)
	if len(all) != 2 || len(all[1].Error()) > 200 || !strings.HasPrefix(all[1].Error(), `column "b" from json:x.y: "zzz`) ||
		!strings.HasPrefix(all[2].Error(), `column "a" from id: it is not valid UTF-8`) {
		t.Errorf("the errors are %v", all)
	}
	if want := "(and 1 more messages are at fault)"; !strings.Contains(err.Error(), want) {
		t.Errorf("the error is %q, want something with %q", err, want)
	}
}

// Encoding few or many messages costs the same few allocations: one array for
// each column.
func TestAllocations(t *testing.T) {
	s := set(t, column(t, "a", "id", uuidType), column(t, "v", "value", jsonbType), column(t, "t", "time", timeType))
	msgs := make([]message.Message, 1000)
	for i := range msgs {
		msgs[i] = message.Message{ID: "6ba7b810-9dad-11d1-80b4-00c04fd430c8", Value: []byte(`{"a":[1,2,3]}`), Time: time.Unix(1, 0)}
	}
	if n := testing.AllocsPerRun(5, func() { _, _ = s.Encode(msgs) }); n > 20 {
		t.Errorf("1,000 messages take %v allocations", n)
	}
}

func TestEscapedNUL(t *testing.T) {
	for raw, bad := range map[string]bool{
		`"\u0000"`: true, `"a\\\u0000"`: true, `"\\u0000"`: false, `"\\\\u0000"`: false, `"\\u0000\u0000"`: true,
		`"u0000"`: false, `"\u00001"`: true, `"\u0001"`: false, `{"\u0000":1}`: true,
	} {
		if err := checkEscapes(jsonbType, raw); (err != nil) != bad {
			t.Errorf("%s: %v", raw, err)
		}
	}
}

// What a JSON element becomes depends on the column: an array is a Postgres array
// only where the column is one, and in an array of JSON its elements stay JSON.
func TestJSONIntoColumns(t *testing.T) {
	texts := Type{Name: "text[]", Category: 'A', Element: oidText}
	jsons := Type{Name: "json[]", Category: 'A', Element: oidJSON}
	jsonbs := Type{Name: "jsonb[]", Category: 'A', Element: oidJSONB}
	for _, c := range []struct {
		typ     Type
		raw     string
		want    string
		null    bool
		refused error
	}{
		{typ: textType, raw: `["a", 1]`, want: `["a", 1]`},
		{typ: textType, raw: `{"a": [1]}`, want: `{"a": [1]}`},
		{typ: textType, raw: `"a"`, want: `a`},
		{typ: textType, raw: `null`, null: true},
		{typ: textType, raw: ``, null: true},
		{typ: jsonbType, raw: `["a", 1]`, want: `["a", 1]`},
		{typ: jsonbType, raw: `["\u0000"]`, refused: errEscapedNUL},
		{typ: texts, raw: `["a", null, [1, "b\"\\"]]`, want: `{"a",NULL,{"1","b\"\\"}}`},
		{typ: texts, raw: `{"a": [1]}`, want: `{"a": [1]}`},
		{typ: jsons, raw: `["a", null, [1, "b"], {"c": 1}]`, want: `{"\"a\"",NULL,"[1, \"b\"]","{\"c\": 1}"}`},
		{typ: jsonbs, raw: `["a", null, [1]]`, want: `{"\"a\"",NULL,"[1]"}`},
	} {
		got, ok, err := jsonColumn(c.typ, gjson.Parse(c.raw))
		if !errors.Is(err, c.refused) || err == nil && (ok == c.null || got != c.want) {
			t.Errorf("%s into %s is %q, %v, %v; want %q", c.raw, c.typ.Name, got, ok, err, c.want)
		}
	}
}

func TestBracesOfAUUID(t *testing.T) {
	const digits = "6ba7b8109dad11d180b400c04fd430c8"
	for s, want := range map[string]bool{
		digits: true, "{" + digits + "}": true,
		"{" + digits: false, digits + "}": false, "{" + digits + "x": false, "x" + digits + "}": false, "{" + digits + "{": false, "}" + digits + "}": false,
		"{{" + digits + "}}": false, "{" + digits + "}}": false, "{": false, "{}": false, "": false,
	} {
		if _, ok := parseUUID(s); ok != want {
			t.Errorf("%q is a UUID: %v, want %v", s, ok, want)
		}
	}
}

func connect(f testing.TB) *pgx.Conn {
	conn, err := pgx.Connect(context.Background(), pgtest.New(f).URL)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// parseUUID takes what Postgres takes, and reads it alike.
func FuzzUUID(f *testing.F) {
	for _, s := range []string{
		"6ba7b810-9dad-11d1-80b4-00c04fd430c8", "{6BA7B8109dad11d180b400c04fd430c8}", "6ba7-b810-9dad-11d1-80b4-00c0-4fd4-30c8",
		"6ba7b810-9dad-11d1-80b4-00c04fd430c8-", "-6ba7b8109dad11d180b400c04fd430c8", "{6ba7b8109dad11d180b400c04fd430c8", "6ba7b8109dad11d180b400c04fd430c8}", "", "{}", "6b-a7b8109dad11d180b400c04fd430c8",
	} {
		f.Add(s)
	}
	conn := connect(f)
	f.Fuzz(func(t *testing.T, s string) {
		if checkText(s) != nil {
			return
		}
		var want [16]byte
		err := conn.QueryRow(context.Background(), "SELECT $1::text::uuid", s).Scan(&want)
		got, ok := parseUUID(s)
		if ok != (err == nil) || ok && got != want {
			t.Errorf("%q gives %x, %v; Postgres says %x, %v", s, got, ok, want, err)
		}
	})
}

// A JSON array of texts and nulls arrives in a text[] as it is.
func FuzzArrayLiteral(f *testing.F) {
	f.Add("a", `b"\`, "NULL", true)
	f.Add("", " ", "{},", false)
	f.Add("\n\t\r\v", "'", "ü🎈", true)
	conn := connect(f)
	f.Fuzz(func(t *testing.T, a, b, c string, null bool) {
		want := []*string{&a, &b, &c}
		for _, s := range want {
			if checkText(*s) != nil {
				return
			}
		}
		if null {
			want[1] = nil
		}
		doc, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		literal, ok, err := jsonColumn(Type{Category: 'A', Element: oidText}, gjson.ParseBytes(doc))
		if err != nil || !ok {
			t.Fatalf("%s: %v, %v", doc, ok, err)
		}
		var got []*string
		if err := conn.QueryRow(context.Background(), "SELECT $1::text::text[]", literal).Scan(&got); err != nil {
			t.Fatalf("%s: Postgres refuses %q: %v", doc, literal, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s becomes %q:\n%s", doc, literal, d)
		}
	})
}

// What passes here as JSON for a jsonb, Postgres either takes or refuses as bad
// data; and what is refused here, Postgres refuses too (but for depth).
func FuzzJSONB(f *testing.F) {
	for _, s := range []string{`{"a":[1,null,"\u0000"]}`, `"\\u0000"`, `1e999999`, `"\ud83d"`, `[[[]]]`, `{"a":1,"a":2}`, "\"\xff\"", `"\/"`, "\v1", "1 ", "-0"} {
		f.Add([]byte(s))
	}
	conn := connect(f)
	s := set(f, column(f, "v", "value", jsonbType))
	sql := "SELECT " + s.Expr(0) + " FROM " + s.From()
	f.Fuzz(func(t *testing.T, doc []byte) {
		values, ours := s.Encode([]message.Message{{Value: doc}})
		if ours != nil {
			if utf8.Valid(doc) && !strings.Contains(ours.Error(), "deeper") && doc != nil && !strings.ContainsRune(string(doc), 0) {
				if _, err := conn.Exec(context.Background(), "SELECT $1::text::jsonb", string(doc)); err == nil {
					t.Errorf("%q is refused (%v), but Postgres takes it", doc, ours)
				}
			}
			return
		}
		_, err := conn.Exec(context.Background(), sql, values.Args()...)
		var pg *pgconn.PgError
		if err != nil && (!errors.As(err, &pg) || !strings.HasPrefix(pg.Code, "22")) {
			t.Errorf("%q: %v", doc, err)
		}
	})
}
