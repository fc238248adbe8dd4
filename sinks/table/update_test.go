package table

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/sinktest"
)

// step is a message that takes an order from one status to another. Its id is what the row
// then says in the column by.
func step(order, from, to string) message.Message {
	return msg(from+">"+to, fmt.Sprintf(`{"k":%s,"from":%s,"to":%s}`, jsonText(order), jsonText(from), jsonText(to)))
}

func jsonText(s string) string {
	if s == "null" {
		return s
	}
	return fmt.Sprintf("%q", s)
}

// updating is the configuration of a sink for steps.
func updating(c Config) Config {
	c.Name, c.Mode, c.Key = "public.t", ModeUpdate, []string{"k"}
	if c.Columns == nil {
		c.Columns = map[string]string{"k": "json:k", "status": "json:to", "by": "id"}
	}
	if c.Expect == nil {
		c.Expect = map[string]string{"status": "json:from"}
	}
	return c
}

const statuses = `SELECT concat_ws(' ', k, coalesce(status::text, 'NULL'), by) FROM t ORDER BY k`

func TestUpdate(t *testing.T) {
	t.Parallel()
	const w, r = sinks.Written, sinks.Rejected
	for name, c := range map[string]struct {
		typ  string
		msgs []message.Message
		want []sinks.Outcome
		rows []string
	}{
		"alone": {
			"text",
			[]message.Message{step("a", "new", "paid"), step("b", "paid", "sent"), step("c", "new", "paid")},
			[]sinks.Outcome{w, r, r},
			[]string{"a paid new>paid", "b new was"},
		},
		"turns": {
			"text",
			[]message.Message{
				step("a", "new", "paid"), step("b", "new", "void"), step("a", "paid", "sent"), step("a", "paid", "void"),
				step("b", "new", "paid"), step("a", "sent", "here"), step("b", "void", "new"), step("c", "new", "paid"), step("c", "paid", "sent"),
			},
			[]sinks.Outcome{w, w, w, r, r, w, w, r, r},
			[]string{"a here sent>here", "b new void>new"},
		},
		"the wrong one first": {
			"text",
			[]message.Message{step("a", "paid", "sent"), step("a", "new", "paid"), step("a", "paid", "sent")},
			[]sinks.Outcome{r, w, w},
			[]string{"a sent paid>sent", "b new was"},
		},
		"to NULL and back": {
			"text",
			[]message.Message{step("a", "new", "null"), step("a", "null", "paid"), step("b", "null", "paid")},
			[]sinks.Outcome{w, w, r},
			[]string{"a paid null>paid", "b new was"},
		},
		"no key": {
			"text",
			[]message.Message{step("null", "new", "paid"), step("a", "new", "paid"), step("null", "new", "paid")},
			[]sinks.Outcome{r, w, r},
			[]string{"a paid new>paid", "b new was"},
		},
		"there and back": {
			"text",
			[]message.Message{step("a", "new", "paid"), step("a", "paid", "new"), step("a", "new", "paid"), step("a", "paid", "new")},
			[]sinks.Outcome{w, w, w, w},
			[]string{"a new paid>new", "b new was"},
		},
		"an enum":    {"public.status", []message.Message{step("a", "new", "paid"), step("a", "paid", "sent")}, []sinks.Outcome{w, w}, []string{"a sent paid>sent", "b new was"}},
		"documents":  {"json", []message.Message{step("a", "new", "paid"), step("b", "void", "paid")}, []sinks.Outcome{w, r}, []string{`a "paid" new>paid`, `b "new" was`}},
		"documents2": {"jsonb", []message.Message{step("a", "new", "paid"), step("a", "paid", "sent")}, []sinks.Outcome{w, w}, []string{`a "sent" paid>sent`, `b "new" was`}},
		"citext":     {"ext.citext", []message.Message{step("a", "NEW", "PAID"), step("a", "paid", "sent")}, []sinks.Outcome{w, w}, []string{`a sent paid>sent`, `b new was`}},
		"collated":   {`text COLLATE public.ignorecase`, []message.Message{step("a", "NEW", "PAID"), step("a", "paid", "sent")}, []sinks.Outcome{w, w}, []string{`a sent paid>sent`, `b new was`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, `CREATE TYPE status AS ENUM ('new', 'paid', 'sent', 'void'); CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext;
				CREATE COLLATION ignorecase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`)
			was := "new"
			if strings.HasPrefix(c.typ, "json") {
				was = `"new"`
			}
			exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status `+c.typ+`, by text); INSERT INTO t VALUES ('a', '`+was+`', 'was'), ('b', '`+was+`', 'was')`)
			for _, on := range []policy.Mismatch{policy.MismatchIgnore, policy.MismatchDeadLetter} {
				s := build(t, updating(Config{OnMismatch: on}))
				if err := prepare(t, pool, s); err != nil {
					t.Fatal(err)
				}
				if on == policy.MismatchIgnore {
					got, err := outcomes(t, pool, s, c.msgs...)
					if err != nil || !slices.Equal(got, c.want) {
						t.Errorf("outcomes %v, %v; want %v", got, err, c.want)
					}
					wantRows(t, pool, statuses, c.rows...)
					exec(t, pool, `UPDATE t SET status = '`+was+`', by = 'was'`)
					continue
				}
				// The same are dead letters, all at once; what is left is as it was.
				_, err := outcomes(t, pool, s, c.msgs...)
				var good []message.Message
				for i, why := range sinks.AllPermanent(err) {
					if c.want[i] != r || !strings.HasPrefix(why.Error(), `it expects status = `) {
						t.Errorf("message %d: %v", i, why)
					}
				}
				for i, m := range c.msgs {
					if sinks.AllPermanent(err)[i] == nil {
						good = append(good, m)
					} else if c.want[i] != r {
						t.Errorf("message %d is refused", i)
					}
				}
				if len(good) != len(c.msgs)-count(c.want, r) {
					t.Errorf("%d messages are good: %v", len(good), err)
				}
				if len(good) < len(c.msgs) {
					if _, err := outcomes(t, pool, s, good...); err != nil {
						t.Error(err)
					}
				}
				wantRows(t, pool, statuses, c.rows...)
			}
		})
	}
}

func count[T comparable](all []T, x T) (n int) {
	for _, y := range all {
		if x == y {
			n++
		}
	}
	return n
}

// Two messages are of one row if the key's index says so, whatever the search path.
func TestUpdateComparesKeysAsTheIndexDoes(t *testing.T) {
	t.Parallel()
	for name, typ := range map[string]string{"citext": "ext.citext", "collation": "text COLLATE public.ignorecase", "numeric": "numeric", "domain": "public.name"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, `CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE DOMAIN name AS ext.citext;
				CREATE COLLATION ignorecase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`)
			one, two := "Ab", "aB"
			if typ == "numeric" {
				one, two = "1", "1.0"
			}
			exec(t, pool, `CREATE TABLE t (k `+typ+` PRIMARY KEY, status text, by text); INSERT INTO t VALUES ('`+one+`', 'new', 'was')`)
			s := build(t, updating(Config{}))
			if _, err := outcomes(t, pool, s, step(one, "new", "paid"), step(two, "paid", "sent"), step(one, "sent", "here")); err != nil {
				t.Error(err)
			}
			wantRows(t, pool, statuses, one+" here sent>here")
		})
	}
}

func TestUpdateOfSeveralColumns(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k int, part date, status text, version int NOT NULL, twice int GENERATED ALWAYS AS (version * 2) STORED, at timestamptz, PRIMARY KEY (part, k)) PARTITION BY RANGE (part);
		CREATE TABLE t1 PARTITION OF t FOR VALUES FROM ('2026-01-01') TO ('2026-02-01'); CREATE TABLE t2 PARTITION OF t DEFAULT;
		INSERT INTO t VALUES (1, '2026-01-05', 'new', 1), (1, '2026-03-05', 'new', 1), (2, '2026-01-05', 'new', 7)`)
	s := build(t, Config{
		Name: "public.t", Mode: ModeUpdate, Key: []string{"k", "part"}, OnMismatch: policy.MismatchStop,
		Columns: map[string]string{"k": "json:k", "part": "json:part", "version": "json:next", "at": "now"},
		Expect:  map[string]string{"version": "json:version", "status": "const:new", "twice": "json:twice"},
	})
	change := func(k int, part string, version int) message.Message {
		return msg("m", fmt.Sprintf(`{"k":%d,"part":%q,"version":%d,"next":%d,"twice":%d}`, k, part, version, version+1, version*2))
	}
	if _, err := outcomes(t, pool, s, change(1, "2026-01-05", 1), change(2, "2026-01-05", 7), change(1, "2026-03-05", 1), change(1, "2026-01-05", 2)); err != nil {
		t.Error(err)
	}
	wantRows(t, pool, `SELECT concat_ws(' ', k, part, version, at > '2020-01-01') FROM t ORDER BY part, k`, "1 2026-01-05 3 t", "2 2026-01-05 8 t", "1 2026-03-05 2 t")

	_, err := outcomes(t, pool, s, change(1, "2026-01-05", 3), change(2, "2026-01-05", 7), change(3, "2026-01-05", 7))
	index, why, ok := sinks.AsHold(err)
	const want = `it expects status = "new", twice = "14", version = "7"; its row has status = "new", twice = "16", version = "8"; sink.table.on_mismatch is stop`
	if !ok || index != 1 || why.Error() != want {
		t.Errorf("message %d holds its lane: %v, want %s", index, why, want)
	}
}

