package table

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

const nocase = `CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false); `

// keyTables are tables t (k, v, text, by) whose key compares in a way of its own. There is a
// row with the key Ab; aB is the same if same is set.
var keyTables = map[string]struct {
	ddl  string
	key  string // of the message; empty: aB
	same bool
}{
	"text":                          {`CREATE TABLE t (k text PRIMARY KEY, v bigint, text text, by text)`, "", false},
	"citext off the search path":    {`CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE t (k ext.citext PRIMARY KEY, v bigint, text text, by text)`, "", true},
	"a domain over citext":          {`CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE DOMAIN ext.d AS ext.citext; CREATE TABLE t (k ext.d PRIMARY KEY, v bigint, text text, by text)`, "", true},
	"a collation":                   {nocase + `CREATE TABLE t (k text COLLATE nocase PRIMARY KEY, v bigint, text text, by text)`, "", true},
	"an index with a collation":     {nocase + `CREATE TABLE t (k text, v bigint, text text, by text); CREATE UNIQUE INDEX ON t (k COLLATE nocase)`, "", true},
	"an index without the column's": {nocase + `CREATE TABLE t (k text COLLATE nocase, v bigint, text text, by text); CREATE UNIQUE INDEX ON t (k COLLATE "default")`, "", false},
	"an index with C":               {`CREATE TABLE t (k text, v bigint, text text, by text); CREATE UNIQUE INDEX ON t (k COLLATE "C")`, "Ab", true},
	"an index for patterns":         {`CREATE TABLE t (k text, v bigint, text text, by text); CREATE UNIQUE INDEX ON t (k text_pattern_ops)`, "Ab", true},
	"a domain with a collation":     {nocase + `CREATE DOMAIN d AS text COLLATE nocase; CREATE TABLE t (k d PRIMARY KEY, v bigint, text text, by text)`, "", true},
	"varchar":                       {`CREATE TABLE t (k varchar(10) PRIMARY KEY, v bigint, text text, by text)`, "Ab", true},
	"char":                          {`CREATE TABLE t (k char(10) PRIMARY KEY, v bigint, text text, by text)`, "Ab  ", true},
	"an enum":                       {`CREATE TYPE mood AS ENUM ('Ab', 'other', 'other2'); CREATE TABLE t (k mood PRIMARY KEY, v bigint, text text, by text)`, "Ab", true},
	"bytea":                         {`CREATE TABLE t (k bytea PRIMARY KEY, v bigint, text text, by text)`, "Ab", true},
	"partitions":                    {nocase + `CREATE TABLE t (k text COLLATE nocase PRIMARY KEY, v bigint, text text, by text) PARTITION BY LIST (k); CREATE TABLE p PARTITION OF t DEFAULT`, "", true},
}

// A key compares as its unique index does, wherever its type, its operators and its collation
// are.
func TestKeysCompareAsTheirIndex(t *testing.T) {
	t.Parallel()
	for name, c := range keyTables {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, c.ddl)
			key := c.key
			if key == "" {
				key = "aB"
			}
			insert := build(t, Config{Name: "public.t", Key: []string{"k"}, OnPresent: policy.PresentCompare, Columns: map[string]string{"k": "json:k", "v": "json:v"}})
			for name, s := range map[string]*Sink{"versioned": versionedConfig(t, Config{}), "insert": insert} {
				exec(t, pool, `TRUNCATE t; INSERT INTO t VALUES ('Ab', 5, 'old')`)
				want := sinks.Written
				switch {
				case c.same && name == "insert":
					want = sinks.AlreadyPresent
				case c.same:
					want = sinks.Stale
				}
				got, err := outcomes(t, pool, s, state(key, "5", "new"), state("other", "1", "new"))
				if err != nil || got[0] != want || got[1] != sinks.Written {
					t.Errorf("%s: %v, %v, want %v first", name, got, err, want)
				}
				// Two of a batch.
				got, err = outcomes(t, pool, s, state("other2", "1", "new"), state("other2", "1", "new"), state("other2", "1", "new"))
				if err != nil || got[0] != sinks.Written || got[1] == sinks.Written || got[2] == sinks.Written {
					t.Errorf("%s, several: %v, %v", name, got, err)
				}
				wantIndexed(t, pool, s)
			}
		})
	}
}

