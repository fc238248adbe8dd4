package table

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// event is a message for a stream, which it expects at a version.
func event(id, stream, expected string) message.Message {
	return msg(id, fmt.Sprintf(`{"s":%s,"v":%s}`, stream, expected))
}

const (
	eventsTable   = `CREATE TABLE events (stream text NOT NULL, version bigint NOT NULL, op text NOT NULL, event_id uuid, data jsonb)`
	eventsIndexes = `; CREATE UNIQUE INDEX ON events (stream, version); CREATE UNIQUE INDEX ON events (stream, op)`
)

func appendConfig() Config {
	return Config{
		Name: "public.events", Mode: ModeAppend, Stream: "stream", Version: "version", Operation: "op", EventID: "event_id", Expected: "json:v",
		Columns: map[string]string{"stream": "json:s", "data": "value"},
	}
}

func TestAppend(t *testing.T) {
	t.Parallel()
	const w, p, x = sinks.Written, sinks.AlreadyPresent, sinks.Rejected
	for name, c := range map[string]struct {
		msgs []message.Message
		want []sinks.Outcome
		rows []string
	}{
		"at the end": {
			[]message.Message{event("1", `"new"`, "null"), event("2", `"old"`, "null"), event("3", `"new"`, "null"), event("4", `"old"`, "null")},
			[]sinks.Outcome{w, w, w, w},
			[]string{"new 1 1", "new 2 3", "old 1 a", "old 2 b", "old 3 2", "old 4 4"},
		},
		"one after the other": {
			[]message.Message{event("1", `"old"`, "2"), event("2", `"old"`, "3"), event("3", `"new"`, "0"), event("4", `"new"`, `"1"`), event("5", `"old"`, "null")},
			[]sinks.Outcome{w, w, w, w, w},
			[]string{"new 1 3", "new 2 4", "old 1 a", "old 2 b", "old 3 1", "old 4 2", "old 5 5"},
		},
		"not as expected": {
			[]message.Message{event("1", `"old"`, "1"), event("2", `"old"`, "3"), event("3", `"old"`, "2"), event("4", `"old"`, "2"), event("5", `"new"`, "1"), event("6", `"old"`, "3")},
			[]sinks.Outcome{x, x, w, x, x, w},
			[]string{"old 1 a", "old 2 b", "old 3 3", "old 4 6"},
		},
		"sent again": {
			[]message.Message{event("a", `"old"`, "0"), event("1", `"old"`, "2"), event("1", `"old"`, "2"), event("2", `"old"`, "3"), event("a", `"new"`, "0"), event("1", `"new"`, "1")},
			[]sinks.Outcome{p, w, p, w, w, w},
			[]string{"new 1 a", "new 2 1", "old 1 a", "old 2 b", "old 3 1", "old 4 2"},
		},
		"rejected, then sent again": {
			[]message.Message{event("1", `"old"`, "3"), event("2", `"old"`, "2"), event("1", `"old"`, "3")},
			[]sinks.Outcome{x, w, w},
			[]string{"old 1 a", "old 2 b", "old 3 2", "old 4 1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, eventsTable+eventsIndexes+`; INSERT INTO events VALUES ('old', 1, 'a'), ('old', 2, 'b')`)
			config := appendConfig()
			config.OnMismatch = policy.MismatchIgnore
			got, err := outcomes(t, pool, build(t, config), c.msgs...)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("outcomes %v, want %v", got, c.want)
			}
			wantRows(t, pool, `SELECT concat_ws(' ', stream, version, op) FROM events ORDER BY stream, version`, c.rows...)
		})
	}
}

