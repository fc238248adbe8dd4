package dedup_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// bySequence is a fixture whose messages' ids are producer/epoch.number, such as "a/0.7".
// A message without an id has no number either.
func bySequence(t *testing.T, gaps policy.SequenceGap) *fixture {
	t.Helper()
	f := newFixture(t)
	f.Strategy = policy.StrategySequence
	place := func(from string) *message.Identity {
		x, err := message.NewIdentity([]string{from}, 100)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	f.Sequence = &dedup.Sequence{Producer: place("header:producer"), Number: place("header:number"), Epoch: place("header:epoch"), Gaps: gaps}
	return f
}

// numbered is a batch of such messages.
func (l *ownedLane) numbered(ids ...string) lane.Batch {
	b := l.batch(ids...)
	for i := range b.Messages {
		m := &b.Messages[i]
		id, _, _ := strings.Cut(ids[i], "=")
		producer, rest, _ := strings.Cut(id, "/")
		epoch, number, ok := strings.Cut(rest, ".")
		if !ok {
			epoch, number = "0", rest
		}
		for key, value := range map[string]string{"producer": producer, "epoch": epoch, "number": number} {
			m.Headers = append(m.Headers, message.Header{Key: key, Value: []byte(value)})
		}
	}
	return b
}

func TestBySequence(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "b/7", "a/2", "a/1", "a/2"))
	f.wantLanded("a/1", "b/7", "a/2")
	f.wantBooks(l, books{applied: 3, resent: 2, next: 5})
	f.handle(l.numbered("a/2", "b/6", "a/5", "a/4", "b/8"))
	f.wantLanded("a/1", "b/7", "a/2", "a/5", "b/8")
	f.wantBooks(l, books{applied: 5, resent: 5, next: 10})
	if n := f.rowCount(`SELECT count(*) FROM dedupd.claims`); n != 0 {
		t.Errorf("%d claims", n)
	}
	if n := f.rowCount(`SELECT count(*) FROM dedupd.sequences`); n != 2 {
		t.Errorf("%d marks, want 2", n)
	}
}

func TestBySequenceEpochs(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapStop)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1.8", "a/1.9", "a/2.0", "a/1.10", "a/2.1", "a/2.0"))
	f.wantLanded("a/1.8", "a/1.9", "a/2.0", "a/2.1")
	f.wantBooks(l, books{applied: 4, resent: 1, dead: 1, next: 6})
	f.wantDead("sequence@3")
}

func TestBySequenceGaps(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapDeadLetter)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "a/3", "a/4", "a/2"))
	// The dead letter has moved the mark: what comes after it is applied.
	f.wantLanded("a/1", "a/4")
	f.wantDead("sequence@1")
	f.wantBooks(l, books{applied: 2, resent: 1, dead: 1, next: 4})
	// Its replay would pass the mark by, so somebody must say so.
	letter := f.deadLetters()[0]
	if r, err := f.Replay(t.Context(), "ann@host", letter.ID); err == nil || !strings.Contains(err.Error(), "a replay looks at no mark") || r.Outcome != "" {
		t.Errorf("replayed: %+v, %v", r, err)
	}
	if after := f.deadLetters(); len(after) != 1 || after[0].Attempts != letter.Attempts || after[0].Reason != letter.Reason {
		t.Errorf("the dead letters are %+v", after)
	}
	f.Overwrite = true
	f.replayAll("applied")
	f.wantLanded("a/1", "a/4", "a/3")
	f.wantBooks(l, books{applied: 3, resent: 1, next: 4})

	f.Sequence.Gaps = policy.SequenceGapStop
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.numbered("a/5", "a/7")}), "numbers 6 to 6", "dedup.sequence.gaps is stop")
	f.wantBooks(l, books{applied: 4, resent: 1, next: 5})
}

// Over two lanes, a later number can come before an earlier one, which would be lost in
// silence.
func TestAMarkBelongsToALane(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(l.numbered("a/2", "a/4"))
	f.handle(other.numbered("a/1", "a/3", "a/5"))
	f.wantLanded("a/2", "a/4")
	f.wantDead("sequence@0", "sequence@1", "sequence@2")
	// With a higher epoch it moves.
	f.handle(other.numbered("a/1.1", "a/1.2"))
	f.handle(l.numbered("a/5", "a/1.3"))
	f.wantLanded("a/2", "a/4", "a/1.1", "a/1.2")
	f.wantBooks(l, books{applied: 2, dead: 2, next: 4})
	// In one group as well.
	f.handle(l.numbered("b/1"), other.numbered("b/2"))
	f.wantLanded("a/2", "a/4", "a/1.1", "a/1.2", "b/1")
}

