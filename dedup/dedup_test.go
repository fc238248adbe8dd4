package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func TestMain(m *testing.M) {
	pgtest.Main(m, func() error { return goleak.Find() })
}

// rows is as plain a sink as can be. Its table has no unique index on the id: one would
// hide the very duplicates that the tests look for.
type rows struct {
	fail func(m *message.Message) error // asked before a row is written
}

const createRows = `CREATE TABLE IF NOT EXISTS public.rows (n bigint GENERATED ALWAYS AS IDENTITY, id text, lane text, position bigint, value text CHECK (value <> 'check'))`

func (s *rows) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	var ids, lanes, values []string
	var positions []int64
	for i := range msgs {
		if s.fail != nil {
			if err := s.fail(&msgs[i]); err != nil {
				return err
			}
		}
		ids, values = append(ids, msgs[i].ID), append(values, string(msgs[i].Value))
		lanes, positions = append(lanes, msgs[i].Position.Lane.String()), append(positions, msgs[i].Position.Offset)
	}
	_, err := tx.Exec(ctx, `INSERT INTO public.rows (id, lane, position, value) SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[])`,
		ids, lanes, positions, values)
	return err
}

// fixture is a migrated database with one processor.
type fixture struct {
	*dedup.Processor
	t    *testing.T
	db   *pgtest.DB
	pool *pgxpool.Pool
	sink *rows
	reg  *prometheus.Registry
}

func newFixture(t *testing.T) *fixture {
	db := pgtest.NewFrom(t, "dedup", func(ctx context.Context, url string) error {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		defer pool.Close()
		if _, err := pool.Exec(ctx, createRows); err != nil {
			return err
		}
		store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "test"})
		if err != nil {
			return err
		}
		_, err = store.Schema().Migrate(ctx)
		return err
	})
	return attach(t, db)
}

// attach is one more worker on the same database.
func attach(t *testing.T, db *pgtest.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, db: db, pool: db.Pool(t), sink: &rows{}, reg: prometheus.NewRegistry()}
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: f.pool, Scope: "test", Owner: t.Name(), FilterMemory: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	identity, err := message.NewIdentity([]string{"header:id"}, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	fingerprint, err := claimkey.NewFingerprint([]string{"value"})
	if err != nil {
		t.Fatal(err)
	}
	f.Processor = &dedup.Processor{
		Store: store, Sink: f.sink, Identity: identity, Fingerprint: fingerprint,
		Missing: policy.MissingDeadLetter, OnDuplicate: policy.DuplicateDrop, OnConflict: policy.ConflictDeadLetter,
		MaxDeadShare: 0.5, DeadWindow: 1000, Metrics: dedup.NewMetrics(f.reg),
	}
	if err := f.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return f
}

// ownedLane is a lane that was acquired.
type ownedLane struct {
	message.Lane
	lane.Assignment
	at      int64
	ordered bool
}

func (f *fixture) acquire(source, name string) *ownedLane {
	f.t.Helper()
	l := message.Lane{Source: source, Name: name}
	assigned, err := f.Store.Acquire(f.t.Context(), lane.Acquire{Lane: l, Ordered: true, Committed: -1})
	if err != nil {
		f.t.Fatal(err)
	}
	return &ownedLane{l, assigned, assigned.Next, true}
}

func (f *fixture) acquireQueue(source string) *ownedLane {
	f.t.Helper()
	l := message.Lane{Source: source, Name: "queue"}
	assigned, err := f.Store.Acquire(f.t.Context(), lane.Acquire{Lane: l, LogID: "stream-1", Committed: -1})
	if err != nil {
		f.t.Fatal(err)
	}
	return &ownedLane{l, assigned, 0, false}
}

// batch makes the lane's next messages: one for each id, with the value "v", or the one
// behind "=" in the id. An empty id makes a message without one.
func (l *ownedLane) batch(ids ...string) lane.Batch {
	b := l.batchAt(l.at, ids...)
	l.at = b.Next
	return b
}

