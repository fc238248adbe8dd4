package nats

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
)

// errBack ends a session whose stream lost its end: the next one finds out what it
// means for the lane.
var errBack = errors.New("the stream ends before what it had")

// backError says that a stream has lost what was read of it.
type backError struct {
	stream, durable, source string
	at, position            int64
}

func (e *backError) Error() string {
	return fmt.Sprintf("stream %s has lost its end from position %d on, below the lane's position %d: it is an older copy, or a disk is gone, and what comes there are other messages, of which the durable may pass over some. "+
		"Delete the durable %s, then \"dedupd lanes forget --force %s %s\", and the stream is read from where start says, or from where a durable begins that you make with a start sequence; what is still claimed is a duplicate",
		e.stream, e.at, e.position, e.durable, e.source, laneName)
}

// wentBack holds a queue whose stream ends below what was read of it: an older copy was
// put in its place, or the server has lost what it hadn't written yet. The server gives
// the same sequences to other messages then. A durable that stands above passes over
// them, and those that are known by their place would pass for what stood there.
//
// That is kept in the lane's row before anything else: once the stream has grown past
// the position, nothing else tells of it. It stays until somebody lets the lane go, for
// nobody knows how far what is there now was read.
func (s *Source) wentBack(ctx context.Context, in *consumer.Session, bound *binding, taken lane.Assignment, stream *jetstream.StreamInfo) error {
	at := taken.Cut
	if end := int64(stream.State.LastSeq) + 1; end < taken.Next && (at < 0 || end < at) {
		if at < 0 {
			if err := s.staysBack(ctx, in, bound, taken.Next); err != nil {
				return err
			}
		}
		at = end
		if err := in.ReportLogCut(ctx, lane.LogCut{Lane: s.lane(), Epoch: taken.Epoch, At: at}); err != nil {
			return err
		}
	}
	if at < 0 {
		return nil
	}
	return &lane.HoldError{Lane: s.lane(), Err: &backError{s.config.Stream, s.config.Durable, s.config.Name, at, taken.Next}}
}

// settles is for how long a leader of the stream may not know all that it has: one that
// has just been elected, or one that doesn't know yet that it was replaced.
const settles = 15 * time.Second

// staysBack waits until a stream's end is surely below a position. errBack: it isn't.
func (s *Source) staysBack(ctx context.Context, in *consumer.Session, bound *binding, position int64) error {
	in.NotReady(errBack)
	for begun := time.Now(); time.Since(begun) < settles; {
		wait.For(ctx, time.Second)
		info, err := bound.stream.Info(ctx)
		switch {
		case err != nil:
			return fmt.Errorf("stream %s: %w", s.config.Stream, err)
		case int64(info.State.LastSeq)+1 >= position:
			return errBack
		}
	}
	return nil
}
