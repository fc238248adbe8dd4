package dedup_test

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/pgrelay"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// replicated is a fixture whose database fails over. replica makes a replica of it, which
// gets nothing more; failOver has the workers go on with that.
func replicated(t *testing.T) (f *fixture, replica func() (failOver func())) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs two servers of its own")
	}
	primary, err := pgtest.StartServer(pgtest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = primary.Stop() })
	host := func(s *pgtest.Server) string {
		u, err := url.Parse(s.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		return u.Host
	}
	line, err := pgrelay.Listen(host(primary))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(line.Close)
	u, err := url.Parse(primary.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	u.Host = line.Addr()
	pool, err := pgxpool.New(t.Context(), u.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := pool.Exec(t.Context(), createRows); err != nil {
		t.Fatal(err)
	}
	store := newStore(t, pool, "dedupd", "test")
	if _, err := store.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	f = newFixture(t)
	f.pool, f.Store = pool, store
	return f, func() (failOver func()) {
		standby, err := primary.Standby(t.Context(), host(primary), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = standby.Stop() })
		if err := standby.Promote(t.Context()); err != nil {
			t.Fatal(err)
		}
		return func() {
			line.Redirect(host(standby))
			line.CutAll()
		}
	}
}

// A queue has no position by which a failover would show that it lost commits. A worker
// that goes on and one that starts notice it all the same, and nothing is written before
// what may be lost is delivered again.
func TestAQueueNoticesAFailover(t *testing.T) {
	t.Parallel()
	f, replica := replicated(t)
	l := f.acquireQueue("nats")
	if l.Rewound {
		t.Error("a new queue was rewound")
	}
	first, second, third := l.batch("a"), l.batch("b"), l.batch("c")
	first.BrokerPosition = 17
	f.handle(first)
	f.mustConfirm(l)

	failOver := replica()
	f.handle(second) // by the old primary, which is about to be lost
	f.mustConfirm(l) // so it is acknowledged
	failOver()

	refused := func() {
		t.Helper()
		var fenced *lane.FencedError
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		for ; ; time.Sleep(50 * time.Millisecond) {
			err := f.Handle(ctx, []lane.Batch{third})
			if errors.As(err, &fenced) {
				return
			}
			if err == nil || ctx.Err() != nil { // until then connections end
				t.Fatalf("the queue goes on in another database: %v", err)
			}
		}
	}
	refused()
	again := f.reacquire(l)
	if !again.Rewound || again.BrokerPosition != 17 {
		t.Errorf("acquired after a failover: %+v", again.Assignment)
	}
	third = again.batchAt(third.From, "c")
	refused() // the broker has yet to be asked
	// A worker that was given a position by the database before has asked the broker for
	// less than was lost.
	if sure, err := f.Store.ConfirmRewind(t.Context(), l.Lane, again.Assignment, 18); err != nil || sure != 17 {
		t.Fatalf("resumed from 18: sure is %d, %v", sure, err)
	}
	refused()
	if sure, err := f.Store.ConfirmRewind(t.Context(), l.Lane, again.Assignment, 17); err != nil || sure != 17 {
		t.Fatalf("resumed from 17: sure is %d, %v", sure, err)
	}
	f.handle(again.batchAt(second.From, "b"))
	f.handle(third)
	f.wantLanded("a", "b", "c")
	if l := f.reacquire(again); l.Rewound {
		t.Error("a queue that has resumed was rewound again")
	}
	// A stream that was made anew has other positions, and no durable of ours.
	if assigned, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: l.Lane, LogID: "stream-2", Committed: -1}); err != nil || assigned.BrokerPosition != -1 {
		t.Errorf("acquired from a stream made anew: %+v, %v", assigned, err)
	}
}

// A lane that is younger than the replica has lost its row: all of it is read again.
func TestAFailoverLosesALane(t *testing.T) {
	t.Parallel()
	f, replica := replicated(t)
	f.handle(f.acquire("kafka", "orders/0").batch("a"))
	failOver := replica()
	l := f.acquire("kafka", "orders/1")
	f.handle(l.batch("b", "c"))
	failOver()
	acquire := lane.Acquire{Lane: l.Lane, Ordered: true, Committed: 2, Start: 2, OffsetMetadata: l.OffsetMetadata}
	f.again(func() (err error) {
		l.Assignment, err = f.Store.Acquire(t.Context(), acquire)
		return err
	})
	if l.Next != 0 || !l.Rewound {
		t.Fatalf("acquired after a failover: %+v", l.Assignment)
	}
	l.at = l.Next
	f.handleAgain(l.batch("b", "c", "d"))
	f.wantLanded("a", "b", "c", "d")
}

