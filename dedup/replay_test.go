package dedup_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// mend makes the table take what it has refused.
func (f *fixture) mend() {
	f.t.Helper()
	f.exec(`ALTER TABLE public.rows DROP CONSTRAINT rows_value_check`)
}

// letters are all dead letters, the oldest first.
func (f *fixture) letters() []dedup.DeadLetter {
	f.t.Helper()
	all, err := f.Store.DeadLetters(f.t.Context(), dedup.DeadLetterFilter{})
	if err != nil {
		f.t.Fatal(err)
	}
	slices.Reverse(all)
	return all
}

func (f *fixture) replay(id int64) dedup.Replayed {
	f.t.Helper()
	r, err := f.Replay(f.t.Context(), "ann@host", id)
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

// replayAll replays every dead letter and wants these outcomes.
func (f *fixture) replayAll(want ...string) {
	f.t.Helper()
	var got []string
	for _, d := range f.letters() {
		got = append(got, f.replay(d.ID).Outcome)
	}
	if !slices.Equal(got, want) {
		f.t.Errorf("replayed: %q, want %q", got, want)
	}
}

func (f *fixture) forget(id string) {
	f.t.Helper()
	if gone, err := f.Store.ForgetClaim(f.t.Context(), "ann@host", id); err != nil || gone == nil {
		f.t.Fatalf("forget %s: %v, %v", id, gone, err)
	}
}

func TestReplayAfterMending(t *testing.T) { bothWays(t, testReplayAfterMending) }

func testReplayAfterMending(t *testing.T, f *fixture) {
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check", "b", "c=check"))
	f.wantBooks(l, books{applied: 1, dead: 2, next: 3})
	buried := f.letters()[0]
	if buried.Attempts != 1 || !buried.LastAt.Equal(buried.CreatedAt) {
		t.Errorf("buried: %d attempts, the last at %s, the first at %s", buried.Attempts, buried.LastAt, buried.CreatedAt)
	}

	// Nothing is mended yet.
	r := f.replay(buried.ID)
	if r.Outcome != dedup.ReplayDead || r.SQLState != "23514" || !strings.Contains(r.Reason, "rows_value_check") || string(r.MessageID) != "a" {
		t.Errorf("%+v", r)
	}
	line, detail := f.audited()
	if line != fmt.Sprintf("test ann@host dlq replay dead letter %d", buried.ID) || detail["outcome"] != "dead" || detail["class"] != "poison" || detail["message_id"] != "a" {
		t.Errorf("audit: %s, %v", line, detail)
	}
	d := f.letters()[0]
	if d.Attempts != 2 || !d.LastAt.After(d.CreatedAt) || !d.CreatedAt.Equal(buried.CreatedAt) || d.Class != "poison" {
		t.Errorf("after a replay in vain: %+v", d)
	}
	f.wantBooks(l, books{applied: 1, dead: 2, next: 3})
	f.wantLanded("b")

	f.mend()
	f.replayAll("applied", "applied")
	f.wantLanded("b", "a", "c")
	f.wantDead()
	f.wantBooks(l, books{applied: 3, next: 3})
	line, detail = f.audited()
	if !strings.HasPrefix(line, "test ann@host dlq replay dead letter ") || detail["outcome"] != "applied" || detail["lane"] != "orders/0" || detail["position"] != 2.0 || detail["message_id"] != "c" || detail["value"] != nil {
		t.Errorf("audit: %s, %v", line, detail)
	}
	if n := f.audits(); n != 3 {
		t.Errorf("%d lines of audit, want 3", n)
	}
	// Its id has had its effect now, and its claim is where it was.
	f.handle(l.batch("a=check", "c=check"))
	f.wantLanded("b", "a", "c")
	f.wantBooks(l, books{applied: 3, resent: 2, next: 5})
	if r := f.replay(buried.ID); r.Outcome != dedup.ReplayGone || f.audits() != 3 {
		t.Errorf("once more: %+v, %d lines of audit", r, f.audits())
	}
}

// TestReplayGivesTheWholeMessage has a sink compare what it was given first with
// what it is given by the replay.
func TestReplayGivesTheWholeMessage(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var given []message.Message
	f.Sink = sinkFunc(func(_ context.Context, _ sinks.Tx, msgs []message.Message) error {
		given = append(given, msgs...)
		return sinks.Permanent(errors.New("not now"))
	})
	q := f.takeQueue("nats")
	b := q.batchAt(7, "a", "b")
	b.Messages[0].Topic, b.Messages[0].Key = "t\x00\xff", []byte{0, 0xff}
	b.Messages[0].Headers = append(b.Messages[0].Headers, message.Header{Key: "\xff", Value: nil}, message.Header{Key: "", Value: []byte{}})
	b.Messages[1].Key, b.Messages[1].Value, b.Messages[1].Time = []byte{}, nil, time.Time{}
	f.handle(b)
	first := given[len(given)-1]
	for _, m := range given {
		if m.ID == "a" {
			first = m
		}
	}
	second := given[len(given)-1]
	given = nil
	f.replayAll("dead", "dead")
	first.Time, second.Time = first.Time.Truncate(time.Microsecond), second.Time.Truncate(time.Microsecond)
	if diff := cmp.Diff([]message.Message{first, second}, given); diff != "" {
		t.Error(diff)
	}
}

func TestReplayOfMessagesWithoutID(t *testing.T) {
	t.Parallel()
	bury := func(t *testing.T) (*fixture, *takenLane) {
		t.Parallel()
		f := newFixture(t)
		l := f.take("kafka", "orders/0")
		f.handle(l.batch(`={"id":"x"}`, "a"))
		f.wantDead("no_id@0")
		return f, l
	}
	t.Run("still none", func(t *testing.T) {
		f, l := bury(t)
		f.replayAll("dead")
		if d := f.letters()[0]; d.Attempts != 2 || d.SQLState != nil || d.Class != "no_id" {
			t.Errorf("%+v", d)
		}
		f.Missing = dedup.MissingStop
		f.replayAll("dead")
		f.Missing, f.Identity = dedup.MissingPosition, mustIdentity(t, 2, "json:id")
		f.replayAll("dead") // there is something, but too long
		if d := f.letters()[0]; d.Attempts != 4 {
			t.Errorf("%+v", d)
		}
		f.wantBooks(l, books{applied: 1, dead: 1, next: 2})
		f.wantLanded("a")
	})
	t.Run("by its place", func(t *testing.T) {
		f, l := bury(t)
		f.Missing = dedup.MissingPosition
		f.replayAll("applied")
		f.wantBooks(l, books{applied: 2, next: 2})
		var claims int // the place is the one that the burial has claimed
		if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM dedupd.claims`).Scan(&claims); err != nil || claims != 2 {
			t.Errorf("%d claims, want 2; %v", claims, err)
		}
		f.setPosition(l, 0)
		l = f.takeCommitted(l, -1)
		f.handle(l.batchAt(0, `={"id":"x"}`, "a"))
		f.wantBooks(l, books{applied: 2, redelivered: 2, next: 2})
	})
	t.Run("id.from was mended", func(t *testing.T) {
		f, l := bury(t)
		f.Identity = mustIdentity(t, 100, "json:id")
		r := f.replay(f.letters()[0].ID)
		if r.Outcome != dedup.ReplayApplied || string(r.MessageID) != "x" {
			t.Errorf("%+v", r)
		}
		f.wantLanded("a", "x")
		f.handle(l.batch(`={"id":"x"}`))
		f.wantBooks(l, books{applied: 2, resent: 1, next: 3})
	})
	t.Run("id.from was mended, and it came again", func(t *testing.T) {
		f, l := bury(t)
		f.Identity = mustIdentity(t, 100, "json:id")
		f.handle(l.batch(`={"id":"x"}`))
		f.replayAll("duplicate")
		f.wantLanded("a", "x")
		f.wantBooks(l, books{applied: 2, resent: 1, next: 3})
		f.wantDead()
	})
}

// TestReplayOfAnIDThatWasClaimedBeside has a message whose id wasn't found, and
// another one that claims this id at the same moment, at the same position of
// another lane.
func TestReplayOfAnIDThatWasClaimedBeside(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, other := f.take("kafka", "orders/0"), f.take("kafka", "orders/1")
	f.handle(l.batch(`={"id":"x"}`), other.batch(`x={"id":"x"}`))
	f.Identity = mustIdentity(t, 100, "json:id")
	f.replayAll("duplicate")
	f.wantLanded("x")
	f.wantBooks(l, books{resent: 1, next: 1})
}

func mustIdentity(t *testing.T, longest int, from ...string) *message.Identity {
	t.Helper()
	identity, err := message.NewIdentity(from, longest)
	if err != nil {
		t.Fatal(err)
	}
	return identity
}

func TestReplayOfAConflict(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=1", "a=2"))
	f.OnConflict = dedup.ConflictStop // a replay only tells
	r := f.replay(f.letters()[0].ID)
	if r.Outcome != dedup.ReplayConflict || r.Reason != "the id was claimed with another payload" {
		t.Errorf("%+v", r)
	}
	if d := f.letters()[0]; d.Attempts != 2 || d.Class != "conflict" {
		t.Errorf("%+v", d)
	}
	if _, detail := f.audited(); detail["outcome"] != "conflict" {
		t.Errorf("audit: %v", detail)
	}
	f.wantBooks(l, books{applied: 1, conflicts: 1, next: 2})
	f.forget("a")
	f.replayAll("applied")
	f.wantLanded("a", "a")
	f.wantBooks(l, books{applied: 2, next: 2})
	f.wantDead()
	// The claim tells what it was applied with.
	f.OnConflict = dedup.ConflictDeadLetter
	f.handle(l.batch("a=2", "a=1"))
	f.wantBooks(l, books{applied: 2, resent: 1, conflicts: 1, next: 4})
}

// TestReplayOfAConflictWithATwin has the winner and the conflict at the same
// position of two lanes, claimed and buried at the same moment.
func TestReplayOfAConflictWithATwin(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, other := f.take("kafka", "orders/0"), f.take("kafka", "orders/1")
	f.handle(l.batch("a=1"), other.batch("a=2"))
	f.replayAll("conflict")
	f.wantLanded("a")
}

func TestReplayOfADuplicate(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.OnDuplicate = dedup.DuplicateDeadLetter
	l, other := f.take("kafka", "orders/0"), f.take("nats", "x")
	f.handle(l.batch("a", "a", "b", "b"), other.batch("a", "b"))
	f.wantBooks(l, books{applied: 2, resent: 2, next: 4})
	f.wantBooks(other, books{crossSource: 2, next: 2})
	f.forget("b")
	for _, d := range f.letters() {
		// Of b, the first that is replayed wins. The books of each lane follow.
		want := map[string]string{"a": "duplicate", "b": "applied"}[string(d.MessageID)]
		if d.Lane == "x" && want == "applied" {
			want = "duplicate"
		}
		if r := f.replay(d.ID); r.Outcome != want {
			t.Errorf("%s of lane %s: %+v, want %s", d.MessageID, d.Lane, r, want)
		}
	}
	f.wantBooks(l, books{applied: 3, resent: 1, next: 4})
	f.wantBooks(other, books{crossSource: 2, next: 2})
	f.wantLanded("a", "b", "b")
	f.wantDead()
}

// TestReplayOfAnIDThatHadItsEffect has a poisoned id set free and sent again,
// before anybody replays the dead letter.
func TestReplayOfAnIDThatHadItsEffect(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, other := f.take("kafka", "orders/0"), f.take("nats", "x")
	f.handle(l.batch("a=check", "b=check", "c=check"))
	f.mend()
	f.forget("a")
	f.forget("b")
	f.forget("c")
	f.handle(l.batch("a=check"), other.batch("b=check", "c=other"))
	f.replayAll("duplicate", "duplicate", "conflict")
	f.wantLanded("a", "b", "c")
	f.wantDead("poison@2")
	f.wantBooks(l, books{applied: 1, resent: 1, crossSource: 1, dead: 1, next: 4})
	f.wantBooks(other, books{applied: 2, next: 2})
}

// TestReplayKnowsItsOwnClaim reads a dead letter's place again after its id was
// forgotten: the claim that is there then looks like the dead letter's own.
func TestReplayKnowsItsOwnClaim(t *testing.T) {
	t.Parallel()
	bury := func(t *testing.T) (*fixture, *takenLane) {
		t.Parallel()
		f := newFixture(t)
		l := f.take("kafka", "orders/0")
		f.handle(l.batch("a=check"))
		f.forget("a")
		f.setPosition(l, 0)
		l = f.takeCommitted(l, -1)
		l.at = 0
		return f, l
	}
	t.Run("applied", func(t *testing.T) {
		f, l := bury(t)
		f.mend()
		f.handle(l.batch("a=check"))
		f.replayAll("duplicate")
		f.wantLanded("a")
		f.wantBooks(l, books{applied: 1, redelivered: 1, next: 1})
	})
	t.Run("buried once more", func(t *testing.T) {
		f, l := bury(t)
		f.handle(l.batch("a=check"))
		f.wantDead("poison@0", "poison@0")
		f.mend()
		f.replayAll("duplicate", "applied")
		f.wantLanded("a")
		f.wantBooks(l, books{applied: 1, redelivered: 1, next: 1})
	})
}

func TestReplayWhenTheClaimExpired(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check", "b=check"))
	f.rotate()
	f.mend()
	f.replay(f.letters()[0].ID) // its claim is sealed
	f.wantLanded("a")
	f.passTime(3 * expiryWindow)
	f.caughtUp(l)
	if n := f.expire(); n != 1 || f.find("b").Found {
		t.Fatalf("%d generations expired", n)
	}
	f.replayAll("applied")
	f.wantLanded("a", "b")
	if c := f.find("b").Claim; c == nil || *c.Lane != "orders/0" || *c.Position != 1 || c.Fingerprint == nil {
		t.Errorf("claimed anew: %+v", c)
	}
	f.handle(l.batch("b=check"))
	f.wantBooks(l, books{applied: 2, resent: 1, next: 3})
}

// TestReplayWhenTheLaneIsGone books nothing: neither where there is no lane, nor
// in a lane of the same name that never counted the message.
func TestReplayWhenTheLaneIsGone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Identity = mustIdentity(t, 1000, "position")
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check", "b=check"))
	f.mend()
	f.exec(`DELETE FROM dedupd.lanes`)
	f.Store.Generations().Forget("its lanes are gone")
	f.replay(f.letters()[0].ID)
	again := f.take("kafka", "orders/0")
	f.exec(`UPDATE dedupd.lanes SET dead = 1, fetched = 1`)
	f.replay(f.letters()[0].ID)
	if n := len(f.landed()); n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
	f.wantBooks(again, books{dead: 1})
}

// TestReplayBooksNothingBelowZero has books that don't know of the dead letters.
func TestReplayBooksNothingBelowZero(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.OnDuplicate = dedup.DuplicateDeadLetter
	l, other := f.take("kafka", "orders/0"), f.take("nats", "x")
	f.handle(l.batch("a=1", "a=2", "a=1", "b=check"), other.batch("a=1"))
	f.exec(`UPDATE dedupd.lanes SET fetched = 0, applied = 0, resent = 0, cross_source = 0, conflicts = 0, dead = 0`)
	f.mend()
	f.forget("a")
	for _, d := range f.letters() {
		f.replay(d.ID)
	}
	f.wantBooks(l, books{next: 4})
	f.wantBooks(other, books{next: 1})
}

// A dead letter outlives its lane: its claim then names a lane that is gone, and no
// books follow.
func TestReplayOfALaneThatIsGone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.mend()
	f.exec(`DELETE FROM dedupd.lanes`)
	f.forget("a")
	f.replayAll("applied")
	f.wantLanded("a")
	if c := f.find("a").Claim; c == nil || c.LaneNumber == nil || c.Source != nil {
		t.Errorf("claimed by a lane that is gone: %+v", c)
	}
}

func TestReplayWaitsForWhatPasses(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.mend()
	tries := 0
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		if tries++; tries <= 3 {
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'in the way' USING ERRCODE = '40P01'; END $$`)
			return err
		}
		return f.sink.Write(ctx, tx, msgs)
	})
	f.replayAll("applied")
	f.wantLanded("a")
	if tries != 4 {
		t.Errorf("%d tries, want 4", tries)
	}
}

