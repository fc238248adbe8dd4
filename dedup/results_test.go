package dedup_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// answering is a sink that gives each message whose value begins with "answer" that value
// as its result, before it writes.
type answering struct{ sinks.Sink }

func (s answering) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	for i, m := range batch.Messages() {
		if bytes.HasPrefix(m.Value, []byte("answer")) {
			batch.Result(i, m.Value)
		}
	}
	return s.Sink.Write(ctx, tx, batch)
}

// claimOnce claims in a transaction of its own, and rolls it back if the id is new.
func (f *fixture) claimOnce(id string) dedup.Claimed {
	f.t.Helper()
	var claims []dedup.Claimed
	err := pgx.BeginFunc(f.t.Context(), f.pool, func(tx pgx.Tx) (err error) {
		if claims, err = f.Store.Claim(f.t.Context(), tx, []string{id}, dedup.ClaimOptions{Wait: 5 * time.Second}); err == nil && claims[0].IsNew {
			err = errRollback
		}
		return err
	})
	if err != nil && !errors.Is(err, errRollback) {
		f.t.Fatalf("claim %s: %v", id, err)
	}
	return claims[0]
}

// wantResult compares what a duplicate of an id is told; want is empty where there is no
// result.
func (f *fixture) wantResult(id, want string) {
	f.t.Helper()
	if c := f.claimOnce(id); c.IsNew || string(c.Result) != want || (c.Result == nil) != (want == "") {
		f.t.Errorf("a duplicate of %s is told new %v, %.100q, want %.100q", id, c.IsNew, c.Result, want)
	}
}

func (f *fixture) wantResults(want int) {
	f.t.Helper()
	if n := f.rowCount(`SELECT count(*) FROM dedupd.results_root`); n != want {
		f.t.Errorf("%d results are kept, want %d", n, want)
	}
}

func TestResultsAreKeptWithTheirClaims(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = answering{saying{f.sink}}
		l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
		// With a duplicate and a message without an id between them: what the sink says is
		// by its own indexes. A duplicate's own value is nobody's result.
		f.handle(l.batch("a=answer a", "b", "b=answer late", "", "c=answer c"), other.batch("b=answer later", "d=answer d"))
		f.wantResults(3)
		for id, want := range map[string]string{"a": "answer a", "b": "", "c": "answer c", "d": "answer d"} {
			f.wantResult(id, want)
		}
		if n := f.metric("dedupd_results_total"); n != 3 {
			t.Errorf("%g results are counted", n)
		}
		// Sealed, with a filter and without.
		f.rotate()
		f.wantResult("a", "answer a")
		f.buildFilters()
		f.loadFilters()
		f.wantResult("a", "answer a")
		f.wantResult("b", "")
		f.handle(l.batch("a=answer other", "e=answer e"))
		f.wantResult("a", "answer a")
		f.wantResult("e", "answer e")
		// Gone with their generation.
		f.passTime(2 * expiryWindow)
		f.caughtUp(l)
		f.caughtUp(other)
		if n := f.expire(); n != 1 {
			t.Errorf("%d generations expired", n)
		}
		f.wantTidy()
		f.wantResults(1)
		if c := f.claimOnce("a"); !c.IsNew || c.Result != nil {
			t.Errorf("an expired claim is %+v", c)
		}
		f.wantResult("e", "answer e")
	})
}

// Claims without results cost nothing for them: their transactions don't touch the tables.
func TestWithoutResultsTheirTablesAreLeftAlone(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = answering{f.sink}
		l := f.acquire("kafka", "orders/0")
		f.exec(`DROP TABLE dedupd.results_test_1`)
		f.handle(l.batch("a", "b", "a", ""))
		f.rotate()
		f.exec(`DROP TABLE dedupd.results_test_2`)
		f.handle(l.batch("a", "c"))
		f.wantLanded("a", "b", "c")
		// A lost table keeps what needs it, until retention makes it again.
		b := l.batch("d=answer d")
		wantHold(t, f.Handle(t.Context(), []lane.Batch{b}), "results_test_2", "the next pass of retention makes it again")
		if a := f.find("a"); !a.Found || a.Claim.Result != nil {
			t.Errorf("%+v", a.Claim)
		}
		if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.handle(b)
		f.wantResult("d", "answer d")
		f.wantResult("a", "")
		f.wantTidy()
	})
}

