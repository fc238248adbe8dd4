package consumer_test

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// heartbeats records heartbeats, and passes them on.
type heartbeats struct {
	consumer.Lanes
	mu     sync.Mutex
	all    []sentHeartbeat
	answer func(ctx context.Context) error // nil: pass it on
	then   func()                          // called before the answer comes back
}

type sentHeartbeat struct {
	at    time.Time
	lanes []lane.Heartbeat
}

func (t *heartbeats) Heartbeat(ctx context.Context, lanes []lane.Heartbeat) ([]message.Lane, error) {
	t.mu.Lock()
	t.all = append(t.all, sentHeartbeat{time.Now(), lanes})
	answer, then := t.answer, t.then
	t.mu.Unlock()
	if answer != nil {
		return nil, answer(ctx)
	}
	gone, err := t.Lanes.Heartbeat(ctx, lanes)
	if then != nil {
		then()
	}
	return gone, err
}

func (t *heartbeats) list() []sentHeartbeat {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]sentHeartbeat(nil), t.all...)
}

// of returns the heartbeats of one lane.
func (t *heartbeats) of(lane message.Lane) (all []lane.Heartbeat) {
	for _, beat := range t.list() {
		for _, c := range beat.lanes {
			if c.Lane == lane {
				all = append(all, c)
			}
		}
	}
	return all
}

// newHeartbeatRig is a rig whose lane i was acquired i times before, if at all at 10.
func newHeartbeatRig(t *testing.T, lanes int, changes ...any) (*rig, *heartbeats) {
	sent := &heartbeats{}
	acquireBefore := func(w *consumer.Worker) {
		for i := range lanes {
			for range i {
				acquire(t, w.Lanes, lane.Acquire{Lane: laneNamed(i), Ordered: true, Committed: -1, Start: 10})
			}
		}
		sent.Lanes, w.Lanes = w.Lanes, sent
	}
	return newRig(t, lanes, append([]any{acquireBefore}, changes...)...), sent
}

func laneNamed(i int) message.Lane { return message.Lane{Source: "test", Name: string(rune('0' + i))} }

func acquire(t *testing.T, lanes consumer.Lanes, how lane.Acquire) {
	t.Helper()
	if _, err := lanes.Acquire(t.Context(), how); err != nil {
		t.Error(err)
	}
}

// caughtUp lets a lane be caught up as of now.
func (l *openLane) caughtUp() {
	l.SetLag(0)
	l.SetCaughtUp(time.Now())
}

func (r *rig) caughtUpAt(lane message.Lane) time.Time {
	row, _ := r.store.Row(lane)
	return row.Heartbeat
}

var errTable = &lane.HoldError{Lane: laneNamed(0), Err: errors.New("no such table")}

func TestHeartbeat(t *testing.T) {
	bubble(t, "is sent from time to time", heartbeatFromTimeToTime)
	bubble(t, "is sent again when that failed", heartbeatSentAgain)
	bubble(t, "has a queue once, when all slots are caught up", heartbeatOfAQueue)
}

func heartbeatFromTimeToTime(t *testing.T) {
	r, sent := newHeartbeatRig(t, 2)
	begun := time.Now()
	r.lanes[0].mustOffer(3)
	time.Sleep(time.Second)
	r.lanes[0].SetCaughtUp(begun)
	r.lanes[1].caughtUp()
	time.Sleep(16 * time.Second)
	first := sent.list()
	if len(first) != 1 || first[0].at.Sub(begun) < 13*time.Second {
		t.Fatalf("sent %v, want one after about 15 s", first)
	}
	age := first[0].at.Sub(begun)
	want := []lane.Heartbeat{
		{Lane: laneNamed(0), Epoch: 1, Next: 3, Age: age},
		{Lane: laneNamed(1), Epoch: 2, Next: 10, Age: age - time.Second},
	}
	if !reflect.DeepEqual(first[0].lanes, want) {
		t.Errorf("sent %v, want %v", first[0].lanes, want)
	}
	if at := r.caughtUpAt(laneNamed(0)); !at.Equal(begun) {
		t.Errorf("the lane was caught up at %s, the store knows of %s", begun, at)
	}

	r.lanes[0].mustOffer(1)
	r.lanes[0].caughtUp()
	again := time.Now()
	time.Sleep(time.Minute)
	if n := len(sent.list()) - 1; n < 3 || n > 5 {
		t.Errorf("sent %d times in a minute", n)
	}
	if at := r.caughtUpAt(laneNamed(0)); !at.Equal(again) {
		t.Errorf("the lane was caught up at %s, the store knows of %s", again, at)
	}
	r.stop()
	n := len(sent.list())
	time.Sleep(time.Minute)
	if len(sent.list()) != n {
		t.Error("sent after the end")
	}
}

