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

// session reads one consumer of one incarnation of the stream. It outlives a
// lost connection, so that what is in its transaction can still be acknowledged.
type session struct {
	source  *Source
	in      *consumer.Session
	log     *slog.Logger
	conn    *natsgo.Conn
	bound   *binding
	taken   lane.Assignment
	ackWait time.Duration

	arrived chan delivery    // fetched, not yet offered
	hands   hands            // what is not yet acknowledged
	gate    gate             // what is committed, and not yet to be acknowledged
	slots   []*consumer.Lane // lanes of the worker, one for each writer
	acks    *acker
	// closing is the context that ends with the session: what is abandoned from
	// then on is given back to the server at once.
	closing context.Context
	end     context.CancelCauseFunc
	look    chan struct{} // watch shall look now

	gaps     *gaps
	halted   atomic.Bool // for a gap: nothing is fetched
	limits   atomic.Pointer[limits]
	refusals refusals
	trouble  atomic.Pointer[refusedError] // nil: pulls are answered
	paused   atomic.Pointer[pausedError]  // nil: the durable delivers

	waiting atomic.Int64 // messages in arrived, or on the way to a slot
	stands  atomic.Pointer[standing]
	kept    atomic.Uint64 // the floor that the durable keeps
	passed  passed
	inHand  atomic.Int64 // messages delivered to us and not yet acknowledged
	pending atomic.Int64 // messages the server has not delivered to anybody yet
	foreign atomic.Int64 // messages delivered, but neither acknowledged nor with us
}

// standing is where the durable stood when it was last looked at.
type standing struct {
	floor int64 // all below this position was acknowledged
	// since is a time that nothing which the server may still deliver is older than;
	// zero: not known.
	since time.Time
}

// delivery is one message of a fetch.
type delivery struct {
	msg      *natsgo.Msg
	held     held
	meta     *jetstream.MsgMetadata
	bytes    int64
	received time.Time
}

// session reads until ctx ends or the consumer is no longer the one that was
// bound; the error says why.
func (s *Source) session(ctx context.Context, in *consumer.Session, log *slog.Logger, conn *natsgo.Conn, bound *binding) error {
	taken, err := in.Acquire(ctx, lane.Acquire{
		Lane: s.lane(), LogID: bound.incarnation, Committed: bound.begins(), Start: 0, Consumed: bound.consumed, OffsetMetadata: bound.origin(), Acknowledged: bound.sure(),
	})
	switch {
	case errors.Is(err, lane.ErrLoss):
		return &lossError{s.config.Stream, err}
	case err != nil:
		return err
	}
	stream, err := bound.stream.Info(ctx) // after the take: nothing above its end was read
	if err != nil {
		return fmt.Errorf("stream %s: %w", s.config.Stream, err)
	}
	if err := s.wentBack(ctx, in, bound, taken, stream); err != nil {
		return err
	}
	if err := s.place(ctx, in, log, bound, taken, stream); err != nil {
		return err
	}
	if err := s.missingAtStart(ctx, in, log, bound, taken, stream); err != nil {
		return err
	}
	in.Hold(s.lane(), nil)
	closing, end := context.WithCancelCause(ctx)
	defer end(nil)
	x := &session{
		source: s, in: in, log: log, conn: conn, bound: bound, taken: taken,
		ackWait: bound.info.Config.AckWait,
		gaps:    newGaps(stream, bound.info),
		arrived: make(chan delivery, in.MaxMessages()),
		closing: closing, end: end, look: make(chan struct{}, 1),
	}
	x.learnFloor(bound.info, time.Now())
	x.learnLimits(&bound.info.Config)
	x.acks = newAcker(in, log, conn, x.told)
	x.gate.open(taken.Checkpoint, bound.info)
	begun := time.Now()
	x.run()
	bound.read = time.Since(begun)
	return context.Cause(closing)
}

// place has the consumer stand where the database says, and keep what the database has
// it keep. errRewound: it is another one now.
func (s *Source) place(ctx context.Context, in *consumer.Session, log *slog.Logger, bound *binding, taken lane.Assignment, stream *jetstream.StreamInfo) error {
	d := bound.durable
	seen := d.seenIn(taken.Checkpoint.Instance)
	switch {
	case taken.Rewound:
		if err := s.rewind(ctx, in, bound, taken, taken.BrokerPosition); err != nil {
			return fmt.Errorf("have the server deliver again what the database has lost: %w", err)
		}
		return errRewound
	case bound.consumer == nil:
		// It was never there, or somebody deleted it: then all below the row's position
		// is sure, and what we have seen of it since in this database.
		position := taken.BrokerPosition
		if seen {
			position = int64(d.ackFloor) + 1
		}
		err := bound.create(ctx, position, taken.OffsetMetadata)
		if errors.Is(err, errNotFresh) {
			// By the time this one is deleted, it may be one that another worker had
			// rewound after one more failover: so what counts is what the row says then.
			err = s.rewind(ctx, in, bound, taken, position)
		}
		if err != nil && !errors.Is(err, jetstream.ErrConsumerExists) {
			return fmt.Errorf("create the durable consumer again: %w", err)
		}
		return errRewound
	case stateLost(stream, bound.info) && bound.skips == "":
		return s.goForward(ctx, in, log, bound, taken)
	case bound.consumed && bound.skips != "":
		return s.deliverRest(ctx, log, bound, taken)
	}
	why := ""
	misplaced, err := bound.misplaced(ctx, taken.BrokerPosition)
	switch {
	case err != nil:
		return err
	case misplaced:
		why = "somebody made the durable consumer anew, and it would skip messages"
	case bound.skips != "":
		why = "somebody changed the durable consumer's " + bound.skips + ", and it has passed over messages"
	}
	if why != "" {
		position := taken.BrokerPosition
		if bound.skips != "" && seen { // under our filter; the row's may be of another one
			position = min(position, int64(d.ackFloor)+1)
		}
		log.Warn(why+": setting it back to where the database stands", "durable", s.config.Durable, "sequence", position)
		if err := s.rewind(ctx, in, bound, taken, position); err != nil {
			return fmt.Errorf("set the durable consumer back: %w", err)
		}
		return errRewound
	}
	d.seen(bound.info.AckFloor.Stream)
	d.created = bound.info.Created
	if !bound.consumed {
		bound.settled.look(bound.info, time.Now())
	}
	return bound.keep(ctx, taken.OffsetMetadata)
}

