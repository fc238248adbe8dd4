package table

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// partial makes a sink for messages about the columns k, a, b and c of t.
func partial(t *testing.T, c Config) *Sink {
	t.Helper()
	c.Name, c.Mode, c.Key = "public.t", ModeUpsert, []string{"k"}
	if c.Columns == nil {
		c.Columns = map[string]string{"k": "json:k", "a": "json:a", "b": "json:b", "c": "json:c"}
	}
	return build(t, c)
}

const (
	partialTable = `CREATE TABLE t (k text PRIMARY KEY, a text NOT NULL, b int DEFAULT 7, c text, other text DEFAULT 'x'); `
	partialRows  = `SELECT concat_ws(' ', k, a, coalesce(b::text, '-'), coalesce(c, '-'), other) FROM t ORDER BY k`
)

func TestUpsertKeepsWhatIsAbsent(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		msgs, want []string
		bad        string
	}{
		"a row that is there":   {[]string{`{"k":"old","b":2}`}, []string{"old o 2 o o"}, ""},
		"NOT NULL, absent":      {[]string{`{"k":"old","c":"new"}`}, []string{"old o 1 new o"}, ""},
		"a null":                {[]string{`{"k":"old","b":null,"c":null}`}, []string{"old o - - o"}, ""},
		"a new row":             {[]string{`{"k":"new","a":"n"}`}, []string{"new n 7 - x", "old o 1 o o"}, ""},
		"a null of a new row":   {[]string{`{"k":"new","a":"n","b":null}`}, []string{"new n - - x", "old o 1 o o"}, ""},
		"nothing but a key":     {[]string{`{"k":"old"}`}, []string{"old o 1 o o"}, ""},
		"column by column":      {[]string{`{"k":"new","a":"1"}`, `{"k":"new","b":2}`, `{"k":"new","a":"3"}`}, []string{"new 3 2 - x", "old o 1 o o"}, ""},
		"a null is a value":     {[]string{`{"k":"old","b":2}`, `{"k":"old","b":null}`, `{"k":"old","a":"n"}`}, []string{"old n - o o"}, ""},
		"several rows":          {[]string{`{"k":"z","a":"z","b":1}`, `{"k":"old","c":"2"}`, `{"k":"y","a":"y"}`, `{"k":"x","a":"x","b":5}`, `{"k":"z","c":"c"}`}, []string{"old o 1 2 o", "x x 5 - x", "y y 7 - x", "z z 1 c x"}, ""},
		"NOT NULL of a new row": {[]string{`{"k":"old","b":2}`, `{"k":"new","b":2}`}, []string{"old o 1 o o"}, `null value in column "a"`},
		"an overwritten value":  {[]string{`{"k":"old","b":"many"}`, `{"k":"old","b":3}`, `{"k":"old","c":"c"}`}, []string{"old o 1 o o"}, `invalid input syntax for type integer: "many"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, partialTable+`INSERT INTO t VALUES ('old', 'o', 1, 'o', 'o')`)
			s := partial(t, Config{})
			var msgs []message.Message
			for i, value := range c.msgs {
				msgs = append(msgs, msg(fmt.Sprint(i), value))
			}
			err := write(t, pool, s, msgs...)
			if c.bad == "" && err != nil || c.bad != "" && (err == nil || !strings.Contains(err.Error(), c.bad)) {
				t.Errorf("the error is %v, want %q", err, c.bad)
			}
			wantRows(t, pool, partialRows, c.want...)
		})
	}
}

// With absent: null, what isn't there is NULL.
func TestUpsertWritesNullForWhatIsAbsent(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, partialTable+`INSERT INTO t VALUES ('old', 'o', 1, 'o', 'o')`)
	s := partial(t, Config{Absent: policy.AbsentNull})
	if err := write(t, pool, s, msg("1", `{"k":"old","a":"1"}`), msg("2", `{"k":"new","a":"2","c":"c"}`)); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, partialRows, "new 2 - c x", "old 1 - - o")
	if err := write(t, pool, s, msg("3", `{"k":"old","c":"c"}`)); sqlstate.Of(err) != "23502" {
		t.Errorf("the error is %v", err)
	}
}

// Every kind of place, more than 64 columns.
func TestUpsertKeepsEveryKindOfColumn(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	var ddl strings.Builder
	cols := map[string]string{"k": "id", "key": "key", "head": "header:h", "at": "time", "u": "header:u", "n": "now"}
	ddl.WriteString(`CREATE TABLE t (k text PRIMARY KEY, key bytea NOT NULL, head text NOT NULL, at timestamptz NOT NULL, u uuid NOT NULL, n timestamptz NOT NULL`)
	for i := range 100 {
		fmt.Fprintf(&ddl, ", c%d int NOT NULL DEFAULT %[1]d", i)
		cols[fmt.Sprint("c", i)] = fmt.Sprintf("json:v.%d", i)
	}
	exec(t, pool, ddl.String()+`)`)
	s := partial(t, Config{Columns: cols})
	full := message.Message{ID: "a", Key: []byte("key"), Time: at, Value: []byte(`{}`), Headers: []message.Header{
		{Key: "h", Value: []byte("head")}, {Key: "u", Value: []byte("6ba7b810-9dad-11d1-80b4-00c04fd430c8")},
	}}
	if err := write(t, pool, s, full, message.Message{ID: "a", Value: []byte(`{"v":{"99":-1,"70":-2,"3":-3}}`)}); err != nil {
		t.Fatal(err)
	}
	if err := write(t, pool, s, message.Message{ID: "a", Value: []byte(`{"v":{"99":-4}}`)}); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT concat_ws(' ', convert_from(key, 'UTF8'), head, at AT TIME ZONE 'UTC', u, c99, c70, c3, c64) FROM t`,
		"key head 2026-03-04 05:06:07.891011 6ba7b810-9dad-11d1-80b4-00c04fd430c8 -4 -2 -3 64")
}