// What a failed try has given isn't kept, nor is the result of a message that becomes a dead
// letter; and every result is given with its own message in the smaller batches.
func TestResultsOfAFailedTryAreForgotten(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = answering{f.sink}
		f.sink.fail = func(m *message.Message) error {
			if m.ID == "b" {
				return sinks.Permanent(errors.New("bad"))
			}
			return nil
		}
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a=answer a", "b=answer b", "c=answer c", "d", "e=answer e"))
		f.wantDead("poison@1")
		f.wantResults(3)
		for id, want := range map[string]string{"a": "answer a", "b": "", "c": "answer c", "d": "", "e": "answer e"} {
			f.wantResult(id, want)
		}
	})
}

type batchFunc func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error

func (f batchFunc) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	return f(ctx, tx, batch)
}

// The result that counts is that of the try that is committed.
func TestResultsOfTheLastTryAreKept(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		broken, cut := f.attachBroken()
		broken.CopyFrom = f.CopyFrom
		tries := 0
		broken.Sink = batchFunc(func(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
			tries++
			for i := range batch.Messages() {
				if tries == 1 || i == 0 {
					batch.Result(i, fmt.Append(nil, "try ", tries))
				}
			}
			return f.sink.Write(ctx, tx, batch)
		})
		cut.then.Store(new(func() {}))
		cut.armed.Store(1)
		broken.handle(broken.acquire("kafka", "orders/0").batch("a", "b"))
		if tries != 2 {
			t.Fatalf("%d tries", tries)
		}
		f.wantLanded("a", "b")
		f.wantResult("a", "try 2")
		f.wantResult("b", "")
	})
}

func TestAResultThatIsTooLarge(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = answering{f.sink}
		l := f.acquire("kafka", "orders/0")
		most, more := "answer"+strings.Repeat("x", sinks.MaxResult-6), "answer"+strings.Repeat("x", sinks.MaxResult-5)
		f.handle(l.batch("a="+most, "b="+more))
		f.wantBooks(l, books{applied: 2, next: 2})
		f.wantResult("a", most)
		f.wantResult("b", "")
		if c := f.claimOnce("b"); c.ResultSize != sinks.MaxResult+1 {
			t.Errorf("its size is %d", c.ResultSize)
		}
		if r := f.find("a").Claim.Result; r == nil || r.Bytes != sinks.MaxResult || !r.Kept {
			t.Errorf("a has %+v", r)
		}
		if r := f.find("b").Claim.Result; r == nil || r.Bytes != sinks.MaxResult+1 || r.Kept {
			t.Errorf("b has %+v", r)
		}
	})
}

// More results than one statement takes.
func TestManyLargeResults(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = answering{f.sink}
	l := f.acquire("kafka", "orders/0")
	ids := make([]string, 200)
	for i := range ids {
		ids[i] = fmt.Sprintf("%d=answer %d %s", i, i, strings.Repeat("x", 60_000))
	}
	f.handle(l.batch(ids...))
	f.wantResults(200)
	for _, i := range []int{0, 66, 70, 199} {
		if c := f.claimOnce(fmt.Sprint(i)); !strings.HasPrefix(string(c.Result), fmt.Sprintf("answer %d ", i)) {
			t.Errorf("%d has %.20q", i, c.Result)
		}
	}
}

