package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func writers(n int) func(*consumer.Worker) {
	return func(w *consumer.Worker) { w.Writers = n }
}

func bubble(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func TestGroupCommit(t *testing.T) {
	bubble(t, "what comes during a transaction is the next group", whatComesDuringATransactionIsTheNextGroup)
	bubble(t, "lanes share a transaction", lanesShareATransaction)
	bubble(t, "a group has its bounds", aGroupHasItsBounds)
	bubble(t, "the source's slice is not written to", theSourcesSliceIsNotWrittenTo)
}

func whatComesDuringATransactionIsTheNextGroup(t *testing.T) {
	r := newRig(t, 1)
	release := r.store.Hold()
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	for range 5 {
		r.lanes[0].mustOffer(1)
	}
	synctest.Wait()
	release()
	synctest.Wait()
	if got, want := r.sizes(), []int{1, 5}; !reflect.DeepEqual(got, want) {
		t.Errorf("groups of %v, want %v", got, want)
	}
	if got, _ := r.lanes[0].outcome(); !reflect.DeepEqual(got, []int{0, 1, 2, 3, 4, 5}) {
		t.Errorf("committed %v", got)
	}
	r.stop()
}

func lanesShareATransaction(t *testing.T) {
	r := newRig(t, 5, writers(1))
	release := r.store.Hold()
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	for _, l := range r.lanes {
		l.mustOffer(10)
	}
	release()
	synctest.Wait()
	if got, want := r.sizes(), []int{1, 50}; !reflect.DeepEqual(got, want) {
		t.Errorf("groups of %v, want %v", got, want)
	}
	r.stop()
}

func aGroupHasItsBounds(t *testing.T) {
	r := newRig(t, 4, writers(1), func(w *consumer.Worker) { w.MaxMessages, w.MaxBytes = 100, 500 })
	release := r.store.Hold()
	r.lanes[0].mustOffer(1)
	synctest.Wait()
	for _, l := range r.lanes {
		l.mustOffer(20) // 200 bytes
	}
	r.lanes[0].mustOffer(20)
	blocked := make(chan error)
	go func() { blocked <- r.lanes[0].offer(20) }() // 600 bytes in the lane
	synctest.Wait()
	select {
	case err := <-blocked:
		t.Errorf("Offer beyond the bounds returned %v", err)
	default:
	}
	release()
	if err := <-blocked; err != nil {
		t.Error(err)
	}
	synctest.Wait()
	for _, n := range r.sizes() {
		if n*10 > 500 {
			t.Errorf("a group of %d bytes", n*10)
		}
	}
	r.stop()
}

func theSourcesSliceIsNotWrittenTo(t *testing.T) {
	r := newRig(t, 1)
	release := r.store.Hold()
	l := r.lanes[0]
	l.mustOffer(1)
	synctest.Wait()
	row, _ := r.store.Row(l.name)
	whole := make([]message.Message, 3)
	for i := range whole {
		whole[i] = message.Message{Topic: "mine", Position: message.Position{Lane: l.name, Offset: int64(1 + i)}}
	}
	batch := func(from, to int64, m []message.Message) lane.Batch {
		return lane.Batch{Lane: l.name, Ordered: true, StreamID: row.StreamID, Epoch: l.epoch, From: from, Next: to, Messages: m}
	}
	_ = l.Offer(t.Context(), batch(1, 2, whole[:1]), 1)
	other := whole[2]
	other.Topic = "other"
	_ = l.Offer(t.Context(), batch(2, 4, []message.Message{other}), 2)
	if whole[1].Topic != "mine" {
		t.Error("a neighbour was overwritten")
	}
	release()
	r.setHandle(func(context.Context, []lane.Batch) error { return nil })
	r.end()
	<-r.done
}

func TestOneInFlightPerLane(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, 3, writers(8))
		r.store.Delay(10 * time.Millisecond)
		for range 50 {
			for _, l := range r.lanes {
				l.mustOffer(3)
			}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		if n := len(r.store.Effects()); n != 450 {
			t.Errorf("%d effects", n)
		}
		r.stop() // the store has noticed two at a time
	})
}

// A queue delivers again what is below what came since. What gathers behind a
// transaction ends where the highest of it does, whatever came last.
func TestAQueueGathersOutOfOrder(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, 1)
		hold := make(chan struct{})
		r.handle = func(context.Context, []lane.Batch) error { // the store knows ordered lanes only
			<-hold
			return nil
		}
		l := r.lanes[0]
		for _, offset := range []int64{1, 7, 3} {
			b := lane.Batch{
				Lane: l.name, Epoch: l.epoch, From: offset, Next: offset + 1, BrokerPosition: -1,
				Messages: []message.Message{{Position: message.Position{Lane: l.name, Offset: offset}}},
			}
			if err := l.Offer(t.Context(), b, 0); err != nil {
				t.Fatal(err)
			}
			synctest.Wait() // the first is in its transaction
		}
		close(hold)
		synctest.Wait()
		r.stop()
		if last := r.groups[len(r.groups)-1][0]; len(last.Messages) != 2 || last.Next != 8 {
			t.Errorf("%d messages were handed over, up to %d; want 2, up to 8", len(last.Messages), last.Next)
		}
	})
}

