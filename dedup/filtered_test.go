package dedup_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/multi"
)

// but lets messages pass whose place has none of the values.
func but(t *testing.T, place string, values ...string) *message.Filter {
	t.Helper()
	return filter(t, message.Condition{Place: place, Values: values, Not: true})
}

func filter(t *testing.T, c message.Condition) *message.Filter {
	t.Helper()
	f, err := message.NewFilter([]message.Condition{c})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// skipping has the fixture's sink want all but messages with the value skip.
func (f *fixture) skipping() *fixture {
	f.t.Helper()
	f.Sink = multi.New(but(f.t, "value", "skip"), multi.Part{Name: "rows", Sink: f.sink})
	return f
}

func (f *fixture) claims() int { return f.rowCount(`SELECT count(*) FROM dedupd.claims`) }

func TestFilteredMessagesClaimNothing(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.skipping()
		l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
		// A filtered copy neither hides the other copy nor is a duplicate of it.
		f.handle(l.batch("a=skip", "a", "b", "c=skip", "b", "a=skip"), other.batch("d=skip", "e"))
		f.wantBooks(l, books{applied: 2, resent: 1, filtered: 3, next: 6})
		f.wantBooks(other, books{applied: 1, filtered: 1, next: 2})
		if n := f.claims(); n != 3 {
			t.Errorf("%d claims, want 3", n)
		}
		if n := f.metric("dedupd_messages_total"); n != 8 {
			t.Errorf("dedupd_messages_total counts %g of 8", n)
		}
		// A batch of which nobody wants anything moves its lane.
		f.handle(l.batch("x=skip", "y=skip"))
		f.wantBooks(l, books{applied: 2, resent: 1, filtered: 5, next: 8})
		f.wantLanded("a", "b", "e")
	})
}

// What nobody wants needs no id.
func TestFilteredMessagesNeedNoID(t *testing.T) {
	t.Parallel()
	f := newFixture(t).skipping()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "=skip"))
	f.Missing = policy.MissingStop
	f.handle(l.batch("=skip", "b"))
	f.wantBooks(l, books{applied: 2, filtered: 2, next: 4})
	f.wantDead()
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("=skip", "")}), "position 5")
}

// The books go on where they were, whoever has the lane next.
func TestFilteredBooksAfterARestart(t *testing.T) {
	t.Parallel()
	f := newFixture(t).skipping()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b=skip"))
	next := attach(t, f.db).skipping()
	l = next.acquire("kafka", "orders/0")
	if l.Next != 2 {
		t.Errorf("the lane goes on at %d", l.Next)
	}
	next.handle(l.batch("c=skip", "a", "d"))
	next.wantBooks(l, books{applied: 2, resent: 1, filtered: 2, next: 5})

	// With another filter, what was filtered is wanted when it comes again: it has left no
	// claim.
	next.Sink = next.sink
	next.handle(l.batch("b=skip"))
	next.wantLanded("a", "d", "b")
}

func TestFilteredMessagesOfAQueue(t *testing.T) {
	t.Parallel()
	f := newFixture(t).skipping()
	q := f.acquireQueue("nats")
	b := q.batchAt(1, "a", "b=skip")
	f.handle(b)
	f.handle(b) // delivered again
	f.wantBooks(q, books{applied: 1, redelivered: 1, filtered: 2, next: 3})
}

// Poison is found beside what is filtered, and nothing else is dead-lettered.
func TestPoisonBesideFilteredMessages(t *testing.T) {
	t.Parallel()
	f := newFixture(t).skipping()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=skip", "b", "c=check", "d=skip", "e", "f=skip", "g"))
	f.wantLanded("b", "e", "g")
	f.wantDead("poison@2")
	f.wantBooks(l, books{applied: 3, dead: 1, filtered: 3, next: 7})
}

func TestFilteredByPosition(t *testing.T) {
	f := byPosition(t).skipping()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=skip", "b", "=skip", "b"))
	f.wantLanded("b", "b")
	f.wantBooks(l, books{applied: 2, filtered: 2, next: 4})
}

// A filtered message has its number all the same: it makes no gap, and it hides none.
func TestFilteredBySequence(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapStop).skipping()
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(l.numbered("a/1", "a/2=skip", "a/3", "a/2=skip", "a/3", "b/7=skip", "b/8"))
	f.wantLanded("a/1", "a/3", "b/8")
	f.wantBooks(l, books{applied: 3, resent: 1, filtered: 3, next: 7})
	f.handle(l.batch("=skip"))           // it has no number
	f.handle(other.numbered("a/9=skip")) // it would be a dead letter, but nobody wants it
	f.wantBooks(other, books{filtered: 1, next: 1})
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.numbered("a/5=skip")}), "numbers 4 to 4")

	l.at--
	f.Sequence.Gaps = policy.SequenceGapDeadLetter
	f.handle(l.numbered("a/5=skip", "a/6", "a/8=skip", "a/7=skip"))
	f.wantDead("sequence@8", "sequence@10")
	f.wantLanded("a/1", "a/3", "b/8", "a/6")
	f.wantBooks(l, books{applied: 4, resent: 1, dead: 2, filtered: 5, next: 12})

	f.Sequence.Gaps = policy.SequenceGapAllow
	f.handle(l.numbered("a/12=skip", "a/12", "a/13"))
	f.wantBooks(l, books{applied: 5, resent: 2, dead: 2, filtered: 6, next: 15})
}