// What a message doesn't have stays as it is. What it expects is NULL then.
func TestUpdateKeepsWhatIsAbsent(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	some := func(k, rest string) message.Message { return msg("m", fmt.Sprintf(`{"k":%q,"to":%s}`, k, rest)) }
	for _, absent := range []policy.Absent{"", policy.AbsentKeep, policy.AbsentNull} {
		for _, kind := range []string{"TABLE t (k text PRIMARY KEY, status text, note text, by text)", "TABLE base (k text PRIMARY KEY, status text, note text, by text); CREATE VIEW t AS SELECT * FROM base"} {
			exec(t, pool, `CREATE `+kind+`; INSERT INTO t VALUES ('a', 'new', 'first', 'was'), ('b', 'new', 'first', 'was'), ('c', 'new', 'first', 'was'), ('d', NULL, 'first', 'was')`)
			s := build(t, updating(Config{
				Absent: absent, OnMismatch: policy.MismatchIgnore, Expect: map[string]string{"status": "json:from"},
				Columns: map[string]string{"k": "json:k", "status": "json:to", "note": "json:note", "by": "const:us"},
			}))
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			got, err := outcomes(t, pool, s, some("a", `"paid","from":"new"`), some("b", `"paid","from":"new","note":"more"`), some("a", `"sent","from":"paid","note":null`),
				some("c", `"paid"`), some("d", `"paid"`), some("b", `"sent","from":"paid"`))
			if want := []sinks.Outcome{0, 0, 0, sinks.Rejected, 0, 0}; err != nil || !slices.Equal(got, want) {
				t.Errorf("%v, %v", got, err)
			}
			notes := []string{"a sent NULL us", "b sent more us", "c new first was", "d paid first us"}
			if absent == policy.AbsentNull {
				notes[1], notes[3] = "b sent NULL us", "d paid NULL us"
			}
			wantRows(t, pool, `SELECT concat_ws(' ', k, status, coalesce(note, 'NULL'), by) FROM t ORDER BY k`, notes...)
			exec(t, pool, `DROP SCHEMA public CASCADE; CREATE SCHEMA public`)
		}
	}
}