func heartbeatSentAgain(t *testing.T) {
	var log strings.Builder
	r, sent := newHeartbeatRig(t, 1, func(w *consumer.Worker) {
		w.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	})
	sent.mu.Lock()
	sent.answer = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	sent.mu.Unlock()
	begun := time.Now()
	r.lanes[0].caughtUp()
	time.Sleep(3 * 22 * time.Second) // the interval and the wait for an answer are at most 21.875 s
	if n := len(sent.list()); n < 3 || n > 4 {
		t.Errorf("sent %d times", n)
	}
	if log.Len() > 0 {
		t.Errorf("that is no news: %s", &log)
	}
	// In the middle of one.
	for n := len(sent.list()); len(sent.list()) == n && time.Since(begun) < time.Hour; {
		time.Sleep(time.Millisecond)
	}
	ended := time.Now()
	r.stop()
	if d := time.Since(ended); d > 0 {
		t.Errorf("the end waited for %s", d)
	}
}

func heartbeatOfAQueue(t *testing.T) {
	queue := message.Lane{Source: "test", Name: "queue"}
	r, sent := newHeartbeatRig(t, 3, func(w *consumer.Worker) { acquire(t, w.Lanes, lane.Acquire{Lane: queue, Committed: -1}) },
		func(o *consumer.LaneOptions) { o.Lane, o.Epoch, o.Next = queue, 0, 0 })
	begun := time.Now()
	r.lanes[0].caughtUp()
	r.lanes[1].caughtUp()
	time.Sleep(time.Minute)
	if all := sent.list(); len(all) > 0 {
		t.Errorf("sent %v while a slot is behind", all)
	}
	r.lanes[2].caughtUp()
	r.lanes[1].caughtUp()
	time.Sleep(17 * time.Second)
	if len(sent.list()) == 0 {
		t.Error("sent nothing")
	}
	for _, each := range sent.list() {
		if want := (lane.Heartbeat{Lane: queue, Age: each.at.Sub(begun)}); len(each.lanes) != 1 || each.lanes[0] != want {
			t.Errorf("sent %v, want the queue once, as old as its earliest slot: %v", each.lanes, want)
		}
	}
	r.stop()
}

func TestHeartbeatLeavesOut(t *testing.T) {
	const keep = 30 * time.Second
	keepFor := func(o *consumer.LaneOptions) { o.KeepFor = keep }
	// What lane 0 does for which it isn't in the heartbeat, while lane 1 is. Lane 2 is for
	// the case to use.
	for name, behind := range map[string]func(r *rig, l *openLane){
		"of which the broker said nothing": func(_ *rig, l *openLane) { l.mustOffer(1); l.SetLag(0) },
		"whose lag is not known":           func(_ *rig, l *openLane) { l.SetCaughtUp(time.Now()); l.SetLag(-1) },
		"that is behind":                   func(_ *rig, l *openLane) { l.SetCaughtUp(time.Now()); l.SetLag(5) },
		"that is behind its last batch": func(_ *rig, l *openLane) {
			l.caughtUp()
			l.next++
			_ = l.Offer(context.Background(), lane.Batch{Lane: l.name, Ordered: true, StreamID: "stream-1", Epoch: l.epoch, Next: 1, Lag: 5}, 0)
		},
		"in its transaction": func(r *rig, l *openLane) {
			r.store.Hold()
			l.mustOffer(1)
			l.caughtUp()
		},
		"that no writer has": func(r *rig, l *openLane) {
			r.store.Hold()
			r.lanes[2].mustOffer(1)
			synctest.Wait()
			l.mustOffer(1)
			l.caughtUp()
		},
		"that is held": func(r *rig, l *openLane) {
			r.store.FailBefore(1_000_000, errTable)
			l.mustOffer(1)
			l.caughtUp()
			asked := time.Now()
			time.Sleep(2 * keep)
			l.SetLag(0)
			l.SetCaughtUp(asked) // before what it was held for was abandoned
		},
		"that abandoned its batch": func(r *rig, l *openLane) {
			r.store.FailBefore(1_000_000, errTransient)
			l.mustOffer(1)
			l.caughtUp()
			time.Sleep(2 * keep)
			l.SetLag(0)
		},
		"that was closed": func(_ *rig, l *openLane) { l.caughtUp(); l.Close(context.Background()) },
		"that was lost": func(r *rig, l *openLane) {
			r.store.Steal(l.name)
			l.mustOffer(1)
			l.caughtUp()
			<-l.Lost()
		},
	} {
		bubble(t, "a lane "+name, func(t *testing.T) {
			r, sent := newHeartbeatRig(t, 3, writers(1), keepFor)
			r.lanes[1].caughtUp()
			behind(r, r.lanes[0])
			time.Sleep(keep / 3 * 2) // longer than the heartbeat interval, shorter than a batch is kept
			if all := sent.of(laneNamed(0)); len(all) > 0 {
				t.Errorf("sent %v", all)
			}
			if len(sent.of(laneNamed(1))) == 0 {
				t.Error("its neighbour is missing")
			}
			r.end()
			<-r.done
		})
	}
}

