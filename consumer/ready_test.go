package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
)

// Of several lanes in the same state readiness names the first, however often it is
// asked, and how many more there are.
func TestReadinessNamesTheFirstLane(t *testing.T) {
	const asked = 30 // a map's order would have to be the same as often
	always := func(t *testing.T, r *rig, want string) {
		t.Helper()
		for range asked {
			if err := r.Ready(); err == nil || !strings.HasPrefix(err.Error(), "lane test:0") || !strings.HasSuffix(err.Error(), want) {
				t.Fatalf("Ready: %v, want lane test:0, and then %q", err, want)
			}
		}
	}
	bubble(t, "held", func(t *testing.T) {
		r := newRig(t, 5)
		r.setHandle(func(context.Context, []lane.Batch) error {
			return &lane.HoldError{Err: errors.New("no such table")}
		})
		for _, l := range r.lanes {
			l.mustOffer(1)
		}
		time.Sleep(time.Minute)
		always(t, r, "; 4 more lanes are held")
		r.setHandle(nil)
		time.Sleep(time.Minute)
		r.stop()
	})
	bubble(t, "failing", func(t *testing.T) {
		r := newRig(t, 5)
		r.setHandle(func(context.Context, []lane.Batch) error { return errTransient })
		for _, l := range r.lanes {
			l.mustOffer(1)
		}
		time.Sleep(10 * time.Second)
		if err := r.Ready(); err != nil {
			t.Errorf("Ready: %v, while it may pass by itself", err)
		}
		time.Sleep(time.Minute)
		always(t, r, "; 4 more lanes are failing")
		r.setHandle(nil)
		time.Sleep(time.Minute)
		r.stop()
	})
	bubble(t, "not opened", func(t *testing.T) {
		r := newRig(t, 0)
		for i := range 5 {
			r.session.Hold(laneNamed(i), fmt.Errorf("lane %s: data is lost", laneNamed(i)))
		}
		always(t, r, "; 4 more lanes are held")
		for i := 4; i > 0; i-- {
			r.session.Hold(laneNamed(i), nil)
		}
		always(t, r, "data is lost")
		r.session.Hold(laneNamed(0), nil)
		if err := r.Ready(); err != nil {
			t.Errorf("Ready: %v", err)
		}
		r.stop()
	})
}

// Both texts, that of the log and what one lane's alone would be.
func TestReadinessCountsInTheTexts(t *testing.T) {
	t.Parallel()
	lane := laneNamed(0)
	for _, c := range []struct {
		err  error
		want string
	}{
		{&consumer.HeldError{Lane: lane, Err: errTransient}, fmt.Sprintf("lane %s: %v", lane, errTransient)},
		{&consumer.HeldError{Lane: lane, Err: errTransient, More: 1}, fmt.Sprintf("lane %s: %v; 1 more lane is held", lane, errTransient)},
		{&consumer.FailingError{Lane: lane, For: time.Minute, Err: errTransient, More: 2}, fmt.Sprintf("lane %s: its transactions have failed for 1m0s: %v; 2 more lanes are failing", lane, errTransient)},
	} {
		if c.err.Error() != c.want {
			t.Errorf("%q, want %q", c.err, c.want)
		}
	}
}
