package consumer_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// After a group of several lanes has failed, no lane hears of a commit before a
// later try of its own messages has succeeded: not the lanes at fault, and not
// their neighbours. The ledger checks that at every callback; here it is also
// looked at between the tries.
func TestAFailedGroupTellsNoLaneOfACommit(t *testing.T) {
	const lanes = 5
	stranger := message.Lane{Source: "test", Name: "stranger"}
	named := func(numbers ...int) (all []message.Lane) {
		for _, i := range numbers {
			all = append(all, laneNamed(i))
		}
		return all
	}
	for _, test := range []struct {
		name string
		err  error
		lost []int // the lanes that it fences
	}{
		{"transient", errTransient, nil},
		{"transient, wrapped", fmt.Errorf("write: %w", errTransient), nil},
		{"the deadline", context.DeadlineExceeded, nil},
		{"a hold of all", &lane.HoldError{Err: errTransient}, nil},
		{"a hold of the first", &lane.HoldError{Lane: laneNamed(0), Err: errTransient}, nil},
		{"a hold of one between", &lane.HoldError{Lane: laneNamed(2), Err: errTransient}, nil},
		{"a hold of the last", &lane.HoldError{Lane: laneNamed(4), Err: errTransient}, nil},
		{"a hold of a lane that isn't in the group", &lane.HoldError{Lane: stranger, Err: errTransient}, nil},
		{"the first is fenced", &lane.FencedError{Lanes: named(0)}, []int{0}},
		{"one between is fenced", &lane.FencedError{Lanes: named(3)}, []int{3}},
		{"several are fenced", &lane.FencedError{Lanes: named(1, 4)}, []int{1, 4}},
		{"all are fenced", &lane.FencedError{Lanes: named(0, 1, 2, 3, 4)}, []int{0, 1, 2, 3, 4}},
		{"a lane is fenced that isn't in the group", &lane.FencedError{Lanes: []message.Lane{stranger}}, nil},
	} {
		bubble(t, test.name, func(t *testing.T) {
			r := newRig(t, lanes+1, writers(1)) // the last lane keeps the writer busy
			goOn := r.failTogether(lanes, test.err)
			for i, l := range r.lanes[:lanes] {
				if committed, _ := l.outcome(); committed != nil {
					t.Errorf("lane %d hears of the commit of %v by an attempt that failed", i, committed)
				}
			}
			if n := len(r.store.Effects()); n != 1 {
				t.Errorf("%d effects, want only that of the last lane", n)
			}
			goOn()
			time.Sleep(time.Minute)
			for i, l := range r.lanes[:lanes] {
				wantCommitted, wantAbandoned := []int{0, 3}, []int(nil)
				if slices.Contains(test.lost, i) {
					wantCommitted, wantAbandoned = wantAbandoned, wantCommitted
				}
				committed, abandoned := l.outcome()
				if !slices.Equal(committed, wantCommitted) || !slices.Equal(abandoned, wantAbandoned) {
					t.Errorf("lane %d: committed %v, abandoned %v; want %v and %v", i, committed, abandoned, wantCommitted, wantAbandoned)
				}
			}
			if n, want := len(r.store.Effects()), 1+6*(lanes-len(test.lost)); n != want {
				t.Errorf("%d effects, want %d", n, want)
			}
			r.stop()
		})
	}
}

// failTogether lets one hand-over fail that has the first so many lanes in it, each
// with six messages of two offers. What is tried afterwards waits until goOn.
func (r *rig) failTogether(lanes int, err error) (goOn func()) {
	r.t.Helper()
	gathered, further := make(chan struct{}), make(chan struct{})
	calls, together := 0, 0 // one writer makes one call at a time
	r.setHandle(func(ctx context.Context, group []lane.Batch) error {
		switch calls++; calls {
		case 1:
			<-gathered
		case 2:
			together = len(group)
			return err
		default:
			<-further
		}
		return r.store.Handle(ctx, group)
	})
	r.lanes[lanes].mustOffer(1)
	synctest.Wait()
	for _, l := range r.lanes[:lanes] {
		l.mustOffer(3)
		l.mustOffer(3)
	}
	close(gathered)
	synctest.Wait()
	if together != lanes {
		r.t.Fatalf("the hand-over that fails has %d lanes, want %d", together, lanes)
	}
	return func() { close(further) }
}

// A COMMIT whose answer was lost counts as a failure for every lane of the group,
// until a later try has found out what became of it.
func TestALostAnswerTellsNoLaneOfACommit(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const lanes = 3
		r := newRig(t, lanes, writers(1))
		r.setHandle(r.store.Handle) // its books count what landed without our knowing
		release := r.store.Hold()
		r.store.FailAfter(1, errTransient)
		for _, l := range r.lanes {
			l.mustOffer(2)
		}
		release()
		time.Sleep(time.Minute)
		// The store in memory has a fence only: it can't tell whose commit it was.
		for i, l := range r.lanes {
			<-l.Lost()
			if committed, abandoned := l.outcome(); committed != nil || !slices.Equal(abandoned, []int{0}) {
				t.Errorf("lane %d: committed %v, abandoned %v", i, committed, abandoned)
			}
		}
		r.stop()
	})
}
