package table

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

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
		want            outcome
	}{
		{"numeric keeps all digits", "numeric", "json:v", value(`12345678901234567890.123456789012345678901234567890`), stored("12345678901234567890.123456789012345678901234567890")},
		{"numeric is rounded as declared", "numeric(6,2)", "json:v", value(`1234.005`), stored("1234.01")},
		{"numeric overflows", "numeric(4,2)", "json:v", value(`123.4`), failed("22003", "overflow")},
		{"numeric with an exponent", "numeric", "json:v", value(`1E3`), stored("1000")},
		{"numeric from a string", "numeric", "json:v", value(`"12.50"`), stored("12.50")},
		{"bigint beyond a double", "bigint", "json:v", value(`9007199254740993`), stored("9007199254740993")},
		{"bigint too large", "bigint", "json:v", value(`9223372036854775808`), failed("22003", "out of range")},
		{"bigint from a fraction", "bigint", "json:v", value(`1.5`), failed("22P02", "invalid input")},
		{"smallint from a position", "smallint", "position", value(`0`), stored("42")},
		{"numeric from a position", "numeric", "position", value(`0`), stored("42")},
		{"text from a position", "varchar", "position", value(`0`), stored("42")},
		{"jsonb from a position", "jsonb", "position", value(`0`), stored("42")},
		{"double", "float8", "json:v", value(`0.1`), stored("0.1")},
		{"bool", "bool", "json:v", value(`true`), stored("true")},
		{"bool as text", "text", "json:v", value(`false`), stored("false")},
		{"uuid", "uuid", "json:v", value(`"` + uuid + `"`), stored(uuid)},
		{"uuid in capitals and braces", "uuid", "json:v", value(`"{` + strings.ToUpper(uuid) + `}"`), stored(uuid)},
		{"uuid that is none", "uuid", "json:v", value(`"` + uuid[1:] + `"`), refused("is no UUID")},
		{"timestamptz", "timestamptz", "json:v", value(`"2026-01-02T03:04:05.123456+01:00"`), stored("2026-01-02 02:04:05.123456+00")},
		{"timestamptz from the message", "timestamptz", "time", value(`0`), stored("2026-03-04 05:06:07.891011+00")},
		{"timestamptz that is rounded", "timestamptz(0)", "time", value(`0`), stored("2026-03-04 05:06:08+00")},
		{"timestamp is UTC", "timestamp", "time", value(`0`), stored("2026-03-04 05:06:07.891011")},
		{"date is UTC", "date", "time", value(`0`), stored("2026-03-04")},
		{"text of a time", "text", "time", value(`0`), stored("2026-03-04T05:06:07.891011Z")},
		{"no time", "timestamptz", "time", message.Message{}, stored("NULL")},
		{"jsonb", "jsonb", "json:v", value(`{"a":[1,null]}`), stored(`{"a": [1, null]}`)},
		{"jsonb of a string stays a JSON string", "jsonb", "json:v", value(`"x\ty"`), stored(`"x\ty"`)},
		{"jsonb of null is NULL", "jsonb", "json:v", value(`null`), stored("NULL")},
		{"json keeps its spelling", "json", "json:v", value(`{"a" :  1.0, "a":2}`), stored(`{"a" :  1.0, "a":2}`)},
		{"json keeps an escaped NUL", "json", "json:v", value(`"a\u0000"`), stored(`"a\u0000"`)},
		{"jsonb can't hold an escaped NUL", "jsonb", "value", value(`"a\u0000"`), refused("u0000")},
		{"jsonb takes an escaped backslash before u0000", "jsonb", "json:v", value(`"a\\u0000"`), stored(`"a\\u0000"`)},
		{"text can't hold an escaped NUL", "text", "json:v", value(`"a\u0000"`), refused("NUL")},
		{"text can't hold half a surrogate", "text", "json:v", value(`"\ud83d"`), refused("surrogate")},
		{"jsonb can't hold half a surrogate", "jsonb", "json:v", value(`"\ud83d"`), failed("22P02", "invalid input")},
		{"text of an object is its JSON", "text", "json:v", value(`{"a": [1]}`), stored(`{"a": [1]}`)},
		{"text of an array is its JSON", "text", "json:v", value(`["a", {"b": 1}]`), stored(`["a", {"b": 1}]`)},
		{"json of an array", "json", "json:v", value(`[1,  "a"]`), stored(`[1,  "a"]`)},
		{"emoji", "text", "json:v", value(`"na\u00efve \ud83c\udf88 🎈"`), stored("naïve 🎈 🎈")},
		{"varchar too long", "varchar(3)", "json:v", value(`"abcd"`), failed("22001", "too long")},
		{"varchar that fits", "varchar(3)", "json:v", value(`"äöü"`), stored("äöü")},
		{"char too long", "char(3)", "json:v", value(`"abcd"`), failed("22001", "too long")},
		{"bit too long", "bit(3)", "json:v", value(`"1011"`), failed("22026", "does not match")},
		{"domain over varchar too long", "shop.short", "json:v", value(`"abcd"`), failed("22001", "too long")},
		{"domain of a domain too long", "shop.shorter", "json:v", value(`"abcd"`), failed("22001", "too long")},
		{"domain of a domain", "shop.shorter", "json:v", value(`"abc"`), stored("abc")},
		{"domain with a CHECK", "shop.shorter", "json:v", value(`"bad"`), failed("23514", "violates check")},
		{"array of varchar too long", "varchar(3)[]", "json:v", value(`["abc","abcd"]`), failed("22001", "too long")},
		{"array of domains too long", "shop.short[]", "json:v", value(`["abcd"]`), failed("22001", "too long")},
		{"array of domains", "shop.short[]", "json:v", value(`["abc", null]`), stored("{abc,NULL}")},
		{"domain over an array", "shop.tags", "json:v", value(`["a","b c"]`), stored(`{a,"b c"}`)},
		{"enum", "shop.mood", "json:v", value(`"Very Happy"`), stored("Very Happy")},
		{"enum without such a label", "shop.mood", "json:v", value(`"glad"`), failed("22P02", "invalid input")},
		{"array of enums", "shop.mood[]", "json:v", value(`["sad","Very Happy"]`), stored(`{sad,"Very Happy"}`)},
		{"composite", "shop.pair", "json:v", value(`"(1,\"x y\")"`), stored(`(1,"x y")`)},
		{"int[]", "int[]", "json:v", value(`[1,null,-3]`), stored("{1,NULL,-3}")},
		{"int[] of two dimensions", "int[]", "json:v", value(`[[1,2],[3,4]]`), stored("{{1,2},{3,4}}")},
		{"int[] that is ragged", "int[]", "json:v", value(`[[1,2],[3]]`), failed("22P02", "malformed array")},
		{"int[] from a number", "int[]", "json:v", value(`1`), failed("22P02", "malformed array")},
		{"empty array", "text[]", "json:v", value(`[]`), stored("{}")},
		{
			"text[] with everything in it", "text[]", "json:v", value(`["", "NULL", "a,b", "{x}", "q\"q", "b\\b", " s ", "\n", "🎈", 1.50, true, {"k":"v"}]`),
			stored(`{"","NULL","a,b","{x}","q\"q","b\\b"," s ","` + "\n" + `",🎈,1.50,true,"{\"k\":\"v\"}"}`),
		},
		{"text[] from an array literal", "text[]", "json:v", value(`"{a,b}"`), stored("{a,b}")},
		{"text[] with a NUL", "text[]", "json:v", value(`["\u0000"]`), refused("NUL")},
		{"jsonb[]", "jsonb[]", "json:v", value(`[{"a":1},[2],"s",null]`), stored(`{"{\"a\": 1}",[2],"\"s\"",NULL}`)},
		{"json[]", "json[]", "json:v", value(`[{"a":1},[2, 3],"s",null]`), stored(`{"{\"a\":1}","[2, 3]","\"s\"",NULL}`)},
		{"json[] of nested arrays", "json[]", "json:v", value(`[[[1]]]`), stored(`{[[1]]}`)},
		{"bytea from a value", "bytea", "value", message.Message{Value: []byte("\x00\xff\\")}, stored(`\x00ff5c`)},
		{"bytea from an empty value", "bytea", "value", message.Message{Value: []byte{}}, stored(`\x`)},
		{"bytea from an id", "bytea", "id", message.Message{ID: "\xff\x00"}, stored(`\xff00`)},
		{"bytea from a header", "bytea", "header:h", withHeader("\xfe"), stored(`\xfe`)},
		{"bytea from a tombstone", "bytea", "value", message.Message{}, stored("NULL")},
		{"jsonb from a tombstone", "jsonb", "value", message.Message{}, stored("NULL")},
		{"jsonb from an empty value", "jsonb", "value", message.Message{Value: []byte{}}, refused("not valid JSON")},
		{"path into a tombstone", "int", "json:v", message.Message{}, stored("NULL")},
		{"path that leads nowhere", "int", "json:w", value(`1`), stored("NULL")},
		{"path into what is no JSON", "int", "json:v", message.Message{Value: []byte(`{"v":1}}`)}, refused("not valid JSON")},
		{"path into bad UTF-8", "int", "json:v", message.Message{Value: []byte("{\"v\":1,\"w\":\"\xff\"}")}, refused("UTF-8")},
		{"path into a pit", "int", "json:v", message.Message{Value: []byte(strings.Repeat("[", 5_000_000))}, refused("deeper")},
		{"text from bad UTF-8", "text", "value", message.Message{Value: []byte("a\xc3")}, refused("UTF-8")},
		{"text from a NUL", "text", "value", message.Message{Value: []byte("a\x00")}, refused("NUL")},
		{"text from an id in bad UTF-8", "text", "id", message.Message{ID: "\xff"}, refused("UTF-8")},
		{"uuid from an id", "uuid", "id", message.Message{ID: uuid}, stored(uuid)},
		{"jsonb from a key", "jsonb", "key", message.Message{Key: []byte(`{"a":1}`)}, stored(`{"a": 1}`)},
		{"jsonb from a key that is none", "jsonb", "key", message.Message{Key: []byte(`a`)}, refused("not valid JSON")},
		{"no key", "text", "key", message.Message{}, stored("NULL")},
		{"empty key", "text", "key", message.Message{Key: []byte{}}, stored("")},
		{"jsonb from a header", "jsonb", "header:h", withHeader(`[1]`), stored("[1]")},
		{"jsonb from a header that is none", "jsonb", "header:h", withHeader(`[`), refused("not valid JSON")},
		{"missing header", "text", "header:h", message.Message{}, stored("NULL")},
		{"last header counts", "text", "header:h", withHeader("a", "b"), stored("b")},
		{"not null", "text NOT NULL", "header:h", message.Message{}, failed("23502", "null value")},
		{"check", "int CHECK (c > 0)", "json:v", value(`0`), failed("23514", "violates check")},
		{"constant of an enum", "shop.mood", "const:sad", message.Message{}, stored("sad")},
		{"constant too long", "varchar(3)", "const:abcd", message.Message{}, failed("22001", "too long")},
		{"inet", "inet", "json:v", value(`"10.0.0.1"`), stored("10.0.0.1/32")},
		{"interval", "interval", "json:v", value(`"P1D"`), stored("1 day")},
		{"range", "int4range", "json:v", value(`"[1,5)"`), stored("[1,5)")},
	} {
		t.Run(c.name, func(t *testing.T) {
			exec(t, pool, `DROP TABLE IF EXISTS shop.t; CREATE TABLE shop.t (c `+c.typ+`)`)
			s := build(t, Config{Name: "shop.t", Columns: map[string]string{"c": c.from}})
			c.want.compare(t, pool, write(t, pool, s, c.m))
		})
	}
}

