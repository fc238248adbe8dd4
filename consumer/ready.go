package consumer

import (
	"errors"
	"fmt"
	"time"

	"github.com/dedupd/dedupd/message"
)

// Ready tells whether every source has reached its broker and knows its lanes.
// Having none is fine: that is a standby. Of a lane that is held by what the
// handler answered it tells by a *HeldError, of one that fails all the time by a
// *FailingError; other errors quote no message.
func (w *Worker) Ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.intakes) == 0 {
		return errors.New("not started")
	}
	for _, in := range w.intakes {
		for _, h := range in.held {
			return h.err
		}
		if !in.ready && in.why != nil {
			return fmt.Errorf("source %s: %w", in.source, in.why)
		}
		if !in.ready {
			return fmt.Errorf("source %s is not connected", in.source)
		}
	}
	for l := range w.lanes {
		if l.held != nil {
			return &HeldError{l.options.Lane, l.held}
		}
	}
	for lane, g := range w.gaveBack {
		return &HeldError{lane, g.err}
	}
	for l := range w.lanes {
		if since := time.Since(l.failing); !l.failing.IsZero() && l.flight != nil && since >= failingTimeout {
			return &FailingError{l.options.Lane, since, l.failure}
		}
	}
	return nil
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
}

func (e *FailingError) Error() string {
	return fmt.Sprintf("lane %s: its transactions have failed for %s: %v", e.Lane, e.For.Round(time.Second), e.Err)
}

func (e *FailingError) Unwrap() error { return e.Err }

// HeldError says that a lane is held since its messages can't be made durable. Its
// text is for the log: it may quote them.
type HeldError struct {
	Lane message.Lane
	Err  error // what the handler answered: a *message.HoldError
}

func (e *HeldError) Error() string {
	if hold := (*message.HoldError)(nil); errors.As(e.Err, &hold) && hold.Lane == e.Lane {
		return e.Err.Error() // it names the lane itself
	}
	return fmt.Sprintf("lane %s: %v", e.Lane, e.Err)
}

func (e *HeldError) Unwrap() error { return e.Err }
