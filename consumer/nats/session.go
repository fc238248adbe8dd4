package nats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// laneName is the one lane of a queue, in the database's books.
const laneName = "queue"

// session reads one durable consumer of one stream. It outlives a lost connection, so
// that what is in its transactions can still be acknowledged.
//
// Three groups of goroutines share it: fetch and the slots (offer) read, watch asks for
// the durable's state, and the acker, progress and confirmAll tell the server. What
// they share is atomic or has a lock of its own; what one of them alone uses says so.
type session struct {
	source     *Source
	in         *consumer.Session
	log        *slog.Logger
	conn       *natsgo.Conn
	bound      *binding
	assignment lane.Assignment
	ackWait    time.Duration

	arrived     chan delivery    // fetched, not yet offered
	outstanding outstanding      // delivered to us and not yet acknowledged
	gate        gate             // committed, and not yet to be acknowledged
	slots       []*consumer.Lane // lanes of the worker, one for each writer
	acks        *acker
	// closing is the context that ends with the session: what is abandoned from
	// then on is given back to the server at once.
	closing context.Context
	end     context.CancelCauseFunc
	wake    chan struct{} // watch shall inspect the durable now

	gaps        *gaps
	halted      atomic.Bool                  // by a gap: nothing is fetched
	limits      atomic.Pointer[pull]         // the most that the durable lets a pull ask for
	refusals    refusals                     // of fetch alone
	pullFailure atomic.Pointer[refusedError] // nil: pulls are answered
	paused      atomic.Pointer[pausedError]  // nil: the durable delivers

	waiting   atomic.Int64 // messages in arrived, or on the way to a slot
	floor     atomic.Pointer[ackFloor]
	keptFloor atomic.Uint64 // the floor in the durable's metadata
	arrivals  arrivals
	unacked   atomic.Int64 // messages delivered to us and not yet acknowledged
	pending   atomic.Int64 // messages the server has not delivered to anybody yet
	foreign   atomic.Int64 // messages delivered, but neither acknowledged nor with us
}

// ackFloor is the durable's floor when it was last inspected.
type ackFloor struct {
	position int64 // all below this position was acknowledged
	// since is a time that nothing which the server may still deliver is older than;
	// zero: not known.
	since time.Time
}

// delivery is one message of a fetch.
type delivery struct {
	msg      *natsgo.Msg
	ack      ackRef
	meta     *natsgo.MsgMetadata
	bytes    int64
	received time.Time
}

// session reads until ctx ends or the consumer is no longer the one that was
// bound; the error says why.
func (s *Source) session(ctx context.Context, in *consumer.Session, log *slog.Logger, conn *natsgo.Conn, bound *binding) error {
	x := &session{source: s, in: in, log: log, conn: conn, bound: bound}
	stream, err := x.acquire(ctx)
	if err != nil {
		return err
	}
	in.Hold(s.lane(), nil)
	closing, end := context.WithCancelCause(ctx)
	defer end(nil)
	x.closing, x.end, x.wake = closing, end, make(chan struct{}, 1)
	x.ackWait = bound.info.Config.AckWait
	x.gaps = newGaps(stream, bound.info)
	x.arrived = make(chan delivery, in.MaxMessages())
	x.learnFloor(bound.info, time.Now())
	x.learnLimits(&bound.info.Config)
	x.acks = newAcker(in, log, conn, x.acked)
	x.gate.open(x.assignment.Checkpoint, bound.info)
	begun := time.Now()
	x.run()
	bound.read = time.Since(begun)
	return context.Cause(closing)
}

// acquire acquires the lane, and makes sure that the durable and the stream fit what
// the database has.
func (x *session) acquire(ctx context.Context) (*jetstream.StreamInfo, error) {
	bound := x.bound
	got, err := x.in.Acquire(ctx, lane.Acquire{
		Lane: x.source.lane(), LogID: bound.logID, Committed: bound.committed(), Start: 0, Consumed: bound.consumed, OffsetMetadata: offsetMetadataOf(bound.info), Acknowledged: bound.acknowledged(),
	})
	switch {
	case errors.Is(err, lane.ErrLoss):
		return nil, &lossError{x.source.config.Stream, err}
	case err != nil:
		return nil, err
	}
	x.assignment = got
	stream, err := bound.stream.Info(ctx) // after Acquire: nothing above its end was read
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", x.source.config.Stream, err)
	}
	if err := x.checkCut(ctx, stream); err != nil {
		return nil, err
	}
	if err := x.place(ctx, stream); err != nil {
		return nil, err
	}
	return stream, x.missingAtStart(ctx, stream)
}

