package sinks

import (
	"errors"
	"fmt"
)

// permanentError marks an error that no retry will ever mend.
type permanentError struct {
	index int // of the message at fault in the msgs of Write; -1: not known
	err   error
}

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent says that a message among those given to Write can never be written,
// whatever is tried, and that the sink can't tell which. The batch is split
// until it is found. Nil stays nil.
func Permanent(err error) error { return PermanentAt(-1, err) }

// PermanentAt says that msgs[index] of this call of Write can never be written.
// It is dead-lettered with err as the reason, and the others are tried again
// without it. Nil stays nil.
func PermanentAt(index int, err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{index, err}
}

// AsPermanent tells whether err was made by Permanent or PermanentAt, and which
// message it speaks of (-1: it doesn't say).
func AsPermanent(err error) (index int, ok bool) {
	var p *permanentError
	if !errors.As(err, &p) {
		return -1, false
	}
	return p.index, true
}

// Recovered turns what a sink panicked with into a permanent error: a panic is
// the fault of a message until it is known to be that of all.
func Recovered(panicked any) error {
	return Permanent(fmt.Errorf("the sink panicked: %v", panicked))
}
