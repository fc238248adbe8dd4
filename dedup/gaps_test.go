package dedup_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
)

// What a broker has discarded of a queue is on record until somebody accepts it.
func TestGaps(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquireQueue("nats")
	f.handle(l.batch("a", "b"))
	report := func(found, want lane.Gap) {
		t.Helper()
		if got, err := f.Store.ReportGap(t.Context(), l.Lane, found); err != nil || got != want {
			t.Errorf("%+v: on record are %+v, want %+v: %v", found, got, want, err)
		}
	}
	none := lane.Gap{}
	report(none, none)
	f.exec(`UPDATE dedupd.lanes SET stream_time = '2026-01-02T00:00:00Z'`)
	clock := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	report(lane.Gap{From: 10, Next: 20, Before: clock}, none) // the lane's clock has come so far
	report(lane.Gap{From: 10, Next: 20, Before: clock.Add(time.Second)}, lane.Gap{From: 10, Next: 20})
	report(lane.Gap{From: 15, Next: 30}, lane.Gap{From: 10, Next: 30})
	report(none, lane.Gap{From: 10, Next: 30})
	if s := f.laneStates()["nats queue"]; s.GapFrom == nil || *s.GapFrom != 10 || s.GapNext == nil || *s.GapNext != 30 {
		t.Errorf("the lane is listed as %+v", s)
	}

	if _, err := f.Store.SetPosition(t.Context(), "test", "nats", "queue", 29, true); err == nil || !strings.Contains(err.Error(), "30 or above") {
		t.Errorf("a position within the gap: %v", err)
	}
	m, err := f.Store.SetPosition(t.Context(), "test", "nats", "queue", 40, true)
	if err != nil || !m.Queue || m.To != 40 || m.Epoch != l.Epoch {
		t.Errorf("%+v: %v", m, err)
	}
	if line, detail := f.audited(); !strings.HasSuffix(line, "lanes set-position lane queue of source nats") || detail["to"] != 40.0 {
		t.Errorf("audited %q: %v", line, detail)
	}
	report(none, none)
	if s := f.laneStates()["nats queue"]; s.NextPosition != 30 || s.GapNext != nil { // the stream may be no longer than that
		t.Errorf("the lane is at %+v", s)
	}
	f.handle(l.batch("c")) // its owner is no other
	if _, err := f.Store.SetPosition(t.Context(), "test", "nats", "queue", 50, true); !errors.Is(err, dedup.ErrUnorderedLane) {
		t.Errorf("without a gap: %v", err)
	}

	report(lane.Gap{From: 50, Next: 60}, lane.Gap{From: 50, Next: 60})
	if err := f.Store.AcceptGap(t.Context(), l.Lane, 60); err != nil {
		t.Fatal(err)
	}
	report(none, none)
	report(lane.Gap{From: 50, Next: 60}, none) // another worker finds it, too
	report(lane.Gap{From: 50, Next: 61}, lane.Gap{From: 60, Next: 61})
	if _, err := f.Store.ForgetLane(t.Context(), "test", "nats", "queue", true); err != nil {
		t.Errorf("a queue with a gap can't be forgotten: %v", err)
	}
	report(lane.Gap{From: 60, Next: 61}, none) // of no queue
}