// TestReplayEndsWhereSomebodyHasToAct leaves the dead letter as it was.
func TestReplayEndsWhereSomebodyHasToAct(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		write func(ctx context.Context, tx sinks.Tx) error
		want  string
	}{
		"no table": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Exec(ctx, "INSERT INTO public.nowhere VALUES (1)")
			return err
		}, "nowhere"},
		"its own reasons": {func(context.Context, sinks.Tx) error { return errors.New("out of ink") }, "out of ink"},
		"a transaction of its own": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Exec(ctx, "rollback; begin; INSERT INTO public.rows (id) VALUES ('loose')", pgx.QueryExecModeSimpleProtocol)
			return err
		}, "ended the transaction"},
		"leaves rows open": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Query(ctx, "SELECT generate_series(1, 1000000)")
			return err
		}, "left a query open"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			l := f.take("kafka", "orders/0")
			f.handle(l.batch("a=check"))
			before := f.letters()
			f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, _ []message.Message) error { return c.write(ctx, tx) })
			if r, err := f.Replay(t.Context(), "ann@host", before[0].ID); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v, %v", r, err)
			}
			if diff := cmp.Diff(before, f.letters()); diff != "" {
				t.Error(diff)
			}
			f.wantLanded()
			f.wantBooks(l, books{dead: 1, next: 1})
			if f.audits() != 0 {
				t.Error("it is in the audit")
			}
			f.Sink = f.sink
			f.mend()
			f.replayAll("applied")
			f.wantLanded("a")
		})
	}
}