// A reason says both states, and stays short.
func TestReasonsOfMismatches(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status text, by text); INSERT INTO t VALUES ('a', 'new', 'was'), ('b', repeat('x"', 100000), 'was')`)
	s := build(t, updating(Config{}))
	long := strings.Repeat("ü", 50_000)
	_, err := outcomes(t, pool, s, step("a", "new", "paid"), step("a", "new", "sent"), step("a", "paid", "sent"), step("b", long, "new"), step("b", "null", "sent"), step("c", "new", "paid"), step("null", "null", "paid"))
	all := sinks.AllPermanent(err)
	tail := "; sink.table.on_mismatch is dead_letter"
	for i, want := range map[int]string{
		1: `it expects status = "new"; its row has status = "paid"` + tail, // as it was in its turn
		3: `it expects status = "` + strings.Repeat("ü", 60) + `"…; its row has status = "` + strings.Repeat(`x\"`, 30) + `"…` + tail,
		4: `it expects status = NULL; its row has status = "` + strings.Repeat(`x\"`, 30) + `"…` + tail,
		5: `it expects status = "new"; there is no row with its key` + tail,
		6: `it expects status = NULL; there is no row with its key` + tail,
	} {
		if all[i] == nil || all[i].Error() != want {
			t.Errorf("message %d: %v\nwant %s", i, all[i], want)
		}
	}
	if len(all) != 5 {
		t.Errorf("%d messages are refused: %v", len(all), err)
	}
	if got := listed(slices.Repeat([]string{"a = NULL"}, 10)); got != strings.Repeat("a = NULL, ", 7)+"a = NULL and 2 more" {
		t.Errorf("ten columns are listed as %s", got)
	}
}

// The server's error of one message names no other: the batch is then divided.
func TestUpdateRefusesBadValues(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status varchar(4) CHECK (status <> 'void'), by text); INSERT INTO t VALUES ('a', 'new', 'was')`)
	s := build(t, updating(Config{}))
	for to, code := range map[string]string{"void": "23514", "longer": "22001"} {
		if _, err := outcomes(t, pool, s, step("a", "new", "paid"), step("a", "paid", to)); sqlstate.Of(err) != code {
			t.Errorf("to %s: %v", to, err)
		}
	}
	_, err := outcomes(t, pool, s, step("a", "new", "paid"), msg("bad", `{"k":`), message.Message{ID: "tombstone"})
	if bad := sinks.AllPermanent(err); len(bad) != 1 || bad[2] == nil {
		t.Errorf("a tombstone: %v", err)
	}
	if _, err = outcomes(t, pool, s, step("a", "new", "paid"), msg("bad", `{"k":`)); sinks.AllPermanent(err)[1] == nil {
		t.Errorf("bad JSON: %v", err)
	}
	wantRows(t, pool, statuses, "a new was")
}