// wantIndexed ends a test whose look-ups by key go through the whole table.
func wantIndexed(t *testing.T, pool *pgxpool.Pool, s *Sink) {
	t.Helper()
	p := s.current.Load()
	values, err := p.set.Encode(nil)
	if err != nil {
		t.Fatal(err)
	}
	lookup := p.statements(values)[0]
	err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL enable_seqscan = off`); err != nil {
			return err
		}
		rows, _ := tx.Query(t.Context(), `EXPLAIN (COSTS OFF) `+lookup.sql, lookup.args...)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if text := strings.Join(lines, "\n"); !strings.Contains(text, "Index") || strings.Contains(text, "Seq Scan on t") || strings.Contains(text, "Seq Scan on p") {
			t.Errorf("no index:\n%s", text)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// What isn't of the key compares as its type does.
func TestOtherColumnsCompareAsTheirTypes(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, nocase+`CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE t (k int PRIMARY KEY, c ext.citext, n text COLLATE nocase, p point, x xid, j json);
		INSERT INTO t VALUES (1, 'Ab', 'Ab', '(1,2)', '7', '{"a":1}'), (2, NULL, NULL, NULL, NULL, NULL)`)
	s := build(t, Config{Name: "public.t", Key: []string{"k"}, OnPresent: policy.PresentCompare, Columns: map[string]string{
		"k": "json:k", "c": "json:c", "n": "json:n", "p": "json:p", "x": "json:x", "j": "json:j",
	}})
	for value, same := range map[string]bool{
		`{"k":1,"c":"aB","n":"aB","p":"(1,2)","x":"7","j":{"a":1}}`: true,
		`{"k":1,"c":"aC","n":"aB","p":"(1,2)","x":"7","j":{"a":1}}`: false,
		`{"k":1,"c":"aB","n":"aC","p":"(1,2)","x":"7","j":{"a":1}}`: false,
		`{"k":1,"c":"aB","n":"aB","p":"(1,3)","x":"7","j":{"a":1}}`: false,
		`{"k":1,"c":"aB","n":"aB","p":"(1,2)","x":"8","j":{"a":1}}`: false,
		`{"k":1,"c":"aB","n":"aB","p":"(1,2)","x":"7","j":{"a":2}}`: false,
		`{"k":1,"c":"aB","n":"aB","p":"(1,2)","x":"7"}`:             false,
		`{"k":2}`: true, `{"k":2,"n":""}`: false, `{"k":2,"c":""}`: false, `{"k":2,"p":"(0,0)"}`: false,
	} {
		got, err := outcomes(t, pool, s, msg("a", value))
		if same != (err == nil) || same && got[0] != sinks.AlreadyPresent {
			t.Errorf("%s: %v, %v", value, got, err)
		}
	}
}

// A version compares as its type does, wherever that is.
func TestVersionsCompareAsTheirType(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE t (k text PRIMARY KEY, v ext.citext, text text, by text);
		INSERT INTO t VALUES ('a', 'a'), ('b', 'A'), ('c', 'a')`)
	got, err := outcomes(t, pool, versionedConfig(t, Config{}), state("a", `"A"`, ""), state("b", `"a"`, ""), state("c", `"B"`, ""), state("d", `"b"`, ""), state("d", `"B"`, ""))
	if want := []sinks.Outcome{sinks.Stale, sinks.Stale, sinks.Written, sinks.Written, sinks.Stale}; err != nil || !slices.Equal(got, want) {
		t.Errorf("citext: %v, %v", got, err)
	}
}

