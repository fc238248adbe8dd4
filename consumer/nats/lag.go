package nats

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// inspectEvery is how often the durable's state is asked for.
const inspectEvery = 2 * time.Second

// errGone ends a session whose consumer is no longer the one it was bound to.
var errGone = errors.New("the durable consumer was deleted or created anew")

// watch measures the lag, and notices when the consumer or the stream is gone or another
// one of the same name.
func (x *session) watch() {
	for {
		select {
		case <-x.closing.Done():
			return
		case <-x.wake:
		case <-time.After(inspectEvery):
		}
		if x.conn.IsConnected() {
			x.inspect()
		}
	}
}

// inspectSoon has watch inspect the durable now.
func (x *session) inspectSoon() { signal(x.wake) }

func (x *session) inspect() {
	ctx, cancel := context.WithTimeout(x.closing, requestTimeout)
	defer cancel()
	stream, err := x.bound.stream.Info(ctx) // first: see gaps.check
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		x.end(errGone)
		return
	case err != nil:
		x.log.Debug("ask for the stream's state", "error", err)
		return
	}
	switch {
	case stream.State.LastSeq < x.gaps.last.end:
		x.end(errCut)
		return
	case shapeOf(&stream.Config, &x.bound.info.Config) != x.gaps.shape:
		x.end(errReshaped)
		return
	}
	before, asked := x.unacked.Load(), time.Now()
	info, err := x.bound.current(ctx)
	switch {
	case errors.Is(err, errGone):
		x.end(errGone)
	case err != nil:
		x.log.Debug("watch the durable", "error", err)
	case altered(&info.Config), x.bound.durable.filter.other(&info.Config), info.Config.AckWait < x.ackWait:
		x.end(errAltered)
	case stateLost(stream, info):
		x.end(errStateLost)
	default:
		x.learnLimits(&info.Config)
		x.learnPause(info)
		x.checkGaps(ctx, stream, info)
		x.bound.durable.seen(info.AckFloor.Stream)
		x.measure(info, before)
		x.learnFloor(info, asked)
		// Another worker confirmed; or the database went back, and it saw that.
		if x.gate.differs(info) || x.bound.floors.due(info) {
			x.gate.request()
		}
		if drained(info) {
			for _, slot := range x.slots {
				slot.SetCaughtUp(asked)
			}
		}
		x.report() // last: a run until idle ends once nothing is left, and its heartbeat has what was set by then
		x.tellReady()
	}
}

// measure learns from the durable's state. Messages that were delivered to a worker that
// is gone count as lag: they come again after their ack wait. What is outstanding here
// changes while the server answers; hence before.
func (x *session) measure(info *jetstream.ConsumerInfo, before int64) {
	x.pending.Store(int64(info.NumPending))
	floor := info.AckFloor.Stream + 1
	x.floor.Store(&ackFloor{int64(floor), x.arrivals.since(floor)})
	x.foreign.Store(max(0, int64(info.NumAckPending)-max(before, x.unacked.Load())))
	x.gate.setLimit(info.Config.MaxAckPending, x.foreign.Load())
}

// drained reports whether everything that the stream held for us was committed, by this
// worker or another: an acknowledgement comes after the commit. The lag says less. It
// subtracts what is outstanding here, a count that changes while the server answers, so
// that another worker's messages may pass for ours.
func drained(info *jetstream.ConsumerInfo) bool {
	return info.NumPending == 0 && info.NumAckPending == 0
}

// lag is how many messages are not yet in a slot.
func (x *session) lag() int64 { return x.pending.Load() + x.foreign.Load() + x.waiting.Load() }

// report tells all slots, for each of them is caught up only by itself.
func (x *session) report() {
	n := x.lag()
	for _, slot := range x.slots {
		slot.SetLag(n)
	}
}