// Streams and operations compare as their columns do, wherever their types are.
func TestAppendComparesAsItsColumnsDo(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ create, stream, a, b, op string }{
		"citext off the search path": {`CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE events (stream ext.citext, version int, op ext.citext, event_id text, data jsonb)`, "stream", `"S"`, `"s"`, "X"},
		"a collation":                {`CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false); CREATE TABLE events (stream text COLLATE ci, version smallint, op text COLLATE ci, event_id text, data jsonb)`, "stream", `"S"`, `"s"`, "X"},
		"numbers":                    {`CREATE TABLE events (stream numeric, version bigint, op text, event_id varchar, data jsonb)`, "stream", `1.0`, `1`, "x"},
		"uuids":                      {`CREATE TABLE events (stream uuid, version bigint, op text, event_id uuid, data jsonb)`, "stream", `"6BA7B810-9DAD-11D1-80B4-00C04FD430C8"`, `"6ba7b8109dad11d180b400c04fd430c8"`, "x"},
		"a partitioned table":        {`CREATE TABLE events (stream text, version bigint, op text, event_id uuid, data jsonb) PARTITION BY HASH (stream); CREATE TABLE e0 PARTITION OF events FOR VALUES WITH (MODULUS 2, REMAINDER 0); CREATE TABLE e1 PARTITION OF events FOR VALUES WITH (MODULUS 2, REMAINDER 1)`, "stream", `"s"`, `"s"`, "x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, c.create+eventsIndexes)
			s := build(t, appendConfig())
			for range 2 { // the second time the first event is there
				got, err := outcomes(t, pool, s, event("x", c.a, "0"), event(c.op, c.b, "5"))
				if err != nil {
					t.Fatal(err)
				}
				if got[1] != sinks.AlreadyPresent {
					t.Errorf("outcomes %v", got)
				}
			}
			if _, err := outcomes(t, pool, s, event("y", c.b, "1"), event("z", c.b, "2")); err != nil {
				t.Fatal(err)
			}
			wantRows(t, pool, `SELECT version::text || op::text FROM events ORDER BY version`, "1x", "2y", "3z")
		})
	}
}

func TestOnMismatch(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+eventsIndexes+`; INSERT INTO events VALUES ('s', 1, 'a')`)
	msgs := []message.Message{event("1", `"s"`, "1"), event("2", `"s"`, "1"), event("3", `"t"`, "null"), event("4", `"s"`, "7")}
	config := appendConfig()
	_, err := outcomes(t, pool, build(t, config), msgs...)
	bad := sinks.AllPermanent(err)
	if len(bad) != 2 || bad[1] == nil || bad[3] == nil || bad[1].Error() != "the message expects its stream at version 1, and it is at 2; sink.table.on_mismatch is dead_letter" {
		t.Errorf("dead letters %v", err)
	}
	config.OnMismatch = policy.MismatchStop
	_, err = outcomes(t, pool, build(t, config), msgs...)
	if index, why, ok := sinks.AsHold(err); !ok || index != 1 || !strings.Contains(why.Error(), "on_mismatch is stop") {
		t.Errorf("the hold is of %d: %v", index, err)
	}
	wantRows(t, pool, `SELECT op FROM events`, "a")
}

func TestExpectationsThatAreNone(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+eventsIndexes)
	for _, bad := range []string{`"x"`, `""`, `-1`, `1.0`, `1e3`, `9223372036854775808`, `[0]`, `true`} {
		_, err := outcomes(t, pool, build(t, appendConfig()), event("1", `"s"`, "null"), event("2", `"s"`, bad))
		if all := sinks.AllPermanent(err); len(all) != 1 || all[1] == nil || !strings.Contains(err.Error(), "sink.table.expected, json:v: ") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	config := appendConfig()
	config.Expected, config.Columns = "header:v", map[string]string{"stream": "key", "data": "const:{}"}
	s := build(t, config)
	m := msg("1", "no JSON")
	m.Headers = []message.Header{{Key: "v", Value: []byte("0")}}
	if err := write(t, pool, s, m, msg("1", "")); err != nil {
		t.Fatal(err)
	}
	m.ID, m.Key = "2", []byte("k-1")
	if err := write(t, pool, s, m); err == nil || !strings.Contains(err.Error(), "expects its stream at version 0") {
		t.Error(err)
	}
	_, err := outcomes(t, pool, build(t, appendConfig()), msg("3", `{"v":0}`), event("4", "null", "0"), event("5", `"s"`, "0"))
	if all := sinks.AllPermanent(err); len(all) != 2 || all[0] == nil || all[1] == nil || !strings.Contains(err.Error(), `column "stream" is NULL`) {
		t.Errorf("no stream: %v", err)
	}
}

