package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// confirm has what a queue committed confirmed, by a checkpoint that is raised or for the
// second time. The lane's offset metadata is what the broker keeps.
func (f *fixture) confirm(l *ownedLane, raise bool) error {
	f.t.Helper()
	confirmed, err := f.Store.Confirm(f.t.Context(), lane.Confirm{Lane: l.Lane, Epoch: l.Epoch, Checkpoint: l.Checkpoint, OffsetMetadata: l.OffsetMetadata, Raise: raise})
	if err == nil {
		l.Checkpoint, l.OffsetMetadata = confirmed.Checkpoint, confirmed.OffsetMetadata
	}
	return err
}

func (f *fixture) mustConfirm(l *ownedLane) {
	f.t.Helper()
	if err := f.confirm(l, true); err != nil {
		f.t.Fatal(err)
	}
}

// reacquire acquires a queue with what the broker keeps of it, as last written.
func (f *fixture) reacquire(l *ownedLane) *ownedLane {
	f.t.Helper()
	assigned := &ownedLane{Lane: l.Lane, at: l.at}
	f.again(func() (err error) {
		assigned.Assignment, err = f.Store.Acquire(f.t.Context(), lane.Acquire{Lane: l.Lane, LogID: "stream-1", Committed: 100, OffsetMetadata: l.OffsetMetadata})
		return err
	})
	return assigned
}

// refused checks that a queue's messages aren't committed.
func (f *fixture) refused(b lane.Batch) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 20*time.Second)
	defer cancel()
	for {
		err := f.Handle(ctx, []lane.Batch{b})
		var fenced *lane.FencedError
		if errors.As(err, &fenced) {
			return
		}
		if err == nil || ctx.Err() != nil { // till then connections end
			f.t.Fatalf("the queue goes on in another database: %v", err)
		}
	}
}

// unconfirmed checks that what a queue committed isn't confirmed.
func (f *fixture) unconfirmed(l *ownedLane) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 20*time.Second)
	defer cancel()
	for _, raise := range []bool{true, false} {
		var fenced *lane.FencedError
		for err := f.confirm(l, raise); !errors.As(err, &fenced); err = f.confirm(l, raise) {
			if err == nil || ctx.Err() != nil { // till then connections end
				f.t.Fatalf("what is lost was confirmed (raise: %t): %v", raise, err)
			}
		}
	}
}

// onItsOwn is a fixture with a server of its own.
func onItsOwn(t *testing.T) (*fixture, *pgtest.Server) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a server of its own")
	}
	server, err := pgtest.StartServer(pgtest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	pool, err := pgxpool.New(t.Context(), server.URL("postgres"))
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
	f := newFixture(t)
	f.pool, f.Store = pool, store
	return f, server
}

// olderCopies are ways to put an older copy of a database back, none of which the
// cluster's identifier or timeline shows.
var olderCopies = map[string]func(t *testing.T) (f *fixture, keep func() (putBack func())){
	"a template": func(t *testing.T) (*fixture, func() func()) {
		f := newFixture(t)
		return f, func() func() { return f.backup() }
	},
	"the rows of a dump": func(t *testing.T) (*fixture, func() func()) {
		f := newFixture(t)
		return f, f.dump
	},
	"a snapshot of the disk": func(t *testing.T) (*fixture, func() func()) {
		f, server := onItsOwn(t)
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		return f, func() func() {
			must(server.Snapshot())
			f.again(func() error { return f.pool.Ping(t.Context()) })
			return func() { must(server.PutBack()) }
		}
	},
}

