package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// newGuarded is a fixture whose lanes may have so many dead letters among so many
// messages.
func newGuarded(t *testing.T, limit, window int) *fixture {
	t.Helper()
	f := newFixture(t)
	f.MaxDeadShare, f.DeadWindow = float64(limit)/float64(window), window
	if err := f.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return f
}

// somewhatDead are n ids, of which the first so many are missing.
func somewhatDead(prefix string, deads, n int) []string {
	all := ids(prefix, n)
	for i := range deads {
		all[i] = ""
	}
	return all
}

func wantHeldLane(t *testing.T, err error, l message.Lane) {
	t.Helper()
	var hold *lane.HoldError
	if !errors.As(err, &hold) || hold.Lane != l {
		t.Fatalf("got %v, want a hold of lane %s", err, l)
	}
}

// recentDead is what a lane's row records.
func (f *fixture) recentDead(l *ownedLane) (recent []int64) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), `SELECT recent_dead FROM dedupd.lanes WHERE source = $1 AND lane = $2`, l.Source, l.Name).Scan(&recent); err != nil {
		f.t.Fatal(err)
	}
	return recent
}

// Lanes that share a transaction are each held by their own share of dead letters: those
// of one are not charged to another, neither now nor later.
func TestEachLaneAnswersForItsOwnDeadLetters(t *testing.T) {
	t.Parallel()
	f := newGuarded(t, 10, 100)
	a, b, c := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1"), f.acquire("kafka", "orders/2")

	// Each of them alone is within its bounds; all together aren't.
	f.handle(a.batch(somewhatDead("a", 8, 20)...), b.batch(somewhatDead("b", 9, 20)...), c.batch(ids("c", 20)...))
	f.wantBooks(a, books{applied: 12, dead: 8, next: 20})
	f.wantBooks(b, books{applied: 11, dead: 9, next: 20})
	f.wantBooks(c, books{applied: 20, next: 20})
	if got := f.recentDead(a); !slices.Equal(got, []int64{1, 2, 3, 4, 5, 6, 7, 8}) {
		t.Errorf("the first lane remembers %v", got)
	}
	if got := f.recentDead(b); !slices.Equal(got, []int64{1, 2, 3, 4, 5, 6, 7, 8, 9}) {
		t.Errorf("the second lane remembers %v", got)
	}
	if got := f.recentDead(c); len(got) != 0 {
		t.Errorf("the third lane remembers %v", got)
	}

	// The third has room for ten, whatever the rows before it say.
	f.handle(a.batch("a20"), b.batch("b20"), c.batch(somewhatDead("cc", 10, 12)...))
	f.wantBooks(c, books{applied: 22, dead: 10, next: 32})

	// And each is held for its own, by name: the first goes on without the second.
	first, second := a.batch("", "", "a21"), b.batch("", "", "b21")
	wantHeldLane(t, f.Handle(t.Context(), []lane.Batch{first, second}), b.Lane)
	f.handle(first)
	wantHeldLane(t, f.Handle(t.Context(), []lane.Batch{second}), b.Lane)
	f.wantBooks(a, books{applied: 14, dead: 10, next: 24})
	f.wantBooks(b, books{applied: 12, dead: 9, next: 21})
	wantHeldLane(t, f.Handle(t.Context(), []lane.Batch{c.batch(""), b.batchAt(21, "b22")}), c.Lane)
}

// The slots of a queue share one row, and so they share their dead letters.
func TestAQueuesBatchesShareTheirDeadLetters(t *testing.T) {
	t.Parallel()
	f := newGuarded(t, 10, 100)
	neighbour, q := f.acquire("kafka", "orders/0"), f.acquireQueue("nats")
	err := f.Handle(t.Context(), []lane.Batch{
		q.batchAt(100, somewhatDead("x", 6, 6)...), neighbour.batch(somewhatDead("n", 1, 3)...), q.batchAt(200, somewhatDead("y", 6, 6)...),
	})
	wantHeldLane(t, err, q.Lane)
	neighbour.at = 0
	f.handle(q.batchAt(100, somewhatDead("x", 6, 6)...), neighbour.batch(somewhatDead("n", 5, 6)...), q.batchAt(200, somewhatDead("y", 4, 6)...))
	f.wantBooks(q, books{applied: 2, dead: 10, next: 206})
	f.wantBooks(neighbour, books{applied: 1, dead: 5, next: 6})
}

// The window is the last so many messages, this one among them: a dead letter is
// forgotten neither a message too early nor one too late, within a batch and from
// one to the next.
func TestTheWindowOfDeadLetters(t *testing.T) {
	t.Parallel()
	const window = 10
	for _, test := range []struct {
		between int // good messages between two dead ones
		held    bool
	}{{0, true}, {window - 2, true}, {window - 1, false}, {window, false}} {
		for _, batches := range []int{1, 2, 3, 4} {
			t.Run(fmt.Sprintf("%d between, %d batches", test.between, batches), func(t *testing.T) {
				t.Parallel()
				f := newGuarded(t, 1, window)
				l := f.acquire("kafka", "orders/0")
				all := append(append(append(ids("before", 15), ""), ids("m", test.between)...), "")
				switch batches {
				case 2: // the dead one is the first of its own
					f.handle(l.batch(all[:15]...))
					all = all[15:]
					f.handle(l.batch(all[:1]...))
					all = all[1:]
				case 3: // each message comes alone
					for ; len(all) > 1; all = all[1:] {
						f.handle(l.batch(all[0]))
					}
				case 4: // and the last one comes alone
					f.handle(l.batch(all[:len(all)-1]...))
					all = all[len(all)-1:]
				}
				err := f.Handle(t.Context(), []lane.Batch{l.batch(all...)})
				if !test.held && err != nil {
					t.Fatal(err)
				}
				if test.held {
					wantHeldLane(t, err, l.Lane)
					wantHold(t, err, fmt.Sprintf("2 of the last %d messages", window))
				}
			})
		}
	}
	t.Run("fewer messages than the window", func(t *testing.T) {
		t.Parallel()
		f := newGuarded(t, 1, window)
		wantHold(t, f.Handle(t.Context(), []lane.Batch{f.acquire("kafka", "orders/0").batch("a", "", "")}), "2 of the last 3 messages")
	})
}