// A writer from outside holds the row: the message waits, and finds the row as it is then.
func TestUpdateBesideAnotherWriter(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		other string
		want  sinks.Outcome
		row   []string
		again bool // the transaction is tried again
	}{
		"who changes what is expected": {`UPDATE t SET status = 'void', by = 'them'`, sinks.Rejected, []string{"a void them"}, false},
		"who changes it to that":       {`UPDATE t SET status = 'paid', by = 'them'`, sinks.Written, []string{"a sent paid>sent"}, false},
		"who deletes the row":          {`DELETE FROM t`, sinks.Rejected, []string{}, false},
		"who replaces the row":         {`DELETE FROM t; INSERT INTO t VALUES ('a', 'paid', 'them')`, sinks.Written, []string{"a sent paid>sent"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status text, by text); INSERT INTO t VALUES ('a', 'new', 'was')`)
			s := build(t, updating(Config{OnMismatch: policy.MismatchIgnore}))
			other, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = other.Rollback(t.Context()) }()
			for _, sql := range strings.Split(c.other, ";") {
				if _, err := other.Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			type result struct {
				got []sinks.Outcome
				err error
			}
			done := make(chan result, 1)
			go func() {
				got, err := outcomes(t, pool, s, step("a", "paid", "sent"))
				done <- result{got, err}
			}()
			awaitWaiting(t, pool)
			if err := other.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			r := <-done
			if c.again {
				if sqlstate.Of(r.err) != sqlstate.SerializationFailure {
					t.Errorf("%v, %v; want another try", r.got, r.err)
				}
				r.got, r.err = outcomes(t, pool, s, step("a", "paid", "sent"))
			}
			if r.err != nil || r.got[0] != c.want {
				t.Errorf("%v, %v; want %v", r.got, r.err, c.want)
			}
			wantRows(t, pool, statuses, c.row...)
		})
	}
}

// Each message expects a version and writes the next. Whatever the order, from workers and
// from an application beside them, each version of a row is written once.
func TestUpdateInAnyOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	const rows, versions, workers = 20, 40, 4
	exec(t, pool, fmt.Sprintf(`CREATE TABLE t (k text PRIMARY KEY, status int, by text); CREATE TABLE log (k text, status int, by text);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO log SELECT NEW.*; RETURN NULL; END $$;
		CREATE TRIGGER note AFTER UPDATE ON t FOR EACH ROW EXECUTE FUNCTION note();
		INSERT INTO t SELECT 'k' || i, 0, '' FROM generate_series(1, %d) i`, rows))
	s := build(t, updating(Config{OnMismatch: policy.MismatchIgnore}))
	var all []message.Message
	for k := range rows {
		for v := range versions {
			all = append(all, step(fmt.Sprint("k", k+1), fmt.Sprint(v), fmt.Sprint(v+1)))
		}
	}
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() {
			random := rand.New(rand.NewPCG(7, uint64(w)))
			for range 30 {
				msgs := make([]message.Message, 200)
				for i := range msgs {
					msgs[i] = all[random.IntN(len(all))]
				}
				if _, err := outcomes(t, pool, s, msgs...); err != nil {
					t.Error(err)
					return
				}
				if _, err := pool.Exec(t.Context(), `UPDATE t SET status = status + 1, by = 'app' WHERE k = $1`, fmt.Sprint("k", 1+random.IntN(rows))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	wantRows(t, pool, `SELECT k FROM log GROUP BY k, status HAVING count(*) > 1`, []string{}...)
	wantRows(t, pool, `SELECT DISTINCT (count(*) = max(status))::text FROM log GROUP BY k`, "true")
	wantRows(t, pool, `SELECT (count(*) > 100)::text FROM log WHERE by <> 'app'`, "true")
}

// Thousands of messages of one row are that many updates, one after the other.
func TestThousandsOfTurns(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status int, by text); INSERT INTO t VALUES ('a', 0, '')`)
	s := build(t, updating(Config{}))
	const n = 4000
	var msgs []message.Message
	for i := range n {
		msgs = append(msgs, step("a", fmt.Sprint(i), fmt.Sprint(i+1)))
	}
	began := time.Now()
	got, err := outcomes(t, pool, s, msgs...)
	if err != nil || count(got, sinks.Written) != n {
		t.Errorf("%d are written: %v", count(got, sinks.Written), err)
	}
	t.Logf("%d turns took %v", n, time.Since(began))
	wantRows(t, pool, `SELECT status::text FROM t`, fmt.Sprint(n))
}

