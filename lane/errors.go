package lane

import (
	"errors"
	"fmt"
	"strings"

	"github.com/dedupd/dedupd/message"
)

// Besides these errors, handing over batches may end with a transient one (any other
// error): the same batches are then tried again.

// FencedError says that these lanes belong to another worker now, or that the
// database went back. Nothing was written. The lanes' batches are dropped, and the
// lanes acquired again or released.
type FencedError struct {
	Lanes []message.Lane
}

func (e *FencedError) Error() string {
	names := make([]string, len(e.Lanes))
	for i, l := range e.Lanes {
		names[i] = l.String()
	}
	return "fenced: another worker owns " + strings.Join(names, ", ") + ", or the database went back"
}

// HoldError says that a lane can't go on until somebody changes something: a
// missing table or grant, too many poison messages, a policy of "stop". Nothing may be
// skipped. The lane is tried again, rarely.
type HoldError struct {
	Lane message.Lane // zero: every lane of the hand-over
	Err  error        // may quote a message
	// Summary says what is wrong to anybody who asks the worker over HTTP. It quotes no
	// message. Empty: they see only the code and the names that the database gave.
	Summary string
	// Landed: messages of the lane were made durable before it was held at another one. So
	// the hold is a new one.
	Landed bool
}

func (e *HoldError) Error() string {
	if e.Lane == (message.Lane{}) {
		return "held: " + e.Err.Error()
	}
	return fmt.Sprintf("lane %s is held: %v", e.Lane, e.Err)
}

func (e *HoldError) Unwrap() error { return e.Err }

// ErrStale ends Acquire when an owner of a newer group generation is at work on the
// lane.
var ErrStale = errors.New("a worker of a newer group generation owns the lane")

// ErrNoStart ends Acquire when the lane has no row and the source knows no position
// to begin at.
var ErrNoStart = errors.New("the lane has no position to begin at")

// ErrLoss ends Acquire when the broker deletes what is acknowledged and the database
// may lose commits in a failover: both would be gone.
var ErrLoss = errors.New("a failover of the database could lose messages that the broker no longer has")