func TestKeepFor(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, 1, func(o *consumer.LaneOptions) { o.KeepFor = 30 * time.Second })
		r.store.FailBefore(1_000_000, errTransient)
		r.lanes[0].mustOffer(1)
		synctest.Wait()
		time.Sleep(20 * time.Second)
		if _, abandoned := r.lanes[0].outcome(); len(abandoned) != 0 {
			t.Errorf("abandoned %v after 20 s", abandoned)
		}
		time.Sleep(11 * time.Second)
		if _, abandoned := r.lanes[0].outcome(); !reflect.DeepEqual(abandoned, []int{0}) {
			t.Errorf("abandoned %v after 31 s", abandoned)
		}
		r.store.Heal()
		l := r.lanes[0]
		l.next = 0 // delivered again
		l.mustOffer(1)
		synctest.Wait()
		if committed, _ := l.outcome(); !reflect.DeepEqual(committed, []int{0}) {
			t.Errorf("committed %v", committed)
		}
		r.stop()
	})
}

// What a slot of a queue was held for, and gave up, another slot applies: once the
// broker has nothing left that anybody has yet to do, the first one isn't held.
func TestAHoldThatAnotherSlotEnds(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r, sent := newHeartbeatRig(t, 2, func(o *consumer.LaneOptions) { o.KeepFor = 30 * time.Second })
		held, other := r.lanes[0], r.lanes[1]
		r.store.FailBefore(1_000_000, &lane.HoldError{Lane: held.name, Err: errors.New("no such table")})
		held.mustOffer(1)
		time.Sleep(time.Minute)
		if _, abandoned := held.outcome(); len(abandoned) != 1 {
			t.Fatalf("abandoned %v", abandoned)
		}
		if r.Ready() == nil || r.metric("dedupd_lanes_held") != 1 {
			t.Error("not held before anybody has applied what was abandoned")
		}
		r.store.Heal()
		other.mustOffer(1)
		synctest.Wait()
		if r.Ready() == nil {
			t.Error("not held before the broker has said that nothing is left")
		}
		held.caughtUp()
		other.caughtUp()
		if err := r.Ready(); err != nil || r.metric("dedupd_lanes_held") != 0 {
			t.Errorf("still held: %v", err)
		}
		time.Sleep(time.Minute)
		if len(sent.of(held.name)) == 0 {
			t.Error("its clock stands still")
		}
		r.stop()
	})
	bubble(t, "not while it has something else to do", func(t *testing.T) {
		r := newRig(t, 1, func(o *consumer.LaneOptions) { o.KeepFor = 30 * time.Second })
		r.store.FailBefore(1_000_000, &lane.HoldError{Lane: r.lanes[0].name, Err: errors.New("no such table")})
		r.lanes[0].mustOffer(1)
		time.Sleep(time.Minute)
		r.lanes[0].next = 0
		r.lanes[0].mustOffer(1)
		time.Sleep(time.Second)
		r.lanes[0].caughtUp()
		if r.Ready() == nil {
			t.Error("not held with a batch in hand")
		}
		r.stop()
	})
}

// What a held lane reads meanwhile joins the batch that it is held for, with all that
// is known of it: the leader epochs that are committed with a position tell the next
// owner whether the log was cut, and some that end below it would say so wrongly.
func TestAHeldBatchGrows(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, 1)
		l := r.lanes[0]
		r.store.FailBefore(1_000_000, &lane.HoldError{Lane: l.name, Err: errors.New("no such table")})
		offer := func(n int, epochs ...lane.LeaderEpoch) {
			t.Helper()
			row, _ := r.store.Row(l.name)
			b := lane.Batch{
				Lane: l.name, Ordered: true, StreamID: row.StreamID, Epoch: l.epoch, From: l.next, Next: l.next + int64(n),
				LeaderEpochs: epochs, Lag: int64(n), BrokerPosition: l.next,
			}
			for i := range n {
				p := message.Position{Lane: l.name, Offset: l.next + int64(i)}
				b.Messages = append(b.Messages, message.Message{Position: p, Headers: []message.Header{{Key: consumertest.IDHeader, Value: fmt.Append(nil, p.Offset)}}})
			}
			token := int(l.next)
			l.next = b.Next
			if err := l.Offer(t.Context(), b, token); err != nil {
				t.Fatal(err)
			}
		}
		first := lane.LeaderEpoch{Epoch: 3, From: 0}
		second := lane.LeaderEpoch{Epoch: 5, From: 12}
		offer(10, first)
		synctest.Wait()
		offer(10, first, second)
		time.Sleep(2 * time.Minute)
		r.mu.Lock()
		grown := r.groups[len(r.groups)-1][0]
		r.mu.Unlock()
		if grown.From != 0 || grown.Next != 20 || len(grown.Messages) != 20 {
			t.Fatalf("%d messages from %d to %d, want all 20", len(grown.Messages), grown.From, grown.Next)
		}
		if want := []lane.LeaderEpoch{first, second}; !reflect.DeepEqual(grown.LeaderEpochs, want) || grown.Lag != 10 || grown.BrokerPosition != 10 {
			t.Errorf("leader epochs %v, lag %d, broker position %d; want %v and those of what came last", grown.LeaderEpochs, grown.Lag, grown.BrokerPosition, want)
		}
		r.store.Heal()
		time.Sleep(time.Minute)
		if committed, _ := l.outcome(); !reflect.DeepEqual(committed, []int{0, 10}) {
			t.Errorf("committed %v", committed)
		}
		r.stop()
	})
}