func isLost(l *openLane) bool {
	select {
	case <-l.Lost():
		return true
	default:
		return false
	}
}

func TestHeartbeatLosesLanes(t *testing.T) {
	bubble(t, "that another worker owns, or that the database lost", heartbeatOfLostLanes)
	bubble(t, "all slots of a queue that went back", heartbeatOfALostQueue)
	bubble(t, "but not one that has changed since", heartbeatOfAChangedLane)
}

func heartbeatOfLostLanes(t *testing.T) {
	r, sent := newHeartbeatRig(t, 3)
	for _, l := range r.lanes {
		l.mustOffer(2)
		l.caughtUp()
	}
	synctest.Wait()
	r.store.Steal(laneNamed(0))
	r.store.Rewind(laneNamed(1), 11)
	time.Sleep(20 * time.Second)
	for i := range 2 {
		if len(sent.of(laneNamed(i))) == 0 {
			t.Errorf("lane %d is idle, and not in the heartbeat", i)
		}
		if at := r.caughtUpAt(laneNamed(i)); !at.IsZero() {
			t.Errorf("lane %d counts as caught up at %s", i, at)
		}
		if !isLost(r.lanes[i]) {
			t.Errorf("lane %d goes on", i)
		}
	}
	if isLost(r.lanes[2]) {
		t.Error("lane 2 is ours, and was lost")
	}
	if n := r.metric("dedupd_fenced_total"); n != 2 {
		t.Errorf("%v lanes count as fenced", n)
	}
	r.stop()
}

func heartbeatOfALostQueue(t *testing.T) {
	queue := message.Lane{Source: "test", Name: "queue"}
	r, sent := newHeartbeatRig(t, 2, func(w *consumer.Worker) { acquire(t, w.Lanes, lane.Acquire{Lane: queue, Committed: -1, Start: 5}) },
		func(o *consumer.LaneOptions) { o.Lane, o.Epoch, o.Next = queue, 0, 5 })
	for _, l := range r.lanes {
		l.caughtUp()
	}
	r.store.Rewind(queue, 3)
	time.Sleep(20 * time.Second)
	if len(sent.of(queue)) == 0 || !isLost(r.lanes[0]) || !isLost(r.lanes[1]) {
		t.Errorf("sent %v, and the slots go on", sent.list())
	}
	r.stop()
}