// dump copies the rows of all tables. restore puts them back.
func (f *fixture) dump() (restore func()) {
	f.t.Helper()
	exec := func(sql string) {
		f.t.Helper()
		if _, err := f.pool.Exec(f.t.Context(), sql); err != nil {
			f.t.Fatal(err)
		}
	}
	each := func(sql string) {
		f.t.Helper()
		exec(`DO $$ DECLARE s text; t text; BEGIN
			FOR s, t IN SELECT schemaname, tablename FROM pg_tables WHERE schemaname IN ('dedupd', 'public') ORDER BY 1, 2 LOOP
				EXECUTE format('` + sql + `', s, t, (SELECT string_agg(quote_ident(column_name), ', ')
					FROM information_schema.columns WHERE table_schema = s AND table_name = t AND is_generated = 'NEVER'));
			END LOOP; END $$`)
	}
	exec(`CREATE SCHEMA dump`)
	each(`CREATE TABLE dump.%2$I AS SELECT * FROM ONLY %1$I.%2$I`)
	return func() {
		exec(`SET session_replication_role = replica`)
		each(`TRUNCATE ONLY %1$I.%2$I CASCADE`)
		each(`INSERT INTO %1$I.%2$I (%3$s) OVERRIDING SYSTEM VALUE SELECT %3$s FROM dump.%2$I`)
		f.pool.Reset()
	}
}

// An older copy of the database lacks what was acknowledged, and nothing of the server
// shows that. A worker that goes on with it notices by its next batch and by what waits
// to be acknowledged; one that starts, when it acquires the queue. Nothing is written
// before what is lost is delivered again.
func TestAQueueNoticesAnOlderCopy(t *testing.T) {
	t.Parallel()
	for name, start := range olderCopies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, keep := start(t)
			l := f.acquireQueue("nats")
			first := l.batch("a")
			first.BrokerPosition = 17
			f.handle(first)
			f.mustConfirm(l)
			putBack := keep()
			l = f.reacquire(l) // keeping one may have ended connections
			if l.Rewound {
				t.Fatalf("rewound without a cause: %+v", l.Assignment)
			}
			f.handle(l.batch("b"))
			f.mustConfirm(l) // so it is acknowledged
			third := l.batch("c")
			putBack()

			f.refused(third)
			f.unconfirmed(l)
			again := f.reacquire(l)
			if !again.Rewound || again.BrokerPosition != 17 {
				t.Fatalf("acquired from an older copy: %+v", again.Assignment)
			}
			f.refused(again.batchAt(third.From, "c")) // the broker has yet to be asked
			// The durable has the new offset metadata, and its worker ends: the next one
			// rewinds, too.
			if other := f.reacquire(again); !other.Rewound || other.BrokerPosition != 17 {
				t.Fatalf("acquired after a rewind that came to no end: %+v", other.Assignment)
			}
			if sure, err := f.Store.ConfirmRewind(t.Context(), l.Lane, again.Assignment, 17); err != nil || sure != 17 {
				t.Fatalf("resumed from 17: sure is %d, %v", sure, err)
			}
			f.handle(again.batchAt(1, "b"), again.batchAt(2, "c"))
			f.wantLanded("a", "b", "c")
			f.mustConfirm(again)
			if l := f.reacquire(again); l.Rewound {
				t.Errorf("a queue that has resumed was rewound again: %+v", l.Assignment)
			}
		})
	}
}

// What is committed but not acknowledged yet may be missing in a copy that no checkpoint
// reveals, and others may have raised the checkpoint further than this worker knows. It
// isn't acknowledged; nothing else comes again.
func TestWhatWaitsForItsAcknowledgementIsLost(t *testing.T) {
	t.Parallel()
	for name, start := range olderCopies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, keep := start(t)
			l := f.acquireQueue("nats")
			f.handle(l.batch("a"))
			f.mustConfirm(l)
			putBack := keep()
			l = f.reacquire(l)
			f.handle(l.batch("b")) // and not confirmed
			putBack()

			other := f.reacquire(l) // another worker, which has nothing that waits
			if other.Rewound {
				t.Fatalf("nothing that was acknowledged is lost, and it is rewound: %+v", other.Assignment)
			}
			for i := range 3 {
				f.handle(other.batchAt(int64(10+i), fmt.Sprint("other-", i)))
				f.mustConfirm(other)
			}
			l.OffsetMetadata = other.OffsetMetadata // as it finds at the broker
			f.unconfirmed(l)
			if again := f.reacquire(l); again.Rewound {
				t.Errorf("rewound without a cause: %+v", again.Assignment)
			}
		})
	}
}

