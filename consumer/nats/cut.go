package nats

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
)

// errCut ends a session whose stream lost its end: the next one finds out what that
// means for the lane.
var errCut = errors.New("the stream ends before what it had")

// cutError says that a stream has lost what was read of it.
type cutError struct {
	stream, durable, source string
	at, position            int64
}

func (e *cutError) Error() string {
	return fmt.Sprintf("stream %s has lost its end from position %d on, below the lane's position %d: it is an older copy, or a disk is gone. Other messages come there now, and the durable may pass over some of them. "+
		"Delete the durable %s, then \"dedupd lanes forget --force %s %s\": the stream is read from where start says, or from the start sequence of a durable that you create; what is still claimed is a duplicate",
		e.stream, e.at, e.position, e.durable, e.source, laneName)
}

// checkCut holds a queue whose stream ends below what was read of it: an older copy took
// its place, or the server lost what it hadn't written yet. The server then gives the
// same sequences to other messages. A durable above them passes over them, and those
// whose id is their position would pass for duplicates.
//
// The cut is recorded in the lane's row before anything else: once the stream has grown
// past the position, nothing else shows it. It stays until somebody forgets the lane,
// for nobody knows how far what is there now was read.
func (x *session) checkCut(ctx context.Context, stream *jetstream.StreamInfo) error {
	s, got := x.source, x.assignment
	at := got.Cut
	if end := int64(stream.State.LastSeq) + 1; end < got.Next && (at < 0 || end < at) {
		if at < 0 {
			if err := x.confirmCut(ctx, got.Next); err != nil {
				return err
			}
		}
		at = end
		if err := x.in.ReportLogCut(ctx, lane.LogCut{Lane: s.lane(), Epoch: got.Epoch, At: at}); err != nil {
			return err
		}
	}
	if at < 0 {
		return nil
	}
	return &lane.HoldError{Lane: s.lane(), Err: &cutError{s.config.Stream, s.config.Durable, s.config.Name, at, got.Next}}
}

// settleTime is for how long a leader of the stream may not know its end: it has just
// been elected, or doesn't know yet that it was replaced.
const settleTime = 15 * time.Second

// confirmCut waits until the stream's end is surely below a position. errCut: it isn't.
func (x *session) confirmCut(ctx context.Context, position int64) error {
	x.in.NotReady(errCut)
	for begun := time.Now(); time.Since(begun) < settleTime; {
		wait.For(ctx, time.Second)
		info, err := x.bound.stream.Info(ctx)
		switch {
		case err != nil:
			return fmt.Errorf("stream %s: %w", x.source.config.Stream, err)
		case int64(info.State.LastSeq)+1 >= position:
			return errCut
		}
	}
	return nil
}