// A refusal that may be the table's fault leaves the dead letter as any refusal does,
// if the sink finds the table in order.
func TestReplayIsRefusedInDoubt(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.exec(raising("P0001", "NEW.value = 'bad'") + triggerBefore)
	f.Sink = preparing{f.sink}
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=bad", "b"))
	before := f.letters()[0]
	if r, err := f.Replay(t.Context(), "ann@host", before.ID); err != nil || r.Outcome != dedup.ReplayDead || r.SQLState != "P0001" {
		t.Errorf("%+v, %v", r, err)
	}
	if after := f.letters()[0]; after.Attempts != before.Attempts+1 {
		t.Errorf("%d attempts", after.Attempts)
	}
	f.exec(`ALTER TABLE public.rows RENAME TO elsewhere`)
	if r, err := f.Replay(t.Context(), "ann@host", before.ID); err == nil || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("%+v, %v", r, err)
	}
	if after := f.letters()[0]; after.Attempts != before.Attempts+1 {
		t.Errorf("%d attempts", after.Attempts)
	}
}

// TestTwoReplayAtOnce has several processes replay the same dead letters.
func TestTwoReplayAtOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const letters, people = 50, 3
	l := f.take("kafka", "orders/0")
	f.handle(l.batch(values("m", letters, "check")...))
	f.mend()
	var workers []*fixture
	for range people {
		workers = append(workers, attach(t, f.db))
	}
	for _, d := range f.letters() {
		var all sync.WaitGroup
		outcomes := make([]string, people)
		start := make(chan struct{})
		for i, w := range workers {
			all.Go(func() {
				<-start
				r, err := w.Replay(t.Context(), "ann@host", d.ID)
				if err != nil {
					t.Error(err)
				}
				outcomes[i] = r.Outcome
			})
		}
		close(start)
		all.Wait()
		slices.Sort(outcomes)
		if !slices.Equal(outcomes, []string{"applied", "gone", "gone"}) {
			t.Errorf("%q", outcomes)
		}
	}
	f.wantOnce(ids("m", letters)...)
	f.wantBooks(l, books{applied: int64(letters), next: int64(letters)})
	f.wantNoDeadlocks()
	if n := f.audits(); n != letters {
		t.Errorf("%d lines of audit, want %d", n, letters)
	}
}

