package dedup_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// doubtful is a table, and a statement that writes ids and values to it. The server
// refuses some with an SQLSTATE that doesn't say whose fault it is.
type doubtful struct {
	state, setup, write, good, bad string
}

const intoRows = `INSERT INTO public.rows (id, value) SELECT * FROM unnest($1::text[], $2::text[])`

func raising(state, when string) string {
	return `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF ` + when + ` THEN RAISE EXCEPTION 'no %', NEW.value USING ERRCODE = '` + state + `'; END IF; RETURN NEW; END $$;`
}

const (
	triggerBefore = `CREATE TRIGGER refuse BEFORE INSERT ON public.rows FOR EACH ROW EXECUTE FUNCTION public.refuse();`
	triggerAtEnd  = `CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON public.rows DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.refuse();`
)

var doubts = map[string]doubtful{
	"a trigger's RAISE":              {state: "P0001", setup: raising("P0001", "NEW.value = 'bad'") + triggerBefore, write: intoRows, good: "v", bad: "bad"},
	"a trigger's RAISE at COMMIT":    {state: "P0001", setup: raising("P0001", "NEW.value = 'bad'") + triggerAtEnd, write: intoRows, good: "v", bad: "bad"},
	"a trigger's own code":           {state: "45000", setup: raising("45000", "NEW.value = 'bad'") + triggerBefore, write: intoRows, good: "v", bad: "bad"},
	"a trigger's CASE without ELSE":  {state: "20000", setup: `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN CASE NEW.value WHEN 'v' THEN NULL; END CASE; RETURN NEW; END $$;` + triggerBefore, write: intoRows, good: "v", bad: "bad"},
	"a tsquery":                      {state: "42601", setup: `ALTER TABLE public.rows ADD q tsquery`, write: `INSERT INTO public.rows (id, q) SELECT id, v::tsquery FROM unnest($1::text[], $2::text[]) AS u (id, v)`, good: "fat & cat", bad: "fat cat"},
	"a jsonpath":                     {state: "42601", setup: `ALTER TABLE public.rows ADD q jsonpath`, write: `INSERT INTO public.rows (id, q) SELECT id, v::jsonpath FROM unnest($1::text[], $2::text[]) AS u (id, v)`, good: "$.a", bad: "$.a["},
	"a regclass":                     {state: "42P01", setup: `ALTER TABLE public.rows ADD q regclass`, write: `INSERT INTO public.rows (id, q) SELECT id, v::regclass FROM unnest($1::text[], $2::text[]) AS u (id, v)`, good: "pg_class", bad: "nowhere"},
	"a regtype":                      {state: "42704", setup: `ALTER TABLE public.rows ADD q regtype`, write: `INSERT INTO public.rows (id, q) SELECT id, v::regtype FROM unnest($1::text[], $2::text[]) AS u (id, v)`, good: "int4", bad: "nothing"},
	"a numeric NaN":                  {state: "0A000", setup: `ALTER TABLE public.rows ADD q bigint`, write: `INSERT INTO public.rows (id, q) SELECT id, v::numeric FROM unnest($1::text[], $2::text[]) AS u (id, v)`, good: "1", bad: "NaN"},
	"a view's check option":          {state: "44000", setup: `CREATE VIEW public.good AS SELECT id, value FROM public.rows WHERE value <> 'bad' WITH CHECK OPTION`, write: `INSERT INTO public.good (id, value) SELECT * FROM unnest($1::text[], $2::text[])`, good: "v", bad: "bad"},
	"row security":                   {state: "42501", setup: `ALTER TABLE public.rows ENABLE ROW LEVEL SECURITY; CREATE POLICY good ON public.rows WITH CHECK (value <> 'bad'); GRANT INSERT ON public.rows TO pg_monitor`, write: intoRows, good: "v", bad: "bad"},
	"an internal error":              {state: "XX000", setup: `SELECT`, write: `INSERT INTO public.rows (id, value) SELECT id, pg_describe_object(v::oid, 1259, 0) FROM unnest($1::text[], $2::text[]) AS u (id, v)`, good: "1259", bad: "1"},
	"an internal error of a trigger": {state: "XX000", setup: raising("XX000", "NEW.value = 'bad'") + triggerBefore, write: intoRows, good: "v", bad: "bad"},
}

