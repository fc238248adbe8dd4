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
	"github.com/jackc/pgx/v5/pgtype"
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
	return Column{Name: name, Field: f, Type: typ}
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
		`"ab\\u0000cdef\u0000"`: true, `"ab\\u0000cdef\\u0000"`: false, `"ab\\u0000\\\u0000"`: true, `\u0000`: true,
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

// Half a surrogate pair is no text, wherever it stands.
func TestHalfASurrogateIsNoText(t *testing.T) {
	texts := Type{Name: "text[]", Category: 'A', Element: oidText}
	for raw, typ := range map[string]Type{`"\ud83d"`: textType, `["a", "\ud83d"]`: texts, `["a", ["b", "\ud83d"], "c"]`: texts} {
		if got, ok, err := jsonColumn(typ, gjson.Parse(raw)); err == nil || ok {
			t.Errorf("%s into %s is %q", raw, typ.Name, got)
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

// Which places go into which types, and what is said of those that can't: a wrong
// answer would be a message that no value of a column can ever be made of.
func TestPlacesAndTypes(t *testing.T) {
	typ := func(name string, oid uint32, category byte) Type {
		return Type{Cast: "pg_catalog." + name, Name: name, OID: oid, Category: category}
	}
	numeric, integer, bigint := typ("numeric", oidNumeric, 'N'), typ("int4", oidInt4, 'N'), typ("int8", oidInt8, 'N')
	bytea, name, char := typ("bytea", oidBytea, 'U'), typ("name", oidName, 'S'), typ(`"char"`, oidChar, 'S')
	date, jsonType := typ("date", 1082, 'D'), typ("json", oidJSON, 'U')
	for _, c := range []struct {
		place string
		typ   Type
		want  wire
		fault string
	}{
		{"id", textType, wireText, ""},
		{"id", uuidType, wireUUID, ""},
		{"id", bytea, wireBytea, ""},
		{"id", bigint, wireText, ""},
		{"id", jsonbType, 0, "plain text; make the column text"},
		{"topic", jsonType, 0, "plain text"},
		{"lane", jsonType, 0, "plain text"},
		{"id", name, 0, "cuts longer values"},
		{"value", char, 0, "cuts longer values"},
		{"const:x", name, 0, "cuts longer values"},
		{"position", bigint, wireInt8, ""},
		{"position", integer, wireInt8, ""},
		{"position", numeric, wireInt8, ""},
		{"position", textType, wireInt8, ""},
		{"position", jsonbType, wireText, ""},
		{"position", bytea, 0, "make the column bigint"},
		{"position", uuidType, 0, "make the column bigint"},
		{"time", timeType, wireTime, ""},
		{"time", date, wireText, ""},
		{"time", textType, wireText, ""},
		{"time", bigint, 0, "make the column timestamptz"},
		{"time", jsonbType, 0, "make the column timestamptz"},
		{"now", timeType, wireNow, ""},
		{"const:x", bigint, wireConst, ""},
		{"value", bytea, wireBytea, ""},
		{"key", uuidType, wireUUID, ""},
		{"header:h", jsonbType, wireText, ""},
		{"json:a", integer, wireText, ""},
		{"cloudevent", textType, 0, "can't fill a column"},
	} {
		got, err := column(t, "c", c.place, c.typ).plan()
		if c.fault == "" && (err != nil || got != c.want) || c.fault != "" && (err == nil || !strings.Contains(err.Error(), c.fault) || !strings.Contains(err.Error(), `"c"`)) {
			t.Errorf("%s into %s travels as %d, %v; want %d, or %q", c.place, c.typ.Name, got, err, c.want, c.fault)
		}
	}
	// All that can't are told at once.
	_, err := NewSet([]Column{column(t, "a", "id", name), column(t, "b", "id", textType), column(t, "d", "time", bigint)})
	if err == nil || !strings.Contains(err.Error(), `"a"`) || !strings.Contains(err.Error(), `"d"`) || strings.Contains(err.Error(), `"b"`) {
		t.Errorf("the set's error is %v", err)
	}
	// Without an array the number of rows is a parameter of its own.
	s := set(t, column(t, "a", "const:x", textType), column(t, "b", "now", timeType), column(t, "d", "const:y", textType))
	if want := "pg_catalog.generate_series(1, $3::pg_catalog.int8) AS u(ord)"; s.From() != want {
		t.Errorf("From is %s, want %s", s.From(), want)
	}
	v, err := s.Encode(make([]message.Message, 5))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]any{"x", "y", int64(5)}, v.Args()); d != "" {
		t.Error(d)
	}
}

// Where values are read by COPY, nothing is converted: only types whose binary form is
// the value as it stands here.
func TestWhatCanBeCopied(t *testing.T) {
	typ := func(name string, oid uint32) Type { return Type{Cast: name, Name: name, OID: oid, Category: 'S'} }
	for _, c := range []struct {
		place string
		typ   Type
		want  bool
	}{
		{"id", textType, true},
		{"id", typ("varchar", oidVarchar), true},
		{"id", typ("bpchar", oidBpchar), true},
		{"value", jsonbType, true},
		{"value", typ("json", oidJSON), true},
		{"id", uuidType, true},
		{"time", timeType, true},
		{"value", typ("bytea", oidBytea), true},
		{"position", typ("int8", oidInt8), true},
		{"const:x", textType, true},
		{"position", typ("int4", oidInt4), false},
		{"position", typ("numeric", oidNumeric), false},
		{"id", typ("inet", 869), false},
		{"json:a", typ("int4", oidInt4), false},
		{"now", timeType, false},
		{"const:x", typ("inet", 869), false},
	} {
		if got := set(t, column(t, "c", c.place, c.typ)).CanCopy(); got != c.want {
			t.Errorf("%s into %s can be copied: %v, want %v", c.place, c.typ.Name, got, c.want)
		}
	}
}

// What a message becomes, place by place; where it has nothing there, NULL.
func TestValues(t *testing.T) {
	bytea := Type{Cast: "pg_catalog.bytea", Name: "bytea", OID: oidBytea, Category: 'U'}
	bigint := Type{Cast: "pg_catalog.int8", Name: "int8", OID: oidInt8, Category: 'N'}
	const uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
	s := set(t,
		column(t, "a", "id", textType), column(t, "b", "key", uuidType), column(t, "d", "value", jsonbType), column(t, "e", "header:h", bytea),
		column(t, "f", "position", bigint), column(t, "g", "time", timeType), column(t, "h", "time", textType), column(t, "i", "json:x", textType), column(t, "j", "value", textType))
	at := time.Date(2026, 3, 4, 5, 6, 7, 8000, time.FixedZone("", 3600))
	values, err := s.Encode([]message.Message{
		{ID: "one", Key: []byte(uuid), Value: []byte(`{"x":"y"}`), Headers: []message.Header{{Key: "h", Value: []byte{0xff}}}, Position: message.Position{Offset: 7}, Time: at},
		{ID: "two"},
	})
	if err != nil {
		t.Fatal(err)
	}
	text := func(s string) pgtype.Text { return pgtype.Text{String: s, Valid: true} }
	key, _ := parseUUID(uuid)
	want := []any{
		[]pgtype.Text{text("one"), text("two")},
		[]pgtype.UUID{{Bytes: key, Valid: true}, {}},
		[]pgtype.Text{text(`{"x":"y"}`), {}},
		[][]byte{{0xff}, nil},
		[]pgtype.Int8{{Int64: 7, Valid: true}, {Valid: true}},
		[]pgtype.Timestamptz{{Time: at.UTC(), Valid: true}, {}},
		[]pgtype.Text{text("2026-03-04T04:06:07.000008Z"), {}},
		[]pgtype.Text{text("y"), {}},
		[]pgtype.Text{text(`{"x":"y"}`), {}},
	}
	if d := cmp.Diff(want, values.Args()); d != "" {
		t.Error(d)
	}
	// A document that is none is the message's fault, whoever asks for it and however often.
	for _, place := range []string{"value", "json:x", "key", "header:h"} {
		for _, doc := range []string{`{"x":`, "{\"x\":\"\xff\"}", `{"x":"\u0000"}`} {
			m := message.Message{Key: []byte(doc), Value: []byte(doc), Headers: []message.Header{{Key: "h", Value: []byte(doc)}}}
			two := set(t, column(t, "a", place, jsonbType), column(t, "b", place, jsonbType))
			if _, err := two.Encode([]message.Message{{ID: "fine"}, m}); len(sinks.AllPermanent(err)) != 1 || sinks.AllPermanent(err)[1] == nil {
				t.Errorf("%s of %q: %v", place, doc, err)
			}
		}
	}
}
