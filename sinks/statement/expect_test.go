package statement

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/sinktest"
)

var accounts = map[string]string{"account": "json:a::text", "cents": "json:c::bigint"}

const withdraw = `UPDATE public.balance AS b SET cents = b.cents - batch.cents FROM batch WHERE b.account = batch.account AND b.cents >= batch.cents RETURNING batch.ord`

func returned(t testing.TB, sql string, on policy.Mismatch) *Sink {
	t.Helper()
	s, err := Config{SQL: sql, Columns: accounts, Expect: ExpectReturned, Key: []string{"account"}, OnMismatch: on}.Sink()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func outcomes(t testing.TB, pool *pgxpool.Pool, s *Sink, msgs ...message.Message) (got []sinks.Outcome, err error) {
	t.Helper()
	batch := sinks.NewBatch(msgs)
	err = inTx(t, pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, batch) })
	for i := range msgs {
		got = append(got, batch.OutcomeOf(i))
	}
	return got, err
}

func TestReturned(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE balance (account text PRIMARY KEY, cents bigint NOT NULL); CREATE DOMAIN place AS smallint`)
	msgs := []message.Message{msg("1", `{"a":"x","c":5}`), msg("2", `{"a":"y","c":50}`), msg("3", `{"a":"z","c":1}`)}
	const w, r = sinks.Written, sinks.Rejected
	for name, c := range map[string]struct {
		sql  string
		want []sinks.Outcome
	}{
		"one column":         {withdraw, []sinks.Outcome{w, r, r}},
		"among others":       {withdraw + ", b.*, NULL::xml AS x;", []sinks.Outcome{w, r, r}},
		"of another integer": {strings.Replace(withdraw, "batch.ord", "batch.ord::integer AS ord", 1), []sinks.Outcome{w, r, r}},
		"of a domain":        {strings.Replace(withdraw, "batch.ord", "batch.ord::public.place AS ord", 1) + " -- so", []sinks.Outcome{w, r, r}},
		"more than once":     {`WITH w AS (` + withdraw + `) SELECT ord FROM w UNION ALL SELECT ord FROM w`, []sinks.Outcome{w, r, r}},
		"all":                {`SELECT ord FROM batch`, []sinks.Outcome{w, w, w}},
		"none":               {`DELETE FROM public.balance USING batch WHERE false RETURNING ord`, []sinks.Outcome{r, r, r}},
		"in parentheses":     {`WITH update AS (` + withdraw + `) (SELECT ord FROM update)`, []sinks.Outcome{w, r, r}},
		"of an insert": {
			`WITH RECURSIVE i AS (INSERT INTO public.balance SELECT account, cents FROM batch ON CONFLICT DO NOTHING RETURNING account) SELECT ord, 1 FROM batch JOIN i USING (account)`,
			[]sinks.Outcome{r, r, w},
		},
	} {
		t.Run(name, func(t *testing.T) {
			exec(t, pool, `TRUNCATE balance; INSERT INTO balance VALUES ('x', 10), ('y', 10)`)
			s := returned(t, c.sql, policy.MismatchIgnore)
			if err := inTx(t, pool, func(tx pgx.Tx) error { return s.Prepare(t.Context(), tx) }); err != nil {
				t.Fatal(err)
			}
			got, err := outcomes(t, pool, s, msgs...)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("outcomes %v, %v; want %v", got, err, c.want)
			}
		})
	}
}

func TestOnMismatch(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE balance (account text PRIMARY KEY, cents bigint NOT NULL); INSERT INTO balance VALUES ('x', 10), ('y', 10)`)
	msgs := []message.Message{msg("1", `{"a":"x","c":5}`), msg("2", `{"a":"y","c":50}`), msg("3", `{"a":"z","c":1}`)}
	for _, on := range []policy.Mismatch{"", policy.MismatchDeadLetter} {
		_, err := outcomes(t, pool, returned(t, withdraw, on), msgs...)
		if bad := sinks.AllPermanent(err); len(bad) != 2 || bad[1] == nil || bad[2] == nil || !strings.Contains(bad[1].Error(), "on_mismatch is dead_letter") {
			t.Errorf("on_mismatch %q: %v", on, err)
		}
	}
	_, err := outcomes(t, pool, returned(t, withdraw, policy.MismatchStop), msgs...)
	if index, why, ok := sinks.AsHold(err); !ok || index != 1 || !strings.Contains(why.Error(), "on_mismatch is stop") {
		t.Errorf("stop: %v", err)
	}
	wantRows(t, pool, `SELECT account || cents FROM balance ORDER BY 1`, "x10", "y10")
}