// The rows of tables that inherit from the target are none of its own: its unique index
// doesn't have them.
func TestHeirsRowsAreOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v bigint, text text, by text); CREATE TABLE heir () INHERITS (t); INSERT INTO heir VALUES ('a', 9, 'heir')`)
	got, err := outcomes(t, pool, versionedConfig(t, Config{}), state("a", "5", "own"), state("a", "5", "again"), state("a", "6", "next"))
	if want := []sinks.Outcome{sinks.Written, sinks.Stale, sinks.Written}; err != nil || !slices.Equal(got, want) {
		t.Fatalf("versioned: %v, %v", got, err)
	}
	exec(t, pool, `INSERT INTO heir VALUES ('b', 9, 'heir'); INSERT INTO t VALUES ('b', 1)`)
	s := build(t, Config{Name: "public.t", Key: []string{"k"}, OnPresent: policy.PresentCompare, Columns: map[string]string{"k": "json:k", "v": "json:v"}})
	if _, err := outcomes(t, pool, s, state("b", "9", "")); err == nil {
		t.Error("an heir's row passed for the target's")
	}
	wantRows(t, pool, `SELECT k || v || text FROM heir ORDER BY k`, "a9heir", "b9heir")
}

// An index that is replaced by one that compares in another way is noticed where the numbers
// of rows don't match.
func TestAnIndexIsReplaced(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, nocase+`CREATE TABLE t (k text, v bigint, text text, by text); CREATE UNIQUE INDEX keys ON t (k); INSERT INTO t VALUES ('Ab', 5)`)
	s := versionedConfig(t, Config{})
	if got, err := outcomes(t, pool, s, state("Ab", "5", "")); err != nil || got[0] != sinks.Stale {
		t.Fatalf("%v, %v", got, err)
	}
	exec(t, pool, `DROP INDEX keys; CREATE UNIQUE INDEX keys ON t (k COLLATE nocase)`)
	if _, err := outcomes(t, pool, s, state("aB", "1", "")); sqlstate.Of(err) != sqlstate.SerializationFailure {
		t.Errorf("the error is %v", err)
	}
	if got, err := outcomes(t, pool, s, state("aB", "1", "")); err != nil || got[0] != sinks.Stale {
		t.Errorf("then: %v, %v", got, err)
	}
	wantRows(t, pool, `SELECT k FROM t`, "Ab")
}

// NULLs in a key are one row or many, as the index has it.
func TestNULLsInAKey(t *testing.T) {
	t.Parallel()
	for _, distinct := range []bool{true, false} {
		t.Run(fmt.Sprint("distinct ", distinct), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			how := nullsNotDistinct
			if distinct {
				how = ""
			}
			skipUnknown(t, pool, how)
			exec(t, pool, `CREATE TABLE t (k text, v bigint, text text, by text, UNIQUE `+how+` (k)); INSERT INTO t VALUES (NULL, 5)`)
			msgs := []message.Message{msg("x", `{"v":5}`), msg("y", `{"v":6}`), msg("z", `{"v":6}`)}
			want := []sinks.Outcome{sinks.Stale, sinks.Written, sinks.Stale}
			if distinct {
				want = []sinks.Outcome{sinks.Written, sinks.Written, sinks.Written}
			}
			s := versionedConfig(t, Config{})
			if got, err := outcomes(t, pool, s, msgs...); err != nil || !slices.Equal(got, want) {
				t.Errorf("versioned: %v, %v, want %v", got, err, want)
			}
			if !distinct {
				wantIndexed(t, pool, s)
				want = []sinks.Outcome{sinks.AlreadyPresent, sinks.AlreadyPresent, sinks.AlreadyPresent}
			}
			s = build(t, Config{Name: "public.t", Key: []string{"k"}, Columns: map[string]string{"k": "json:k", "v": "json:v"}})
			if got, err := outcomes(t, pool, s, msgs...); err != nil || !slices.Equal(got, want) {
				t.Errorf("insert: %v, %v, want %v", got, err, want)
			}
		})
	}
}

// caseless is an operator class for text that folds case.
func caseless() string {
	var sql, members strings.Builder
	for i, op := range []string{"<", "<=", "=", ">=", ">"} {
		fmt.Fprintf(&sql, "CREATE FUNCTION ci%d(text, text) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT lower($1) %s lower($2)'; CREATE OPERATOR %[2]s## (LEFTARG = text, RIGHTARG = text, FUNCTION = ci%[1]d); ", i, op)
		fmt.Fprintf(&members, "OPERATOR %d %s##, ", i+1, op)
	}
	return sql.String() +
		"CREATE FUNCTION ci(text, text) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT CASE WHEN lower($1) < lower($2) THEN -1 WHEN lower($1) = lower($2) THEN 0 ELSE 1 END'; " +
		"CREATE OPERATOR CLASS caseless FOR TYPE text USING btree AS " + members.String() + "FUNCTION 1 ci(text, text); "
}

func TestKeysThatCantBeFollowed(t *testing.T) {
	t.Parallel()
	const columns = `k text, v bigint, text text, by text`
	for name, c := range map[string]struct{ ddl, want string }{
		"an operator class": {caseless() + `CREATE TABLE t (` + columns + `); CREATE UNIQUE INDEX keys ON t (k caseless)`, `key: the unique index "keys" compares column "k" by the operator class caseless, which takes other values for equal than type text does`},
		"two collations":    {nocase + `CREATE TABLE t (` + columns + `); CREATE UNIQUE INDEX one ON t (k); CREATE UNIQUE INDEX two ON t (k COLLATE nocase)`, `key: the unique indexes "one" and "two" on these columns take different rows for the same`},
		"a version":         {`CREATE TABLE t (k text PRIMARY KEY, v point, text text, by text)`, `version: column "v" is of type point, which has no order`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, c.ddl)
			if err := prepare(t, pool, versionedConfig(t, Config{})); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v", err)
			}
		})
	}
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (`+columns+`); CREATE UNIQUE INDEX ON t (k); CREATE UNIQUE INDEX ON t (k COLLATE "C")`)
	if err := prepare(t, pool, versionedConfig(t, Config{})); err != nil {
		t.Errorf("two that agree: %v", err)
	}
}
