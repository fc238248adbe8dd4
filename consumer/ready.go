package consumer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Ready tells whether every source has reached its broker and knows its lanes.
// Having none is fine: that is a standby. Of a lane that is held by what the
// handler answered it tells by a *HeldError, of one that fails all the time by a
// *FailingError; other errors quote no message. Of several lanes it names the first
// by order, so that the answer changes with what is wrong only.
func (w *Worker) Ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.intakes) == 0 {
		return errors.New("not started")
	}
	for _, in := range w.intakes {
		if lane, more, ok := first(in.held); ok {
			return withMore(in.held[lane].err, "held", more)
		}
		if !in.ready && in.why != nil {
			return fmt.Errorf("source %s: %w", in.source, in.why)
		}
		if !in.ready {
			return fmt.Errorf("source %s is not connected", in.source)
		}
	}
	held, failing := make(map[message.Lane]error), make(map[message.Lane]*FailingError)
	for lane, g := range w.gaveBack {
		held[lane] = g.err
	}
	for l := range w.lanes {
		switch since := time.Since(l.failing); {
		case l.held != nil:
			held[l.options.Lane] = l.held
		case !l.failing.IsZero() && l.flight != nil && since >= failingTimeout:
			failing[l.options.Lane] = &FailingError{Lane: l.options.Lane, For: since, Err: l.failure}
		}
	}
	if lane, more, ok := first(held); ok {
		return &HeldError{Lane: lane, Err: held[lane], More: more}
	}
	if lane, more, ok := first(failing); ok {
		failing[lane].More = more
		return failing[lane]
	}
	return nil
}

// first is the first lane by order, and how many there are beside it.
func first[T any](lanes map[message.Lane]T) (lane message.Lane, more int, ok bool) {
	if len(lanes) == 0 {
		return lane, 0, false
	}
	return slices.MinFunc(slices.Collect(maps.Keys(lanes)), message.Lane.Compare), len(lanes) - 1, true
}

// withMore says beside an error of one lane how many others are in the same state.
func withMore(err error, state string, more int) error {
	if more == 0 {
		return err
	}
	return fmt.Errorf("%w%s", err, MoreLanes(more, state))
}

// MoreLanes is what the text of an error of one lane ends with where other lanes are
// in the same state.
func MoreLanes(more int, state string) string {
	switch more {
	case 0:
		return ""
	case 1:
		return "; 1 more lane is " + state
	}
	return fmt.Sprintf("; %d more lanes are %s", more, state)
}

// failingTimeout is how long a lane's transactions may fail, with errors that pass by
// themselves, until the worker isn't ready: longer than a deadlock, a failover or a
// wait for a lock that was in vain once.
const failingTimeout = 15 * time.Second

// FailingError says that for some time no transaction of a lane was made durable,
// though whatever is wrong should pass by itself. Its text is for the log, as that of
// a HeldError.
type FailingError struct {
	Lane message.Lane
	For  time.Duration // since the first one that failed
	Err  error         // of the last try
	More int           // how many other lanes fail as well
}

func (e *FailingError) Error() string {
	return fmt.Sprintf("lane %s: its transactions have failed for %s: %v%s", e.Lane, e.For.Round(time.Second), e.Err, MoreLanes(e.More, "failing"))
}

func (e *FailingError) Unwrap() error { return e.Err }

// HeldError says that a lane is held since its messages can't be made durable. Its
// text is for the log: it may quote them.
type HeldError struct {
	Lane message.Lane
	Err  error // what the handler answered: a *message.HoldError
	More int   // how many other lanes are held as well
}

func (e *HeldError) Error() string {
	if hold := (*lane.HoldError)(nil); errors.As(e.Err, &hold) && hold.Lane == e.Lane {
		return e.Err.Error() + MoreLanes(e.More, "held") // it names the lane itself
	}
	return fmt.Sprintf("lane %s: %v%s", e.Lane, e.Err, MoreLanes(e.More, "held"))
}

func (e *HeldError) Unwrap() error { return e.Err }
