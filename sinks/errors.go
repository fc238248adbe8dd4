package sinks

import (
	"errors"
	"fmt"
)

// permanentError marks an error that no retry will fix.
type permanentError struct {
	index int // of the message at fault in Write's msgs; -1: not known
	err   error
}

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent says that one of the messages given to Write can never be written, and that the
// sink doesn't know which. The batch is split until it is found. Nil stays nil.
func Permanent(err error) error { return PermanentAt(-1, err) }

// PermanentAt says that msgs[index] of this call of Write can never be written. It is
// dead-lettered with err as the reason, and the others are tried again without it. Nil
// stays nil.
//
// A sink that names all bad messages of a batch at once, joined by errors.Join, saves a
// transaction for each.
func PermanentAt(index int, err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{index, err}
}

// holdError marks an error that holds a message's lane.
type holdError struct {
	index int // of the message in Write's msgs
	err   error
}

func (e *holdError) Error() string { return e.err.Error() }
func (e *holdError) Unwrap() error { return e.err }

// HoldAt says that msgs[index] of this call of Write can't be written until somebody changes
// something, and that nothing behind it in its lane may be written before: a policy of "stop".
// This call's transaction is rolled back. What comes before the message in its lane is then
// written by another call, and the lane is held; other lanes go on. A queue has no order: all
// of its other messages are written, unless more than 64 hold it. Nil stays nil.
//
// Any other error that is neither permanent nor passing holds all lanes of the transaction.
func HoldAt(index int, err error) error {
	if err == nil {
		return nil
	}
	return &holdError{index, err}
}

// AsHold reports whether err was made by HoldAt, and for which message and why.
func AsHold(err error) (index int, why error, ok bool) {
	var h *holdError
	if !errors.As(err, &h) {
		return -1, nil, false
	}
	return h.index, h.err, true
}

// AsPermanent reports whether err was made by Permanent or PermanentAt, and the index of the
// message at fault (-1: not known).
func AsPermanent(err error) (index int, ok bool) {
	var p *permanentError
	if !errors.As(err, &p) {
		return -1, false
	}
	return p.index, true
}

// AllPermanent returns the reasons that err gives by PermanentAt, by the indexes of their
// messages. It is empty if err names none.
func AllPermanent(err error) map[int]error {
	found := make(map[int]error)
	collectPermanent(err, found)
	return found
}

func collectPermanent(err error, into map[int]error) {
	switch e := err.(type) { //nolint:errorlint // it walks the wrapping itself
	case nil:
	case *permanentError:
		if _, ok := into[e.index]; !ok && e.index >= 0 {
			into[e.index] = e.err
		}
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			collectPermanent(err, into)
		}
	case interface{ Unwrap() error }:
		collectPermanent(e.Unwrap(), into)
	}
}

// Recovered makes a permanent error of a sink's panic: one message is taken to be at fault
// until all are known to be.
func Recovered(panicked any) error {
	return Permanent(fmt.Errorf("the sink panicked: %v", panicked))
}