// A copy from before the queue was first acquired has no row of it.
func TestAnOlderCopyLosesAQueue(t *testing.T) {
	t.Parallel()
	for name, start := range olderCopies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, keep := start(t)
			putBack := keep()
			l := f.reacquire(&ownedLane{Lane: message.Lane{Source: "nats", Name: "queue"}})
			if l.BrokerPosition != 100 {
				t.Fatalf("a new queue begins at %d", l.BrokerPosition)
			}
			f.handle(l.batch("a"))
			f.mustConfirm(l)
			putBack()

			for range 2 { // the first one ends before the durable was made anew
				if again := f.reacquire(l); !again.Rewound || again.BrokerPosition != 100 {
					t.Fatalf("acquired after its row was lost: %+v", again.Assignment)
				}
			}
			again := f.reacquire(l)
			f.refused(again.batchAt(0, "a"))
			if sure, err := f.Store.ConfirmRewind(t.Context(), l.Lane, again.Assignment, 100); err != nil || sure != 100 {
				t.Fatalf("resumed from 100: sure is %d, %v", sure, err)
			}
			f.handle(again.batchAt(0, "a"))
			f.wantLanded("a")
			f.mustConfirm(again)
			if l := f.reacquire(again); l.Rewound {
				t.Errorf("a queue that has resumed was rewound again: %+v", l.Assignment)
			}
		})
	}
}

// A server that is started again has lost nothing: the queue is acquired anew, and
// nothing comes again.
func TestARestartRewindsNothing(t *testing.T) {
	t.Parallel()
	f, server := onItsOwn(t)
	l := f.acquireQueue("nats")
	f.handle(l.batch("a"))
	f.mustConfirm(l)
	f.handle(l.batch("b"))
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	f.unconfirmed(l) // it might have been another server
	again := f.reacquire(l)
	if again.Rewound {
		t.Errorf("rewound: %+v", again.Assignment)
	}
	f.handle(again.batchAt(2, "c"))
	f.mustConfirm(again)
	f.wantLanded("a", "b", "c")
}

// queueRow is a queue with its row, and what its next owner says of it.
type queueRow struct {
	*fixture
	acquire lane.Acquire
	*ownedLane
}

func (s *queueRow) forget() {
	s.t.Helper()
	if _, err := s.Store.ForgetLane(s.t.Context(), "somebody", s.Lane.Source, s.Lane.Name, true); err != nil {
		s.t.Fatal(err)
	}
}

func (s *queueRow) exec(sql string) {
	s.t.Helper()
	if _, err := s.pool.Exec(s.t.Context(), sql); err != nil {
		s.t.Fatal(err)
	}
}

// wantBegin wants that the queue begins there. From then on the broker keeps what it is
// given, and is believed.
func (s *queueRow) wantBegin(position int64, rewound bool) {
	s.t.Helper()
	assigned, err := s.Store.Acquire(s.t.Context(), s.acquire)
	if err != nil || assigned.BrokerPosition != position || assigned.Rewound != rewound {
		s.t.Fatalf("at %d, rewound: %t, %v; want %d, %t", assigned.BrokerPosition, assigned.Rewound, err, position, rewound)
	}
	if assigned.Rewound {
		if sure, err := s.Store.ConfirmRewind(s.t.Context(), s.Lane, assigned, max(assigned.BrokerPosition, 1)); err != nil || sure != assigned.BrokerPosition {
			s.t.Fatalf("resumed: %d, %v", sure, err)
		}
	}
	l := &ownedLane{Lane: s.Lane, Assignment: assigned}
	s.mustConfirm(l)
	s.acquire.OffsetMetadata, s.acquire.Acknowledged = l.OffsetMetadata, 0 // as a durable that is made anew keeps it
	if again, err := s.Store.Acquire(s.t.Context(), s.acquire); err != nil || again.Rewound || again.BrokerPosition != position {
		s.t.Errorf("acquired again: %+v, %v", again, err)
	}
}