func TestUntilIdle(t *testing.T) {
	idle := func(w *consumer.Worker) { w.UntilIdle = 5 * time.Second }
	bubble(t, "every lane for that long", func(t *testing.T) {
		r := newRig(t, 2, idle)
		r.lanes[0].mustOffer(1)
		r.lanes[0].SetLag(0)
		time.Sleep(time.Minute) // lane 1 doesn't know yet
		r.lanes[1].SetLag(7)
		time.Sleep(time.Minute)
		r.lanes[1].SetLag(0)
		begun := time.Now()
		if err := <-r.done; err != nil {
			t.Error(err)
		}
		if d := time.Since(begun); d < 4900*time.Millisecond || d > 6*time.Second {
			t.Errorf("ended %s after the last lane had caught up", d)
		}
		r.checkEnd()
	})
	bubble(t, "not while what was given up is still to be done", func(t *testing.T) {
		r := newRig(t, 1, idle, func(o *consumer.LaneOptions) { o.KeepFor = 30 * time.Second })
		r.store.FailBefore(1_000_000, errTransient)
		r.lanes[0].mustOffer(1)
		r.lanes[0].SetLag(0)
		select {
		case err := <-r.done:
			t.Errorf("Run: %v, though its one message was given up", err)
		case <-time.After(time.Minute):
		}
		r.stop()
	})
	bubble(t, "a held lane is an error", func(t *testing.T) {
		r := newRig(t, 1, idle)
		hold := &lane.HoldError{Err: errors.New("no such table")}
		r.store.FailBefore(1000, hold)
		r.lanes[0].mustOffer(1)
		if err := <-r.done; !errors.Is(err, hold) {
			t.Errorf("Run: %v", err)
		}
		r.checkEnd()
	})
}

// A job gives a lane up that is held after three tries, and not before: what holds
// it may be a moment's. Waits between tries are random, so that a fourth may come
// before the third is looked at; but not each time.
func TestAJobTriesAHeldLaneThreeTimes(t *testing.T) {
	brief := func(w *consumer.Worker) { w.UntilIdle = time.Millisecond }
	hold := &lane.HoldError{Err: errors.New("no such table")}
	bubble(t, "and goes on if the third succeeds", func(t *testing.T) {
		for range 5 {
			r := newRig(t, 1, brief)
			r.store.FailBefore(2, hold)
			r.lanes[0].mustOffer(1)
			r.lanes[0].SetLag(0)
			if err := <-r.done; err != nil {
				t.Errorf("Run: %v", err)
			}
			r.checkEnd()
		}
	})
	bubble(t, "and gives up if it fails", func(t *testing.T) {
		least := 0
		for range 5 {
			r := newRig(t, 1, brief)
			r.store.FailBefore(1000, hold)
			r.lanes[0].mustOffer(1)
			if err := <-r.done; !errors.Is(err, hold) {
				t.Errorf("Run: %v", err)
			}
			r.checkEnd()
			if n := len(r.sizes()); least == 0 || n < least {
				least = n
			}
		}
		if least != 3 {
			t.Errorf("at the earliest it gave up after %d tries, want 3", least)
		}
	})
}

// However often it was tried, a job waits for a held lane as long as for a quiet one.
func TestAJobWaitsForAHeldLane(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, 1, func(w *consumer.Worker) { w.UntilIdle = time.Minute })
		r.store.FailBefore(1000, &lane.HoldError{Err: errors.New("no such table")})
		r.lanes[0].mustOffer(1)
		r.lanes[0].SetLag(0)
		time.Sleep(25 * time.Second) // the next try is 30 s away at most
		r.store.Heal()
		if err := <-r.done; err != nil {
			t.Errorf("Run: %v", err)
		}
		r.checkEnd()
	})
}

func TestSourcesEnd(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"with an error": {errTransient, "source bad: the connection was lost"},
		"by itself":     {nil, "source bad ended by itself"},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, 1, func(w *consumer.Worker) {
				w.Sources = append(w.Sources, &script{"bad", func(context.Context, *consumer.Session) error {
					time.Sleep(time.Minute)
					return c.err
				}})
			})
			r.lanes[0].mustOffer(1)
			if err := <-r.done; err == nil || err.Error() != c.want {
				t.Errorf("Run: %v, want %s", err, c.want)
			}
			r.checkEnd()
		})
	}
}
