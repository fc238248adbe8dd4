package table

import (
	"context"
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

// outcomes writes messages and returns what the sink says of each.
func outcomes(t *testing.T, pool *pgxpool.Pool, s *Sink, msgs ...message.Message) ([]sinks.Outcome, error) {
	t.Helper()
	batch := sinks.NewBatch(msgs)
	err := inTx(t, pool, func(tx pgx.Tx) error { return s.Write(t.Context(), tx, batch) })
	all := make([]sinks.Outcome, len(msgs))
	for i := range all {
		all[i] = batch.OutcomeOf(i)
	}
	return all, err
}

func TestAlreadyPresent(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ table, index string }{
		"a table":              {"CREATE TABLE t (k text, n numeric, v json, by text)", "UNIQUE (k, n)"},
		"nulls not distinct":   {"CREATE TABLE t (k text, n numeric, v json, by text)", "UNIQUE NULLS NOT DISTINCT (k, n)"},
		"a partitioned table":  {"CREATE TABLE t (k text, n numeric, v json, by text) PARTITION BY LIST (k); CREATE TABLE rest PARTITION OF t DEFAULT", "UNIQUE (k, n)"},
		"a trigger that fills": {"CREATE TABLE t (k text, n numeric, v json, by text); CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; CREATE TRIGGER fill BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fill()", "UNIQUE (k, n)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			skipUnknown(t, pool, c.index)
			exec(t, pool, c.table+`; ALTER TABLE t ADD `+c.index+`; INSERT INTO t VALUES ('old', 1, '{"by": "hand"}'), (NULL, 1, '{}')`)
			s := build(t, Config{Name: "public.t", Key: []string{"k", "n"}, Columns: map[string]string{"k": "json:k", "n": "json:n", "v": "value", "by": "const:dedupd"}})
			got, err := outcomes(t, pool, s,
				msg("1", `{"k":"new","n":1}`), msg("2", `{"k":"old","n":1.0}`), msg("3", `{"k":"new","n":1.00}`), msg("4", `{"n":1}`), msg("5", `{"k":"old","n":2}`))
			if err != nil {
				t.Fatal(err)
			}
			want := []sinks.Outcome{sinks.Written, sinks.AlreadyPresent, sinks.AlreadyPresent, sinks.Written, sinks.Written}
			if strings.Contains(c.index, "NOT DISTINCT") {
				want[3] = sinks.AlreadyPresent
			}
			if strings.Contains(c.table, "TRIGGER") {
				want[1], want[2] = sinks.Written, sinks.Written // it might have kept the rows away
			}
			if !slices.Equal(got, want) {
				t.Errorf("outcomes %v, want %v", got, want)
			}
		})
	}
}

// A row that a trigger keeps away isn't present.
func TestASuppressedRowIsNotPresent(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY); CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
		CREATE TRIGGER keep BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION keep()`)
	s := build(t, Config{Name: "public.t", Key: []string{"k"}, Columns: map[string]string{"k": "id"}})
	got, err := outcomes(t, pool, s, msg("a", ""))
	if err != nil || got[0] != sinks.Written {
		t.Errorf("outcomes %v, %v", got, err)
	}
}

func TestOnPresent(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v json, n numeric(8,2), p point, at timestamptz DEFAULT now())`)
	fill := `TRUNCATE t; INSERT INTO t VALUES ('same', '{"a": 1}', 1.5, '(1,2)'), ('other', '{"a": 2}', 1.5, '(1,2)'), ('null', NULL, NULL, NULL)`
	row := func(id, v, n string) message.Message {
		return msg(id, fmt.Sprintf(`{"v":%s,"n":%s,"p":"(1,2)"}`, v, n))
	}
	msgs := []message.Message{
		row("new", `{"a": 1}`, "1.5"), row("same", `{"a": 1}`, "1.499"), row("other", `{"a": 1}`, "1.5"), row("null", "null", "1"), row("new", `{"a": 3}`, "1.5"),
	}
	for on, want := range map[policy.Present][]int{policy.PresentIgnore: nil, policy.PresentCompare: {2, 3, 4}, policy.PresentDeadLetter: {1, 2, 3, 4}} {
		t.Run(string(on), func(t *testing.T) {
			exec(t, pool, fill)
			s := build(t, Config{Name: "public.t", Key: []string{"k"}, OnPresent: on, Columns: map[string]string{"k": "id", "v": "json:v", "n": "json:n", "p": "json:p", "at": "now"}})
			_, err := outcomes(t, pool, s, msgs...)
			var at []int
			for i := range sinks.AllPermanent(err) {
				at = append(at, i)
			}
			if slices.Sort(at); !slices.Equal(at, want) {
				t.Fatalf("dead letters %v, want %v: %v", at, want, err)
			}
			if err != nil && !strings.Contains(err.Error(), "sink.table.on_present is "+string(on)) {
				t.Error(err)
			}
			// The transaction is rolled back, and the others are written.
			exec(t, pool, fill)
			var rest []message.Message
			for i, m := range msgs {
				if !slices.Contains(want, i) {
					rest = append(rest, m)
				}
			}
			got, err := outcomes(t, pool, s, rest...)
			if err != nil || got[0] != sinks.Written {
				t.Errorf("the others: %v, %v", got, err)
			}
		})
	}
}

func TestOnPresentIsForKeyedInserts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]Config{
		"no key":    {OnPresent: policy.PresentCompare},
		"upsert":    {OnPresent: policy.PresentCompare, Mode: "upsert", Key: []string{"k"}},
		"no policy": {OnPresent: "whatever", Key: []string{"k"}},
	} {
		c.Name, c.Columns = "public.t", map[string]string{"k": "id"}
		if _, err := c.Sink(); err == nil || !strings.Contains(err.Error(), "on_present: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// deletesFirst is a transaction beside which somebody deletes rows before its second batch.
type deletesFirst struct {
	pgx.Tx
	batches int
	delete  func()
}

func (d *deletesFirst) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if d.batches++; d.batches == 2 {
		d.delete()
	}
	return d.Tx.SendBatch(ctx, b)
}

// A row that is deleted between the insert that found it and the comparison isn't a row with
// other values: the transaction is tried again, and adds it.
func TestARowIsDeletedBeforeItIsCompared(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (k text PRIMARY KEY, v int); INSERT INTO t VALUES ('gone', 1), ('same', 1)`)
	s := build(t, Config{Name: "public.t", Key: []string{"k"}, OnPresent: policy.PresentCompare, Columns: map[string]string{"k": "id", "v": "json:v"}})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	msgs := []message.Message{msg("same", `{"v":1}`), msg("gone", `{"v":1}`)}
	err := inTx(t, pool, func(tx pgx.Tx) error {
		d := &deletesFirst{Tx: tx, delete: func() { exec(t, pool, `DELETE FROM t WHERE k = 'gone'`) }}
		return s.Write(t.Context(), d, sinks.NewBatch(msgs))
	})
	if bad := sinks.AllPermanent(err); len(bad) > 0 || sqlstate.Of(err) != sqlstate.SerializationFailure {
		t.Fatalf("the error is %v", err)
	}
	got, err := outcomes(t, pool, s, msgs...)
	if want := []sinks.Outcome{sinks.AlreadyPresent, sinks.Written}; err != nil || !slices.Equal(got, want) {
		t.Errorf("then: %v, %v", got, err)
	}
}
