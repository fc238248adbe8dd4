package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// mend makes the table accept what it has refused.
func (f *fixture) mend() {
	f.t.Helper()
	f.exec(`ALTER TABLE public.rows DROP CONSTRAINT rows_value_check`)
}

// deadLetters are all of them, the oldest first.
func (f *fixture) deadLetters() []dedup.DeadLetter {
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
	for _, d := range f.deadLetters() {
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
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check", "b", "c=check"))
	f.wantBooks(l, books{applied: 1, dead: 2, next: 3})
	original := f.deadLetters()[0]
	if original.Attempts != 1 || !original.LastAt.Equal(original.CreatedAt) {
		t.Errorf("at first: %d attempts, the last at %s, the first at %s", original.Attempts, original.LastAt, original.CreatedAt)
	}

	// Nothing is mended yet.
	r := f.replay(original.ID)
	if r.Outcome != dedup.ReplayDead || r.SQLState != "23514" || !strings.Contains(r.Reason, "rows_value_check") || string(r.MessageID) != "a" {
		t.Errorf("%+v", r)
	}
	line, detail := f.audited()
	if line != fmt.Sprintf("test ann@host dlq replay dead letter %d", original.ID) || detail["outcome"] != "dead" || detail["class"] != "poison" || detail["message_id"] != "a" {
		t.Errorf("audit: %s, %v", line, detail)
	}
	d := f.deadLetters()[0]
	if d.Attempts != 2 || !d.LastAt.After(d.CreatedAt) || !d.CreatedAt.Equal(original.CreatedAt) || d.Class != "poison" {
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
	if r := f.replay(original.ID); r.Outcome != dedup.ReplayGone || f.audits() != 3 {
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
	q := f.acquireQueue("nats")
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
	begin := func(t *testing.T) (*fixture, *ownedLane) {
		t.Parallel()
		f := newFixture(t)
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch(`={"id":"x"}`, "a"))
		f.wantDead("no_id@0")
		return f, l
	}
	t.Run("still none", func(t *testing.T) {
		f, l := begin(t)
		f.replayAll("dead")
		if d := f.deadLetters()[0]; d.Attempts != 2 || d.SQLState != nil || d.Class != "no_id" {
			t.Errorf("%+v", d)
		}
		f.Missing = policy.MissingStop
		f.replayAll("dead")
		f.Missing, f.Identity = policy.MissingPosition, mustIdentity(t, 2, "json:id")
		f.replayAll("dead") // there is something, but too long
		if d := f.deadLetters()[0]; d.Attempts != 4 {
			t.Errorf("%+v", d)
		}
		f.wantBooks(l, books{applied: 1, dead: 1, next: 2})
		f.wantLanded("a")
	})
	t.Run("by its place", func(t *testing.T) {
		f, l := begin(t)
		f.Missing = policy.MissingPosition
		f.replayAll("applied")
		f.wantBooks(l, books{applied: 2, next: 2})
		var claims int // the place is the one that the dead letter has claimed
		if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM dedupd.claims`).Scan(&claims); err != nil || claims != 2 {
			t.Errorf("%d claims, want 2; %v", claims, err)
		}
		f.setPosition(l, 0)
		l = f.acquireCommitted(l, -1)
		f.handle(l.batchAt(0, `={"id":"x"}`, "a"))
		f.wantBooks(l, books{applied: 2, redelivered: 2, next: 2})
	})
	t.Run("id.from was corrected", func(t *testing.T) {
		f, l := begin(t)
		f.Identity = mustIdentity(t, 100, "json:id")
		r := f.replay(f.deadLetters()[0].ID)
		if r.Outcome != dedup.ReplayApplied || string(r.MessageID) != "x" {
			t.Errorf("%+v", r)
		}
		f.wantLanded("a", "x")
		f.handle(l.batch(`={"id":"x"}`))
		f.wantBooks(l, books{applied: 2, resent: 1, next: 3})
	})
	t.Run("id.from was corrected, and it came again", func(t *testing.T) {
		f, l := begin(t)
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
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
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
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=1", "a=2"))
	f.OnConflict = policy.ConflictStop // a replay only reports it
	r := f.replay(f.deadLetters()[0].ID)
	if r.Outcome != dedup.ReplayConflict || r.Reason != "the id was claimed with another payload" {
		t.Errorf("%+v", r)
	}
	if d := f.deadLetters()[0]; d.Attempts != 2 || d.Class != "conflict" {
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
	// The claim says with which payload it was applied.
	f.OnConflict = policy.ConflictDeadLetter
	f.handle(l.batch("a=2", "a=1"))
	f.wantBooks(l, books{applied: 2, resent: 1, conflicts: 1, next: 4})
}

// TestReplayOfAConflictAtTheSamePosition has the first copy and the conflict at the same
// position of two lanes, claimed and dead-lettered at the same moment.
func TestReplayOfAConflictAtTheSamePosition(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(l.batch("a=1"), other.batch("a=2"))
	f.replayAll("conflict")
	f.wantLanded("a")
}

func TestReplayOfADuplicate(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.OnDuplicate = policy.DuplicateDeadLetter
	l, other := f.acquire("kafka", "orders/0"), f.acquire("nats", "x")
	f.handle(l.batch("a", "a", "b", "b"), other.batch("a", "b"))
	f.wantBooks(l, books{applied: 2, resent: 2, next: 4})
	f.wantBooks(other, books{crossSource: 2, next: 2})
	f.forget("b")
	for _, d := range f.deadLetters() {
		// Of b, the first that is replayed is new. The books of each lane follow.
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

// The books go back by what counted the duplicate, also when the lane that had claimed its
// id is forgotten.
func TestReplayOfADuplicateOfAForgottenLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.OnDuplicate = policy.DuplicateDeadLetter
	l, other := f.acquire("kafka", "orders/0"), f.acquire("nats", "x")
	f.handle(l.batch("a"))
	f.handle(other.batch("a", "b", "b"))
	f.wantBooks(other, books{applied: 1, crossSource: 1, resent: 1, next: 3})
	if _, err := f.Store.ForgetLane(t.Context(), "ann@host", "kafka", "orders/0", true); err != nil {
		t.Fatal(err)
	}
	f.forget("a")
	if r := f.replay(f.deadLetters()[0].ID); r.Outcome != dedup.ReplayApplied || string(r.MessageID) != "a" {
		t.Errorf("%+v", r)
	}
	f.wantBooks(other, books{applied: 2, resent: 1, next: 3})
}

// TestReplayOfAnIDThatHadItsEffect forgets the claim of a poisoned id and sends it again,
// before anybody replays the dead letter.
func TestReplayOfAnIDThatHadItsEffect(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("nats", "x")
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
	begin := func(t *testing.T) (*fixture, *ownedLane) {
		t.Parallel()
		f := newFixture(t)
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a=check"))
		f.forget("a")
		f.setPosition(l, 0)
		l = f.acquireCommitted(l, -1)
		l.at = 0
		return f, l
	}
	t.Run("applied", func(t *testing.T) {
		f, l := begin(t)
		f.mend()
		f.handle(l.batch("a=check"))
		f.replayAll("duplicate")
		f.wantLanded("a")
		f.wantBooks(l, books{applied: 1, redelivered: 1, next: 1})
	})
	t.Run("dead-lettered once more", func(t *testing.T) {
		f, l := begin(t)
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
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check", "b=check"))
	f.rotate()
	f.mend()
	f.replay(f.deadLetters()[0].ID) // its claim is sealed
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
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check", "b=check"))
	f.mend()
	f.exec(`DELETE FROM dedupd.lanes`)
	f.Store.Generations().Forget("its lanes are gone")
	f.replay(f.deadLetters()[0].ID)
	again := f.acquire("kafka", "orders/0")
	f.exec(`UPDATE dedupd.lanes SET dead = 1, fetched = 1`)
	f.replay(f.deadLetters()[0].ID)
	if n := len(f.landed()); n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
	f.wantBooks(again, books{dead: 1})
}

// TestReplayBooksNothingBelowZero has books that don't know of the dead letters.
func TestReplayBooksNothingBelowZero(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.OnDuplicate = policy.DuplicateDeadLetter
	l, other := f.acquire("kafka", "orders/0"), f.acquire("nats", "x")
	f.handle(l.batch("a=1", "a=2", "a=1", "b=check"), other.batch("a=1"))
	f.exec(`UPDATE dedupd.lanes SET fetched = 0, written = 0, resent = 0, cross_source = 0, conflicts = 0, dead = 0`)
	f.mend()
	f.forget("a")
	for _, d := range f.deadLetters() {
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
	l := f.acquire("kafka", "orders/0")
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
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.mend()
	tries := 0
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		if tries++; tries <= 3 {
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'in the way' USING ERRCODE = '40P01'; END $$`)
			return err
		}
		return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
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
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a=check"))
			before := f.deadLetters()
			f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, _ []message.Message) error { return c.write(ctx, tx) })
			if r, err := f.Replay(t.Context(), "ann@host", before[0].ID); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v, %v", r, err)
			}
			if diff := cmp.Diff(before, f.deadLetters()); diff != "" {
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
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=bad", "b"))
	before := f.deadLetters()[0]
	if r, err := f.Replay(t.Context(), "ann@host", before.ID); err != nil || r.Outcome != dedup.ReplayDead || r.SQLState != "P0001" {
		t.Errorf("%+v, %v", r, err)
	}
	if after := f.deadLetters()[0]; after.Attempts != before.Attempts+1 {
		t.Errorf("%d attempts", after.Attempts)
	}
	f.exec(`ALTER TABLE public.rows RENAME TO elsewhere`)
	if r, err := f.Replay(t.Context(), "ann@host", before.ID); err == nil || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("%+v, %v", r, err)
	}
	if after := f.deadLetters()[0]; after.Attempts != before.Attempts+1 {
		t.Errorf("%d attempts", after.Attempts)
	}
}