func (l *ownedLane) batchAt(at int64, ids ...string) lane.Batch {
	b := lane.Batch{Lane: l.Lane, Ordered: l.ordered, StreamID: l.StreamID, Epoch: l.Epoch, From: at, Next: at + int64(len(ids)), Lag: 0, BrokerPosition: -1, Checkpoint: l.Checkpoint}
	for i, id := range ids {
		id, value, ok := strings.Cut(id, "=")
		if !ok {
			value = "v"
		}
		m := message.Message{Topic: "t", Value: []byte(value), Time: time.Now(), Position: message.Position{Lane: l.Lane, Offset: at + int64(i)}}
		if id != "" {
			m.Headers = []message.Header{{Key: "id", Value: []byte(id)}}
		}
		b.Messages = append(b.Messages, m)
	}
	return b
}

func (f *fixture) handle(batches ...lane.Batch) {
	f.t.Helper()
	if err := f.Handle(f.t.Context(), batches); err != nil {
		f.t.Fatalf("handle: %v", err)
	}
}

// landed is the sink's ids in the order they were written.
func (f *fixture) landed() []string {
	f.t.Helper()
	var ids []string
	if err := f.pool.QueryRow(f.t.Context(), `SELECT coalesce(array_agg(id ORDER BY n), '{}') FROM public.rows`).Scan(&ids); err != nil {
		f.t.Fatal(err)
	}
	return ids
}

func (f *fixture) wantLanded(ids ...string) {
	f.t.Helper()
	if got := f.landed(); !slices.Equal(got, ids) {
		f.t.Errorf("the sink holds %q, want %q", got, ids)
	}
}

// books are what a lane's row counts, and its position. What was applied was written, but
// for what the sink says is not.
type books struct {
	applied, alreadyPresent, stale, rejected, redelivered, resent, crossSource, conflicts, dead, filtered int64
	next                                                                                                  int64
}

func (f *fixture) wantBooks(l *ownedLane, want books) {
	f.t.Helper()
	all, err := f.Store.Books(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	for _, b := range all {
		if b.Source != l.Source || b.Lane != l.Name {
			continue
		}
		if got := (books{b.Applied, b.AlreadyPresent, b.Stale, b.Rejected, b.Redelivered, b.Resent, b.CrossSource, b.Conflicts, b.Dead, b.Filtered, b.NextPosition}); got != want {
			f.t.Errorf("books of %s: %+v, want %+v", l.Lane, got, want)
		}
		if sum := b.Applied + b.Duplicates + b.Conflicts + b.Dead + b.Filtered; sum != b.Fetched {
			f.t.Errorf("books of %s don't balance: fetched %d, outcomes %d", l.Lane, b.Fetched, sum)
		}
		if sum := b.Written + b.AlreadyPresent + b.Stale + b.Rejected; sum != b.Applied {
			f.t.Errorf("books of %s don't balance: applied %d, by the sink %d", l.Lane, b.Applied, sum)
		}
		return
	}
	f.t.Errorf("no books of %s", l.Lane)
}

func (f *fixture) wantDead(want ...string) {
	f.t.Helper()
	deadLetters, err := f.Store.DeadLetters(f.t.Context(), dedup.DeadLetterFilter{})
	if err != nil {
		f.t.Fatal(err)
	}
	var got []string
	for _, d := range deadLetters {
		got = append(got, fmt.Sprintf("%s@%d", d.Class, d.Position))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		f.t.Errorf("dead letters %q, want %q", got, want)
	}
}

// bothWays runs a test once for each way of claiming.
func bothWays(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Parallel()
	for name, copyFrom := range map[string]int{"on conflict": math.MaxInt, "copy": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.CopyFrom = copyFrom
			test(t, f)
		})
	}
}

func TestEachIDOnce(t *testing.T) { bothWays(t, testEachIDOnce) }

func testEachIDOnce(t *testing.T, f *fixture) {
	l := f.acquire("kafka", "orders/0")
	other := f.acquire("kafka", "orders/1")
	elsewhere := f.acquire("nats", "lane-0")

	f.handle(l.batch("a", "b", "a", "c"), other.batch("b", "d"))
	f.wantLanded("a", "b", "c", "d")
	f.wantBooks(l, books{applied: 3, resent: 1, next: 4})
	f.wantBooks(other, books{applied: 1, resent: 1, next: 2})

	f.handle(elsewhere.batch("a", "e"), l.batch("e", "c"))
	// Lanes are worked through in their order, so kafka's copy of e came first.
	f.wantLanded("a", "b", "c", "d", "e")
	f.wantBooks(l, books{applied: 4, resent: 2, next: 6})
	f.wantBooks(elsewhere, books{crossSource: 2, next: 2})
	f.wantDead()
}