func TestPrepareWantsAnOrd(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE balance (account text PRIMARY KEY, cents bigint NOT NULL)`)
	const wanted = "must return the column ord"
	for name, c := range map[string]struct{ sql, want string }{
		"nothing returned":  {`UPDATE public.balance SET cents = 0 FROM batch`, wanted},
		"another column":    {`UPDATE public.balance SET cents = 0 FROM batch RETURNING batch.account`, wanted},
		"of another type":   {`SELECT ord::text AS ord FROM batch`, wanted},
		"a numeric":         {`WITH a AS (SELECT * FROM batch) SELECT ord::numeric AS ord FROM a`, wanted},
		"two of the name":   {`SELECT ord, ord FROM batch`, wanted},
		"a fault of itself": {`SELECT ord FROM batch, public.nowhere`, "the server refuses sink.statement.sql"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := inTx(t, pool, func(tx pgx.Tx) error { return returned(t, c.sql, "").Prepare(t.Context(), tx) })
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, want %s", err, c.want)
			}
		})
	}
}

// An ord that no message has is the statement's fault, and no message's: it holds the lane.
func TestOrdsOfNoMessage(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	for sql, want := range map[string]string{
		`SELECT ord + 1 AS ord FROM batch`:             "returned ord 3 of a batch of 2 messages",
		`SELECT ord - 1 AS ord FROM batch`:             "returned ord 0 of a batch of 2 messages",
		`SELECT nullif(ord, 2) AS ord FROM batch`:      "an ord that is NULL",
		`SELECT -ord * 1000000000 AS "ord" FROM batch`: "returned ord -1000000000",
	} {
		_, err := outcomes(t, pool, returned(t, sql, policy.MismatchIgnore), msg("1", `{"a":"x"}`), msg("2", `{"a":"y"}`))
		if _, permanent := sinks.AsPermanent(err); err == nil || permanent || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", sql, err, want)
		}
	}
}

func TestExpectConfig(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]Config{
		`expect: "some" is not one of returned`: {Expect: "some"},
		`on_mismatch: "drop" is not one of`:     {Expect: ExpectReturned, OnMismatch: "drop"},
		"on_mismatch: only a statement with":    {OnMismatch: policy.MismatchStop},
		"key: only with expect: returned":       {Key: []string{"id"}},
		"key: expect: returned needs":           {Expect: ExpectReturned},
		`key: "ord" is not among the columns`:   {Expect: ExpectReturned, Key: []string{"id", "ord"}},
	} {
		c.SQL = "SELECT ord FROM batch"
		if _, err := c.Sink(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

func TestConformanceOfReturned(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE effects (id text PRIMARY KEY, n int NOT NULL)`)
	sinktest.Run(t, sinktest.Config{
		Pool: pool,
		New: func() sinks.Sink {
			s, err := Config{
				SQL:     "WITH i AS (INSERT INTO public.effects SELECT id, n FROM batch WHERE n >= 0 ORDER BY id RETURNING id) SELECT ord FROM batch JOIN i USING (id)",
				Columns: map[string]string{"id": "id", "n": "json:n::int"}, Expect: ExpectReturned, Key: []string{"id"},
			}.Sink()
			if err != nil {
				t.Fatal(err)
			}
			return s
		},
		Message: func(n int) message.Message { return msg(fmt.Sprint(n), fmt.Sprintf(`{"n":%d}`, n)) },
		Poison:  func() message.Message { return msg("p", `{"n":-1}`) },
		Count:   sinktest.Rows("public.effects"),
	})
}

// Messages of one row are applied one after the other, each to the row as the one before has
// left it, however they are batched.
func TestReturnedInTurns(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE balance (account text PRIMARY KEY, cents bigint NOT NULL)`)
	const accounts, most = 7, 600
	fill := fmt.Sprintf(`TRUNCATE balance; INSERT INTO balance SELECT n, 100 FROM generate_series(1, %d) AS n`, accounts)
	random := rand.New(rand.NewPCG(1, 2))
	msgs := make([]message.Message, most)
	for i := range msgs { // of account 1 there are more than are sent at once
		msgs[i] = msg(fmt.Sprint(i), fmt.Sprintf(`{"a":%d,"c":%d}`, max(1, random.IntN(2*accounts)-accounts), random.IntN(80)-35))
	}
	s := returned(t, withdraw, policy.MismatchIgnore)
	apply := func(size int) (got []sinks.Outcome) {
		exec(t, pool, fill)
		for some := range slices.Chunk(msgs, size) {
			part, err := outcomes(t, pool, s, some...)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, part...)
		}
		return got
	}
	left := func(got []sinks.Outcome) (all []string) {
		cents := make(map[int]int)
		for i, m := range msgs {
			var value struct{ A, C int }
			if err := json.Unmarshal(m.Value, &value); err != nil {
				t.Fatal(err)
			}
			if got[i] == sinks.Written {
				cents[value.A] += value.C
			}
		}
		for account := 1; account <= accounts; account++ {
			all = append(all, fmt.Sprint(account, " ", 100-cents[account]))
		}
		return all
	}
	want := apply(1)
	if !slices.Contains(want, sinks.Rejected) {
		t.Fatal("nothing is rejected")
	}
	for _, size := range []int{2, 10, most} {
		if got := apply(size); !slices.Equal(got, want) {
			t.Errorf("in batches of %d: %v, want %v", size, got, want)
		}
		wantRows(t, pool, `SELECT account || ' ' || cents FROM balance ORDER BY 1`, left(want)...)
	}
}

// A key's values are equal as their types have it.
func TestAKeyOfItsTypes(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE n (n numeric, times int); INSERT INTO n VALUES (1, 0), (NULL, 0)`)
	c := Config{
		SQL:     `UPDATE public.n AS t SET times = times + 1 FROM batch WHERE t.n IS NOT DISTINCT FROM batch.n RETURNING ord`,
		Columns: map[string]string{"n": "json:n::numeric", "doc": "json:doc::json"}, Expect: ExpectReturned, Key: []string{"n"},
	}
	s, err := c.Sink()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := outcomes(t, pool, s, msg("1", `{"n":1}`), msg("2", `{"n":1.0}`), msg("3", `{}`), msg("4", `{}`)); err != nil || slices.Contains(got, sinks.Rejected) {
		t.Errorf("%v, %v", got, err)
	}
	wantRows(t, pool, `SELECT times::text FROM n`, "2", "2")
	c.Key = []string{"n", "doc"}
	if s, err = c.Sink(); err != nil {
		t.Fatal(err)
	}
	if err := inTx(t, pool, func(tx pgx.Tx) error { return s.Prepare(t.Context(), tx) }); err == nil || !strings.Contains(err.Error(), "sink.statement.key: ") {
		t.Errorf("a key of type json: %v", err)
	}
}