// undoing is a sink in which an older message undoes newer ones, unless it is b.
type undoing struct{ sinks.Sink }

func (undoing) Overwrites(m *message.Message) error {
	if m.ID == "b" {
		return nil
	}
	return errors.New("it is old")
}

// A dead letter is older than what was applied since. Where it would undo that, somebody must
// say so.
func TestReplayOverNewerStates(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.Sink = undoing{f.sink}
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a=check", "b=check"))
		f.mend()
		before := f.deadLetters()
		r, err := f.Replay(t.Context(), "ann@host", before[0].ID)
		if err == nil || !strings.Contains(err.Error(), "it is old, then replay it with --overwrite, or discard it") || r.Outcome != "" {
			t.Errorf("replayed: %+v, %v", r, err)
		}
		if after := f.deadLetters(); len(after) != 2 || after[0].Attempts != 1 || after[0].Reason != before[0].Reason {
			t.Errorf("the dead letters are %+v", after)
		}
		if r := f.replay(before[1].ID); r.Outcome != dedup.ReplayApplied {
			t.Errorf("the harmless one: %+v", r)
		}
		f.Overwrite = true
		f.replayAll(dedup.ReplayApplied)
		f.wantLanded("b", "a")
		f.wantBooks(l, books{applied: 2, next: 2})
	})
}