func TestRedeliveryDiffersFromResend(t *testing.T) { bothWays(t, testRedeliveryDiffersFromResend) }

func testRedeliveryDiffersFromResend(t *testing.T, f *fixture) {
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(l.batch("a", "b"), other.batch("x", "y"))
	// An operator moved the lanes back: the same places come again.
	if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET next_position = 0`); err != nil {
		t.Fatal(err)
	}
	l.at, other.at = 0, 0
	f.handle(l.batch("a", "b", "a"), other.batch("x", "y"))
	f.wantLanded("a", "b", "x", "y")
	f.wantBooks(l, books{applied: 2, redelivered: 2, resent: 1, next: 3})
	f.wantBooks(other, books{applied: 2, redelivered: 2, next: 2})
}

func TestConflicts(t *testing.T) {
	t.Parallel()
	for _, name := range []policy.Conflict{policy.ConflictDeadLetter, policy.ConflictDrop} {
		t.Run(string(name), func(t *testing.T) {
			bothWays(t, func(t *testing.T, f *fixture) {
				f.OnConflict = name
				l := f.acquire("kafka", "orders/0")
				f.handle(l.batch("a=1", "a=2", "a=1"))
				f.handle(l.batch("a=3", "a=1"))
				f.wantLanded("a")
				f.wantBooks(l, books{applied: 1, resent: 2, conflicts: 2, next: 5})
				if name == policy.ConflictDrop {
					f.wantDead()
					return
				}
				f.wantDead("conflict@1", "conflict@3")
				d, err := f.Store.DeadLetters(t.Context(), dedup.DeadLetterFilter{Limit: 1})
				if err != nil {
					t.Fatal(err)
				}
				if p := d[0].OriginalPosition; p == nil || *p != 0 || *d[0].OriginalLane != "orders/0" {
					t.Errorf("the conflict does not tell the original's place: %+v", d[0])
				}
			})
		})
	}
	t.Run("stop", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.OnConflict = policy.ConflictStop
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a=1"))
		wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("b", "a=2")}), "another payload")
		f.wantLanded("a", "b")
		f.wantBooks(l, books{applied: 2, next: 2})
	})
	t.Run("without fingerprints", func(t *testing.T) {
		bothWays(t, func(t *testing.T, f *fixture) {
			f.Fingerprint, _ = claimkey.NewFingerprint([]string{"none"})
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a=1", "a=2"))
			f.handle(l.batch("a=3"))
			f.wantBooks(l, books{applied: 1, resent: 2, next: 3})
		})
	})
}

// A change of dedup.fingerprint doesn't make conflicts of copies: what was claimed by
// another configuration isn't compared, also while workers of both are at work.
func TestFingerprintsOfAnotherConfiguration(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch(`a={"n":1,"at":1}`, `b={"n":2,"at":1}`))
		next := attach(t, f.db)
		next.CopyFrom = f.CopyFrom
		next.Fingerprint, _ = claimkey.NewFingerprint([]string{"json:n"})
		f.exec(`UPDATE dedupd.lanes SET next_position = 0`)
		l = next.acquire("kafka", "orders/0")
		// A redelivery, and a resend that differs only by what isn't compared now.
		next.handle(l.batch(`a={"n":1,"at":1}`, `b={"n":2,"at":1}`, `a={"n":1,"at":2}`))
		next.wantBooks(l, books{applied: 2, redelivered: 2, resent: 1, next: 3})
		// Claims of the new one are compared by it, and not by the old.
		next.handle(l.batch(`c={"n":3,"at":1}`, `c={"n":3,"at":2}`, `c={"n":4,"at":1}`))
		next.wantBooks(l, books{applied: 3, redelivered: 2, resent: 2, conflicts: 1, next: 6})
		old := f.acquire("kafka", "orders/0")
		f.handle(old.batch(`c={"n":3,"at":9}`, `a={"n":7,"at":1}`))
		f.wantBooks(old, books{applied: 3, redelivered: 2, resent: 3, conflicts: 2, next: 8})
		f.wantDead("conflict@5", "conflict@7")
	})
}

// A stream that was made anew has other messages at the same places.
func TestConflictsOfAnotherStream(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	q := f.acquireQueue("nats")
	f.handle(q.batchAt(1, "a=1", "a=2"), q.batchAt(2, "a=2")) // delivered twice, kept once
	f.wantDead("conflict@2")
	q.StreamID = "stream-2"
	f.handle(q.batchAt(1, "b=1", "a=3"))
	f.wantDead("conflict@2", "conflict@2")
}

func wantHold(t *testing.T, err error, texts ...string) {
	t.Helper()
	var hold *lane.HoldError
	if !errors.As(err, &hold) {
		t.Fatalf("got %v, want a lane to be held", err)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not say %q", err, text)
		}
	}
}

// A message that the source could read only in part goes to no sink, with or without an
// id.
func TestADamagedMessageIsDead(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		l := f.acquire("kafka", "orders/0")
		b := l.batch("a", "b", "", "c")
		b.Messages[1].Damaged, b.Messages[2].Damaged = "its headers are gone", "its headers are gone"
		f.handle(b)
		f.wantLanded("a", "c")
		f.wantBooks(l, books{applied: 2, dead: 2, next: 4})
		f.wantDead("poison@1", "no_id@2")
		for _, d := range f.deadLetters() {
			if !strings.HasSuffix(d.Reason, "its headers are gone") {
				t.Errorf("the dead letter of %d says %q", d.Position, d.Reason)
			}
		}
	})
}

func TestMissingIDs(t *testing.T) {
	t.Parallel()
	t.Run("dead_letter", func(t *testing.T) {
		bothWays(t, func(t *testing.T, f *fixture) {
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a", "", "b", ""))
			f.wantLanded("a", "b")
			f.wantBooks(l, books{applied: 2, dead: 2, next: 4})
			f.wantDead("no_id@1", "no_id@3")
			// The same place again is a redelivery, not one more dead letter.
			if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET next_position = 0`); err != nil {
				t.Fatal(err)
			}
			l.at = 0
			f.handle(l.batch("a", ""))
			f.wantBooks(l, books{applied: 2, redelivered: 2, dead: 2, next: 2})
			f.wantDead("no_id@1", "no_id@3")
		})
	})
	t.Run("position", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.Missing = policy.MissingPosition
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a", "", ""))
		f.wantBooks(l, books{applied: 3, next: 3})
		if got := f.landed(); len(got) != 3 || got[1] == got[2] {
			t.Errorf("the sink holds %q, want three different ids", got)
		}
	})
	t.Run("stop", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.Missing = policy.MissingStop
		l := f.acquire("kafka", "orders/0")
		wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("a", "")}), "id.missing is stop")
		f.wantLanded("a")
	})
	t.Run("unusable", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.Missing = policy.MissingPosition // there is an id: its place is no substitute
		f.Identity, _ = message.NewIdentity([]string{"header:id"}, 8)
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("12345678", "123456789"))
		f.wantLanded("12345678")
		f.wantDead("bad_id@1")
	})
}