// However the server is set, a claim transaction survives a crash once it is
// acknowledged; a setting that is stricter than needed stays.
func TestACommitIsDurableWhateverIsSet(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{"off": "on", "local": "local", "remote_apply": "remote_apply"} {
		f := newFixture(t)
		for _, sql := range []string{`ALTER DATABASE %I SET synchronous_commit = ` + set, `ALTER DATABASE %I SET default_transaction_isolation = 'serializable'`} {
			if _, err := f.pool.Exec(t.Context(), `DO $$ BEGIN EXECUTE format('`+strings.ReplaceAll(sql, "'", "''")+`', current_database()); END $$`); err != nil {
				t.Fatal(err)
			}
		}
		f = attach(t, f.db) // with connections of its own
		s := &settings{sink: f.sink}
		f.Sink = s
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a"))
		if s.synchronous != want || s.isolation != "read committed" {
			t.Errorf("set to %s, serializable: the transaction is %s, %s", set, s.synchronous, s.isolation)
		}
	}
}

// settings is a sink that reads its transaction's settings.
type settings struct {
	sink                   sinks.Sink
	synchronous, isolation string
}

func (s *settings) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	err := tx.QueryRow(ctx, `SELECT current_setting('synchronous_commit'), current_setting('transaction_isolation')`).Scan(&s.synchronous, &s.isolation)
	if err != nil {
		return err
	}
	return s.sink.Write(ctx, tx, batch)
}

// Whatever the sink's table does to the setting, and when, the transaction commits
// with the one it began with.
func TestATriggerDoesNotMakeACommitLessDurable(t *testing.T) {
	t.Parallel()
	for name, trigger := range map[string]string{
		"a trigger":          `CREATE TRIGGER lowers AFTER INSERT ON public.rows FOR EACH ROW EXECUTE FUNCTION public.lower()`,
		"a deferred trigger": `CREATE CONSTRAINT TRIGGER lowers AFTER INSERT ON public.rows DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.lower()`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			// What is deferred after the sink's triggers sees what they have left.
			for _, sql := range []string{
				`CREATE FUNCTION public.lower() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN SET LOCAL synchronous_commit = off; RETURN NULL; END $$`,
				trigger,
				`CREATE TABLE public.seen (of text, setting text)`,
				`CREATE FUNCTION public.look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.seen VALUES (TG_TABLE_NAME, current_setting('synchronous_commit')); RETURN NULL; END $$`,
				`CREATE CONSTRAINT TRIGGER look AFTER UPDATE ON dedupd.lanes DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.look()`,
				`CREATE CONSTRAINT TRIGGER look AFTER DELETE ON dedupd.dead_letters DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.look()`,
			} {
				if _, err := f.pool.Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a", "b=check"))
			if _, err := f.pool.Exec(t.Context(), `ALTER TABLE public.rows DROP CONSTRAINT rows_value_check`); err != nil {
				t.Fatal(err)
			}
			if r, err := f.Replay(t.Context(), "ann@host", f.deadLetters()[0].ID); err != nil || r.Outcome != dedup.ReplayApplied {
				t.Fatalf("replay: %+v, %v", r, err)
			}
			f.wantLanded("a", "b")
			var moved, replayed, low int
			if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE of = 'lanes'), count(*) FILTER (WHERE of = 'dead_letters'), count(*) FILTER (WHERE setting <> 'on') FROM public.seen`).
				Scan(&moved, &replayed, &low); err != nil || moved == 0 || replayed == 0 || low != 0 {
				t.Errorf("%d moves and %d replays were seen, %d of them with a lower setting: %v", moved, replayed, low, err)
			}
		})
	}
}

// A broker that deletes what is acknowledged is refused, unless the loss is accepted.
func TestAQueueThatForgetsIsRefused(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	acquire := func() error {
		_, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: message.Lane{Source: "nats", Name: "queue"}, LogID: "stream-1", Committed: -1, Consumed: true})
		return err
	}
	if err := acquire(); !errors.Is(err, lane.ErrLoss) {
		t.Errorf("without a standby: %v, want %v", err, lane.ErrLoss)
	}
	f.Store.AcceptLoss()
	if err := acquire(); err != nil {
		t.Errorf("accepted, and refused all the same: %v", err)
	}
}