func (s *Source) lane() message.Lane { return message.Lane{Source: s.config.Name, Name: laneName} }

// run reads until closing ends, and then gives back what can't be committed.
func (x *session) run() {
	x.openSlots()
	x.in.Rebalanced()
	x.measure(x.bound.info, 0)
	x.inspectSoon() // until then nobody knows what there is to do
	x.in.Ready(true)

	var acking, confirming, reading sync.WaitGroup
	acking.Go(x.acks.run)
	for _, slot := range x.slots {
		reading.Go(func() { x.offer(slot) })
		reading.Go(func() { x.endIfLost(slot) })
	}
	reading.Go(x.fetch)
	reading.Go(x.watch)
	drained := make(chan struct{})
	acking.Go(func() { x.progress(drained) })
	confirming.Go(func() { x.confirmAll(drained) })

	<-x.closing.Done()
	// The lanes are closed while the last fetch ends: both take a moment, and
	// transactions in flight should have all the time there is.
	drain, cancel := context.WithTimeout(context.WithoutCancel(x.closing), x.in.Drain())
	defer cancel()
	for _, slot := range x.slots {
		reading.Go(func() { slot.Close(drain) })
	}
	reading.Wait()
	close(drained)
	x.giveBack()
	confirming.Wait()
	x.acks.stop()
	acking.Wait()
	if x.conn.IsConnected() { // what is given back is not confirmed one by one
		if err := x.conn.FlushTimeout(confirmTimeout); err != nil {
			x.in.CommitFailed()
		}
	}
}

func (x *session) openSlots() {
	for range max(1, x.in.Writers()) {
		x.slots = append(x.slots, x.in.Open(consumer.LaneOptions{
			Lane: x.source.lane(), Epoch: x.assignment.Epoch, Next: x.assignment.Next, KeepFor: keepFor, Checkpoint: x.assignment.Checkpoint,
			Committed: x.committed, Abandoned: x.abandoned,
		}))
	}
}

func (x *session) endIfLost(slot *consumer.Lane) {
	select {
	case <-slot.Lost():
		x.end(errLost)
	case <-x.closing.Done():
	}
}

// lossError refuses a stream whose messages can't be read again.
type lossError struct {
	stream string
	err    error
}

func (e *lossError) Error() string {
	return fmt.Sprintf("stream %s deletes what is acknowledged (its retention is WorkQueue or Interest): %s. Use a stream with Limits retention, or have Postgres commit to a synchronous standby, or accept the loss with --accept-loss-on-failover", e.stream, e.err)
}

func (e *lossError) Unwrap() error { return e.err }

// errRewound ends a session whose consumer was set back: it is bound again.
var errRewound = errors.New("the durable consumer was set back to what the database has")

var errLost = errors.New("the lane's row is gone or was moved, or the database is not the one it was; acquiring the lane again")

// committed passes what is durable to the gate, to be acknowledged. It must not block.
func (x *session) committed(_ int64, tokens []any) {
	for _, t := range tokens {
		x.gate.add(t.([]ackRef))
	}
}

// forget removes messages that are answered from what is outstanding.
func (x *session) forget(all []ackRef) (replies []string) {
	x.unacked.Add(-int64(len(all)))
	return x.outstanding.remove(all...)
}

// abandoned gives back what will not be committed, but only when the session ends. A
// batch that was kept too long stays with the server until its ack wait has passed:
// redelivered at once, it would fail at once, again and again.
func (x *session) abandoned(tokens []any) {
	for _, t := range tokens {
		replies := x.forget(t.([]ackRef))
		if x.closing.Err() != nil {
			x.acks.add(replies, true)
		} else {
			for _, m := range t.([]ackRef) {
				x.gaps.abandon(m.sequence)
			}
			x.foreign.Add(int64(len(replies))) // still to be done, until the next inspection says who has them
		}
	}
}

// giveBack returns what was fetched but never offered.
func (x *session) giveBack() {
	for {
		select {
		case d := <-x.arrived:
			x.acks.add(x.drop(d), true)
		default:
			return
		}
	}
}

// drop forgets a message that was not offered to a slot.
func (x *session) drop(d delivery) (replies []string) {
	x.in.Budget().Release(d.bytes)
	x.waiting.Add(-1)
	return x.forget([]ackRef{d.ack})
}
