package nats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
)

// What to do when the stream has discarded messages before they were read.
const (
	// StopOnGap holds the queue until somebody accepts the gap.
	StopOnGap = "stop"
	// SkipGap counts what is missing and goes on.
	SkipGap = "skip"
)

// gaps notices what the stream discards before it was read: by its limits, or when
// somebody purges it. JetStream tells nobody. So each look compares the stream's first
// sequence with how far the durable had delivered at the look before: what lies between
// was either delivered meanwhile, or is lost.
//
// Of a durable that takes the whole stream the delivered messages are known by their
// number, and so are the lost ones. With a filter nobody knows which of the discarded
// positions the filter would have matched. Then it goes by the messages that were
// waiting at the look before: what came and was discarded between two looks isn't seen.
type gaps struct {
	shape

	// Only the goroutine that looks uses these.
	last    look
	horizon uint64 // all up to here that the durable takes was delivered
	unnoted gap    // found, and not yet in the database

	again atomic.Int64 // messages that came to this worker again since the last look

	mu     sync.Mutex
	left   map[uint64]struct{} // given up by this worker, for the server to deliver again
	holes  gap                 // in the middle of the stream, since the last look
	passed passage
}

// shape is what a stream's configuration says of what it discards.
type shape struct {
	whole bool // the durable takes every message of the stream
	// superseding tells that the stream discards in its middle, too: it keeps only the
	// last messages of each subject, or its producers may roll a subject up, or give
	// messages a time to live.
	superseding bool
	// consumed tells that the stream discards what is acknowledged.
	consumed bool
}

func shapeOf(stream *jetstream.StreamConfig, c *jetstream.ConsumerConfig) shape {
	return shape{
		whole:       takesAll(stream, c),
		superseding: stream.MaxMsgsPerSubject > 0 || stream.AllowRollup || stream.AllowMsgTTL,
		consumed:    stream.Retention != jetstream.LimitsPolicy,
	}
}

// errReshaped ends a session whose stream's configuration says something else by now.
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

// look is what was seen of stream and durable.
type look struct {
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
		last:    look{stream.State.LastSeq, info.Delivered.Stream, info.Delivered.Consumer, info.NumPending},
	}
	g.passed = passage{info.Delivered.Consumer, g.horizon}
	return g
}

// takesAll tells whether a durable's filter leaves nothing out.
func takesAll(stream *jetstream.StreamConfig, c *jetstream.ConsumerConfig) bool {
	filter := c.FilterSubjects
	if c.FilterSubject != "" {
		filter = append(slices.Clone(filter), c.FilterSubject)
	}
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

// look compares. The stream's state must be older than the durable's.
func (g *gaps) look(stream *jetstream.StreamState, info *jetstream.ConsumerInfo) gap {
	first, was, horizon := first(stream), g.last, g.horizon
	now := look{stream.LastSeq, info.Delivered.Stream, info.Delivered.Consumer, info.NumPending}
	came := max(0, int64(now.count)-int64(was.count)-g.again.Swap(0))
	g.last = now
	g.horizon = max(horizon, now.delivered, first-1)
	if !g.whole && now.pending == 0 {
		g.horizon = max(g.horizon, now.end) // what doesn't match needn't be delivered
	}
	found := g.givenUp(first, info.AckFloor.Stream)
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
		// What is acknowledged of other filters' messages goes, too, where that is
		// discarded: positions tell nothing there.
		if missing.messages = min(discarded, surely); surely <= 0 && !g.consumed {
			missing.messages = min(discarded, waited-came, surely+arrived)
		}
	}
	if missing.messages > 0 {
		found = found.and(missing)
	}
	return found
}

// givenUp finds the messages that this worker has given up and that the stream has
// discarded since: nobody can deliver them again. It also returns the holes.
func (g *gaps) givenUp(first, floor uint64) (found gap) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for sequence := range g.left {
		if sequence < first {
			found = found.and(gap{sequence, sequence + 1, 1})
		}
		if sequence < first || sequence <= floor {
			delete(g.left, sequence)
		}
	}
	found, g.holes = found.and(g.holes), gap{}
	return found
}