// What the broker keeps of a queue decides where it begins.
func TestWhereAQueueBegins(t *testing.T) {
	t.Parallel()
	queue := message.Lane{Source: "nats", Name: "queue"}
	const began, floor, later = 100, 140, 150
	for name, c := range map[string]struct {
		do       func(s *queueRow)
		position int64
		rewound  bool
	}{
		"as it was":                                   {do: func(*queueRow) {}, position: floor},
		"the broker keeps nothing":                    {do: func(s *queueRow) { s.acquire.OffsetMetadata = "" }, position: floor},
		"the broker keeps what is older":              {do: func(s *queueRow) { s.mustConfirm(&ownedLane{Lane: queue, Assignment: s.Assignment}) }, position: floor},
		"the broker keeps what another program wrote": {do: func(s *queueRow) { s.acquire.OffsetMetadata = `{"checkpoint": 99}` }, position: floor},
		"the row went back":                           {do: func(s *queueRow) { s.exec(`UPDATE dedupd.lanes SET checkpoint = 0`) }, position: floor, rewound: true},
		"the row went back to before a position was known": {do: func(s *queueRow) {
			s.exec(`UPDATE dedupd.lanes SET checkpoint = 0, broker_position = NULL, start_position = NULL`)
		}, position: began, rewound: true},
		"the row is lost":    {do: func(s *queueRow) { s.exec(`DELETE FROM dedupd.lanes`) }, position: began, rewound: true},
		"somebody forgot it": {do: (*queueRow).forget, position: later},
		"it was forgotten, and the database lost what came after": {do: func(s *queueRow) {
			s.forget()
			s.acquire.Committed = 120
			l := &ownedLane{Lane: queue}
			l.Assignment, _ = s.Store.Acquire(s.t.Context(), s.acquire)
			s.mustConfirm(l)
			s.exec(`DELETE FROM dedupd.lanes`)
			s.acquire.OffsetMetadata, s.acquire.Committed = l.OffsetMetadata, later
		}, position: 120, rewound: true},
		"its row is lost, and another worker has made one that it knows nothing of": {do: func(s *queueRow) {
			s.exec(`DELETE FROM dedupd.lanes`)
			if _, err := s.Store.Acquire(s.t.Context(), lane.Acquire{Lane: queue, LogID: "stream-1", Committed: later}); err != nil {
				s.t.Fatal(err)
			}
		}, position: began, rewound: true},
		"the durable lost its state, and keeps its position": {do: func(s *queueRow) {
			s.acquire.Committed, s.acquire.Acknowledged = 1, 145
		}, position: 145},
		"the durable keeps less than the row": {do: func(s *queueRow) {
			s.acquire.Committed, s.acquire.Acknowledged = 1, 130
		}, position: floor},
		"the durable lost its state, and the row went back": {do: func(s *queueRow) {
			s.exec(`UPDATE dedupd.lanes SET checkpoint = 0`)
			s.acquire.Committed, s.acquire.Acknowledged = 1, 145
		}, position: floor, rewound: true},
		"the durable lost its state, and the row is lost": {do: func(s *queueRow) {
			s.exec(`DELETE FROM dedupd.lanes`)
			s.acquire.Committed, s.acquire.Acknowledged = 1, 145
		}, position: began, rewound: true},
		"the durable lost its state, and somebody forgot the row": {do: func(s *queueRow) {
			s.forget()
			s.acquire.Committed, s.acquire.Acknowledged = 1, 145
		}, position: 1},
		"the durable lost its state, and the stream was made anew": {do: func(s *queueRow) {
			s.acquire.LogID, s.acquire.Committed, s.acquire.Acknowledged = "stream-2", 1, 145
		}, position: 1},
		"the stream was made anew": {do: func(s *queueRow) { s.acquire.LogID, s.acquire.Committed = "stream-2", 7 }, position: 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &queueRow{newFixture(t), lane.Acquire{Lane: queue, LogID: "stream-1", Committed: began}, &ownedLane{Lane: queue}}
			var err error
			if s.Assignment, err = s.Store.Acquire(t.Context(), s.acquire); err != nil {
				t.Fatal(err)
			}
			b := s.batch("a")
			b.BrokerPosition = floor
			s.handle(b)
			s.mustConfirm(s.ownedLane)
			s.acquire.OffsetMetadata, s.acquire.Committed = s.OffsetMetadata, later
			c.do(s)
			s.wantBegin(c.position, c.rewound)
		})
	}
}