// While poison is searched for, one part may land and the other fail. Then the hand-over
// has failed: what did not land is handed over again.
func TestAHalfThatFailsWhilePoisonIsFound(t *testing.T) {
	t.Parallel()
	errAway := fmt.Errorf("the network: %w", context.DeadlineExceeded)
	for name, wrong := range map[string]error{"transient": errAway, "for good": errors.New("out of ink")} {
		for place, ids := range map[string]struct {
			first, second []string
			landed        []string // before the fault is repaired
		}{
			"the other lane":         {[]string{"a", "b"}, []string{"c", "wrong"}, []string{"a", "b", "c"}},
			"one lane, on the right": {[]string{"a", "b", "c", "wrong"}, nil, []string{"a", "b", "c"}},
			"one lane, on the left":  {[]string{"a", "wrong", "b", "c"}, nil, []string{"a"}},
			"the first lane":         {[]string{"a", "wrong"}, []string{"b", "c"}, []string{"a"}},
		} {
			t.Run(name+", "+place, func(t *testing.T) {
				t.Parallel()
				f := newFixture(t)
				mended := false
				f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
					switch {
					case mended:
					case len(msgs) > 1:
						return sinks.Permanent(errors.New("one of them is no good"))
					case msgs[0].ID == "wrong":
						return wrong
					}
					return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
				})
				l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
				group := []lane.Batch{l.batch(ids.first...)}
				if ids.second != nil {
					group = append(group, other.batch(ids.second...))
				}
				err := f.Handle(t.Context(), slices.Clone(group))
				if !errors.Is(err, wrong) {
					t.Fatalf("got %v, want %v", err, wrong)
				}
				f.wantLanded(ids.landed...)
				mended = true
				f.handle(group...)
				f.wantOnce("a", "b", "c", "wrong")
				f.wantDead()
			})
		}
	}
}

// A sink that names a message which it was not given has a bug. Its error says no
// more than that one of them is bad: that one is found, and only that one.
func TestASinkThatNamesAMessageItWasNotGiven(t *testing.T) {
	t.Parallel()
	for name, blame := range map[string]func(bad, n int) error{
		"one after the last": func(_, n int) error { return sinks.PermanentAt(n, errors.New("no good")) },
		"far beyond":         func(int, int) error { return sinks.PermanentAt(1<<40, errors.New("no good")) },
		"before the first":   func(int, int) error { return sinks.PermanentAt(-2, errors.New("no good")) },
		"beside the right one": func(bad, n int) error {
			return errors.Join(sinks.PermanentAt(n, errors.New("not there")), sinks.PermanentAt(bad, errors.New("no good")), sinks.PermanentAt(-7, errors.New("not there")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
				if bad := slices.IndexFunc(msgs, func(m message.Message) bool { return m.ID == "bad" }); bad >= 0 {
					return blame(bad, len(msgs))
				}
				return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
			})
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a", "b", "bad", "c", "d"))
			f.wantLanded("a", "b", "c", "d")
			f.wantDead("poison@2")
		})
	}
}

// What the probes may show of a hold contains nothing of a message.
func TestSummariesOfHoldsQuoteNoMessage(t *testing.T) {
	t.Parallel()
	const secret = "s3cret"
	for name, c := range map[string]struct {
		change func(f *fixture)
		ids    []string
		want   string
	}{
		"id.missing is stop": {func(f *fixture) { f.Missing = policy.MissingStop }, []string{secret, ""}, "position 1"},
		"an id that is too long": {func(f *fixture) {
			f.Missing = policy.MissingStop
			f.Identity, _ = message.NewIdentity([]string{"header:id"}, 4)
		}, []string{secret}, "position 0"},
		"on_conflict is stop": {func(f *fixture) { f.OnConflict = policy.ConflictStop }, []string{secret + "=1", secret + "=2"}, "position 1"},
		"the sink holds":      {func(f *fixture) { f.Sink = holding{f.sink} }, []string{secret, secret + "2=hold"}, "position 1"},
		"too many dead letters": {func(f *fixture) {
			f.exec(`ALTER TABLE public.rows ADD COLUMN n2 integer GENERATED ALWAYS AS (value::integer) STORED`)
		}, []string{"a=" + secret, "b=" + secret, "c=" + secret}, "22P02"},
		"a trigger's exception": {func(f *fixture) {
			f.exec(`CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no %', NEW.value; END $$;
				CREATE TRIGGER no BEFORE INSERT ON public.rows FOR EACH ROW EXECUTE FUNCTION public.no()`)
		}, []string{"a=" + secret}, "no other message"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newGuarded(t, 1, 100)
			c.change(f)
			err := f.Handle(t.Context(), []lane.Batch{f.acquire("kafka", "orders/0").batch(c.ids...)})
			var hold *lane.HoldError
			if !errors.As(err, &hold) {
				t.Fatalf("got %v, want a hold", err)
			}
			if !strings.Contains(hold.Summary, c.want) || strings.Contains(hold.Summary, secret) {
				t.Errorf("the summary is %q; the error %v", hold.Summary, err)
			}
		})
	}
}
