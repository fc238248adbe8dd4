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
// replaced, or a file of it is damaged. The server then delivers the stream from where
// the durable began, and ids that are older than the window would be applied again. So
// the durable keeps in its metadata, too, how far it has had all acknowledged. See
// docs/decisions/0029.

// floorKey is where in the durable's metadata that stands.
const floorKey = "dedupd-floor"

// settling is how old an acknowledgement floor must be to be kept. A server that
// crashes may forget what it hasn't written yet, and a new leader what it wasn't told:
// that comes again, is a duplicate within any window, and no loss of the state.
const settling = 2 * time.Minute

// floorRecord says that all up to a sequence was acknowledged at a time of the server's.
type floorRecord struct {
	Floor uint64    `json:"floor"`
	At    time.Time `json:"at"`
}

// floorOf is what a durable keeps of its floor; zero: nothing.
func floorOf(info *jetstream.ConsumerInfo) (n floorRecord) {
	if info == nil || json.Unmarshal([]byte(info.Config.Metadata[floorKey]), &n) != nil {
		return floorRecord{}
	}
	return n
}

// stateLost tells that a durable stands below the floor that it keeps, and that the
// stream has what lies between. Of a stream that deletes what is acknowledged, it hasn't.
func stateLost(stream *jetstream.StreamInfo, info *jetstream.ConsumerInfo) bool {
	kept := floorOf(info).Floor
	return info.AckFloor.Stream < kept && first(&stream.State) <= kept && stream.Config.Retention == jetstream.LimitsPolicy
}

// errStateLost ends a session whose durable has lost its state.
var errStateLost = errors.New("the durable consumer has lost its state, and delivers again what was acknowledged")

// settled remembers the floors of one durable until they are old enough to be kept.
type settled struct {
	after  time.Duration
	seen   []floorSeen
	oldest atomic.Uint64 // the highest floor that is old enough
}

type floorSeen struct {
	floor uint64
	at    time.Time
}

// look learns from the durable's state. Only one goroutine looks.
func (s *settled) observe(info *jetstream.ConsumerInfo, now time.Time) {
	floor := info.AckFloor.Stream
	if last := info.AckFloor.Last; last != nil && info.TimeStamp.Sub(*last) >= s.after {
		s.seen = nil // nothing was acknowledged since
		s.oldest.Store(max(s.oldest.Load(), floor))
		return
	}
	if n := len(s.seen); n == 0 || now.Sub(s.seen[n-1].at) >= s.after/8 {
		s.seen = append(s.seen, floorSeen{floor, now})
	}
	for len(s.seen) > 0 && now.Sub(s.seen[0].at) >= s.after {
		s.oldest.Store(max(s.oldest.Load(), s.seen[0].floor))
		s.seen = s.seen[1:]
	}
}

// due tells that a durable is to keep a higher floor than it does.
func (s *settled) due(info *jetstream.ConsumerInfo) bool {
	floor := s.oldest.Load()
	return floor > floorOf(info).Floor && floor <= info.AckFloor.Stream && !info.TimeStamp.IsZero()
}

// note puts the floor into the metadata that a durable is to have.
func (s *settled) note(info *jetstream.ConsumerInfo, metadata map[string]string) {
	if !s.due(info) {
		return
	}
	if text, err := json.Marshal(floorRecord{s.oldest.Load(), info.TimeStamp.UTC()}); err == nil {
		metadata[floorKey] = string(text)
	}
}

// learnFloor learns from the durable's state what it keeps and is to keep.
func (x *session) learnFloor(info *jetstream.ConsumerInfo, now time.Time) {
	if !x.bound.consumed {
		x.bound.settled.observe(info, now)
	}
	x.setKeptFloor(info)
}

// setKeptFloor learns what the durable keeps. A stream that deletes what is acknowledged
// has nothing of it to deliver.
func (x *session) setKeptFloor(info *jetstream.ConsumerInfo) {
	if !x.bound.consumed {
		x.keptFloor.Store(floorOf(info).Floor)
	}
}

// sure is the position below which the durable has had all acknowledged, as it keeps
// itself; 0: it isn't known.
func (b *binding) acknowledged() int64 {
	if kept := floorOf(b.info).Floor; kept > 0 && b.skips == "" {
		return int64(kept) + 1
	}
	return 0
}

// stateLostError says that a durable has lost its state, and that it can't be proved that
// the stream still has what was acknowledged.
type stateLostError struct {
	stream, durable, source string
	kept                    floorRecord
	why                     error
}

func (e *stateLostError) Error() string {
	return fmt.Sprintf("durable %s has lost its state: it would deliver stream %s again from below %d, up to which all was acknowledged at %s, and %v. "+
		"If the stream has lost nothing, delete the durable, and it is created again where the database stands. If there are other messages by now, delete the durable, then \"dedupd lanes forget --force %s %s\", and the stream is read from where start says",
		e.durable, e.stream, e.kept.Floor, e.kept.At.Format(time.RFC3339), e.why, e.source, laneName)
}

func (e *stateLostError) Unwrap() error { return e.why }

var (
	errOthers  = errors.New("the stream has younger messages there, which are others")
	errNoProof = errors.New("the stream has no message from there on that would prove that what lies below is what was read")
)

// restoreFloor sets a durable that has lost its state back to where it stood. It skips
// nothing: what was acknowledged was committed, and the take has just found that the
// database lacks nothing of it. Only the stream may have lost it, and have given its
// places to other messages since: that is looked at first.
func (x *session) restoreFloor(ctx context.Context) error {
	s, bound := x.source, x.bound
	kept := floorOf(bound.info)
	if err := bound.proveSame(ctx, kept); err != nil {
		return &lane.HoldError{Lane: s.lane(), Err: &stateLostError{s.config.Stream, s.config.Durable, s.config.Name, kept, err}}
	}
	x.log.Warn("the durable consumer has lost its state, and would deliver again what was acknowledged: setting it to where it stood",
		"durable", s.config.Durable, "sequence", kept.Floor+1, "lost_its_state_at", bound.info.AckFloor.Stream+1)
	if err := x.rewind(ctx, int64(kept.Floor)+1); err != nil {
		return fmt.Errorf("set the durable consumer to where it stood: %w", err)
	}
	return errRewound
}

// proveSame returns an error unless the stream's messages up to a floor are those that
// were there when it was kept: a stream stamps its messages in their order, so it is
// enough to look at one from there on.
func (b *binding) proveSame(ctx context.Context, kept floorRecord) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	msg, err := b.stream.GetMsg(ctx, kept.Floor, jetstream.WithGetMsgSubject(">"))
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return errNoProof
	case err != nil:
		return fmt.Errorf("the stream's message there can't be read, which takes the right to $JS.API.STREAM.MSG.GET.%s, or $JS.API.DIRECT.GET.%s if the stream allows direct access: %w", b.durable.config.Stream, b.durable.config.Stream, err)
	case msg.Time.After(kept.At):
		return errOthers
	}
	return nil
}
