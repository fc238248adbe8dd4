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

// Ready returns nil if every source has reached its broker and opened its lanes.
// Having none is fine: that is a standby. The error is a *HeldError if the handler
// answered a hold for a lane, and a *FailingError if a lane keeps failing; other errors
// quote no message. Of several lanes it names the first by order, so that the answer
// changes only with what is wrong.
func (w *Worker) Ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sessions) == 0 {
		return errors.New("not started")
	}
	for _, in := range w.sessions {
		if l, more, ok := first(in.held); ok {
			return fmt.Errorf("%w%s", in.held[l].err, MoreLanes(more, "held"))
		}
		if !in.ready && in.why != nil {
			return fmt.Errorf("source %s: %w", in.source, in.why)
		}
		if !in.ready {
			return fmt.Errorf("source %s is not connected", in.source)
		}
	}
	held, failing := make(map[message.Lane]error), make(map[message.Lane]*FailingError)
	for l, e := range w.evicted {
		held[l] = e.err
	}
	for l := range w.lanes {
		switch since := time.Since(l.failing); {
		case l.held != nil:
			held[l.options.Lane] = l.held
		case !l.failing.IsZero() && l.flight != nil && since >= failingTimeout:
			failing[l.options.Lane] = &FailingError{Lane: l.options.Lane, For: since, Err: l.failure}
		}
	}
	if l, more, ok := first(held); ok {
		return &HeldError{Lane: l, Err: held[l], More: more}
	}
	if l, more, ok := first(failing); ok {
		failing[l].More = more
		return failing[l]
	}
	return nil
}

// first is the first lane by order, and how many there are besides.
func first[T any](lanes map[message.Lane]T) (l message.Lane, more int, ok bool) {
	if len(lanes) == 0 {
		return l, 0, false
	}
	return slices.MinFunc(slices.Collect(maps.Keys(lanes)), message.Lane.Compare), len(lanes) - 1, true
}

// MoreLanes ends the text of one lane's error where other lanes are in the same state.
func MoreLanes(more int, state string) string {
	switch more {
	case 0:
		return ""
	case 1:
		return "; 1 more lane is " + state
	}
	return fmt.Sprintf("; %d more lanes are %s", more, state)
}

// failingTimeout is how long a lane's transactions may fail with transient errors until
// the worker isn't ready: longer than a deadlock, a failover or one lock timeout.
const failingTimeout = 15 * time.Second

// FailingError says that a lane's transactions have failed for some time, with errors
// that should pass by themselves. Its text is for the log: it may quote messages.
type FailingError struct {
	Lane message.Lane
	For  time.Duration // since the first one that failed
	Err  error         // of the last attempt
	More int           // how many other lanes fail, too
}

func (e *FailingError) Error() string {
	return fmt.Sprintf("lane %s: its transactions have failed for %s: %v%s", e.Lane, e.For.Round(time.Second), e.Err, MoreLanes(e.More, "failing"))
}

func (e *FailingError) Unwrap() error { return e.Err }

// HeldError says that a lane is held because its messages can't be made durable. Its
// text is for the log: it may quote them.
type HeldError struct {
	Lane message.Lane
	Err  error // what the handler answered: a *lane.HoldError
	More int   // how many other lanes are held, too
}

func (e *HeldError) Error() string {
	if hold := (*lane.HoldError)(nil); errors.As(e.Err, &hold) && hold.Lane == e.Lane {
		return e.Err.Error() + MoreLanes(e.More, "held") // it names the lane itself
	}
	return fmt.Sprintf("lane %s: %v%s", e.Lane, e.Err, MoreLanes(e.More, "held"))
}

func (e *HeldError) Unwrap() error { return e.Err }
