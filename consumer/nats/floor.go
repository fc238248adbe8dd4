package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/lane"
)

// A durable may lose its state and keep its configuration: its server's disk is
// replaced, or one of its files is damaged. The server then delivers the stream from
// where the durable began, and ids older than the window would be applied again. So the
// durable also keeps in its metadata up to where everything was acknowledged. See
// docs/decisions/0029.

// floorKey is the key of the floor in the durable's metadata.
const floorKey = "dedupd-floor"

// floorAge is how old a floor must be to be kept. A server that crashes may forget what
// it hasn't written yet, and a new leader what it wasn't told: that comes again and is a
// duplicate within any window, but the state isn't lost.
const floorAge = 2 * time.Minute

// floorRecord says that everything up to a sequence was acknowledged at a time of the
// server's.
type floorRecord struct {
	Floor uint64    `json:"floor"`
	At    time.Time `json:"at"`
}

// floorOf is the floor that a durable keeps; zero: none.
func floorOf(info *jetstream.ConsumerInfo) (n floorRecord) {
	if info == nil || json.Unmarshal([]byte(info.Config.Metadata[floorKey]), &n) != nil {
		return floorRecord{}
	}
	return n
}

// stateLost reports whether a durable is below the floor that it keeps, and the stream
// still has what is between. A stream that deletes what is acknowledged hasn't.
func stateLost(stream *jetstream.StreamInfo, info *jetstream.ConsumerInfo) bool {
	kept := floorOf(info).Floor
	return info.AckFloor.Stream < kept && first(&stream.State) <= kept && stream.Config.Retention == jetstream.LimitsPolicy
}

// errStateLost ends a session whose durable has lost its state.
var errStateLost = errors.New("the durable consumer has lost its state, and delivers again what was acknowledged")

// floors remembers the floors of one durable until they are old enough to be kept.
type floors struct {
	after  time.Duration
	seen   []floorSeen
	oldest atomic.Uint64 // the highest floor that is old enough
}

type floorSeen struct {
	floor uint64
	at    time.Time
}

// observe learns from the durable's state. Only one goroutine calls it.
func (f *floors) observe(info *jetstream.ConsumerInfo, now time.Time) {
	floor := info.AckFloor.Stream
	if last := info.AckFloor.Last; last != nil && info.TimeStamp.Sub(*last) >= f.after {
		f.seen = nil // nothing was acknowledged since
		f.oldest.Store(max(f.oldest.Load(), floor))
		return
	}
	if n := len(f.seen); n == 0 || now.Sub(f.seen[n-1].at) >= f.after/8 {
		f.seen = append(f.seen, floorSeen{floor, now})
	}
	for len(f.seen) > 0 && now.Sub(f.seen[0].at) >= f.after {
		f.oldest.Store(max(f.oldest.Load(), f.seen[0].floor))
		f.seen = f.seen[1:]
	}
}

// due reports whether the durable has to keep a higher floor than it does.
func (f *floors) due(info *jetstream.ConsumerInfo) bool {
	floor := f.oldest.Load()
	return floor > floorOf(info).Floor && floor <= info.AckFloor.Stream && !info.TimeStamp.IsZero()
}

// note puts the floor into the metadata that the durable will have.
func (f *floors) note(info *jetstream.ConsumerInfo, metadata map[string]string) {
	if !f.due(info) {
		return
	}
	if text, err := json.Marshal(floorRecord{f.oldest.Load(), info.TimeStamp.UTC()}); err == nil {
		metadata[floorKey] = string(text)
	}
}

// learnFloor learns from the durable's state which floor it has and keeps.
func (x *session) learnFloor(info *jetstream.ConsumerInfo, now time.Time) {
	if !x.bound.consumed {
		x.bound.floors.observe(info, now)
	}
	x.setKeptFloor(info)
}

// setKeptFloor remembers the floor that the durable keeps. A stream that deletes what is
// acknowledged has nothing below it to deliver.
func (x *session) setKeptFloor(info *jetstream.ConsumerInfo) {
	if !x.bound.consumed {
		x.keptFloor.Store(floorOf(info).Floor)
	}
}

// acknowledged is the position below which, as the durable itself keeps, everything was
// acknowledged; 0: not known.
func (b *binding) acknowledged() int64 {
	if kept := floorOf(b.info).Floor; kept > 0 && b.skips == "" {
		return int64(kept) + 1
	}
	return 0
}

// stateLostError says that a durable has lost its state, and that nothing proves that
// the stream still has what was acknowledged.
type stateLostError struct {
	stream, durable, source string
	kept                    floorRecord
	why                     error
}

func (e *stateLostError) Error() string {
	return fmt.Sprintf("durable %s has lost its state: it would deliver stream %s again from below %d, up to where everything was acknowledged at %s, and %v. "+
		"If the stream has lost nothing, delete the durable: it is created again at the database's position. If there are other messages now, delete the durable, then \"dedupd lanes forget --force %s %s\", and the stream is read from where start says",
		e.durable, e.stream, e.kept.Floor, e.kept.At.Format(time.RFC3339), e.why, e.source, laneName)
}

func (e *stateLostError) Unwrap() error { return e.why }

var (
	errOthers  = errors.New("the stream has younger messages there, which are others")
	errNoProof = errors.New("the stream has no message from there on that would prove that the ones below are those that were read")
)

// restoreFloor sets a durable that has lost its state back to where it was. That skips
// nothing: what was acknowledged was committed, and Acquire has just found that the
// database lacks none of it. Only the stream may have lost it, and given its sequences
// to other messages: that is checked first.
func (x *session) restoreFloor(ctx context.Context) error {
	s, bound := x.source, x.bound
	kept := floorOf(bound.info)
	if err := bound.proveSame(ctx, kept); err != nil {
		return &lane.HoldError{Lane: s.lane(), Err: &stateLostError{s.config.Stream, s.config.Durable, s.config.Name, kept, err}}
	}
	x.log.Warn("the durable consumer has lost its state, and would deliver again what was acknowledged: setting it back to where it was",
		"durable", s.config.Durable, "sequence", kept.Floor+1, "lost_its_state_at", bound.info.AckFloor.Stream+1)
	if err := x.rewind(ctx, int64(kept.Floor)+1); err != nil {
		return fmt.Errorf("set the durable consumer back to where it was: %w", err)
	}
	return errRewound
}

// proveSame returns an error unless the stream's messages up to a floor are those that
// were there when it was recorded. A stream stamps its messages in their order, so it is
// enough to look at one from the floor on.
func (b *binding) proveSame(ctx context.Context, kept floorRecord) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	msg, err := b.stream.GetMsg(ctx, kept.Floor, jetstream.WithGetMsgSubject(">"))
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return errNoProof
	case err != nil:
		return fmt.Errorf("the stream's message there can't be read, which requires the right to $JS.API.STREAM.MSG.GET.%s, or $JS.API.DIRECT.GET.%s if the stream allows direct access: %w", b.durable.config.Stream, b.durable.config.Stream, err)
	case msg.Time.After(kept.At):
		return errOthers
	}
	return nil
}