// newDoubtful is a fixture whose sink writes by that statement, as pg_monitor.
func newDoubtful(t *testing.T, d doubtful) (*fixture, *atomic.Int32) {
	f := newFixture(t)
	f.exec(d.setup)
	writes := new(atomic.Int32)
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		writes.Add(1)
		var ids, values []string
		for i := range msgs {
			v := d.good
			if strings.HasPrefix(string(msgs[i].Value), "bad") {
				v = d.bad
			}
			ids, values = append(ids, msgs[i].ID), append(values, v)
		}
		role := "NONE"
		if d.state == "42501" {
			role = "pg_monitor"
		}
		if _, err := tx.Exec(ctx, `SET LOCAL ROLE `+role); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, d.write, ids, values); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `RESET ROLE`)
		return err
	})
	return f, writes
}

// The server's error alone doesn't say whether a message is at fault or the table. That
// others are written does.
func TestDoubtfulPoisonIsFoundAlone(t *testing.T) {
	t.Parallel()
	for name, d := range doubts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, _ := newDoubtful(t, d)
			l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
			f.handle(l.batch(numbered(40, map[int]string{0: "=bad", 1: "=bad", 17: "=bad", 39: "=bad"})...), other.batch("alone=bad"))
			f.wantBooks(l, books{applied: 36, dead: 4, next: 40})
			f.wantBooks(other, books{dead: 1, next: 1})
			f.wantDead("poison@0", "poison@1", "poison@17", "poison@39", "poison@0")
			landed := f.landed()
			if len(landed) != 36 || !slices.IsSortedFunc(landed, func(a, b string) int { return num(a) - num(b) }) {
				t.Errorf("the neighbours of poison are missing or out of order: %q", landed)
			}
			deadLetters, err := f.Store.DeadLetters(t.Context(), dedup.DeadLetterFilter{Limit: 1})
			if err != nil || deadLetters[0].SQLState == nil || *deadLetters[0].SQLState != d.state {
				t.Errorf("%v; the dead letter's SQLSTATE is %v, want %s", err, deadLetters[0].SQLState, d.state)
			}
		})
		t.Run(name+" alone in its lane", func(t *testing.T) {
			t.Parallel()
			f, _ := newDoubtful(t, d)
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("before"))
			for range 3 {
				l.at = 1
				wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("a=bad")}), "lane kafka:orders/0 is held: position 1: ", d.state)
			}
			f.wantDead()
			// What comes next joins it.
			l.at = 1
			f.handle(l.batch("a=bad", "b"))
			f.wantLanded("before", "b")
			f.wantDead("poison@1")
			f.wantBooks(l, books{applied: 2, dead: 1, next: 3})
		})
	}
}

// In a queue nothing joins what is held: the proof is what others write.
func TestDoubtfulPoisonOfAQueue(t *testing.T) {
	t.Parallel()
	f, _ := newDoubtful(t, doubts["a trigger's RAISE"])
	q := f.acquireQueue("nats")
	bad := func() lane.Batch { return q.batchAt(7, "a=bad") }
	wantHold(t, f.Handle(t.Context(), []lane.Batch{bad()}), "position 7")
	elsewhere := f.acquire("kafka", "orders/0")
	f.handle(elsewhere.batch("x")) // another source: no proof
	wantHold(t, f.Handle(t.Context(), []lane.Batch{bad()}), "position 7")
	f.handle(q.batchAt(8, "b"))
	f.handle(bad())
	f.wantDead("poison@7")
	f.wantLanded("x", "b")
	// The proof was for that one.
	wantHold(t, f.Handle(t.Context(), []lane.Batch{q.batchAt(9, "c=bad")}), "position 9")
}