// Somebody else appends to the stream between the look at it and the write.
func TestAConcurrentAppender(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		expected, operation string
		on                  policy.Mismatch
		rollback            bool
		want                []sinks.Outcome
		rows                []string
	}{
		"at the end":       {"null", "theirs", "", false, []sinks.Outcome{sinks.Written, sinks.Written}, []string{"1 a", "2 theirs", "3 x", "4 y"}},
		"expected":         {"1", "theirs", policy.MismatchIgnore, false, []sinks.Outcome{sinks.Rejected, sinks.Written}, []string{"1 a", "2 theirs", "3 y"}},
		"dead-lettered":    {"1", "theirs", "", false, nil, []string{"1 a", "2 theirs"}},
		"this very one":    {"1", "x", "", false, []sinks.Outcome{sinks.AlreadyPresent, sinks.Written}, []string{"1 a", "2 x", "3 y"}},
		"the second one":   {"null", "y", "", false, []sinks.Outcome{sinks.Written, sinks.AlreadyPresent}, []string{"1 a", "2 y", "3 x"}},
		"but not for good": {"1", "theirs", "", true, []sinks.Outcome{sinks.Written, sinks.Written}, []string{"1 a", "2 x", "3 y"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, eventsTable+eventsIndexes+`; INSERT INTO events VALUES ('s', 1, 'a')`)
			config := appendConfig()
			config.OnMismatch = c.on
			s := build(t, config)
			other, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := other.Exec(t.Context(), `INSERT INTO events VALUES ('s', 2, $1)`, c.operation); err != nil {
				t.Fatal(err)
			}
			type result struct {
				got []sinks.Outcome
				err error
			}
			done := make(chan result, 1)
			go func() {
				got, err := outcomes(t, pool, s, event("x", `"s"`, c.expected), event("y", `"s"`, "null"))
				done <- result{got, err}
			}()
			awaitWaiting(t, pool)
			end := other.Commit
			if c.rollback {
				end = other.Rollback
			}
			if err := end(t.Context()); err != nil {
				t.Fatal(err)
			}
			r := <-done
			if c.want == nil {
				if bad := sinks.AllPermanent(r.err); len(bad) != 1 || bad[0] == nil {
					t.Errorf("dead letters: %v", r.err)
				}
			} else if r.err != nil || !slices.Equal(r.got, c.want) {
				t.Errorf("outcomes %v, want %v: %v", r.got, c.want, r.err)
			}
			wantRows(t, pool, `SELECT version || ' ' || op FROM events ORDER BY version`, c.rows...)
		})
	}
}

// Writers with streams in common, and others that know nothing of dedupd, wait for each other,
// never deadlock, and come to an end however fast the others are. Each stream has all its events, one after the other, and each lane's in
// its order.
func TestAppendersOfTheSameStreams(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+eventsIndexes)
	config := appendConfig()
	config.Expected = ""
	s := build(t, config)
	const workers, batches, size, streams, outside = 4, 30, 100, 20, 200
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(2, uint64(w)))
			for b := range batches {
				msgs := make([]message.Message, size)
				for i := range msgs {
					msgs[i] = event(fmt.Sprintf("%d/%05d", w, b*size+i), fmt.Sprintf(`"%d"`, random.IntN(streams)), "null")
				}
				if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, sinks.NewBatch(msgs)) }); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Go(func() {
		random := rand.New(rand.NewPCG(2, 99))
		for n := range outside {
			appendByHand(t, pool, fmt.Sprint(random.IntN(streams)), fmt.Sprintf("outside/%05d", n))
		}
	})
	wg.Wait()
	wantRows(t, pool, `SELECT count(*)::text FROM events`, fmt.Sprint(workers*batches*size+outside))
	for what, sql := range map[string]string{
		"have gaps":        `SELECT stream FROM events GROUP BY stream HAVING min(version) <> 1 OR max(version) <> count(*)`,
		"are out of order": `SELECT op FROM (SELECT op, lag(op) OVER (PARTITION BY stream, split_part(op, '/', 1) ORDER BY version) AS before FROM events) e WHERE op <= before`,
	} {
		if bad := rows(t, pool, sql); len(bad) > 0 {
			t.Errorf("%d %s, such as %s", len(bad), what, bad[0])
		}
	}
}

// Who appends to many streams comes to an end, too, if others append to all of them in less
// time than that takes.
func TestAppendBesideFastAppenders(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+eventsIndexes)
	const streams, batches, size, others = 20, 3, 1000, 3
	config := appendConfig()
	config.Expected = ""
	s := build(t, config)
	var wg sync.WaitGroup
	var done atomic.Bool
	for o := range others {
		wg.Go(func() {
			for n := 0; !done.Load(); n++ {
				appendByHand(t, pool, fmt.Sprint((n*others+o)%streams), fmt.Sprintf("outside %d/%d", o, n))
			}
		})
	}
	for b := range batches {
		msgs := make([]message.Message, size)
		for i := range msgs {
			msgs[i] = event(fmt.Sprintf("%d/%d", b, i), fmt.Sprintf(`"%d"`, i%streams), "null")
		}
		if err := write(t, pool, s, msgs...); err != nil {
			t.Error(err)
		}
	}
	done.Store(true)
	wg.Wait()
	wantRows(t, pool, `SELECT count(*)::text FROM events WHERE op NOT LIKE 'outside%'`, fmt.Sprint(batches*size))
}

