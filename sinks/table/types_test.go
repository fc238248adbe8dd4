package table

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

const typesSchema = `
CREATE SCHEMA shop;
CREATE TYPE shop.mood AS ENUM ('sad', 'Very Happy');
CREATE DOMAIN shop.short AS varchar(3);
CREATE DOMAIN shop.shorter AS shop.short CHECK (VALUE <> 'bad');
CREATE DOMAIN shop.tags AS text[];
CREATE TYPE shop.pair AS (a int, b text);`

// Each case writes one value to a column of the type and reads it back as text.
func TestTypes(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, typesSchema)
	const uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
	for _, c := range []struct {
		name, typ, from string
		m               message.Message
		want            string // as text; or what the error says:
		state           string // its SQLSTATE, or "ours": PermanentAt
	}{
		{"numeric keeps all digits", "numeric", "json:v", value(`12345678901234567890.123456789012345678901234567890`), "12345678901234567890.123456789012345678901234567890", ""},
		{"numeric is rounded as declared", "numeric(6,2)", "json:v", value(`1234.005`), "1234.01", ""},
		{"numeric overflows", "numeric(4,2)", "json:v", value(`123.4`), "overflow", "22003"},
		{"numeric with an exponent", "numeric", "json:v", value(`1E3`), "1000", ""},
		{"numeric from a string", "numeric", "json:v", value(`"12.50"`), "12.50", ""},
		{"bigint beyond a double", "bigint", "json:v", value(`9007199254740993`), "9007199254740993", ""},
		{"bigint too large", "bigint", "json:v", value(`9223372036854775808`), "out of range", "22003"},
		{"bigint from a fraction", "bigint", "json:v", value(`1.5`), "invalid input", "22P02"},
		{"smallint from a position", "smallint", "position", value(`0`), "42", ""},
		{"numeric from a position", "numeric", "position", value(`0`), "42", ""},
		{"text from a position", "varchar", "position", value(`0`), "42", ""},
		{"jsonb from a position", "jsonb", "position", value(`0`), "42", ""},
		{"double", "float8", "json:v", value(`0.1`), "0.1", ""},
		{"bool", "bool", "json:v", value(`true`), "true", ""},
		{"bool as text", "text", "json:v", value(`false`), "false", ""},
		{"uuid", "uuid", "json:v", value(`"` + uuid + `"`), uuid, ""},
		{"uuid in capitals and braces", "uuid", "json:v", value(`"{` + strings.ToUpper(uuid) + `}"`), uuid, ""},
		{"uuid that is none", "uuid", "json:v", value(`"` + uuid[1:] + `"`), "is no UUID", "ours"},
		{"timestamptz", "timestamptz", "json:v", value(`"2026-01-02T03:04:05.123456+01:00"`), "2026-01-02 02:04:05.123456+00", ""},
		{"timestamptz from the message", "timestamptz", "time", value(`0`), "2026-03-04 05:06:07.891011+00", ""},
		{"timestamptz that is rounded", "timestamptz(0)", "time", value(`0`), "2026-03-04 05:06:08+00", ""},
		{"timestamp is UTC", "timestamp", "time", value(`0`), "2026-03-04 05:06:07.891011", ""},
		{"date is UTC", "date", "time", value(`0`), "2026-03-04", ""},
		{"text of a time", "text", "time", value(`0`), "2026-03-04T05:06:07.891011Z", ""},
		{"no time", "timestamptz", "time", message.Message{}, "NULL", ""},
		{"jsonb", "jsonb", "json:v", value(`{"a":[1,null]}`), `{"a": [1, null]}`, ""},
		{"jsonb of a string stays a JSON string", "jsonb", "json:v", value(`"x\ty"`), `"x\ty"`, ""},
		{"jsonb of null is NULL", "jsonb", "json:v", value(`null`), "NULL", ""},
		{"json keeps its spelling", "json", "json:v", value(`{"a" :  1.0, "a":2}`), `{"a" :  1.0, "a":2}`, ""},
		{"json keeps an escaped NUL", "json", "json:v", value(`"a\u0000"`), `"a\u0000"`, ""},
		{"jsonb can't hold an escaped NUL", "jsonb", "value", value(`"a\u0000"`), "u0000", "ours"},
		{"jsonb takes an escaped backslash before u0000", "jsonb", "json:v", value(`"a\\u0000"`), `"a\\u0000"`, ""},
		{"text can't hold an escaped NUL", "text", "json:v", value(`"a\u0000"`), "NUL", "ours"},
		{"text can't hold half a surrogate", "text", "json:v", value(`"\ud83d"`), "surrogate", "ours"},
		{"jsonb can't hold half a surrogate", "jsonb", "json:v", value(`"\ud83d"`), "invalid input", "22P02"},
		{"text of an object is its JSON", "text", "json:v", value(`{"a": [1]}`), `{"a": [1]}`, ""},
		{"text of an array is its JSON", "text", "json:v", value(`["a", {"b": 1}]`), `["a", {"b": 1}]`, ""},
		{"json of an array", "json", "json:v", value(`[1,  "a"]`), `[1,  "a"]`, ""},
		{"emoji", "text", "json:v", value(`"na\u00efve \ud83c\udf88 🎈"`), "naïve 🎈 🎈", ""},
		{"varchar too long", "varchar(3)", "json:v", value(`"abcd"`), "too long", "22001"},
		{"varchar that fits", "varchar(3)", "json:v", value(`"äöü"`), "äöü", ""},
		{"char too long", "char(3)", "json:v", value(`"abcd"`), "too long", "22001"},
		{"bit too long", "bit(3)", "json:v", value(`"1011"`), "does not match", "22026"},
		{"domain over varchar too long", "shop.short", "json:v", value(`"abcd"`), "too long", "22001"},
		{"domain of a domain too long", "shop.shorter", "json:v", value(`"abcd"`), "too long", "22001"},
		{"domain of a domain", "shop.shorter", "json:v", value(`"abc"`), "abc", ""},
		{"domain with a CHECK", "shop.shorter", "json:v", value(`"bad"`), "violates check", "23514"},
		{"array of varchar too long", "varchar(3)[]", "json:v", value(`["abc","abcd"]`), "too long", "22001"},
		{"array of domains too long", "shop.short[]", "json:v", value(`["abcd"]`), "too long", "22001"},
		{"array of domains", "shop.short[]", "json:v", value(`["abc", null]`), "{abc,NULL}", ""},
		{"domain over an array", "shop.tags", "json:v", value(`["a","b c"]`), `{a,"b c"}`, ""},
		{"enum", "shop.mood", "json:v", value(`"Very Happy"`), "Very Happy", ""},
		{"enum without such a label", "shop.mood", "json:v", value(`"glad"`), "invalid input", "22P02"},
		{"array of enums", "shop.mood[]", "json:v", value(`["sad","Very Happy"]`), `{sad,"Very Happy"}`, ""},
		{"composite", "shop.pair", "json:v", value(`"(1,\"x y\")"`), `(1,"x y")`, ""},
		{"int[]", "int[]", "json:v", value(`[1,null,-3]`), "{1,NULL,-3}", ""},
		{"int[] of two dimensions", "int[]", "json:v", value(`[[1,2],[3,4]]`), "{{1,2},{3,4}}", ""},
		{"int[] that is ragged", "int[]", "json:v", value(`[[1,2],[3]]`), "malformed array", "22P02"},
		{"int[] from a number", "int[]", "json:v", value(`1`), "malformed array", "22P02"},
		{"empty array", "text[]", "json:v", value(`[]`), "{}", ""},
		{
			"text[] with everything in it", "text[]", "json:v", value(`["", "NULL", "a,b", "{x}", "q\"q", "b\\b", " s ", "\n", "🎈", 1.50, true, {"k":"v"}]`),
			`{"","NULL","a,b","{x}","q\"q","b\\b"," s ","` + "\n" + `",🎈,1.50,true,"{\"k\":\"v\"}"}`, "",
		},
		{"text[] from an array literal", "text[]", "json:v", value(`"{a,b}"`), "{a,b}", ""},
		{"text[] with a NUL", "text[]", "json:v", value(`["\u0000"]`), "NUL", "ours"},
		{"jsonb[]", "jsonb[]", "json:v", value(`[{"a":1},[2],"s",null]`), `{"{\"a\": 1}",[2],"\"s\"",NULL}`, ""},
		{"json[]", "json[]", "json:v", value(`[{"a":1},[2, 3],"s",null]`), `{"{\"a\":1}","[2, 3]","\"s\"",NULL}`, ""},
		{"json[] of nested arrays", "json[]", "json:v", value(`[[[1]]]`), `{[[1]]}`, ""},
		{"bytea from a value", "bytea", "value", message.Message{Value: []byte("\x00\xff\\")}, `\x00ff5c`, ""},
		{"bytea from an empty value", "bytea", "value", message.Message{Value: []byte{}}, `\x`, ""},
		{"bytea from an id", "bytea", "id", message.Message{ID: "\xff\x00"}, `\xff00`, ""},
		{"bytea from a header", "bytea", "header:h", withHeader("\xfe"), `\xfe`, ""},
		{"bytea from a tombstone", "bytea", "value", message.Message{}, "NULL", ""},
		{"jsonb from a tombstone", "jsonb", "value", message.Message{}, "NULL", ""},
		{"jsonb from an empty value", "jsonb", "value", message.Message{Value: []byte{}}, "not valid JSON", "ours"},
		{"path into a tombstone", "int", "json:v", message.Message{}, "NULL", ""},
		{"path that leads nowhere", "int", "json:w", value(`1`), "NULL", ""},
		{"path into what is no JSON", "int", "json:v", message.Message{Value: []byte(`{"v":1}}`)}, "not valid JSON", "ours"},
		{"path into bad UTF-8", "int", "json:v", message.Message{Value: []byte("{\"v\":1,\"w\":\"\xff\"}")}, "UTF-8", "ours"},
		{"path into a pit", "int", "json:v", message.Message{Value: []byte(strings.Repeat("[", 5_000_000))}, "deeper", "ours"},
		{"text from bad UTF-8", "text", "value", message.Message{Value: []byte("a\xc3")}, "UTF-8", "ours"},
		{"text from a NUL", "text", "value", message.Message{Value: []byte("a\x00")}, "NUL", "ours"},
		{"text from an id in bad UTF-8", "text", "id", message.Message{ID: "\xff"}, "UTF-8", "ours"},
		{"uuid from an id", "uuid", "id", message.Message{ID: uuid}, uuid, ""},
		{"jsonb from a key", "jsonb", "key", message.Message{Key: []byte(`{"a":1}`)}, `{"a": 1}`, ""},
		{"jsonb from a key that is none", "jsonb", "key", message.Message{Key: []byte(`a`)}, "not valid JSON", "ours"},
		{"no key", "text", "key", message.Message{}, "NULL", ""},
		{"empty key", "text", "key", message.Message{Key: []byte{}}, "", ""},
		{"jsonb from a header", "jsonb", "header:h", withHeader(`[1]`), "[1]", ""},
		{"jsonb from a header that is none", "jsonb", "header:h", withHeader(`[`), "not valid JSON", "ours"},
		{"missing header", "text", "header:h", message.Message{}, "NULL", ""},
		{"last header counts", "text", "header:h", withHeader("a", "b"), "b", ""},
		{"not null", "text NOT NULL", "header:h", message.Message{}, "null value", "23502"},
		{"check", "int CHECK (c > 0)", "json:v", value(`0`), "violates check", "23514"},
		{"constant of an enum", "shop.mood", "const:sad", message.Message{}, "sad", ""},
		{"constant too long", "varchar(3)", "const:abcd", message.Message{}, "too long", "22001"},
		{"inet", "inet", "json:v", value(`"10.0.0.1"`), "10.0.0.1/32", ""},
		{"interval", "interval", "json:v", value(`"P1D"`), "1 day", ""},
		{"range", "int4range", "json:v", value(`"[1,5)"`), "[1,5)", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			exec(t, pool, `DROP TABLE IF EXISTS shop.t; CREATE TABLE shop.t (c `+c.typ+`)`)
			s := build(t, Config{Name: "shop.t", Columns: map[string]string{"c": c.from}})
			err := write(t, pool, s, c.m)
			if c.state == "" {
				if err != nil {
					t.Fatal(err)
				}
				wantRows(t, pool, `SELECT c::text FROM shop.t`, c.want)
				return
			}
			if err == nil {
				t.Fatalf("it is written as %q, want an error with %q", rows(t, pool, `SELECT c::text FROM shop.t`), c.want)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %q, want something with %q", err, c.want)
			}
			index, permanent := sinks.AsPermanent(err)
			var pg *pgconn.PgError
			switch {
			case c.state == "ours":
				if !permanent || index != 0 {
					t.Errorf("permanent %v at %d, want at 0: %v", permanent, index, err)
				}
			case !errors.As(err, &pg) || pg.Code != c.state || permanent:
				t.Errorf("the error is %v, want SQLSTATE %s", err, c.state)
			}
		})
	}
}

// value is a message whose JSON value has it under v.
func value(json string) message.Message {
	m := msg("x", `{"v":`+json+`}`)
	return m
}

func withHeader(values ...string) message.Message {
	var m message.Message
	for _, v := range values {
		m.Headers = append(m.Headers, message.Header{Key: "h", Value: []byte(v)})
	}
	return m
}

func TestAllBadMessagesAreNamed(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (c jsonb)`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{"c": "value"}})
	err := write(t, pool, s, msg("0", `{}`), msg("1", `{`), msg("2", `[]`), msg("3", `x`))
	if index, ok := sinks.AsPermanent(err); !ok || index != 1 {
		t.Errorf("the first one named is %d (%v), want 1", index, ok)
	}
	all := sinks.AllPermanent(err)
	if len(all) != 2 || all[1] == nil || all[3] == nil {
		t.Errorf("named are %v, want 1 and 3", all)
	}
	wantRows(t, pool, `SELECT c::text FROM t`, []string{}...)
}