// values are ids with a value each.
func values(prefix string, n int, value string) []string {
	all := ids(prefix, n)
	for i := range all {
		all[i] += "=" + value
	}
	return all
}

func (f *fixture) wantNoDeadlocks() {
	f.t.Helper()
	var n int
	if err := f.pool.QueryRow(f.t.Context(), `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&n); err != nil || n > 0 {
		f.t.Errorf("%d deadlocks, %v", n, err)
	}
}

// TestReplayBesideAResend has a worker meet the same id at the moment of its
// replay: with the claim in place, and without.
func TestReplayBesideAResend(t *testing.T) {
	t.Parallel()
	const letters = 60
	f := newFixture(t)
	worker := attach(t, f.db)
	l, other := f.take("kafka", "orders/0"), worker.take("kafka", "orders/1")
	f.handle(l.batch(values("m", letters, "check")...))
	f.mend()
	outcomes := map[string]int{}
	for i, d := range f.letters() {
		if i%3 > 0 {
			f.forget(string(d.MessageID))
		}
		var all sync.WaitGroup
		worker.CopyFrom = i % 2 // 0: the default; 1: every group looks ahead
		all.Go(func() { worker.handle(other.batch(string(d.MessageID)+"=check", fmt.Sprint("other", i))) })
		all.Go(func() {
			time.Sleep(time.Duration(rand.N(3000)) * time.Microsecond)
			r, err := f.Replay(t.Context(), "ann@host", d.ID)
			if err != nil {
				t.Error(err)
			}
			outcomes[r.Outcome]++
		})
		all.Wait()
	}
	f.wantOnce(append(ids("m", letters), ids("other", letters)...)...)
	f.wantDead()
	f.wantNoDeadlocks()
	if outcomes["applied"]+outcomes["duplicate"] != letters || outcomes["applied"] < letters/3 || outcomes["duplicate"] == 0 {
		t.Errorf("outcomes %v", outcomes)
	}
	f.wantBooks(l, books{applied: int64(outcomes["applied"]), resent: int64(outcomes["duplicate"]), next: int64(letters)})
	f.wantBooks(other, books{applied: int64(letters + outcomes["duplicate"]), resent: int64(outcomes["applied"]), next: int64(2 * letters)})
}

// gate is a sink that waits, within its transaction, until open is called.
type gate struct {
	sinks.Sink
	entered, opened chan struct{}
	open            func()
}

// newGate makes a gate, which opens at the latest when the test ends.
func newGate(t *testing.T, s sinks.Sink) *gate {
	g := &gate{Sink: s, entered: make(chan struct{}, 10), opened: make(chan struct{})}
	g.open = sync.OnceFunc(func() { close(g.opened) })
	t.Cleanup(g.open)
	return g
}

func (g *gate) Write(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
	g.entered <- struct{}{}
	<-g.opened
	return g.Sink.Write(ctx, tx, msgs)
}

// replayHeld begins a replay whose sink waits; end lets it on and gives its
// outcome.
func (f *fixture) replayHeld(id int64) (end func() string) {
	f.t.Helper()
	g := newGate(f.t, f.sink)
	f.Sink = g
	done := make(chan dedup.Replayed, 1)
	go func() {
		r, err := f.Replay(context.Background(), "ann@host", id)
		if err != nil {
			f.t.Error(err)
		}
		done <- r
	}()
	<-g.entered
	return func() string {
		g.open()
		r := <-done
		f.Sink = f.sink
		return r.Outcome
	}
}

// TestAClaimIsNotForgottenWithinAReplay: else the next copy would be applied
// beside the dead letter.
func TestAClaimIsNotForgottenWithinAReplay(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.rotate() // the claim is sealed
	f.mend()
	end := f.replayHeld(f.letters()[0].ID)
	other := attach(t, f.db)
	var replayed atomic.Bool
	forgotten := make(chan error, 1)
	go func() {
		_, err := other.Store.ForgetClaim(context.Background(), "ann@host", "a")
		if !replayed.Load() {
			err = errors.Join(err, errors.New("the claim was forgotten while the replay was at work"))
		}
		forgotten <- err
	}()
	select {
	case err := <-forgotten:
		t.Error(err)
		forgotten <- nil
	case <-time.After(300 * time.Millisecond):
	}
	replayed.Store(true)
	if got := end(); got != "applied" {
		t.Errorf("replayed: %s", got)
	}
	if err := <-forgotten; err != nil {
		t.Error(err)
	}
	f.wantLanded("a")
	if f.find("a").Found {
		t.Error("the claim is still there")
	}
}

// TestAClaimThatIsForgottenBeforeAReplay is waited for, and then claimed anew.
func TestAClaimThatIsForgottenBeforeAReplay(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.rotate()
	f.mend()
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `DELETE FROM dedupd.claims_test_1`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		r, err := f.Replay(context.Background(), "ann@host", f.letters()[0].ID)
		if r.Outcome != dedup.ReplayApplied {
			err = errors.Join(err, errors.New(r.Outcome))
		}
		done <- err
	}()
	f.awaitLock()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	f.wantLanded("a")
	if c := f.find("a").Claim; c == nil || c.Generation != 2 {
		t.Errorf("%+v", c)
	}
}

// TestReplayBesideRotations seals generations without end, so that claims move
// from one table to the next, and catalogs are out of date.
func TestReplayBesideRotations(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const letters = 60
	l := f.take("kafka", "orders/0")
	f.handle(l.batch(values("m", letters, "check")...))
	f.mend()
	for i, id := range ids("m", letters) {
		if i%2 == 0 {
			f.forget(id)
		}
	}
	keeper := attach(t, f.db)
	var all sync.WaitGroup
	end := make(chan struct{})
	var rotations atomic.Int64
	all.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
				keeper.rotate()
				rotations.Add(1)
				time.Sleep(20 * time.Millisecond) // a replay gives up after ten in a row
			}
		}
	})
	for i, d := range f.letters() {
		for rotations.Load() < int64(i/5) { // else none may come in between
			time.Sleep(time.Millisecond)
		}
		if r, err := f.Replay(t.Context(), "ann@host", d.ID); err != nil || r.Outcome != dedup.ReplayApplied {
			t.Errorf("%+v, %v", r, err)
		}
	}
	close(end)
	all.Wait()
	f.handle(l.batch(values("m", letters, "check")...)) // all are known
	f.wantOnce(ids("m", letters)...)
	f.wantBooks(l, books{applied: int64(letters), resent: int64(letters), next: int64(2 * letters)})
}

// TestExpiryPassesAReplayOver: it neither waits for the dead letter nor takes it
// away.
func TestExpiryPassesAReplayOver(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a=check", "b=check", "c=check"))
	f.mend()
	end := f.replayHeld(f.letters()[1].ID)
	f.passTime(time.Hour)
	keeper := attach(t, f.db)
	if n, led, err := keeper.Store.ExpireDeadLetters(t.Context(), time.Minute); n != 2 || !led || err != nil {
		t.Errorf("expired %d, %v, %v", n, led, err)
	}
	f.wantDead("poison@1")
	if got := end(); got != "applied" {
		t.Errorf("replayed: %s", got)
	}
	f.wantLanded("b")
	f.wantDead()
	f.wantBooks(l, books{applied: 1, dead: 2, next: 3})
}

// TestBuryingDoesntWaitForAReplay has a worker bury a message again whose dead
// letter is locked by a replay, which would have to wait for the worker's claims.
func TestBuryingDoesntWaitForAReplay(t *testing.T) {
	t.Parallel()
	t.Run("conflict", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		worker := attach(t, f.db)
		q := worker.takeQueue("nats")
		worker.handle(q.batchAt(0, "a=1", "a=2"))
		g := newGate(t, worker.sink)
		worker.Sink = g
		handled := make(chan error, 1)
		go func() { handled <- worker.Handle(context.Background(), []lane.Batch{q.batchAt(1, "a=2", "b")}) }()
		<-g.entered // it has looked at the claim, and found a conflict
		f.forget("a")
		end := f.replayHeld(f.letters()[0].ID)
		g.open()
		select {
		case err := <-handled:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(4 * time.Second):
			t.Error("the worker waits for the replay")
		}
		if got := end(); got != "applied" {
			t.Errorf("replayed: %s", got)
		}
		f.wantLanded("a", "b", "a")
		f.wantDead()
		f.wantNoDeadlocks()
	})
	t.Run("poison", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		worker := attach(t, f.db)
		l := worker.take("kafka", "orders/0")
		worker.handle(l.batch("a=check"))
		worker.forget("a")
		worker.setPosition(l, 0)
		l = worker.takeCommitted(l, -1)
		l.at = 0
		// The sink names the message, and waits when it is given the other one alone.
		g := newGate(t, worker.sink)
		worker.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			if len(msgs) > 1 {
				return sinks.PermanentAt(0, errors.New("no good"))
			}
			return g.Write(ctx, tx, msgs)
		})
		handled := make(chan error, 1)
		go func() { handled <- worker.Handle(context.Background(), []lane.Batch{l.batch("a=check", "b")}) }()
		<-g.entered // it has claimed a, and is to bury it
		f.mend()
		replayed := make(chan dedup.Replayed, 1)
		go func() {
			r, err := f.Replay(context.Background(), "ann@host", f.letters()[0].ID)
			if err != nil {
				t.Error(err)
			}
			replayed <- r
		}()
		f.awaitLock() // it has the dead letter, and waits for the claim
		g.open()
		if err := <-handled; err != nil {
			t.Error(err)
		}
		if r := <-replayed; r.Outcome != dedup.ReplayDuplicate {
			t.Errorf("%+v", r)
		}
		f.wantNoDeadlocks()
		f.wantDead("poison@0")
		f.replayAll("applied")
		f.wantLanded("b", "a")
	})
}

// commitCutter cuts a connection in the moment of a COMMIT, a worker's or a
// replay's, and may then let no other through.
type commitCutter struct {
	armed atomic.Int32 // 1: before it reaches the server, 2: after
	down  atomic.Bool
	then  atomic.Pointer[func()] // what happens in that moment; nil: nothing
}

func (c *commitCutter) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if c.down.Load() {
		return nil, errCut
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &replayConn{Conn: conn, c: c}, nil
}

type replayConn struct {
	net.Conn
	c *commitCutter
}

func (c *replayConn) Write(b []byte) (int, error) {
	moves := bytes.Contains(b, []byte("dedupd_replayed")) || bytes.Contains(b, []byte("dedupd_advance"))
	if !moves || !bytes.Contains(b, []byte("dedupd_commit")) {
		return c.Conn.Write(b)
	}
	how := c.c.armed.Swap(0)
	if how == 0 {
		return c.Conn.Write(b)
	}
	n, err := len(b), error(nil)
	if how == 2 {
		n, err = c.Conn.Write(b)
		// Wait for the answer, which shows that it is done, and lose it.
		_ = c.Conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, _ = c.Conn.Read(make([]byte, 1))
	}
	_ = c.Conn.Close()
	if then := c.c.then.Load(); then != nil {
		(*then)()
	}
	return n, err
}

// TestReplayWhoseCommitIsLost cuts the connection before and after COMMIT reached
// the server; half of the time nothing comes through after that, as if the
// process had died, and somebody presses again.
func TestReplayWhoseCommitIsLost(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const letters = 40
	l := f.take("kafka", "orders/0")
	f.handle(l.batch(values("m", letters, "check")...))
	f.mend()
	broken, cut := f.attachBroken()
	for i, d := range f.letters() {
		how, dies := int32(1+i%2), i%4 > 1
		ctx, cancel := context.WithCancel(t.Context())
		cut.then.Store(nil)
		if dies {
			cut.then.Store(new(func() {
				cut.down.Store(true)
				cancel()
			}))
		}
		cut.armed.Store(how)
		r, err := broken.Replay(ctx, "ann@host", d.ID)
		cancel()
		cut.down.Store(false)
		again := f.replay(d.ID).Outcome
		switch {
		case cut.armed.Load() != 0:
			t.Fatal("nothing was cut")
		case !dies && (err != nil || r.Outcome != "applied" || again != "gone"):
			t.Errorf("%d: %+v, %v, and then %s", i, r, err, again)
		case dies && how == 1 && (err == nil || again != "applied"),
			dies && how == 2 && (err == nil || again != "gone"):
			t.Errorf("%d died: %+v, %v, and then %s", i, r, err, again)
		}
	}
	f.wantOnce(ids("m", letters)...)
	f.wantDead()
	f.wantBooks(l, books{applied: int64(letters), next: int64(letters)})
	if n := f.audits(); n != letters {
		t.Errorf("%d lines of audit, want %d", n, letters)
	}
}

// TestReplayWhoseCommitIsLostAndThenDiscarded must not pass for applied, since the
// dead letter is gone.
func TestReplayWhoseCommitIsLostAndThenDiscarded(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.handle(f.take("kafka", "orders/0").batch("a=check"))
	f.mend()
	id := f.letters()[0].ID
	broken, cut := f.attachBroken()
	cut.then.Store(new(func() {
		// The server learns of the lost connection, and lets the dead letter go.
		if _, err := f.Store.DiscardDeadLetters(t.Context(), "bob", []int64{id}, nil); err != nil {
			t.Error(err)
		}
	}))
	cut.armed.Store(1)
	if r := broken.replay(id); r.Outcome != dedup.ReplayGone {
		t.Errorf("%+v", r)
	}
	f.wantLanded()
}

// attachBroken is one more worker, whose connections can be cut.
func (f *fixture) attachBroken() (*fixture, *commitCutter) {
	f.t.Helper()
	t := f.t
	config, err := pgxpool.ParseConfig(f.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	cut := &commitCutter{}
	config.MaxConns = 2
	config.ConnConfig.DialFunc = cut.dial
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	broken := attach(t, f.db)
	broken.Store = newStore(t, pool, "dedupd", "test")
	return broken, cut
}

// TestReplayInAllTheNoise has people replay, discard and forget at the same dead
// letters while workers meet the same ids and generations rotate. What is not
// forgotten has one effect at most, and the books balance.
func TestReplayInAllTheNoise(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const letters, rounds = 120, 6
	l := f.take("kafka", "orders/0")
	f.handle(l.batch(values("m", letters, "check")...))
	f.mend()
	numbers, err := f.Store.DeadLetterIDs(t.Context(), dedup.DeadLetterFilter{})
	if err != nil || len(numbers) != letters {
		t.Fatal(len(numbers), err)
	}
	var all sync.WaitGroup
	for i := range 3 {
		person := attach(t, f.db)
		all.Go(func() {
			for _, n := range rand.Perm(letters) {
				if _, err := person.Replay(t.Context(), fmt.Sprint("person ", i), numbers[n]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 2 {
		worker := attach(t, f.db)
		name := worker.take("kafka", fmt.Sprint("resends/", i))
		all.Go(func() {
			for range rounds {
				b := values("m", letters, "check")
				rand.Shuffle(len(b), func(i, j int) { b[i], b[j] = b[j], b[i] })
				if err := worker.Handle(t.Context(), []lane.Batch{name.batch(b[:letters/2]...)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	keeper := attach(t, f.db)
	all.Go(func() {
		for range rounds {
			keeper.rotate()
		}
	})
	all.Go(func() {
		for n := 0; n < letters; n += 10 {
			if _, err := keeper.Store.DiscardDeadLetters(t.Context(), "bob", numbers[n:n+2], nil); err != nil {
				t.Error(err)
			}
		}
	})
	all.Wait()
	f.wantDead()
	var rows, distinct, replays, discards, balance int
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM dedupd.audit WHERE action = 'dlq replay'),
		(SELECT count(*) FROM dedupd.audit WHERE action = 'dlq discard'), (SELECT sum(applied) FROM dedupd.books) FROM public.rows`).Scan(&rows, &distinct, &replays, &discards, &balance); err != nil {
		t.Fatal(err)
	}
	if rows != distinct || rows != replays || replays+discards != letters || balance != rows {
		t.Errorf("%d rows of %d ids, %d applied by the books; %d replays, %d discards of %d", rows, distinct, balance, replays, discards, letters)
	}
	f.wantNoDeadlocks()
}