// appendByHand appends an event as an application does: it looks, writes, and does both again
// if another one was faster.
func appendByHand(t *testing.T, pool *pgxpool.Pool, stream, operation string) {
	t.Helper()
	for {
		_, err := pool.Exec(t.Context(), `INSERT INTO events SELECT $1, coalesce(max(version), 0) + 1, $2 FROM events WHERE stream = $1`, stream, operation)
		if sqlstate.Of(err) == sqlstate.UniqueViolation {
			continue
		}
		if err != nil {
			t.Error(err)
		}
		return
	}
}

// Another unique index that refuses an event is the message's fault, and no appender's.
func TestAnotherIndexRefusesAnEvent(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+eventsIndexes+`; CREATE UNIQUE INDEX once ON events (event_id)`)
	s := build(t, appendConfig())
	if err := write(t, pool, s, event("x", `"s"`, "null")); err != nil {
		t.Fatal(err)
	}
	if err := write(t, pool, s, event("x", `"t"`, "null")); sqlstate.Of(err) != sqlstate.UniqueViolation {
		t.Errorf("the error is %v", err)
	}
	if err := write(t, pool, s, event("y", `"t"`, "0")); err != nil {
		t.Error(err)
	}
}

// The id of an event is that of SELECT uuid_generate_v5('5d4ed4b2-317e-54be-b05a-13fbab3ce4bd', id || '/0').
func TestEventIDs(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+eventsIndexes)
	if err := write(t, pool, build(t, appendConfig()), event("order-7", `"s"`, "null"), event("é", `"s"`, "null")); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT event_id::text FROM events ORDER BY version`, "00ad1793-eb15-5e25-a6e7-44df07aae47b", "7e935918-1780-51c5-ad98-52d08833b64f")
}

func TestATriggerThatKeepsEventsAway(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+eventsIndexes+`; CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN CASE WHEN NEW.op <> ''b'' THEN NEW END; END';
		CREATE TRIGGER keep BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION keep()`)
	s := build(t, appendConfig())
	if err := write(t, pool, s, event("a", `"s"`, "null")); err != nil {
		t.Fatal(err)
	}
	if err := write(t, pool, s, event("b", `"s"`, "null"), event("c", `"s"`, "null")); err == nil || !strings.Contains(err.Error(), "2 events were to be added, and the server added 1") {
		t.Error(err)
	}
}

func TestAppendFollowsAChangedColumn(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE events (stream text, version int, op text, event_id uuid, data int)`+eventsIndexes)
	config := appendConfig()
	config.Columns["data"] = "json:n"
	s := build(t, config)
	if err := write(t, pool, s, msg("a", `{"s":"1","n":1}`)); err != nil {
		t.Fatal(err)
	}
	for i, alter := range []string{
		"stream TYPE uuid USING '6ba7b810-9dad-11d1-80b4-00c04fd430c8'", "data TYPE numeric", "version TYPE bigint", "event_id TYPE text", "op TYPE varchar",
	} {
		exec(t, pool, `ALTER TABLE events ALTER `+alter)
		m := msg(fmt.Sprint("m", i), `{"s":"6BA7b8109dad11d180b400c04fd430c8","n":1}`)
		err := write(t, pool, s, m)
		if _, permanent := sinks.AsPermanent(err); permanent || sqlstate.Means(sqlstate.Of(err), sqlstate.Data) {
			t.Fatalf("%s: a changed table is called the message's fault: %v", alter, err)
		}
		if err != nil {
			if err := write(t, pool, s, m); err != nil {
				t.Fatalf("%s: %v", alter, err)
			}
		}
	}
	wantRows(t, pool, `SELECT version || op FROM events ORDER BY version`, "1a", "2m0", "3m1", "4m2", "5m3", "6m4")
}