// What keeps a row from being updated isn't taken for success.
func TestRowsThatAreKeptFromUpdates(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status text, by text); INSERT INTO t VALUES ('a', 'new', 'was'), ('b', 'new', 'was');
		CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN CASE WHEN NEW.k = 'b' THEN NULL ELSE NEW END; END $$;
		CREATE TRIGGER keep BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION keep()`)
	_, err := outcomes(t, pool, build(t, updating(Config{})), step("a", "new", "paid"), step("b", "new", "paid"))
	if bad := sinks.AllPermanent(err); len(bad) != 1 || bad[1] == nil || !strings.Contains(bad[1].Error(), "left it unchanged") {
		t.Errorf("a trigger: %v", err)
	}

	exec(t, pool, `DROP TRIGGER keep ON t; ALTER TABLE t ENABLE ROW LEVEL SECURITY; ALTER TABLE t FORCE ROW LEVEL SECURITY; CREATE POLICY one ON t USING (k = 'a')`)
	role := "keeper_" + db.Name
	exec(t, pool, `CREATE ROLE `+role+`; GRANT SELECT, UPDATE ON t TO `+role)
	t.Cleanup(func() { _, _ = db.Pool(t).Exec(t.Context(), "DROP OWNED BY "+role+"; DROP ROLE "+role) })
	err = inTx(t, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SET LOCAL ROLE "+role); err != nil {
			return err
		}
		return build(t, updating(Config{})).Write(t.Context(), tx, sinks.NewBatch([]message.Message{step("a", "new", "paid"), step("b", "new", "paid")}))
	})
	if bad := sinks.AllPermanent(err); len(bad) != 1 || bad[1] == nil || !strings.Contains(bad[1].Error(), "there is no row") {
		t.Errorf("row security: %v", err)
	}
}

func TestUpdateOfAView(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE base (k text PRIMARY KEY, status text, by text, kind int DEFAULT 1); INSERT INTO base VALUES ('a', 'new', 'was', 1), ('b', 'new', 'was', 2);
		CREATE VIEW t AS SELECT k, status, by FROM base WHERE kind = 1`)
	s := build(t, updating(Config{}))
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	if _, err := outcomes(t, pool, s, step("a", "new", "paid"), step("a", "paid", "sent")); err != nil {
		t.Error(err)
	}
	if _, err := outcomes(t, pool, s, step("b", "new", "paid")); !strings.Contains(fmt.Sprint(err), "there is no row") {
		t.Errorf("a row that isn't the view's: %v", err)
	}
	wantRows(t, pool, statuses, "a sent paid>sent")
}