// leave notes a message that this worker has given up. Of a stream that discards what
// is acknowledged nobody can tell whether another one has applied it.
func (g *gaps) leave(sequence uint64) {
	if g.consumed {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left == nil {
		g.left = make(map[uint64]struct{})
	}
	g.left[sequence] = struct{}{}
}

// pass notes a message that came.
func (g *gaps) pass(meta *jetstream.MsgMetadata) {
	if meta.NumDelivered > 1 {
		g.again.Add(1)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.left, meta.Sequence.Stream)
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

// missing has a gap noted in the database, so that it isn't forgotten with this
// process, and skips it if that is allowed. Else the error holds the queue. An empty
// one asks for what was noted before. messages is how many are missing, at most.
func (s *Source) missing(ctx context.Context, in *consumer.Session, log *slog.Logger, found lane.Gap, messages int64) error {
	noted, err := in.ReportGap(ctx, s.lane(), found)
	if err != nil {
		return err
	}
	if noted.Positions() == 0 {
		if found.Positions() > 0 && found.Before.IsZero() { // else it was no gap
			log.Info("what the stream has discarded was found by another worker, too, and is accepted", "from", found.From, "next", found.Next)
		}
		return nil
	}
	if s.config.OnGap != SkipGap {
		return &lane.HoldError{Lane: s.lane(), Err: &gapError{s.config.Stream, s.config.Name, noted}}
	}
	if err := in.AcceptGap(ctx, s.lane(), noted.Next); err != nil {
		return err
	}
	if messages <= 0 { // noted before
		messages = noted.Positions()
	}
	in.Skipped(messages)
	log.Warn("the stream has discarded messages before they were read: skipping them",
		"stream", s.config.Stream, "from", noted.From, "next", noted.Next, "messages_at_most", messages)
	return nil
}

// missingAtStart looks for what the stream has discarded while nobody read: all above
// the row's position was never committed. With a filter it goes by the lane's clock,
// too: what is older was read. A lane that has never moved has missed nothing, and of a
// stream that deletes what is acknowledged the positions tell nothing.
func (s *Source) missingAtStart(ctx context.Context, in *consumer.Session, log *slog.Logger, bound *binding, taken lane.Assignment, info *jetstream.StreamInfo) error {
	var found lane.Gap
	next, first := max(taken.Next, taken.BrokerPosition), int64(first(&info.State))
	if !bound.consumed && taken.Next > 0 && next < first {
		found = lane.Gap{From: next, Next: first}
		if !takesAll(&info.Config, &bound.info.Config) {
			found.Before = info.State.FirstTime
			if info.State.Msgs == 0 {
				found.Before = info.State.LastTime
			}
		}
	}
	return s.missing(ctx, in, log, found, found.Positions())
}

// lookForGaps deals with what is missing since the last look. A queue that is held
// fetches nothing until somebody accepts the gap; what is in hand is still tried, for
// the stream may no longer have it.
func (x *session) lookForGaps(ctx context.Context, stream *jetstream.StreamInfo, info *jetstream.ConsumerInfo) {
	g := x.gaps
	found := g.unnoted.and(g.look(&stream.State, info))
	halted := x.halted.Load()
	if found.empty() && !halted {
		return
	}
	err := x.source.missing(ctx, x.in, x.log, lane.Gap{From: int64(found.from), Next: int64(found.next)}, found.messages)
	switch {
	case err == nil:
		g.unnoted = gap{}
		if halted {
			x.halted.Store(false)
			x.in.Hold(x.source.lane(), nil)
			x.log.Info("the gap is accepted: reading what is left")
		}
	case isHold(err):
		g.unnoted = gap{}
		x.halted.Store(true)
		x.in.Hold(x.source.lane(), err)
		if !found.empty() {
			x.log.Warn("the queue is held; what is in hand is still tried", "error", err)
		}
	default:
		g.unnoted = found
		x.log.Warn("messages are missing in the stream, which can't be noted in the database; trying again", "from", found.from, "next", found.next, "error", err)
	}
}
