package dedup_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// audited are the last line of the audit: "actor action subject", and its detail.
func (f *fixture) audited() (line string, detail map[string]any) {
	f.t.Helper()
	var role string
	var text []byte
	if err := f.pool.QueryRow(f.t.Context(), `SELECT concat_ws(' ', scope, actor, action, subject), db_role, detail FROM dedupd.audit ORDER BY id DESC LIMIT 1`).
		Scan(&line, &role, &text); err != nil {
		f.t.Fatal(err)
	}
	if err := json.Unmarshal(text, &detail); err != nil || role == "" {
		f.t.Fatalf("detail %s, role %q: %v", text, role, err)
	}
	return line, detail
}

func (f *fixture) audits() (n int) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), `SELECT count(*) FROM dedupd.audit`).Scan(&n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

func (f *fixture) exec(sql string, args ...any) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) laneStates() map[string]dedup.LaneState {
	f.t.Helper()
	list, err := f.Store.LaneStates(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	all := make(map[string]dedup.LaneState)
	for _, l := range list {
		all[l.Source+" "+l.Lane] = l
	}
	return all
}

func (f *fixture) setPosition(l *ownedLane, position int64) dedup.LaneMove {
	f.t.Helper()
	m, err := f.Store.SetPosition(f.t.Context(), "ann@host", l.Source, l.Name, position, true)
	if err != nil {
		f.t.Fatal(err)
	}
	return m
}

// acquireCommitted does what a Kafka source does: it passes the group's offset, and
// honours a reset.
func (f *fixture) acquireCommitted(l *ownedLane, committed int64) *ownedLane {
	f.t.Helper()
	assigned, err := f.Store.Acquire(f.t.Context(), lane.Acquire{Lane: l.Lane, Ordered: true, Committed: committed, HonourReset: true})
	if err != nil {
		f.t.Fatal(err)
	}
	return &ownedLane{l.Lane, assigned, assigned.Next, true}
}

// commitAt has the lane confirm a position of the broker.
func (f *fixture) commitAt(l *ownedLane, broker int64, ids ...string) {
	f.t.Helper()
	b := l.batch(ids...)
	b.BrokerPosition = broker
	f.handle(b)
}

func TestLaneStates(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if list, err := f.Store.LaneStates(t.Context()); err != nil || list == nil || len(list) != 0 {
		t.Errorf("no lanes: %v, %v", list, err)
	}
	a, b := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	queue := f.acquireQueue("nats")
	f.commitAt(a, 1, "a", "b")
	f.handle(queue.batch("c"))

	all := f.laneStates()
	if l := all["kafka orders/0"]; !l.Ordered || l.Epoch != a.Epoch || l.Owner == "" || l.NextPosition != 2 || l.BrokerPosition == nil || *l.BrokerPosition != 1 ||
		l.Lag == nil || *l.Lag != 0 || l.StreamTime == nil || l.StreamAge == nil || *l.StreamAge > 60 || l.HoldsUpExpiry || time.Since(l.UpdatedAt) > time.Minute {
		t.Errorf("%+v", l)
	}
	if l := all["kafka orders/1"]; l.StreamTime != nil || l.StreamAge != nil || l.BrokerPosition != nil || !l.HoldsUpExpiry {
		t.Errorf("a lane of which nothing is known holds up expiry: %+v", l)
	}
	if l := all["nats queue"]; l.Ordered || l.HoldsUpExpiry {
		t.Errorf("%+v", l)
	}

	f.handle(b.batch("d"))
	f.exec(`UPDATE dedupd.lanes SET stream_time = stream_time - interval '1 hour' WHERE source = 'nats'`)
	for name, l := range f.laneStates() {
		if l.HoldsUpExpiry != (name == "nats queue") {
			t.Errorf("%s: %+v", name, l)
		}
	}
}

// TestMovingALaneBack has the worker read again what is above the new position,
// fenced by a new epoch, and keeps claims until it has.
func TestMovingALaneBack(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.commitAt(l, 3, "a", "b", "c", "d")

	m := f.setPosition(l, 1)
	if m.From != 4 || m.To != 1 || m.Epoch <= l.Epoch || m.Owner == "" || time.Since(m.ClaimsSince) > time.Hour {
		t.Errorf("%+v", m)
	}
	state := f.laneStates()["kafka orders/0"]
	if state.StreamTime != nil || state.Lag != nil || state.BrokerPosition != nil || state.NextPosition != 1 {
		t.Errorf("%+v", state)
	}
	if line, detail := f.audited(); line != "test ann@host lanes set-position lane orders/0 of source kafka" || detail["from"] != 4.0 || detail["to"] != 1.0 {
		t.Errorf("audit: %s, %v", line, detail)
	}

	// The owner is fenced, and neither its batch nor its heartbeat counts any more.
	var fenced *lane.FencedError
	if err := f.Handle(t.Context(), []lane.Batch{l.batch("e")}); !errors.As(err, &fenced) {
		t.Fatalf("a running owner: %v", err)
	}
	f.caughtUp(&ownedLane{l.Lane, l.Assignment, 1, true})
	if f.laneStates()["kafka orders/0"].StreamTime != nil {
		t.Error("the fenced owner moved the lane's clock")
	}
	f.wantLanded("a", "b", "c", "d")

	// The group's offset is above and below; neither moves the lane away.
	for _, committed := range []int64{4, 0} {
		if again := f.acquireCommitted(l, committed); again.Next != 1 || again.Reset {
			t.Errorf("with the group at %d the lane begins at %d", committed, again.Next)
		}
	}
	l = f.acquireCommitted(l, -1)
	f.handle(l.batch("b", "c", "d", "e"))
	f.wantLanded("a", "b", "c", "d", "e")
	f.wantBooks(l, books{applied: 5, redelivered: 3, next: 5})
}

// TestMovingALaneForward must not be undone by the group's offset, which is
// below: it would pass for an operator's reset.
func TestMovingALaneForward(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.commitAt(l, 2, "a", "b")
	before := f.laneStates()["kafka orders/0"]
	f.setPosition(l, 10)
	state := f.laneStates()["kafka orders/0"]
	if state.StreamTime == nil || !state.StreamTime.Equal(*before.StreamTime) {
		t.Errorf("the lane's clock is %v, want %v", state.StreamTime, before.StreamTime)
	}
	if !state.UpdatedAt.Equal(before.UpdatedAt) {
		t.Error("a move by hand passes for the owner's work")
	}
	l = f.acquireCommitted(l, 2)
	if l.Next != 10 || l.Reset || l.Rewound {
		t.Fatalf("the lane begins at %+v", l.Assignment)
	}
	f.handle(l.batch("k"))
	f.wantLanded("a", "b", "k")
	f.wantBooks(l, books{applied: 3, next: 11})

	// The epoch is from the clock. A clock that runs behind the last epoch gives a higher
	// one all the same.
	f.exec(`UPDATE dedupd.lanes SET epoch = 5`)
	if m := f.setPosition(l, 11); time.Since(time.UnixMicro(m.Epoch)).Abs() > time.Minute {
		t.Errorf("epoch %d", m.Epoch)
	}
	f.exec(`UPDATE dedupd.lanes SET epoch = 9000000000000000`)
	if m := f.setPosition(l, 11); m.Epoch != 9000000000000001 {
		t.Errorf("epoch %d", m.Epoch)
	}
}

func TestALaneInHandIsMovedAfterwards(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `UPDATE dedupd.lanes SET next_position = 7`); err != nil {
		t.Fatal(err)
	}
	moved := make(chan dedup.LaneMove)
	go func() {
		m, err := f.Store.SetPosition(context.Background(), "ann@host", l.Source, l.Name, 3, true)
		if err != nil {
			t.Error(err)
		}
		moved <- m
	}()
	f.awaitLock()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m := <-moved; m.From != 7 || m.To != 3 {
		t.Errorf("%+v", m)
	}
}

