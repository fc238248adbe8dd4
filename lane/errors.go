package lane

import (
	"errors"
	"fmt"
	"strings"

	"github.com/dedupd/dedupd/message"
)

// The errors that a hand-over of batches may end with, besides a transient one
// (any other error), after which the same batches are tried again.

// FencedError says that these lanes now belong to another worker, or that the
// database has gone back behind us. Nothing was written. The lanes' batches are
// to be dropped, and the lanes taken anew or let go.
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
// missing table or grant, too many poison messages, a policy of "stop". Nothing
// was written and nothing may be skipped; the lane is tried again, rarely.
type HoldError struct {
	Lane message.Lane // zero: every lane of the hand-over
	Err  error
	// Summary says what is wrong to whoever may ask the worker over HTTP, without
	// quoting anything from a message, as Err may. Empty: only the code and the names
	// are told that the database gave.
	Summary string
}

func (e *HoldError) Error() string {
	if e.Lane == (message.Lane{}) {
		return "held: " + e.Err.Error()
	}
	return fmt.Sprintf("lane %s is held: %v", e.Lane, e.Err)
}

func (e *HoldError) Unwrap() error { return e.Err }

// ErrStale is what taking a lane ends with when an owner of a newer consumer
// group generation is at work on it.
var ErrStale = errors.New("a worker of a newer group generation owns the lane")

// ErrNoStart is what taking a lane ends with that has no row, when the source
// knows of no position to begin at.
var ErrNoStart = errors.New("the lane has no position to begin at")

// ErrLoss says that a broker which deletes what it was told of is to be read into
// a database that may lose commits in a failover: what they held would be lost.
var ErrLoss = errors.New("a failover of the database could lose messages that the broker no longer has")