func TestDiscard(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.take("kafka", "orders/0")
	f.handle(l.batch("a\x00\xff=check", "", "c=check"))
	letters := f.letters()
	told := 0
	gone, err := f.Store.DiscardDeadLetters(t.Context(), "ann@host", []int64{letters[0].ID, 999}, func(done int) { told = done })
	if err != nil || !slices.Equal(gone, []int64{letters[0].ID}) || told != 2 {
		t.Errorf("discarded %v, told %d, %v", gone, told, err)
	}
	f.wantDead("no_id@1", "poison@2")
	line, detail := f.audited()
	if line != fmt.Sprintf("test ann@host dlq discard dead letter %d", letters[0].ID) || detail["class"] != "poison" || detail["message_id"] != "a␀\ufffd" ||
		detail["claim_key"] != letters[0].ClaimKey || detail["position"] != 0.0 || detail["source"] != "kafka" || len(detail) != 6 {
		t.Errorf("audit: %s, %v", line, detail)
	}
	// Its claim stays, and the books as well: it had no effect.
	f.mend()
	f.handle(l.batch("a\x00\xff=check"))
	f.wantBooks(l, books{resent: 1, dead: 3, next: 4})
	if r := f.replay(letters[0].ID); r.Outcome != dedup.ReplayGone {
		t.Errorf("%+v", r)
	}

	end := f.replayHeld(letters[2].ID)
	done := make(chan []int64, 1)
	go func() {
		gone, err := attach(t, f.db).Store.DiscardDeadLetters(context.Background(), "bob", []int64{letters[2].ID}, nil)
		if err != nil {
			t.Error(err)
		}
		done <- gone
	}()
	f.awaitLock()
	end()
	if gone := <-done; len(gone) > 0 {
		t.Errorf("discarded %v, which was applied", gone)
	}
	f.wantLanded("c")
}