func TestAppendNeedsItsIndexes(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, eventsTable+`; CREATE UNIQUE INDEX ON events (version, stream); CREATE UNIQUE INDEX ON events (op); CREATE VIEW v AS SELECT * FROM events`)
	err := prepare(t, pool, build(t, appendConfig()))
	for _, want := range []string{`run: CREATE UNIQUE INDEX ON "public"."events" ("stream", "version")`, `run: CREATE UNIQUE INDEX ON "public"."events" ("stream", "op")`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	exec(t, pool, `CREATE UNIQUE INDEX ON events (stream, version); CREATE UNIQUE INDEX ON events (stream, op)`)
	if err := prepare(t, pool, build(t, appendConfig())); err != nil {
		t.Error(err)
	}
	view := appendConfig()
	view.Name = "public.v"
	for _, c := range []struct {
		sql    string
		config Config
		want   string
	}{
		{``, view, "no view"},
		{`DROP VIEW v; ALTER TABLE events ALTER version TYPE numeric`, appendConfig(), `version: column "version" is of type numeric; make it bigint`},
		{`DROP INDEX events_stream_op_idx; CREATE UNIQUE INDEX ON events (stream COLLATE "C", op)`, appendConfig(), `compares column "stream" by another collation`},
		{`ALTER TABLE events ALTER event_id TYPE int USING 1`, appendConfig(), `event_id: column "event_id" is of type integer; make it uuid`},
		{`ALTER TABLE events DROP event_id`, appendConfig(), `it has no column "event_id"`},
		{`ALTER TABLE events ENABLE ROW LEVEL SECURITY`, appendConfig(), `no row security`},
	} {
		exec(t, pool, `SELECT 1;`+c.sql)
		if err := prepare(t, pool, build(t, c.config)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.want, err)
		}
	}
}

func TestAppendConfig(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*Config){
		"stream: mode append needs":                       func(c *Config) { c.Stream = "" },
		"version: mode append needs":                      func(c *Config) { c.Version = "" },
		"operation: mode append needs":                    func(c *Config) { c.Operation = "" },
		`stream: "x" is not among the columns`:            func(c *Config) { c.Stream = "x" },
		"version: dedupd fills":                           func(c *Config) { c.Version = "data" },
		"event_id: dedupd fills":                          func(c *Config) { c.EventID = "data" },
		`operation: column "stream" is another key's`:     func(c *Config) { c.Operation = "stream" },
		`operation: column "data" is filled by "value"`:   func(c *Config) { c.Operation = "data" },
		"key: mode append goes by":                        func(c *Config) { c.Key = []string{"stream"} },
		`expected: "id" names no`:                         func(c *Config) { c.Expected = "id" },
		`expected: "nothing" is no place`:                 func(c *Config) { c.Expected = "nothing" },
		"on_mismatch: without expected":                   func(c *Config) { c.Expected, c.OnMismatch = "", policy.MismatchIgnore },
		`on_mismatch: "x" is not one of`:                  func(c *Config) { c.OnMismatch = "x" },
		"on_stale: only mode versioned":                   func(c *Config) { c.OnStale = policy.StaleIgnore },
		"history: only mode upsert":                       func(c *Config) { c.History.Column = "h" },
		"stream: only mode append":                        func(c *Config) { c.Mode = ModeInsert },
		"version: only mode versioned or append reads it": func(c *Config) { c.Mode = ModeInsert },
	} {
		c := appendConfig()
		change(&c)
		if _, err := c.Sink(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	c := appendConfig()
	c.Columns["op"] = "id"
	if _, err := c.Sink(); err != nil {
		t.Error(err)
	}
	if s := build(t, appendConfig()); s.NeedsOrder() == nil {
		t.Error("a queue would do")
	}
	c.AcceptReordering = true
	if err := build(t, c).NeedsOrder(); err != nil {
		t.Error(err)
	}
}

// An application's role may be allowed to add events, and nothing else.
func TestAppendNeedsNoRightToChangeEvents(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	role := fmt.Sprint("adder_", rand.Uint32())
	exec(t, pool, eventsTable+eventsIndexes+`; CREATE ROLE `+role+`; GRANT USAGE ON SCHEMA public TO `+role+`; GRANT INSERT, SELECT (stream, version) ON events TO `+role)
	t.Cleanup(func() { _, _ = pool.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	s := build(t, appendConfig())
	as := func(f func(pgx.Tx) error) error {
		return inTx(t, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SET LOCAL ROLE `+role); err != nil {
				return err
			}
			return f(tx)
		})
	}
	if err := as(func(tx pgx.Tx) error { return s.Prepare(t.Context(), tx) }); err == nil || !strings.Contains(err.Error(), `run: GRANT SELECT ("op") ON "public"."events" TO <role>`) {
		t.Errorf("the error is %v", err)
	}
	exec(t, pool, `GRANT SELECT (op) ON events TO `+role)
	for range 2 {
		if err := as(func(tx pgx.Tx) error {
			return s.Write(t.Context(), tx, sinks.NewBatch([]message.Message{event("a", `"s"`, "0"), event("b", `"s"`, "1")}))
		}); err != nil {
			t.Fatal(err)
		}
	}
	wantRows(t, pool, `SELECT version || op FROM events ORDER BY version`, "1a", "2b")
}