// Where no ids are claimed there is nothing to keep a result with.
func TestStrategiesWithoutClaimsKeepNoResults(t *testing.T) {
	t.Run("position", func(t *testing.T) {
		f := byPosition(t)
		f.Sink = answering{f.sink}
		f.handle(f.acquire("kafka", "orders/0").batch("a=answer a", "b"))
		f.wantLanded("a", "b")
		f.wantResults(0)
		if n := f.metric("dedupd_results_total"); n != 1 {
			t.Errorf("%g results are counted", n)
		}
	})
	t.Run("sequence", func(t *testing.T) {
		t.Parallel()
		f := bySequence(t, policy.SequenceGapAllow)
		f.Sink = answering{f.sink}
		l := f.acquire("kafka", "orders/0")
		f.handle(l.numbered("a/1=answer a", "a/2"))
		f.wantLanded("a/1", "a/2")
		f.wantResults(0)
	})
}

func TestForgettingAClaimForgetsItsResult(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = answering{f.sink}
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a=answer a", "b=answer b"))
		f.rotate()
		f.handle(l.batch("c=answer c"))
		for _, id := range []string{"a", "c"} {
			gone, err := f.Store.ForgetClaim(t.Context(), "ann@host", id)
			if err != nil || gone == nil || gone.Result == nil || gone.Result.Bytes != int64(len("answer a")) || !gone.Result.Kept {
				t.Fatalf("forgotten: %+v, %v", gone, err)
			}
			if _, detail := f.audited(); detail["result"] == nil {
				t.Errorf("the audit says %v", detail)
			}
		}
		f.wantResults(1)
		// Applied again, without a result.
		f.handle(l.batch("a=x", "c=x"))
		f.wantResult("a", "")
		f.wantResult("c", "")
		f.wantResult("b", "answer b")
	})
}

// A claim that somebody deleted by hand leaves its result. The next one's result replaces it.
func TestAResultReplacesWhatIsLeft(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = answering{f.sink}
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=answer a"))
	f.exec(`DELETE FROM dedupd.claims_root`)
	f.handle(l.batch("a=answer b"))
	f.wantResult("a", "answer b")
}

// A dead letter has claimed its id without a result. Its replay gives one, to the claim
// where it is.
func TestAReplayKeepsTheResult(t *testing.T) {
	for _, sealed := range []bool{false, true} {
		t.Run(fmt.Sprintf("sealed %v", sealed), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.Sink, f.OnConflict = answering{f.sink}, policy.ConflictDrop
			f.sink.fail = func(*message.Message) error { return sinks.Permanent(errors.New("not now")) }
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a=answer a", "b=answer b", "c"))
			f.forget("b") // it claims again
			f.wantResult("a", "")
			if sealed {
				f.rotate()
			}
			f.sink.fail = nil
			f.replayAll(dedup.ReplayApplied, dedup.ReplayApplied, dedup.ReplayApplied)
			f.wantResults(2)
			f.wantResult("a", "answer a")
			f.wantResult("b", "answer b")
			f.wantResult("c", "")
			if a := f.find("a"); sealed != (a.Claim.State == "sealed") || a.Claim.Result == nil {
				t.Errorf("%+v", a.Claim)
			}
			// A replay that finds a duplicate changes no result.
			f.handle(l.batch("a=answer x"))
			f.replayAll()
			f.wantResult("a", "answer a")
		})
	}
}

// A result that can't be kept is no message's fault.
func TestAResultThatCantBeKeptHoldsTheLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = answering{f.sink}
	f.exec(`ALTER TABLE dedupd.results_test_1 ADD CHECK (size < 0)`)
	l := f.acquire("kafka", "orders/0")
	b := l.batch("a", "b=answer b")
	err := f.Handle(t.Context(), []lane.Batch{b})
	var pg *pgconn.PgError
	if wantHold(t, err); !errors.As(err, &pg) || pg.Code != "23514" {
		t.Errorf("the error is %v", err)
	}
	f.wantLanded()
	f.wantDead()
}