// A transaction that began before a message was refused proves nothing: the table may
// have changed in between.
func TestProofIsNewer(t *testing.T) {
	t.Parallel()
	f, _ := newDoubtful(t, doubts["a trigger's RAISE"])
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	inner := f.Sink
	entered, release := make(chan struct{}), make(chan struct{})
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		err := inner.Write(ctx, tx, sinks.NewBatch(msgs))
		if msgs[0].ID == "slow" {
			close(entered)
			<-release
		}
		return err
	})
	done := make(chan error)
	go func() { done <- f.Handle(t.Context(), []lane.Batch{other.batch("slow")}) }()
	<-entered
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batchAt(0, "a=bad")}))
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batchAt(0, "a=bad")}))
	f.wantDead()
	f.handle(other.batch("later"))
	f.handle(l.batch("a=bad"))
	f.wantDead("poison@0")
}

// If every message is refused, the table is at fault: nothing becomes a dead letter, and
// no more is tried than it takes to see that.
func TestTableAtFaultHoldsTheLane(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]string{"a trigger that refuses all": "P0001", "an internal error that stays": "XX000"} {
		for _, n := range []int{1, 2, 10, 500} {
			t.Run(fmt.Sprintf("%s, %d messages", name, n), func(t *testing.T) {
				t.Parallel()
				f, writes := newDoubtful(t, doubtful{state, raising(state, "true") + triggerBefore, intoRows, "v", "v"})
				l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
				ids := numbered(n, nil)
				for range 3 {
					l.at, other.at = 0, 0
					writes.Store(0)
					wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch(ids...), other.batch("x", "y", "z")}), "no other message of the lane could be written")
					if w := writes.Load(); w > 80 {
						t.Errorf("the sink was asked %d times", w)
					}
				}
				f.wantDead()
				f.wantBooks(l, books{})
				f.exec(`DROP TRIGGER refuse ON public.rows`)
				l.at, other.at = 0, 0
				f.handle(l.batch(ids...), other.batch("x", "y", "z"))
				f.wantDead()
				f.wantBooks(l, books{applied: int64(n), next: int64(n)})
			})
		}
	}
}

// A table that refuses everything may be repaired at any moment of a hand-over. What it
// refused before is no dead letter, though others are written after it.
func TestTableIsMendedInTheMiddle(t *testing.T) {
	t.Parallel()
	f, writes := newDoubtful(t, doubtful{"P0001", raising("P0001", "true"), intoRows, "v", "v"})
	var mendAt int32
	written := f.Sink
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		if writes.Load() == mendAt {
			f.exec(`DROP TRIGGER IF EXISTS refuse ON public.rows`)
		}
		return written.Write(ctx, tx, sinks.NewBatch(msgs))
	})
	for reached := true; reached; mendAt++ {
		f.exec(triggerBefore)
		writes.Store(0)
		source := fmt.Sprint("shop", mendAt)
		var ids []string
		for n := range 5 {
			ids = append(ids, fmt.Sprintf("%d-%d", mendAt, n))
		}
		l, other, q := f.acquire(source, "orders/0"), f.acquire(source, "orders/1"), f.acquireQueue(source+"q")
		for {
			l.at, other.at = 0, 0
			err := f.Handle(t.Context(), []lane.Batch{l.batch(ids[:3]...), other.batch(ids[3]), q.batchAt(1, ids[4])})
			if err == nil {
				break
			}
			wantHold(t, err, "no other message of the lane could be written")
			if reached = writes.Load() > mendAt; !reached {
				f.exec(`DROP TRIGGER refuse ON public.rows`)
			}
		}
		f.wantDead()
		if t.Failed() {
			t.Fatalf("mended before write %d", mendAt)
		}
		f.exec(`TRUNCATE public.rows; DELETE FROM dedupd.lanes`)
	}
	if mendAt < 10 {
		t.Errorf("only %d moments", mendAt)
	}
}

// preparing is a sink that checks its table first.
type preparing struct{ sinks.Sink }