// A key that isn't one, which only a view can have.
func TestUpdateByAKeyOfSeveralRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE base (id int PRIMARY KEY, k text, status text, by text); INSERT INTO base VALUES (1, 'a', 'new', 'was'), (2, 'a', 'new', 'was');
		CREATE VIEW t AS SELECT k, status, by FROM base`)
	_, err := outcomes(t, pool, build(t, updating(Config{})), step("a", "new", "paid"))
	if _, permanent := sinks.AsPermanent(err); permanent || !strings.Contains(fmt.Sprint(err), "find more than one row") {
		t.Errorf("the error is %v", err)
	}
	wantRows(t, pool, `SELECT status FROM base`, "new", "new")
}

// An expected column that gets another type is noticed as one that is filled.
func TestUpdateFollowsAChangedExpectation(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status text, by text, version int); INSERT INTO t VALUES ('a', 'new', 'was', 1)`)
	s := build(t, updating(Config{Expect: map[string]string{"version": "const:1.0"}, OnMismatch: policy.MismatchIgnore}))
	if err := prepare(t, pool, s); err == nil {
		t.Error("1.0 is an integer")
	}
	exec(t, pool, `ALTER TABLE t ALTER version TYPE numeric`)
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t ALTER version TYPE text`)
	if _, err := outcomes(t, pool, s, step("a", "new", "paid")); !errors.Is(err, errChanged) {
		t.Errorf("the error is %v", err)
	}
	if got, err := outcomes(t, pool, s, step("a", "new", "paid")); err != nil || got[0] != sinks.Rejected {
		t.Errorf("then: %v, %v", got, err)
	}

	// Without a constant, the statement that locks compares the columns itself.
	s = build(t, updating(Config{Expect: map[string]string{"version": "json:from"}}))
	exec(t, pool, `ALTER TABLE t ALTER version TYPE int USING version::int`)
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t ALTER version TYPE numeric; UPDATE t SET version = 1.5`)
	if _, err := outcomes(t, pool, s, step("a", "1.5", "paid")); !errors.Is(err, errChanged) {
		t.Errorf("the error is %v", err)
	}
	if _, err := outcomes(t, pool, s, step("a", "1.5", "paid")); err != nil {
		t.Errorf("then: %v", err)
	}
}