// awaitLock waits until somebody waits for a lock.
func (f *fixture) awaitLock() {
	f.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !f.waitsForLock(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			f.t.Fatal("nobody waits for a lock")
		}
	}
}

// waitsForLock reports whether a lock is waited for now.
func (f *fixture) waitsForLock() (waits bool) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits); err != nil {
		f.t.Fatal(err)
	}
	return waits
}

func TestLanesThatCantBeMoved(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	set := func(source, lane string, position int64) error {
		_, err := f.Store.SetPosition(t.Context(), "ann@host", source, lane, position, true)
		return err
	}
	if err := set("kafka", "orders/0", 1); !errors.Is(err, dedup.ErrNoLane) || !strings.Contains(err.Error(), "has none yet") {
		t.Errorf("a scope without lanes: %v", err)
	}
	f.acquire("kafka", "orders/0")
	f.acquireQueue("nats")
	if err := set("kafka", "order/0", 1); !errors.Is(err, dedup.ErrNoLane) || !strings.Contains(err.Error(), "kafka orders/0, nats queue") {
		t.Errorf("an unknown lane: %v", err)
	}
	if err := set("nats", "queue", 1); !errors.Is(err, dedup.ErrUnorderedLane) {
		t.Errorf("a queue: %v", err)
	}
	if err := set("kafka", "orders/0", -1); err == nil {
		t.Error("a position below 0 was accepted")
	}
	for i := range 12 {
		f.acquire("kafka", fmt.Sprintf("orders/%02d", i+1))
	}
	if err := set("kafka", "order/0", 1); err == nil || !strings.HasSuffix(err.Error(), "orders/09, and 4 more, which dedupd lanes list shows") {
		t.Errorf("many lanes: %v", err)
	}
	if n := f.audits(); n != 0 {
		t.Errorf("%d lines of audit of what was not done", n)
	}
}