func (preparing) Prepare(ctx context.Context, tx sinks.Tx) error {
	_, err := tx.Exec(ctx, "EXPLAIN INSERT INTO public.rows (id) VALUES ('')")
	return err
}

// A sink that can see that the table is at fault saves the search, and the proof by
// another table's messages.
func TestSinkSeesThatTheTableIsAtFault(t *testing.T) {
	t.Parallel()
	f, writes := newDoubtful(t, doubtful{"42P01", `SELECT`, intoRows, "v", "v"})
	f.Sink = preparing{f.Sink}
	l := f.acquire("kafka", "orders/0")
	f.exec(`ALTER TABLE public.rows RENAME TO elsewhere`)
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch(numbered(100, nil)...)}), `relation "public.rows" does not exist`)
	if w := writes.Load(); w != 1 {
		t.Errorf("the sink was asked %d times", w)
	}
	f.exec(`ALTER TABLE public.elsewhere RENAME TO rows`)
	l.at = 0
	f.handle(l.batch(numbered(100, nil)...))
	f.wantDead()
}

// What fails for a moment is nobody's fault.
func TestDoubtThatPasses(t *testing.T) {
	t.Parallel()
	for state, times := range map[string]int32{"P0001": 1, "XX000": 4} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			var left atomic.Int32
			left.Store(times)
			f.sink.fail = func(*message.Message) error {
				if left.Add(-1) >= 0 {
					return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: state, Message: "not now"}
				}
				return nil
			}
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a"))
			f.wantLanded("a")
			f.handle(l.batch("b", "c"))
			f.wantDead()
		})
	}
}

// Proven or not, a large share of dead letters holds the lane.
func TestDoubtfulPoisonCountsAsDead(t *testing.T) {
	t.Parallel()
	f, _ := newDoubtful(t, doubts["a trigger's RAISE"])
	f.MaxDeadShare, f.DeadWindow = 0.1, 20
	if err := f.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(numbered(10, map[int]string{3: "=bad", 5: "=bad"})...))
	f.wantDead("poison@3", "poison@5")
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("a", "b=bad", "c")}), "max_share")
	f.wantDead("poison@3", "poison@5")
}

// Both kinds of poison in one hand-over, each found.
func TestDoubtBesideCertainty(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.exec(raising("P0001", "NEW.value = 'bad'") + triggerBefore)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(numbered(20, map[int]string{0: "=check", 1: "=bad", 2: "=check", 9: "=bad", 19: "=check"})...))
	f.wantDead("poison@0", "poison@1", "poison@2", "poison@9", "poison@19")
	f.wantBooks(l, books{applied: 15, dead: 5, next: 20})
}

// A deferred constraint is the sink's, also where its tables share a schema with dedupd's
// own.
func TestDeferredConstraintInASharedSchema(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.exec(`CREATE TABLE dedupd.parents (value text PRIMARY KEY);
		INSERT INTO dedupd.parents VALUES ('v');
		CREATE TABLE dedupd.children (id text, value text REFERENCES dedupd.parents DEFERRABLE INITIALLY DEFERRED)`)
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		for i := range msgs {
			if _, err := tx.Exec(ctx, `INSERT INTO dedupd.children VALUES ($1, $2)`, msgs[i].ID, string(msgs[i].Value)); err != nil {
				return err
			}
		}
		return nil
	})
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b=orphan", "c"))
	f.wantDead("poison@1")
	f.wantBooks(l, books{applied: 2, dead: 1, next: 3})
	if ids := one[[]string](f, `SELECT array_agg(id ORDER BY id) FROM dedupd.children`); !slices.Equal(ids, []string{"a", "c"}) {
		t.Errorf("landed %q", ids)
	}
	// If something of dedupd's own fails there, no message is at fault.
	f.exec(`ALTER TABLE dedupd.lanes ADD CONSTRAINT broken CHECK (applied < 3)`)
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("d")}), "move the lanes", "23514")
	f.wantDead("poison@1")
}
