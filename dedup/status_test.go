package dedup_test

import (
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
)

func (f *fixture) status() dedup.Status {
	f.t.Helper()
	status, err := f.Store.Status(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	return status
}

// TestStatusNamesTheLaneBehind gives each lane another clock.
func TestStatusNamesTheLaneBehind(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.passTime(time.Hour)
	s := f.status()
	if ahead := time.Until(s.Now); ahead < 50*time.Minute || ahead > 70*time.Minute {
		t.Errorf("the database's clock is %s ahead, want an hour", ahead)
	}
	if s.Lane != "" || s.LaneTime != nil || !s.Stream.Equal(s.Now) || len(s.Generations) != 1 {
		t.Errorf("a scope without lanes: %+v", s)
	}

	fast, slow := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(fast.batch("a"))
	if s := f.status(); s.Lane != "kafka:orders/1" || s.LaneTime != nil || !s.Stream.IsZero() {
		t.Errorf("a lane of which nothing is known: %+v", s)
	}
	f.handle(slow.batch("b"))
	f.caughtUp(fast)
	s = f.status()
	if s.Lane != "kafka:orders/1" || s.LaneTime == nil || !s.Stream.Equal(*s.LaneTime) || !s.Stream.Before(s.Now.Add(-50*time.Minute)) {
		t.Errorf("a lane an hour behind: %+v", s)
	}
	f.caughtUp(slow)
	// The lanes of another scope hold up nothing here.
	other := newStore(t, f.pool, "dedupd", "other")
	if _, err := other.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.pool.Exec(t.Context(), `INSERT INTO dedupd.lanes (scope, source, lane, ordered, stream_id, epoch, group_generation, owner, next_position)
		VALUES ('other', 'kafka', 'orders/0', true, '', 1, 1, '', 0)`); err != nil {
		t.Fatal(err)
	}
	if s := f.status(); s.LaneTime == nil || !s.Stream.Equal(*s.LaneTime) || s.Now.Sub(s.Stream) > time.Minute {
		t.Errorf("all caught up: %+v", s)
	}
	if s, err := other.Status(t.Context()); err != nil || s.Lane != "kafka:orders/0" || !s.Stream.IsZero() {
		t.Errorf("the other scope: %+v, %v", s, err)
	}
}
