package nats

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
)

// gaps notices what the stream discards before it was read: by its limits, or when
// somebody purges it. JetStream doesn't report that. So each check compares the stream's
// first sequence with how far the durable had delivered at the check before: what is
// between was either delivered since, or is lost.
//
// If the durable takes the whole stream, the delivered messages are known by their
// number, and so are the lost ones. With a filter nobody knows which of the discarded
// positions it would have matched. Then the messages count that were waiting at the check
// before: what came and was discarded between two checks isn't noticed.
type gaps struct {
	shape

	// Only the goroutine that checks uses these.
	last       snapshot
	horizon    uint64 // all up to here that the durable takes was delivered
	unrecorded gap    // found, and not yet recorded in the database

	redelivered atomic.Int64 // messages redelivered to this worker since the last check

	mu        sync.Mutex
	abandoned map[uint64]struct{} // abandoned by this worker, for the server to deliver again
	holes     gap                 // in the middle of the stream, since the last check
	passed    passage
}

// shape is what a stream discards by its configuration.
type shape struct {
	whole bool // the durable takes every message of the stream
	// superseding: the stream discards in its middle, too. It keeps only the last
	// messages of each subject, or producers may roll a subject up, or give messages a
	// time to live.
	superseding bool
	// consumed: the stream deletes what is acknowledged.
	consumed bool
}

func shapeOf(stream *jetstream.StreamConfig, c *jetstream.ConsumerConfig) shape {
	return shape{
		whole:       takesAll(stream, c),
		superseding: stream.MaxMsgsPerSubject > 0 || stream.AllowRollup || stream.AllowMsgTTL,
		consumed:    stream.Retention != jetstream.LimitsPolicy,
	}
}

// errReshaped ends a session whose stream discards by other rules now.
var errReshaped = errors.New("somebody changed the stream's configuration")

// gap is what is missing.
type gap struct {
	from, next uint64 // the sequences; none: both are the same
	messages   int64  // how many of them were messages of the durable, at most
}

func (g gap) empty() bool { return g.next <= g.from }

func (g gap) and(other gap) gap {
	switch {
	case other.empty():
		return g
	case g.empty():
		return other
	}
	return gap{min(g.from, other.from), max(g.next, other.next), g.messages + other.messages}
}

// snapshot is what a check saw of stream and durable.
type snapshot struct {
	end       uint64 // the stream's last sequence
	delivered uint64 // the highest sequence that was delivered
	count     uint64 // deliveries so far
	pending   uint64 // messages that were waiting
}

// passage is the last message that came to this worker.
type passage struct {
	count uint64 // its number among the durable's deliveries
	top   uint64 // the highest sequence that came for the first time
}

// newGaps begins with a durable as it stands.
func newGaps(stream *jetstream.StreamInfo, info *jetstream.ConsumerInfo) *gaps {
	g := &gaps{
		shape:   shapeOf(&stream.Config, &info.Config),
		horizon: max(info.Delivered.Stream, first(&stream.State)-1),
		last:    snapshot{stream.State.LastSeq, info.Delivered.Stream, info.Delivered.Consumer, info.NumPending},
	}
	g.passed = passage{info.Delivered.Consumer, g.horizon}
	return g
}

// takesAll reports whether a durable's filter leaves nothing out.
func takesAll(stream *jetstream.StreamConfig, c *jetstream.ConsumerConfig) bool {
	filter := subjectsOf(c)
	return len(filter) == 0 || slices.Contains(filter, ">") ||
		!slices.ContainsFunc(stream.Subjects, func(s string) bool { return !slices.Contains(filter, s) })
}

// first is the first sequence that is there, or will be.
func first(s *jetstream.StreamState) uint64 {
	if s.Msgs == 0 {
		return s.LastSeq + 1
	}
	return max(s.FirstSeq, 1)
}

// check compares with the last check. The stream's state must be older than the durable's.
func (g *gaps) check(stream *jetstream.StreamState, info *jetstream.ConsumerInfo) gap {
	first, was, horizon := first(stream), g.last, g.horizon
	now := snapshot{stream.LastSeq, info.Delivered.Stream, info.Delivered.Consumer, info.NumPending}
	came := max(0, int64(now.count)-int64(was.count)-g.redelivered.Swap(0))
	g.last = now
	g.horizon = max(horizon, now.delivered, first-1)
	if !g.whole && now.pending == 0 {
		g.horizon = max(g.horizon, now.end) // what doesn't match needn't be delivered
	}
	found := g.lostAbandoned(first, info.AckFloor.Stream)
	if first <= horizon+1 {
		return found
	}
	missing := gap{from: horizon + 1, next: first}
	discarded := int64(first - 1 - horizon)
	if g.whole {
		passed := int64(max(now.delivered, first-1) - horizon)
		missing.messages = min(discarded, passed-came)
	} else {
		waited, arrived := int64(was.pending), int64(now.end)-int64(was.end)
		surely := waited - came - int64(now.pending) // those that arrived hide as many
		// Where the stream deletes what is acknowledged, other consumers' messages go, too:
		// positions tell nothing there.
		if missing.messages = min(discarded, surely); surely <= 0 && !g.consumed {
			missing.messages = min(discarded, waited-came, surely+arrived)
		}
	}
	if missing.messages > 0 {
		found = found.and(missing)
	}
	return found
}