// TestOtherScopesDeadLettersAreNotTouched, whatever number is given.
func TestOtherScopesDeadLettersAreNotTouched(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.handle(f.take("kafka", "orders/0").batch("a=check"))
	id := f.letters()[0].ID
	store := newStore(t, f.pool, "dedupd", "other")
	if _, err := store.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.mend()
	mine := f.Store
	f.Store = store
	if r := f.replay(id); r.Outcome != dedup.ReplayGone {
		t.Errorf("%+v", r)
	}
	if gone, err := store.DiscardDeadLetters(t.Context(), "ann@host", []int64{id}, nil); err != nil || len(gone) > 0 {
		t.Errorf("discarded %v, %v", gone, err)
	}
	f.Store = mine
	f.wantDead("poison@0")
	f.wantLanded()
}

func TestDeadLetterFilters(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, other := f.take("kafka", "orders/0"), f.take("nats", "orders/0")
	f.handle(l.batch("a=check", "", "b=1", "b=2"))
	f.passTime(48 * time.Hour)
	f.handle(other.batch("c=check", ""))
	f.sink.fail = func(*message.Message) error { return sinks.Permanent(errors.New("50 % off")) }
	f.handle(l.batch("d"))
	f.sink.fail = nil
	middle := time.Now().Add(24 * time.Hour)
	for name, c := range map[string]struct {
		filter dedup.DeadLetterFilter
		want   string
	}{
		"all":                   {dedup.DeadLetterFilter{}, "1 2 3 4 5 6"},
		"ids":                   {dedup.DeadLetterFilter{IDs: []int64{3, 1, 99}}, "1 3"},
		"class":                 {dedup.DeadLetterFilter{Classes: []string{"no_id"}}, "2 5"},
		"classes":               {dedup.DeadLetterFilter{Classes: []string{"no_id", "conflict"}}, "2 3 5"},
		"source":                {dedup.DeadLetterFilter{Source: "nats"}, "4 5"},
		"lane":                  {dedup.DeadLetterFilter{Lane: "orders/0"}, "1 2 3 4 5 6"},
		"lane of nobody":        {dedup.DeadLetterFilter{Lane: "orders"}, ""},
		"sqlstate":              {dedup.DeadLetterFilter{SQLState: "23514"}, "1 4"},
		"class of sqlstate":     {dedup.DeadLetterFilter{SQLState: "23"}, "1 4"},
		"other sqlstate":        {dedup.DeadLetterFilter{SQLState: "3514"}, ""},
		"reason":                {dedup.DeadLetterFilter{Reason: "0 % o"}, "6"},
		"since":                 {dedup.DeadLetterFilter{Since: dedup.Moment{Ago: time.Hour}}, "4 5 6"},
		"until":                 {dedup.DeadLetterFilter{Until: dedup.Moment{Ago: time.Hour}}, "1 2 3"},
		"since a time":          {dedup.DeadLetterFilter{Since: dedup.Moment{At: middle}}, "4 5 6"},
		"until a time":          {dedup.DeadLetterFilter{Until: dedup.Moment{At: middle}}, "1 2 3"},
		"between":               {dedup.DeadLetterFilter{Since: dedup.Moment{Ago: 96 * time.Hour}, Until: dedup.Moment{At: middle}}, "1 2 3"},
		"limit":                 {dedup.DeadLetterFilter{Limit: 2}, "1 2"},
		"before":                {dedup.DeadLetterFilter{Before: 3}, "1 2"},
		"all of them":           {dedup.DeadLetterFilter{IDs: []int64{1, 4, 5}, Classes: []string{"poison"}, Source: "nats", SQLState: "2"}, "4"},
		"nobody's":              {dedup.DeadLetterFilter{Classes: []string{"x"}}, ""},
		"an empty list is none": {dedup.DeadLetterFilter{IDs: []int64{}, Limit: 1}, ""},
	} {
		found, err := f.Store.DeadLetterIDs(t.Context(), c.filter)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := strings.Trim(fmt.Sprint(found), "[]"); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		listed, err := f.Store.DeadLetters(t.Context(), c.filter)
		if err != nil || len(listed) != len(found) {
			t.Errorf("%s: %d are listed, %d found, %v", name, len(listed), len(found), err)
		}
	}
	newest, err := f.Store.DeadLetters(t.Context(), dedup.DeadLetterFilter{Limit: 2})
	if err != nil || newest[0].ID != 6 || newest[1].ID != 5 {
		t.Errorf("the newest: %v, %v", newest, err)
	}
}