func heartbeatOfAChangedLane(t *testing.T) {
	r, sent := newHeartbeatRig(t, 3, writers(1))
	for _, l := range r.lanes {
		l.caughtUp()
	}
	for i := range 3 {
		r.store.Steal(laneNamed(i))
	}
	release := func() {}
	sent.mu.Lock()
	sent.then = func() {
		// One has a batch in its transaction, one has a batch that waits, and one is
		// closed.
		release = r.store.Hold()
		r.lanes[0].mustOffer(1)
		synctest.Wait()
		r.lanes[1].mustOffer(1)
		r.lanes[2].Close(context.Background())
		sent.mu.Lock()
		defer sent.mu.Unlock()
		sent.then = nil
	}
	sent.mu.Unlock()
	time.Sleep(20 * time.Second)
	synctest.Wait()
	for i, l := range r.lanes {
		if isLost(l) {
			t.Errorf("lane %d was lost by an older heartbeat", i)
		}
	}
	release()
	synctest.Wait()
	if !isLost(r.lanes[0]) || !isLost(r.lanes[1]) {
		t.Error("a lane that another worker owns was not fenced")
	}
	r.stop()
}

func TestHeartbeatUntilIdle(t *testing.T) {
	bubble(t, "is sent before it ends", lastHeartbeat)
	bubble(t, "is sent for the others when it ends because of a held lane", lastHeartbeatBesideAHeldLane)
	bubble(t, "is sent until it succeeds", lastHeartbeatUntilItSucceeds)
	bubble(t, "has it read again what the database lost", lastHeartbeatAfterALoss)
}

func lastHeartbeat(t *testing.T) {
	r, sent := newHeartbeatRig(t, 3, func(w *consumer.Worker) { w.UntilIdle = 2 * time.Second })
	r.lanes[0].mustOffer(3)
	for _, l := range r.lanes {
		l.caughtUp()
	}
	begun := time.Now()
	if err := <-r.done; err != nil {
		t.Errorf("Run: %v", err)
	}
	if d := time.Since(begun); d > 3*time.Second {
		t.Errorf("the run took %s, longer than it should", d)
	}
	if n := len(sent.list()); n != 1 {
		t.Errorf("sent %d times, want once", n)
	}
	for i := range 3 {
		if at := r.caughtUpAt(laneNamed(i)); !at.Equal(begun) {
			t.Errorf("lane %d was caught up at %s, the store knows of %s", i, begun, at)
		}
	}
	r.checkEnd()
}

func lastHeartbeatBesideAHeldLane(t *testing.T) {
	r, sent := newHeartbeatRig(t, 2, func(w *consumer.Worker) { w.UntilIdle = 2 * time.Second })
	r.store.FailBefore(1_000_000, errTable)
	r.lanes[0].mustOffer(1)
	r.lanes[1].caughtUp()
	if err := <-r.done; !errors.Is(err, errTable) {
		t.Errorf("Run: %v", err)
	}
	if len(sent.of(laneNamed(0))) > 0 || len(sent.of(laneNamed(1))) == 0 {
		t.Errorf("sent %v", sent.list())
	}
	r.checkEnd()
}

func lastHeartbeatUntilItSucceeds(t *testing.T) {
	r, sent := newHeartbeatRig(t, 1, func(w *consumer.Worker) { w.UntilIdle, w.HeartbeatInterval = 2*time.Second, time.Hour })
	sent.mu.Lock()
	sent.answer = func(context.Context) error { return errTransient }
	sent.mu.Unlock()
	r.lanes[0].caughtUp()
	time.Sleep(time.Minute)
	select {
	case err := <-r.done:
		t.Fatalf("the run has ended, and nobody knows whether it has done its work: %v", err)
	default:
	}
	sent.mu.Lock()
	sent.answer = nil
	sent.mu.Unlock()
	if err := <-r.done; err != nil {
		t.Errorf("Run: %v", err)
	}
	r.checkEnd()
}

func lastHeartbeatAfterALoss(t *testing.T) {
	r, _ := newHeartbeatRig(t, 1, func(w *consumer.Worker) { w.UntilIdle, w.HeartbeatInterval = 2*time.Second, time.Hour })
	r.lanes[0].mustOffer(3)
	r.lanes[0].caughtUp()
	synctest.Wait()
	r.store.Rewind(laneNamed(0), 1)
	select {
	case <-r.lanes[0].Lost():
	case <-time.After(time.Minute):
		t.Fatal("the lane goes on")
	}
	select {
	case err := <-r.done:
		t.Fatalf("the run has ended, with lost commits: %v", err)
	case <-time.After(time.Second): // in which the source may acquire the lane again
	}
	if err := <-r.done; err != nil {
		t.Errorf("Run: %v", err)
	}
}