func TestUpdateConfig(t *testing.T) {
	t.Parallel()
	columns := map[string]string{"k": "id", "v": "json:v"}
	expect := map[string]string{"v": "json:old"}
	for want, c := range map[string]Config{
		"key: mode update needs":                                {Mode: ModeUpdate, Expect: expect},
		"expect: mode update needs":                             {Mode: ModeUpdate, Key: []string{"k"}},
		"expect: only mode update reads it":                     {Mode: ModeUpsert, Key: []string{"k"}, Expect: expect},
		"on_mismatch: only mode":                                {Mode: ModeUpsert, Key: []string{"k"}, OnMismatch: policy.MismatchStop},
		`on_mismatch: "x" is not one of`:                        {Mode: ModeUpdate, Key: []string{"k"}, Expect: expect, OnMismatch: "x"},
		"expect.k: it is part of the key":                       {Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"k": "id"}},
		"expect.v: no row holds":                                {Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"v": "now"}},
		`expect.v: "nope" is no place`:                          {Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"v": "nope"}},
		`expect.v: "cloudevent" is a way to find`:               {Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"v": "cloudevent"}},
		"expect: a name is empty":                               {Mode: ModeUpdate, Key: []string{"k"}, Expect: map[string]string{"": "id"}},
		"columns: they have nothing but the key":                {Mode: ModeUpdate, Key: []string{"k", "v"}, Expect: map[string]string{"w": "id"}},
		"accept_reordering: only mode upsert, update or append": {Key: []string{"k"}, AcceptReordering: true},
	} {
		c.Name, c.Columns = "public.t", columns
		if _, err := c.Sink(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// Order doesn't matter where a message changes what it expects.
func TestUpdateNeedsOrder(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		expect map[string]string
		accept bool
		needs  bool
	}{
		{map[string]string{"v": "json:old"}, false, false},
		{map[string]string{"v": "const:1", "w": "json:w"}, false, false},
		{map[string]string{"w": "json:w"}, false, true},
		{map[string]string{"v": "json:v"}, false, true}, // it stays as it is
		{map[string]string{"w": "json:w"}, true, false},
	} {
		s := build(t, Config{Name: "public.t", Mode: ModeUpdate, Key: []string{"k"}, Columns: map[string]string{"k": "id", "v": "json:v"}, Expect: c.expect, AcceptReordering: c.accept})
		if err := s.NeedsOrder(); (err != nil) != c.needs {
			t.Errorf("%v: %v", c.expect, err)
		}
	}
}

func TestUpdatePrepares(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t)
	role := "updater_" + db.Name
	exec(t, pool, `CREATE TABLE t (k int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text, by text, must int NOT NULL, secret text);
		CREATE TABLE rules (k text PRIMARY KEY, status text, by text); CREATE RULE r AS ON UPDATE TO rules DO INSTEAD NOTHING;
		CREATE ROLE `+role+`; GRANT SELECT (k, status, by), UPDATE (status, by) ON t TO `+role)
	t.Cleanup(func() { _, _ = db.Pool(t).Exec(t.Context(), "DROP OWNED BY "+role+"; DROP ROLE "+role) })
	for want, c := range map[string]Config{
		"": {}, // an update needs no column that an insert would, and writes no key
		`expect: it has no column "satus"; did you mean "status"?`: {Expect: map[string]string{"satus": "const:x"}},
		`expect: it has no column "qqqqqqq"; the columns are`:      {Expect: map[string]string{"qqqqqqq": "const:x"}},
		`GRANT SELECT ("secret") ON "public"."t"`:                  {Expect: map[string]string{"secret": "const:x"}},
		`GRANT UPDATE ("must")`:                                    {Columns: map[string]string{"k": "json:k", "must": "json:m"}},
	} {
		err := inTx(t, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SET LOCAL ROLE "+role); err != nil {
				return err
			}
			return build(t, updating(c)).Prepare(t.Context(), tx)
		})
		if want == "" && err != nil || want != "" && !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("the error is %v, want %s", err, want)
		}
	}
	c := updating(Config{})
	c.Name = "public.rules"
	if err := prepare(t, pool, build(t, c)); err == nil || !strings.Contains(err.Error(), "the server refuses") {
		t.Errorf("a rule: %v", err)
	}
}

func TestUpdateInEveryProtocol(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool(t), `CREATE TABLE t (k text, status text, by text, tenant text DEFAULT 'acme', PRIMARY KEY (tenant, k))`)
	c := updating(Config{Expect: map[string]string{"status": "json:from", "by": "const:was"}, Columns: map[string]string{"k": "json:k", "status": "json:to", "tenant": "const:acme"}})
	c.Key = []string{"tenant", "k"}
	s := build(t, c)
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
			exec(t, pool, `TRUNCATE t; INSERT INTO t VALUES ('a', 'new', 'was'), ('b', 'new', 'me')`)
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			_, err = outcomes(t, pool, s, step("a", "new", "paid"), step("a", "paid", "sent"), step("b", "new", "paid"), step("a", "x", "y"))
			if bad := sinks.AllPermanent(err); len(bad) != 2 || bad[2] == nil || bad[3] == nil {
				t.Errorf("the error is %v", err)
			}
			if _, err := outcomes(t, pool, s, step("a", "new", "paid"), step("a", "paid", "sent")); err != nil {
				t.Error(err)
			}
			wantRows(t, pool, statuses, "a sent was", "b new me")
		})
	}
}

// The suite's messages have rows of their own, which are there.
func TestConformanceOfUpdate(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, status text, by text); INSERT INTO t SELECT i, 'new' FROM generate_series(0, 20000) i`)
	sinktest.Run(t, sinktest.Config{
		Pool: pool, New: func() sinks.Sink { return build(t, updating(Config{})) }, Count: sinktest.Rows("public.t WHERE status = 'paid'"),
		Message: func(n int) message.Message { return step(fmt.Sprint(n), "new", "paid") },
		Poison:  func() message.Message { return step("0", "never", "paid") },
	})
}