func TestAbsentConfig(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]Config{
		"absent: only mode upsert or update reads it":    {Absent: policy.AbsentKeep},
		`absent: "drop" is not one of keep`:              {Mode: ModeUpsert, Key: []string{"k"}, Absent: "drop"},
		"absent: only mode upsert or update reads it\n.": {Mode: ModeVersioned, Key: []string{"k"}, Version: "v", Absent: policy.AbsentNull},
	} {
		c.Name, c.Columns = "public.t", map[string]string{"k": "id", "v": "json:v"}
		if _, err := c.Sink(); err == nil || !strings.Contains(err.Error(), strings.TrimSuffix(want, "\n.")) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// An upsert reads every column that it writes: Postgres asks for that of EXCLUDED, too.
func TestUpsertNeedsToRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	role := fmt.Sprint("reader_", rand.Uint64())
	exec(t, pool, partialTable+`CREATE ROLE `+role+`; GRANT INSERT, UPDATE, SELECT (k) ON t TO `+role)
	t.Cleanup(func() { _, _ = pool.Exec(t.Context(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	as := func(s *Sink, msgs ...message.Message) error {
		return inTx(t, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SET LOCAL ROLE `+role); err != nil {
				return err
			}
			return s.Write(t.Context(), tx, sinks.NewBatch(msgs))
		})
	}
	m := msg("1", `{"k":"a","a":"1"}`)
	for _, c := range []Config{{}, {Absent: policy.AbsentNull}} {
		if err := as(partial(t, c), m); err == nil || !strings.Contains(err.Error(), `GRANT SELECT ("a", "b", "c") ON`) {
			t.Errorf("the error is %v", err)
		}
	}
	exec(t, pool, `GRANT SELECT (a, b, c) ON t TO `+role)
	for _, c := range []Config{{}, {Absent: policy.AbsentNull}} {
		if err := as(partial(t, c), m); err != nil {
			t.Error(err)
		}
	}
	exec(t, pool, `DROP OWNED BY `+role+`; DROP ROLE `+role)
}

// targets are tables and views t that rows may be added to and written over in their own
// ways. In all of them a batch is what its messages are one by one.
var targets = map[string]string{
	"a table":            partialTable,
	"a nullable key":     `CREATE TABLE t (k text UNIQUE, a text NOT NULL, b int DEFAULT 7, c text, other text DEFAULT 'x')`,
	"nulls not distinct": `CREATE TABLE t (k text UNIQUE NULLS NOT DISTINCT, a text NOT NULL, b int DEFAULT 7, c text, other text DEFAULT 'x')`,
	"many defaults":      `CREATE TABLE t (k text PRIMARY KEY, a text DEFAULT 'a', b int DEFAULT 7, c text DEFAULT 'c', other text DEFAULT 'x')`,
	"partitions":         `CREATE TABLE t (k text PRIMARY KEY, a text NOT NULL, b int DEFAULT 7, c text, other text DEFAULT 'x') PARTITION BY LIST (k); CREATE TABLE p1 PARTITION OF t FOR VALUES IN ('1', '2'); CREATE TABLE p2 (other text DEFAULT 'y', c text, b int, a text NOT NULL, k text NOT NULL); ALTER TABLE t ATTACH PARTITION p2 DEFAULT`,
	"a view":             `CREATE TABLE behind (k text PRIMARY KEY, a text NOT NULL, b int DEFAULT 7, c text, other text DEFAULT 'x'); CREATE VIEW t AS SELECT * FROM behind; ALTER VIEW t ALTER c SET DEFAULT 'v'`,
	"a trigger":          partialTable + `CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.other := 'fill'; NEW.a := upper(NEW.a); NEW.k := lower(NEW.k); RETURN NEW; END $$; CREATE TRIGGER fill BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fill()`,
	"a constraint":       partialTable + `ALTER TABLE t ADD CHECK (b IS NOT NULL OR c IS NULL)`,
	"a child":            partialTable + `CREATE TABLE child () INHERITS (t); INSERT INTO child (k, a) VALUES ('1', 'child'), ('2', 'child')`,
	"row security":       partialTable + `ALTER TABLE t ENABLE ROW LEVEL SECURITY`,
	"citext elsewhere":   `CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE t (k ext.citext PRIMARY KEY, a text NOT NULL, b int DEFAULT 7, c text, other text DEFAULT 'x')`,
	"nocase":             nocase + `CREATE TABLE t (k text, a text COLLATE nocase NOT NULL, b int DEFAULT 7, c text, other text DEFAULT 'x'); CREATE UNIQUE INDEX ON t (k COLLATE nocase)`,
}

// A batch leaves what its messages leave one by one, whatever they lack and whichever rows
// are there.
func TestUpsertOfABatchIsOneByOne(t *testing.T) {
	t.Parallel()
	for name, ddl := range targets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			whole, single := pgtest.New(t).Pool(t), pgtest.New(t).Pool(t)
			skipUnknown(t, whole, ddl)
			for _, pool := range []*pgxpool.Pool{whole, single} {
				exec(t, pool, ddl)
			}
			s, one := partial(t, Config{}), partial(t, Config{})
			if err := prepare(t, whole, s); err != nil {
				t.Fatal(err)
			}
			rapid.Check(t, func(r *rapid.T) {
				for _, pool := range []*pgxpool.Pool{whole, single} {
					exec(t, pool, `DELETE FROM `+map[bool]string{true: "ONLY t", false: "t"}[name == "a child"])
				}
				for range rapid.IntRange(1, 2).Draw(r, "batches") {
					var batch []message.Message
					for _, m := range rapid.SliceOfN(rapid.Custom(partialMessage), 1, 10).Draw(r, "batch") {
						if err := write(t, single, one, m); err == nil {
							batch = append(batch, m)
						} else if !strings.HasPrefix(sqlstate.Of(err), "23") { // else it is a dead letter
							t.Fatal(err)
						}
					}
					err := write(t, whole, s, batch...)
					if code := sqlstate.Of(err); name == "a trigger" && (errors.Is(err, errKeyChanges) || code == "21000" || code == "23502") { // the worker divides the batch
						for _, m := range batch {
							err = write(t, whole, s, m)
						}
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				const state = `SELECT concat_ws(' ', coalesce(lower(k::text), 'NULL'), a, coalesce(b::text, '-'), coalesce(c, '-'), other) FROM t ORDER BY 1`
				if d := cmp.Diff(rows(t, single, state), rows(t, whole, state)); d != "" {
					r.Fatalf("-one by one +a batch\n%s", d)
				}
			})
			wantIndexed(t, whole, s)
		})
	}
}

// partialMessage says something of some columns of a few rows.
func partialMessage(r *rapid.T) message.Message {
	var parts []string
	if key := rapid.SampledFrom([]string{"1", "2", "3", "x", "X", "y", "null"}).Draw(r, "key"); key == "null" {
		parts = append(parts, `"k":null`)
	} else {
		parts = append(parts, fmt.Sprintf(`"k":%q`, key))
	}
	if rapid.IntRange(0, 9).Draw(r, "a") > 1 {
		parts = append(parts, fmt.Sprintf(`"a":"a%d"`, rapid.IntRange(0, 9).Draw(r, "a's")))
	}
	if b := rapid.IntRange(-20, 9).Draw(r, "b"); b >= 0 {
		parts = append(parts, fmt.Sprintf(`"b":%d`, b))
	} else if b > -5 {
		parts = append(parts, `"b":null`)
	}
	if c := rapid.IntRange(-20, 9).Draw(r, "c"); c >= 0 {
		parts = append(parts, fmt.Sprintf(`"c":"c%d"`, c))
	} else if c > -5 {
		parts = append(parts, `"c":null`)
	}
	return msg("id", "{"+strings.Join(parts, ",")+"}")
}

// Keys compare as their index does: what is the same row to it is one row here.
func TestUpsertOfPartsComparesKeysAsTheirIndex(t *testing.T) {
	t.Parallel()
	for name, c := range keyTables {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, c.ddl+`; INSERT INTO t VALUES ('Ab', 5, 'old', 'hand')`)
			key := c.key
			if key == "" {
				key = "aB"
			}
			s := partial(t, Config{Columns: map[string]string{"k": "json:k", "v": "json:v", "text": "json:text"}})
			if err := write(t, pool, s, msg("1", fmt.Sprintf(`{"k":%q,"v":6}`, key)), msg("2", `{"k":"other","text":"x"}`), msg("3", fmt.Sprintf(`{"k":%q,"text":"new"}`, key))); err != nil {
				if c.same || sqlstate.Of(err) != "22P02" {
					t.Fatal(err)
				}
			}
			want := []string{"6 new hand", "x"}
			if !c.same {
				want = []string{"5 old hand", "6 new", "x"}
			}
			wantRows(t, pool, `SELECT concat_ws(' ', v, text, by) FROM t ORDER BY 1`, want...)
			wantIndexed(t, pool, s)
		})
	}
}

// Workers that share keys, with and without absent places, lock the rows in one order.
func TestPartsAndWholesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, partialTable)
	s := partial(t, Config{})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	const workers, rounds = 4, 40
	var group sync.WaitGroup
	var together [rounds]sync.WaitGroup // each round begins for all at once
	for i := range together {
		together[i].Add(workers)
	}
	for w := range workers {
		group.Go(func() {
			random := rand.New(rand.NewPCG(7, uint64(w)))
			for i := range rounds {
				together[i].Done()
				together[i].Wait()
				msgs := make([]message.Message, 100)
				for j, k := range random.Perm(len(msgs)) {
					value := fmt.Sprintf(`{"k":"%d","a":"%d","b":1,"c":"c"}`, k+i*50, w) // half of them are there
					switch {
					case w == 0 && j%3 == 0:
						value = fmt.Sprintf(`{"k":"%d","a":"%d"}`, k+i*50, w)
					case w < 2:
						value = fmt.Sprintf(`{"k":"%d","a":"%d","b":2}`, k+i*50, w)
					}
					msgs[j] = msg("x", value)
				}
				for {
					err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, sinks.NewBatch(msgs)) })
					if sqlstate.Of(err) == sqlstate.SerializationFailure {
						continue
					}
					var pg *pgconn.PgError
					if errors.As(err, &pg) && pg.Code == "40P01" {
						t.Error("a deadlock: ", pg.Detail)
						break
					} else if err != nil {
						t.Error(err)
					}
					break
				}
			}
		})
	}
	group.Wait()
}

// Somebody else adds the row of a key between the look and the write. Its other columns stay.
func TestARowAddedWhilePartsAreWritten(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, partialTable)
	s := partial(t, Config{})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	other, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback(t.Context()) }()
	if _, err := other.Exec(t.Context(), `INSERT INTO t VALUES ('k', 'theirs', 1, 'theirs')`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			return s.Write(t.Context(), tx, sinks.NewBatch([]message.Message{msg("1", `{"k":"k","a":"ours"}`)}))
		})
	}()
	awaitWaiting(t, pool)
	if err := other.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, partialRows, "k ours 1 theirs x")
}

// Somebody else deletes a row after it was looked for. Nothing is said to be wrong with the
// message until there is no row that has what it lacks.
func TestARowDeletedWhilePartsAreWritten(t *testing.T) {
	t.Parallel()
	for name, ddl := range map[string]string{"counted": partialTable, "with a trigger": partialTable + `CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
		CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f(); `} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, ddl+`INSERT INTO t (k, a) VALUES ('k', 'old'), ('l', 'old')`)
			s := partial(t, Config{})
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			msgs := []message.Message{msg("1", `{"k":"k","b":1}`), msg("2", `{"k":"l","b":1}`)}
			err := inTx(t, pool, func(tx pgx.Tx) error {
				between := &betweenTx{Tx: tx, at: 2, do: func() { exec(t, pool, `DELETE FROM t WHERE k = 'k'`) }}
				return s.Write(t.Context(), between, sinks.NewBatch(msgs))
			})
			if sqlstate.Of(err) != sqlstate.SerializationFailure {
				t.Errorf("the error is %v", err)
			}
			if err := write(t, pool, s, msgs[0]); sqlstate.Of(err) != "23502" {
				t.Errorf("then: %v", err)
			}
			if err := write(t, pool, s, msgs[1]); err != nil {
				t.Error(err)
			}
		})
	}
}

// betweenTx does something before one of the round trips of a transaction.
type betweenTx struct {
	pgx.Tx
	at int
	do func()
}

func (tx *betweenTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if tx.at--; tx.at == 0 {
		tx.do()
	}
	return tx.Tx.SendBatch(ctx, b)
}

// Others write to the same rows at the same time, to other columns, and add and delete rows:
// nothing of theirs is undone.
func TestOthersWriteBesideParts(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, partialTable+`INSERT INTO t (k, a, b) SELECT i, '0', 0 FROM generate_series(1, 20) AS i`)
	s := partial(t, Config{})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	const rounds = 300
	var group sync.WaitGroup
	group.Go(func() {
		for i := range rounds {
			k := i%20 + 1
			if _, err := pool.Exec(t.Context(), `UPDATE t SET b = b + 1 WHERE k = $1`, fmt.Sprint(k)); err != nil {
				t.Error(err)
				return
			}
			if _, err := pool.Exec(t.Context(), `WITH d AS (DELETE FROM t WHERE k = 'come and go' RETURNING 1) INSERT INTO t (k, a, b) SELECT 'gone', '', 0 WHERE NOT EXISTS (SELECT FROM d) ON CONFLICT DO NOTHING`); err != nil {
				t.Error(err)
				return
			}
		}
	})
	tries := 0
	for i := range rounds {
		var msgs []message.Message
		for _, k := range rand.Perm(20) {
			msgs = append(msgs, msg("x", fmt.Sprintf(`{"k":"%d","a":"%d"}`, k+1, i)))
		}
		msgs = append(msgs, msg("x", `{"k":"come and go","a":"new"}`))
		for {
			tries++
			err := write(t, pool, s, msgs...)
			if err == nil {
				break
			}
			if sqlstate.Of(err) != sqlstate.SerializationFailure {
				t.Fatal(err)
			}
		}
	}
	group.Wait()
	t.Logf("%d tries for %d batches", tries, rounds)
	wantRows(t, pool, `SELECT sum(b)::text || ' ' || min(a) || ' ' || max(a) FROM t WHERE k NOT IN ('come and go', 'gone')`, fmt.Sprintf("%d %d %[2]d", rounds, rounds-1))
	wantRows(t, pool, `SELECT count(*)::text FROM t WHERE k = 'come and go' AND (a, b) <> ('new', 7)`, "0")
}

// A column that has got another type since the statements were made.
func TestPartsFollowAChangedColumn(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, a text, b int, c text)`)
	s := partial(t, Config{})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t ALTER b TYPE numeric`)
	m := msg("a", `{"k":"k","b":1.25}`)
	if err := write(t, pool, s, m); err == nil || sqlstate.Of(err) != "" && sqlstate.Means(sqlstate.Of(err), sqlstate.Unreadable) {
		t.Fatalf("the error is %v", err)
	}
	if err := write(t, pool, s, m); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT b::text FROM t`, "1.25")
}

// Rows that lack the same go together.
func TestRuns(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, partialTable)
	s := partial(t, Config{})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	p := s.current.Load()
	values, err := p.set.Encode([]message.Message{
		msg("0", `{"k":"0","a":"","b":1}`), msg("1", `{"k":"1","a":"","b":1,"c":""}`), msg("2", `{"k":"2","c":""}`),
		msg("3", `{"k":"3","a":""}`), msg("4", `{"k":"4"}`), msg("5", `{"k":"5"}`),
	})
	if err != nil {
		t.Fatal(err)
	}
	var got [][]int
	for _, r := range p.writer.(*upsertWriter).fold.runs(values, []bool{false, false, true, false, false, true}) {
		got = append(got, r.rows)
	}
	if want := [][]int{{0, 1, 2}, {3, 4}, {5}}; !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("the runs are %v, want %v", got, want)
	}
}

// An old message undoes newer ones only where nothing is compared, and nothing but the key is
// not enough.
func TestOverwrites(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		Config
		undoes bool
	}{
		"insert":                      {Config{}, false},
		"insert with a key":           {Config{Key: []string{"k"}}, false},
		"upsert":                      {Config{Mode: ModeUpsert, Key: []string{"k"}}, true},
		"upsert, whatever it accepts": {Config{Mode: ModeUpsert, Key: []string{"k"}, AcceptReordering: true}, true},
		"upsert of the key":           {Config{Mode: ModeUpsert, Key: []string{"k", "v"}}, false},
		"versioned":                   {Config{Mode: ModeVersioned, Key: []string{"k"}, Version: "v"}, false},
		"update":                      {Config{Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"v": "json:before"}}, false},
		"update of another column":    {Config{Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"w": "json:w"}}, true},
	} {
		c.Name, c.Columns = "public.t", map[string]string{"k": "id", "v": "json:v"}
		err := build(t, c.Config).Overwrites(&message.Message{})
		if (err != nil) != c.undoes || err != nil && !strings.Contains(err.Error(), "newer messages may have written to public.t; look at the row first") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