// TestForgettingALane unblocks expiry, and keeps the books in the audit and the claims
// where they are.
func TestForgettingALane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	gone, lives := f.acquire("kafka", "gone/0"), f.acquire("kafka", "lives/0")
	f.handle(gone.batch("a", "b", "a"))
	f.handle(lives.batch("c"))
	forget := func(force bool) error {
		_, err := f.Store.ForgetLane(t.Context(), "ann@host", "kafka", "gone/0", force)
		return err
	}
	inUse := func(why, sql string) {
		t.Helper()
		f.exec(`UPDATE dedupd.lanes SET updated_at = now() - interval '6 minutes', acquired_at = now() - interval '6 minutes', stream_time = now() - interval '6 minutes'`)
		f.exec(`UPDATE dedupd.lanes SET ` + sql)
		if err := forget(false); !errors.Is(err, dedup.ErrLaneInUse) {
			t.Errorf("%s: %v", why, err)
		}
	}
	inUse("a lane that was moved", `updated_at = now() - interval '4 minutes'`)
	inUse("a lane that was acquired", `acquired_at = now() - interval '4 minutes'`)
	inUse("a lane that is caught up", `stream_time = now() - interval '4 minutes'`)

	f.exec(`UPDATE dedupd.lanes SET updated_at = now() - interval '6 minutes', acquired_at = now() - interval '6 minutes', stream_time = NULL WHERE lane = 'gone/0'`)
	f.rotate()
	f.passTime(48 * time.Hour)
	f.caughtUp(lives)
	expire := func() int {
		n, _, err := f.Store.Generations().Expire(t.Context(), 24*time.Hour, 28*24*time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := expire(); n != 0 {
		t.Fatalf("%d generations expired beside a lane that does not move", n)
	}
	row, err := f.Store.ForgetLane(t.Context(), "ann@host", "kafka", "gone/0", false)
	if err != nil {
		t.Fatal(err)
	}
	line, detail := f.audited()
	if line != "test ann@host lanes forget lane gone/0 of source kafka" || detail["fetched"] != 3.0 || detail["applied"] != 2.0 || detail["next_position"] != 3.0 ||
		!strings.Contains(string(row), `"applied": 2`) {
		t.Errorf("audit: %s, %v; row %s", line, detail, row)
	}
	var claims int
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM dedupd.claims WHERE source IS NULL AND position IS NOT NULL`).Scan(&claims); err != nil || claims != 2 {
		t.Errorf("%d claims without their lane, want 2; %v", claims, err)
	}
	f.handle(lives.batch("a"))
	f.wantLanded("a", "b", "c") // still a duplicate
	if n := expire(); n != 1 {
		t.Errorf("%d generations expired without the lane, want 1", n)
	}
	if err := forget(false); !errors.Is(err, dedup.ErrNoLane) {
		t.Errorf("once more: %v", err)
	}
}

// TestAForgottenLanesPlacesAreNew reads other messages at the positions of a lane that
// was forgotten, as an operator does who has lost a part of the log. Ids that are places,
// and dead letters that are known by theirs, must not pass for the old ones.
func TestAForgottenLanesPlacesAreNew(t *testing.T) {
	t.Parallel()
	for name, acquire := range map[string]lane.Acquire{
		"a partition": {Lane: message.Lane{Source: "kafka", Name: "orders/0"}, Ordered: true, LogID: "topic-1", Committed: -1},
		"a queue":     {Lane: message.Lane{Source: "nats", Name: "queue"}, LogID: "stream-1", Committed: -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			assigned := func() *ownedLane {
				t.Helper()
				assigned, err := f.Store.Acquire(t.Context(), acquire)
				if err != nil {
					t.Fatal(err)
				}
				return &ownedLane{acquire.Lane, assigned, 0, acquire.Ordered}
			}
			read := func(l *ownedLane, value string) {
				t.Helper()
				f.Missing = policy.MissingPosition
				f.handle(l.batch("="+value, "="+value))
				f.Missing = policy.MissingDeadLetter
				f.handle(l.batch("=" + value))
			}
			first := assigned()
			read(first, "v")
			if again := assigned(); again.StreamID != first.StreamID {
				t.Errorf("acquired again, its stream id is %s, was %s", again.StreamID, first.StreamID)
			}
			if !acquire.Ordered { // a worker that hasn't noticed yet that the stream is another one
				late := acquire
				late.LogID = "stream-0"
				other, err := f.Store.Acquire(t.Context(), late)
				if err != nil || other.StreamID == first.StreamID {
					t.Errorf("acquired from another stream: %+v, %v", other, err)
				}
				if again := assigned(); again.StreamID != first.StreamID {
					t.Errorf("after that its stream id is %s, was %s", again.StreamID, first.StreamID)
				}
			}
			if _, err := f.Store.ForgetLane(t.Context(), "ann@host", acquire.Lane.Source, acquire.Lane.Name, true); err != nil {
				t.Fatal(err)
			}
			second := assigned()
			read(second, "w")
			f.wantBooks(second, books{applied: 2, dead: 1, next: 3})
			f.wantDead("no_id@2", "no_id@2")
			if n := len(f.landed()); n != 4 {
				t.Errorf("%d rows landed, want 4", n)
			}
		})
	}
}

func TestForgettingALaneInUse(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	if _, err := f.Store.ForgetLane(t.Context(), "ann@host", "kafka", "orders/0", true); err != nil {
		t.Fatal(err)
	}
	var fenced *lane.FencedError
	if err := f.Handle(t.Context(), []lane.Batch{l.batch("b")}); !errors.As(err, &fenced) {
		t.Errorf("its owner: %v", err)
	}
	f.wantLanded("a")
}

// TestAdminWorkNeedsTheOwner tries all of it with a worker's grants: nothing is done, and
// the error names the remedy.
func TestAdminWorkNeedsTheOwner(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	f.exec(`INSERT INTO dedupd.sequences (scope_id, producer, name, lane, epoch, number, position) SELECT id, $1::text::uuid, 'p', 1, 0, 1, 0 FROM dedupd.scopes`,
		claimkey.Of("p").String())
	role := strings.ReplaceAll(f.db.Name, "pgtest", "hand")
	f.exec(`CREATE ROLE ` + role + ` LOGIN`)
	t.Cleanup(func() {
		_, _ = f.pool.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	})
	f.exec(f.Store.Schema().GrantSQL(role))
	store := newStore(t, as(t, f.db, role), "dedupd", "test")
	for what, do := range map[string]func() error{
		"set-position": func() error { _, err := store.SetPosition(t.Context(), "x", "kafka", "orders/0", 0, true); return err },
		"forget":       func() error { _, err := store.ForgetLane(t.Context(), "x", "kafka", "orders/0", true); return err },
		"claim":        func() error { _, err := store.ForgetClaim(t.Context(), "x", "a"); return err },
		"mark":         func() error { _, err := store.ForgetMark(t.Context(), "x", "p"); return err },
		"import": func() error {
			_, err := store.Import(t.Context(), dedup.Import{Unit: "line", MaxBytes: 10, IDs: only("x")})
			return err
		},
	} {
		var pg *pgconn.PgError
		if err := do(); !errors.As(err, &pg) || pg.Code != "42501" || !strings.Contains(err.Error(), "the rights of the schema's owner") {
			t.Errorf("%s: %v", what, err)
		}
	}
	// Reading needs no more than the worker has.
	if a, err := store.FindClaim(t.Context(), "a"); err != nil || !a.Found {
		t.Errorf("find: %+v, %v", a, err)
	}
	if a, err := store.FindClaim(t.Context(), "x"); err != nil || a.Found {
		t.Errorf("find what was not imported: %+v, %v", a, err)
	}
	if a, err := store.FindMark(t.Context(), "p"); err != nil || a.Mark == nil {
		t.Errorf("the mark: %+v, %v", a, err)
	}
	f.wantBooks(l, books{applied: 1, next: 1})
}