// deliverRest makes the durable of a WorkQueue anew. The stream has deleted what was
// acknowledged, so what it still has is what wasn't.
func (s *Source) deliverRest(ctx context.Context, log *slog.Logger, bound *binding, taken lane.Assignment) error {
	log.Warn("somebody changed the durable consumer's "+bound.skips+", and it has passed over messages: making it anew, to deliver all that the stream still has", "durable", s.config.Durable)
	if err := bound.remake(ctx, -1, taken.OffsetMetadata); err != nil {
		return fmt.Errorf("make the durable consumer anew: %w", err)
	}
	return errRewound
}

// rewind has the server deliver again from a position on, until the database
// agrees that all below is sure: it may go back once more meanwhile. The durable is
// given the origin first: whoever comes before the database knows of that finds it
// behind, and rewinds.
func (s *Source) rewind(ctx context.Context, in *consumer.Session, bound *binding, taken lane.Assignment, position int64) error {
	for {
		from := max(position, 1)
		if err := bound.rewind(ctx, from, taken.OffsetMetadata); err != nil {
			return err
		}
		if bound.consumed {
			from = 0 // what is lost is lost
		}
		sure, err := in.ConfirmRewind(ctx, s.lane(), taken, from)
		if err != nil || sure >= from {
			return err
		}
		position = sure
	}
}

func (s *Source) lane() message.Lane { return message.Lane{Source: s.config.Name, Name: laneName} }

func (x *session) run() {
	for range max(1, x.in.Writers()) {
		x.slots = append(x.slots, x.in.Open(consumer.LaneOptions{
			Lane: x.source.lane(), Epoch: x.taken.Epoch, Next: x.taken.Next, KeepFor: keepFor, Checkpoint: x.taken.Checkpoint,
			Committed: x.committed, Abandoned: x.abandoned,
		}))
	}
	x.in.Rebalanced()
	x.measure(x.bound.info, 0)
	x.lookSoon() // until then nobody knows what there is to do
	x.in.Ready(true)

	var acking, confirming, reading sync.WaitGroup
	acking.Go(x.acks.run)
	for _, slot := range x.slots {
		reading.Go(func() { x.offer(slot) })
		reading.Go(func() {
			select {
			case <-slot.Lost():
				x.end(errLost)
			case <-x.closing.Done():
			}
		})
	}
	reading.Go(x.fetch)
	reading.Go(x.watch)
	drained := make(chan struct{})
	acking.Go(func() { x.progress(drained) })
	confirming.Go(func() { x.confirmAll(drained) })

	<-x.closing.Done()
	// The lanes are closed while the last fetch comes to its end: both take a
	// moment, and transactions in hand should have all the time there is.
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

// lossError refuses a stream whose messages can't be read again.
type lossError struct {
	stream string
	err    error
}

func (e *lossError) Error() string {
	return fmt.Sprintf("stream %s deletes what is acknowledged (its retention is WorkQueue or Interest): %s. Use a stream with Limits retention, or have Postgres commit to a synchronous standby, or accept the loss with --accept-loss-on-failover", e.stream, e.err)
}

func (e *lossError) Unwrap() error { return e.err }

// errRewound ends a session whose consumer was set back: it is bound anew.
var errRewound = errors.New("the durable consumer was set back to what the database has")

var errLost = errors.New("the lane's row is gone or was moved, or the database is not the one it was; taking the lane again")

// committed lets through to be acknowledged what is durable. It must not block.
func (x *session) committed(_ int64, tokens []any) {
	for _, t := range tokens {
		x.gate.add(t.([]held))
	}
}

// letGo takes messages out of our hands.
func (x *session) letGo(all []held) (replies []string) {
	x.inHand.Add(-int64(len(all)))
	return x.hands.drop(all...)
}

// abandoned gives back what will not be committed, but only when we stop
// reading. A batch that was kept too long stays with the server until its ack
// wait has passed, for whatever is wrong would be so at the next moment, too,
// and the redeliveries a storm.
func (x *session) abandoned(tokens []any) {
	for _, t := range tokens {
		replies := x.letGo(t.([]held))
		if x.closing.Err() != nil {
			x.acks.add(replies, true)
		} else {
			for _, m := range t.([]held) {
				x.gaps.leave(m.sequence)
			}
			x.foreign.Add(int64(len(replies))) // still to be done, until the next look says who has them
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

// drop forgets a message that no slot has been given.
func (x *session) drop(d delivery) (replies []string) {
	x.in.Budget().Release(d.bytes)
	x.waiting.Add(-1)
	return x.letGo([]held{d.held})
}