func TestHostileIDs(t *testing.T) { bothWays(t, testHostileIDs) }

func testHostileIDs(t *testing.T, f *fixture) {
	f.sink.fail = func(m *message.Message) error { m.ID = fmt.Sprintf("%x", m.ID); return nil } // text can't hold them
	l := f.acquire("kafka", "orders/0")
	ids := []string{"\x00", "\x00\x00", "\xff", "\xff\xfe", "é", "e\u0301", strings.Repeat("x", 64<<10), "ab", "AB", "\U0001F600"}
	f.handle(l.batch(ids...))
	f.handle(l.batch(ids...))
	f.wantBooks(l, books{applied: int64(len(ids)), resent: int64(len(ids)), next: int64(2 * len(ids))})
}

func TestDuplicatesToDeadLetters(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.OnDuplicate = policy.DuplicateDeadLetter
	q := f.acquireQueue("nats")
	f.handle(q.batch("a", "b", "a"))
	f.wantDead("duplicate@2")
	// The queue delivers everything once more: a redelivery is the broker's doing, and
	// makes no second dead letter.
	f.handle(q.batchAt(0, "a", "b", "a"))
	f.wantDead("duplicate@2")
	f.wantBooks(q, books{applied: 2, redelivered: 2, resent: 2, next: 3})
}