// lostAbandoned finds the messages that this worker abandoned and that the stream has
// discarded since: nobody can deliver them again. It also returns the holes.
func (g *gaps) lostAbandoned(first, floor uint64) (found gap) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for sequence := range g.abandoned {
		if sequence < first {
			found = found.and(gap{sequence, sequence + 1, 1})
		}
		if sequence < first || sequence <= floor {
			delete(g.abandoned, sequence)
		}
	}
	found, g.holes = found.and(g.holes), gap{}
	return found
}

// abandon records a message that this worker abandoned. Where the stream deletes what is
// acknowledged, nobody can tell whether another worker has applied it.
func (g *gaps) abandon(sequence uint64) {
	if g.consumed {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.abandoned == nil {
		g.abandoned = make(map[uint64]struct{})
	}
	g.abandoned[sequence] = struct{}{}
}

// record records a delivery.
func (g *gaps) record(meta *natsgo.MsgMetadata) {
	if meta.NumDelivered > 1 {
		g.redelivered.Add(1)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.abandoned, meta.Sequence.Stream)
	next := meta.Sequence.Consumer == g.passed.count+1
	g.passed.count = meta.Sequence.Consumer
	if meta.NumDelivered > 1 {
		return
	}
	// Between two deliveries that follow each other, the stream had nothing else.
	if at := meta.Sequence.Stream; g.superseding && g.whole && next && at > g.passed.top+1 {
		g.holes = g.holes.and(gap{g.passed.top + 1, at, int64(at - g.passed.top - 1)})
	}
	g.passed.top = meta.Sequence.Stream
}

// gapError says that the stream has discarded what a queue was to read.
type gapError struct {
	stream, source string
	gap            lane.Gap
}

func (e *gapError) Error() string {
	return fmt.Sprintf("data is lost: stream %s has discarded positions %d to %d, of which not all were read; on_gap: skip, or dedupd lanes set-position %s %s %d or above, goes on with what is left",
		e.stream, e.gap.From, e.gap.Next-1, e.source, laneName, e.gap.Next)
}

// missing records a gap in the database, so that it outlives this process, and skips it
// if that is allowed. Otherwise the error holds the queue. An empty gap asks for what was
// recorded before. messages is how many are missing, at most.
func (x *session) missing(ctx context.Context, found lane.Gap, messages int64) error {
	c := &x.source.config
	open, err := x.in.ReportGap(ctx, x.source.lane(), found)
	if err != nil {
		return err
	}
	if open.Positions() == 0 {
		if found.Positions() > 0 && found.Before.IsZero() { // else it was no gap
			x.log.Info("another worker found the same gap, and it is accepted", "from", found.From, "next", found.Next)
		}
		return nil
	}
	if c.OnGap != policy.GapSkip {
		return &lane.HoldError{Lane: x.source.lane(), Err: &gapError{c.Stream, c.Name, open}}
	}
	if err := x.in.AcceptGap(ctx, x.source.lane(), open.Next); err != nil {
		return err
	}
	if messages <= 0 { // recorded before
		messages = open.Positions()
	}
	x.in.Skipped(messages)
	x.log.Warn("the stream has discarded messages before they were read: skipping them",
		"stream", c.Stream, "from", open.From, "next", open.Next, "messages_at_most", messages)
	return nil
}

// missingAtStart looks for what the stream discarded while nobody read: everything above
// the row's position was never committed. With a filter the lane's clock counts, too:
// what is older was read. A lane that has never moved has missed nothing, and where the
// stream deletes what is acknowledged, positions tell nothing.
func (x *session) missingAtStart(ctx context.Context, info *jetstream.StreamInfo) error {
	var found lane.Gap
	next, first := max(x.assignment.Next, x.assignment.BrokerPosition), int64(first(&info.State))
	if !x.bound.consumed && x.assignment.Next > 0 && next < first {
		found = lane.Gap{From: next, Next: first}
		if !takesAll(&info.Config, &x.bound.info.Config) {
			found.Before = info.State.FirstTime
			if info.State.Msgs == 0 {
				found.Before = info.State.LastTime
			}
		}
	}
	return x.missing(ctx, found, found.Positions())
}

// checkGaps deals with what is missing since the last check. A held queue fetches nothing
// until somebody accepts the gap; what is in hand is still tried, for the stream may no
// longer have it.
func (x *session) checkGaps(ctx context.Context, stream *jetstream.StreamInfo, info *jetstream.ConsumerInfo) {
	g := x.gaps
	found := g.unrecorded.and(g.check(&stream.State, info))
	halted := x.halted.Load()
	if found.empty() && !halted {
		return
	}
	err := x.missing(ctx, lane.Gap{From: int64(found.from), Next: int64(found.next)}, found.messages)
	switch {
	case err == nil:
		g.unrecorded = gap{}
		if halted {
			x.halted.Store(false)
			x.in.Hold(x.source.lane(), nil)
			x.log.Info("the gap is accepted: reading what is left")
		}
	case isHold(err):
		g.unrecorded = gap{}
		x.halted.Store(true)
		x.in.Hold(x.source.lane(), err)
		if !found.empty() {
			x.log.Warn("the queue is held; what is in hand is still tried", "error", err)
		}
	default:
		g.unrecorded = found
		x.log.Warn("messages are missing in the stream, and the database can't record that; trying again", "from", found.from, "next", found.next, "error", err)
	}
}