// outcome is what becomes of one value: it is stored, or there is an error.
type outcome struct {
	text  string // as it is stored
	part  string // of the error
	state string // the error's SQLSTATE; empty: the sink's own error, which says that it is permanent
}

func stored(text string) outcome        { return outcome{text: text} }
func refused(part string) outcome       { return outcome{part: part} }
func failed(state, part string) outcome { return outcome{part: part, state: state} }

func (o outcome) compare(t *testing.T, pool *pgxpool.Pool, err error) {
	t.Helper()
	if o.part == "" {
		if err != nil {
			t.Fatal(err)
		}
		wantRows(t, pool, `SELECT c::text FROM shop.t`, o.text)
		return
	}
	if err == nil {
		t.Fatalf("it is written as %q, want an error with %q", rows(t, pool, `SELECT c::text FROM shop.t`), o.part)
	}
	if !strings.Contains(err.Error(), o.part) {
		t.Errorf("the error is %q, want something with %q", err, o.part)
	}
	index, permanent := sinks.AsPermanent(err)
	var pg *pgconn.PgError
	switch {
	case o.state == "":
		if !permanent || index != 0 {
			t.Errorf("permanent %v at %d, want at 0: %v", permanent, index, err)
		}
	case !errors.As(err, &pg) || pg.Code != o.state || permanent:
		t.Errorf("the error is %v, want SQLSTATE %s", err, o.state)
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