// Two workers see a producer for the first time, each by another lane: one of them is
// first.
func TestANewProducerOnTwoLanesAtOnce(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	for n := range 20 {
		var both sync.WaitGroup
		for i, b := range []lane.Batch{l.numbered(fmt.Sprintf("p%d/1", n)), other.numbered(fmt.Sprintf("p%d/2", n))} {
			both.Go(func() {
				err := f.Handle(t.Context(), []lane.Batch{b})
				for codeOf(err) == "40001" { // the worker tries again, too
					err = f.Handle(t.Context(), []lane.Batch{b})
				}
				if err != nil {
					t.Errorf("lane %d: %v", i, err)
				}
			})
		}
		both.Wait()
	}
	if n := f.rowCount(`SELECT count(*) FROM public.rows`); n != 20 {
		t.Errorf("%d landed, want one of each pair", n)
	}
	if n := f.rowCount(`SELECT count(*) FROM dedupd.dead_letters WHERE class = 'sequence'`); n != 20 {
		t.Errorf("%d dead letters, want one of each pair", n)
	}
}

// A mark outlives its lane's row: the next lane takes it over, and knows what was applied.
func TestAForgottenLanesMarksAreTakenOver(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "a/2"))
	if _, err := f.Store.ForgetLane(t.Context(), "ann@host", "kafka", "orders/0", true); err != nil {
		t.Fatal(err)
	}
	l = f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "a/2", "a/3"))
	f.wantLanded("a/1", "a/2", "a/3")
}

func TestBySequenceBadNumbers(t *testing.T) {
	t.Parallel()
	for number, want := range map[string]string{
		"": "no_id", "-1": "bad_id", "1.5": "bad_id", "x": "bad_id", "9223372036854775808": "bad_id", "1e3": "bad_id", " 1": "bad_id",
		"0": "", "007": "", "9223372036854775807": "",
	} {
		f := bySequence(t, policy.SequenceGapAllow)
		l := f.acquire("kafka", "orders/0")
		b := l.batch("x")
		b.Messages[0].Headers = append(b.Messages[0].Headers, message.Header{Key: "producer", Value: []byte("a")}, message.Header{Key: "epoch", Value: []byte("1")})
		if number != "" {
			b.Messages[0].Headers = append(b.Messages[0].Headers, message.Header{Key: "number", Value: []byte(number)})
		}
		f.handle(b)
		if want == "" {
			f.wantDead()
			continue
		}
		f.wantDead(want + "@0")
		if d := f.deadLetters()[0]; !strings.Contains(d.Reason, "dedup.sequence.seq") || !strings.Contains(d.Reason, "header:number") && want == "no_id" {
			t.Errorf("%q: %s", number, d.Reason)
		}
	}
}

// A poison message moves the mark, so that its replay and its successors both land, once.
func TestBySequencePoison(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapStop)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "a/2=check", "a/3"))
	f.handle(l.numbered("a/2=check", "a/4"))
	f.wantLanded("a/1", "a/3", "a/4")
	f.wantBooks(l, books{applied: 3, resent: 1, dead: 1, next: 5})
	f.mend()
	f.replayAll("applied")
	f.wantLanded("a/1", "a/3", "a/4", "a/2")
}

func TestBySequenceDuplicatesAreDeadLetters(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	f.OnDuplicate = policy.DuplicateDeadLetter
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "a/1"))
	f.wantDead("duplicate@1")
	f.replayAll("duplicate")
	f.wantLanded("a/1")
}

func TestBySequenceAQueueIsRefused(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	q := f.acquireQueue("nats")
	err := f.Handle(t.Context(), []lane.Batch{q.numbered("a/1")})
	var held *lane.HoldError
	if !errors.As(err, &held) || !strings.Contains(err.Error(), "no order") {
		t.Errorf("the error is %v", err)
	}
}

// A producer that isn't seen for the window begins anew. While a lane lags behind, nothing
// is forgotten.
func TestMarksExpireByStreamTime(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/5", "b/5"))
	expire := func(want int64) {
		t.Helper()
		if n, led, err := f.Store.ExpireMarks(t.Context(), time.Hour); n != want || !led || err != nil {
			t.Errorf("%d expired, want %d (led %t, %v)", n, want, led, err)
		}
	}
	f.exec(`UPDATE dedupd.sequences SET seen_at = seen_at - interval '2 hours' WHERE name = 'a'`)
	f.exec(`UPDATE dedupd.lanes SET stream_time = now() - interval '90 minutes'`)
	expire(0)
	f.exec(`UPDATE dedupd.lanes SET stream_time = now()`)
	expire(1)
	f.handle(l.numbered("a/5", "b/5"))
	f.wantLanded("a/5", "b/5", "a/5")
}