// If a filter can't be answered, nobody knows whether the message is wanted: it isn't lost.
func TestAMessageThatAFilterCantRead(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Sink = multi.New(nil, multi.Part{Name: "rows", Sink: f.sink, Filter: but(t, "json:type", "test")})
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(`a={"type": "test"}`, `b={"type": "test"`, `c={}`))
	f.wantLanded("c")
	f.wantDead("poison@1")
	f.wantBooks(l, books{applied: 1, dead: 1, filtered: 1, next: 3})
	if d := f.deadLetters()[0]; !strings.Contains(d.Reason, "a filter can't read the value") || string(d.MessageID) != "b" {
		t.Errorf("%+v", d)
	}
	f.handle(l.batch(`b={"type": "test"`)) // the dead letter holds its id
	f.wantBooks(l, books{applied: 1, resent: 1, dead: 1, filtered: 1, next: 4})
}

// A dead letter that nobody wants any more is kept until a person discards it.
func TestAReplayThatNobodyWants(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check", "b"))
	f.mend()
	f.Sink = multi.New(but(t, "value", "check"), multi.Part{Name: "rows", Sink: f.sink})
	if r := f.replay(f.deadLetters()[0].ID); r.Outcome != dedup.ReplayFiltered || r.Reason == "" {
		t.Errorf("%+v", r)
	}
	f.wantDead("poison@0")
	f.wantBooks(l, books{applied: 1, dead: 1, next: 2})
	f.Sink = f.sink
	f.replayAll("applied")
	f.wantBooks(l, books{applied: 2, next: 2})
}

// others is a second table.
type others struct{}

const createOthers = `CREATE TABLE public.others (n bigint GENERATED ALWAYS AS IDENTITY, id text, value text CONSTRAINT others_value_check CHECK (value <> 'bad'))`

func (others) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	for _, m := range batch.Messages() {
		if _, err := tx.Exec(ctx, `INSERT INTO public.others (id, value) VALUES ($1, $2)`, m.ID, string(m.Value)); err != nil {
			return err
		}
	}
	return nil
}

// twoTables has the fixture write to two tables: all but "second" to the first, all but
// "first" to the second.
func (f *fixture) twoTables() *fixture {
	f.t.Helper()
	f.exec(createOthers)
	f.Sink = multi.New(nil,
		multi.Part{Name: "sink[0].rows", Sink: f.sink, Filter: but(f.t, "value", "second", "none")},
		multi.Part{Name: "sink[1].others", Sink: others{}, Filter: but(f.t, "value", "first", "none")})
	return f
}

func (f *fixture) wantOthers(ids ...string) {
	f.t.Helper()
	var got []string
	if err := f.pool.QueryRow(f.t.Context(), `SELECT coalesce(array_agg(id ORDER BY n), '{}') FROM public.others`).Scan(&got); err != nil {
		f.t.Fatal(err)
	}
	if !slices.Equal(got, ids) {
		f.t.Errorf("the second table holds %q, want %q", got, ids)
	}
}

func TestTwoSinks(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		f.twoTables()
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a", "b=first", "c=second", "d=none", "a", "b=first", "e=second"))
		f.wantLanded("a", "b")
		f.wantOthers("a", "c", "e")
		f.wantBooks(l, books{applied: 4, resent: 2, filtered: 1, next: 7})
	})
}

// What the second sink refuses is in neither table: dead is the whole message, and its
// reason names the sink.
func TestADeadLetterOfTheSecondSinkIsInNoTable(t *testing.T) {
	t.Parallel()
	f := newFixture(t).twoTables()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=first", "b", "c=bad", "d=none", "e=second", "f"))
	f.wantLanded("a", "b", "f")
	f.wantOthers("b", "e", "f")
	f.wantDead("poison@2")
	f.wantBooks(l, books{applied: 4, dead: 1, filtered: 1, next: 6})
	if d := f.deadLetters()[0]; !strings.HasPrefix(d.Reason, "write: sink[1].others: ") || d.SQLState == nil || *d.SQLState != "23514" {
		t.Errorf("%+v", d)
	}

	f.exec(`ALTER TABLE public.others DROP CONSTRAINT others_value_check`)
	f.replayAll("applied")
	f.wantLanded("a", "b", "f", "c")
	f.wantOthers("b", "e", "f", "c")
}

// The messages that a sink names are found by its own indexes.
func TestTheSecondSinkNamesTheMessage(t *testing.T) {
	t.Parallel()
	f := newFixture(t).twoTables()
	naming := namingSink{others{}}
	f.Sink = multi.New(nil, multi.Part{Name: "first", Sink: f.sink}, multi.Part{Name: "second", Sink: naming, Filter: but(t, "value", "first")})
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=first", "b", "c=first", "d=named", "e=first", "f=named", "g"))
	f.wantLanded("a", "b", "c", "e", "g")
	f.wantOthers("b", "g")
	f.wantDead("poison@3", "poison@5")
	for _, d := range f.deadLetters() {
		if d.Reason != "second: named" {
			t.Errorf("the reason of %d is %q", d.Position, d.Reason)
		}
	}
	if n := f.metric("dedupd_transaction_retries_total"); n != 0 {
		t.Errorf("%g transactions to find what was named", n)
	}
}

type namingSink struct{ sinks.Sink }

func (s namingSink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	var named []error
	for i, m := range batch.Messages() {
		if string(m.Value) == "named" {
			named = append(named, sinks.PermanentAt(i, errors.New("named")))
		}
	}
	if len(named) > 0 {
		return errors.Join(named...)
	}
	return s.Sink.Write(ctx, tx, batch)
}