// What the broker keeps shows a worker that it knows less: another one has confirmed in a
// database that has come further, or under another row.
func TestAConfirmationIsComparedWithTheOffsetMetadata(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquireQueue("nats")
	behind := *l
	f.mustConfirm(l)
	f.mustConfirm(l)
	if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET checkpoint = 1`); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		metadata string
		fenced   bool
	}{
		"a checkpoint above the row's": {l.OffsetMetadata, true},
		"another row":                  {strings.Replace(behind.OffsetMetadata, `"epoch":`, `"epoch":1`, 1), true},
		"another scope":                {strings.Replace(l.OffsetMetadata, `"scope":"test"`, `"scope":"tests"`, 1), false},
		"another program's":            {`{"checkpoint": 99}`, false},
		"nothing":                      {"", false},
		"the row's own":                {behind.OffsetMetadata, false},
	} {
		for _, raise := range []bool{false, true} {
			_, err := f.Store.Confirm(t.Context(), lane.Confirm{Lane: l.Lane, Epoch: l.Epoch, Checkpoint: behind.Checkpoint, OffsetMetadata: c.metadata, Raise: raise})
			var fenced *lane.FencedError
			if errors.As(err, &fenced) != c.fenced || !c.fenced && err != nil {
				t.Errorf("the broker keeps %s, raise: %t: %v", name, raise, err)
			}
			if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET checkpoint = 1`); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Two scopes that read one durable would each get a part of the messages.
func TestADurableOfAnotherScope(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	other := `dedupd:{"scope":"billing","source":"nats","start":1,"epoch":1,"checkpoint":7}`
	_, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: message.Lane{Source: "nats", Name: "queue"}, LogID: "stream-1", Committed: 1, OffsetMetadata: other})
	var held *lane.HoldError
	if !errors.As(err, &held) || !strings.Contains(err.Error(), `scope "billing" reads the same durable`) {
		t.Errorf("acquired: %v", err)
	}
}

// Another stream has other positions: what was read of the one before, what was missing
// there, and where it was cut, say nothing about them.
func TestAQueueOfAnotherStream(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquireQueue("nats")
	f.handle(l.batch("a", "b"))
	if _, err := f.Store.ReportGap(t.Context(), l.Lane, lane.Gap{From: 50, Next: 60}); err != nil {
		t.Fatal(err)
	}
	if err := f.Store.AcceptGap(t.Context(), l.Lane, 60); err != nil {
		t.Fatal(err)
	}
	acquire := func(stream string) lane.Assignment {
		t.Helper()
		assigned, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: l.Lane, LogID: stream, Committed: 1})
		if err != nil {
			t.Fatal(err)
		}
		return assigned
	}
	if err := f.Store.ReportLogCut(t.Context(), lane.LogCut{Lane: l.Lane, Epoch: l.Epoch, At: 5}); err != nil {
		t.Fatal(err)
	}
	if assigned := acquire("stream-1"); assigned.Next != 60 || assigned.Cut != 5 {
		t.Errorf("the same stream is acquired at %d, cut at %d", assigned.Next, assigned.Cut)
	}
	if assigned := acquire("stream-2"); assigned.Next != 0 || assigned.Cut != -1 {
		t.Errorf("another stream is acquired at %d, cut at %d", assigned.Next, assigned.Cut)
	}
	want := lane.Gap{From: 3, Next: 7}
	if got, err := f.Store.ReportGap(t.Context(), l.Lane, want); err != nil || got != want {
		t.Errorf("%+v is recorded as %+v: %v", want, got, err)
	}
}