// A mark that moves to another lane while somebody waits for its lock is seen to have
// moved.
func TestAMarkMovesWhileAnotherWorkerWaits(t *testing.T) {
	t.Parallel()
	for name, move := range map[string]string{
		"by its epoch":        `UPDATE dedupd.sequences SET lane = (SELECT id FROM dedupd.lanes WHERE lane = 'orders/1'), epoch = 1, number = 4`,
		"of a lane forgotten": `UPDATE dedupd.sequences SET lane = (SELECT id FROM dedupd.lanes WHERE lane = 'orders/1'), number = 4`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := bySequence(t, policy.SequenceGapAllow)
			l := f.acquire("kafka", "orders/0")
			f.acquire("kafka", "orders/1")
			f.handle(l.numbered("a/1"))
			if name != "by its epoch" {
				if _, err := f.Store.ForgetLane(t.Context(), "ann@host", "kafka", "orders/0", true); err != nil {
					t.Fatal(err)
				}
				l = f.acquire("kafka", "orders/2")
			}
			tx, err := f.pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), move); err != nil {
				t.Fatal(err)
			}
			done := make(chan error)
			go func() { done <- f.Handle(t.Context(), []lane.Batch{l.numbered("a/3", "a/5")}) }()
			for f.rowCount(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == 0 {
				if t.Context().Err() != nil {
					t.Fatal("nobody waits")
				}
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			f.wantLanded("a/1")
			if n := f.rowCount(`SELECT count(*) FROM dedupd.dead_letters WHERE class = 'sequence'`); n != 2 {
				t.Errorf("%d dead letters, want 2", n)
			}
		})
	}
}

// A producer whose messages are all copies is seen.
func TestCopiesKeepAMark(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l := f.acquire("kafka", "orders/0")
	for range 3 {
		f.handle(l.numbered("a/5"))
		f.exec(`UPDATE dedupd.sequences SET seen_at = seen_at - interval '50 minutes'`)
		f.exec(`UPDATE dedupd.lanes SET stream_time = now()`)
		if n, _, err := f.Store.ExpireMarks(t.Context(), time.Hour); n != 0 || err != nil {
			t.Errorf("%d expired, %v", n, err)
		}
	}
	f.wantLanded("a/5")
}

// The answer to COMMIT was lost, and the batch rose its producer's epoch: the next try must
// find that it has landed before it judges the messages.
func TestALostAnswerAndARisenEpoch(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapStop)
	f.MaxDeadShare, f.DeadWindow = 0.01, 100
	if err := f.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := f.acquire("kafka", "orders/0")
	b := l.numbered("a/0.1", "a/0.2", "a/0.3", "a/0.4", "a/0.5", "a/1.0")
	f.handle(b)
	f.handle(b)
	f.wantBooks(l, books{applied: 6, next: 6})
}

// A lane that goes back brings what it had: the broker's doing, not the producer's.
func TestBySequenceGoingBackIsRedelivery(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	f.OnDuplicate = policy.DuplicateDeadLetter
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "b/1", "a/2", "a/1"))
	f.wantDead("duplicate@3")
	if _, err := f.Store.SetPosition(t.Context(), "ann@host", "kafka", "orders/0", 0, true); err != nil {
		t.Fatal(err)
	}
	l = f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "b/1", "a/2"))
	f.wantDead("duplicate@3")
	f.wantBooks(l, books{applied: 3, redelivered: 3, resent: 1, next: 3})
}

// With gaps: stop, a message that can't be applied leaves no gap, and hides none.
// A lane whose log was made anew: a number that the producer uses again is no redelivery.
func TestBySequenceAnotherLogIsNoRedelivery(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "a/2", "b/7"))
	f.exec(`UPDATE dedupd.lanes SET next_position = 0, stream_id = 'another'`)
	l = f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1", "a/2", "a/3"))
	f.wantLanded("a/1", "a/2", "b/7", "a/3")
	f.wantBooks(l, books{applied: 4, resent: 2, next: 3})
}

func TestBySequenceRejectionsAndGaps(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapStop)
	l := f.acquire("kafka", "orders/0")
	b := l.numbered("a/1", "a/2", "a/3")
	b.Messages[1].Headers = slices.DeleteFunc(b.Messages[1].Headers, func(h message.Header) bool { return h.Key == "id" })
	f.handle(b)
	f.wantBooks(l, books{applied: 2, dead: 1, next: 3})
	b = l.numbered("a/5")
	b.Messages[0].Damaged = "cut"
	wantHold(t, f.Handle(t.Context(), []lane.Batch{b}), "numbers 4 to 4")
}
