package nats

import (
	"context"
	"errors"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/wait"
)

// fetchWait is how long the server keeps a fetch open. A session that ends waits for its
// last fetch instead of cutting it off: what is on its way to a fetch that is gone comes
// again only after the ack wait.
const fetchWait = time.Second

// unanswered is how long we wait for the server to say that a fetch has ended.
const unanswered = time.Second

// fetchPause is the shortest wait after a fetch that failed.
const fetchPause = 100 * time.Millisecond

// fetch keeps one fetch open at a time, so that the next batch arrives while the slots
// are at work, and hands its messages on as they come.
func (x *session) fetch() {
	large := false
	for x.closing.Err() == nil {
		if !x.connected() {
			return
		}
		if x.halted.Load() {
			wait.For(x.closing, fetchPause)
			continue
		}
		n, err := x.fetchOnce(large)
		switch {
		case err == nil:
			x.granted()
			// The server ends a fetch at once when the next message is larger than the
			// fetch may be.
			large = n == tooLarge && !large
			if n == tooLarge && !large {
				wait.For(x.closing, fetchPause)
			}
		case x.closing.Err() != nil:
		case errors.Is(err, jetstream.ErrConsumerDeleted):
			x.end(errGone)
		default:
			// A server that goes away, a new leader, a limit that was set: watch
			// finds out what has become of the consumer.
			x.inspectSoon()
			wait.For(x.closing, x.refused(err))
		}
	}
}

const tooLarge = -1

// next is what the next fetch asks for. A large one is for one message of any size.
func (x *session) next(large bool) (p pull, bytes int64) {
	p = pull{messages: x.in.MaxMessages(), bytes: x.in.MaxBytes(), wait: fetchWait}.within(*x.limits.Load())
	if !large {
		return p, p.bytes
	}
	p.messages, p.bytes = 1, 0
	return p, max(x.in.MaxBytes(), x.conn.MaxPayload())
}

// fetchOnce asks for a batch. It returns how many messages came, or tooLarge.
func (x *session) fetchOnce(large bool) (came int, err error) {
	ask, bytes := x.next(large)
	if err := x.in.Budget().Acquire(x.closing, bytes); err != nil {
		return 0, err
	}
	defer func() { x.in.Budget().Release(bytes) }() // what is left of it

	begun := time.Now()
	var f fetched
	err = x.receive(ask, func(msg *natsgo.Msg) error {
		meta, err := msg.Metadata()
		if err == nil {
			err = x.whole(msg)
		}
		if err == nil {
			err = x.unacknowledged(msg, meta)
		}
		if err != nil {
			return err
		}
		x.gaps.record(meta)
		x.arrivals.record(meta.Sequence.Stream, meta.Timestamp)
		d := delivery{msg: msg, meta: meta, bytes: footprint(msg), received: time.Now(), ack: x.outstanding.add(&f, msg.Reply, meta.Sequence.Stream)}
		came++
		x.unacked.Add(1)
		x.waiting.Add(1)
		x.pending.Store(int64(meta.NumPending))
		if bytes >= d.bytes {
			bytes -= d.bytes
		} else { // more than was asked for: what we count is more than the wire's
			x.in.Budget().Adjust(d.bytes - bytes)
			bytes = 0
		}
		select {
		case x.arrived <- d:
		case <-x.closing.Done():
			x.acks.add(x.drop(d), true)
		}
		return nil
	})
	if err != nil {
		return came, err
	}
	switch took := time.Since(begun); {
	case came > 0:
	case took < ask.wait/2:
		return tooLarge, nil
	case took >= ask.wait+unanswered:
		return 0, errNoAnswer
	case ask.wait < fetchPause: // a durable may limit the wait to next to nothing
		wait.For(x.closing, fetchPause)
	}
	return came, nil
}

// whole refuses a message without its payload, as a durable delivers it that somebody
// has set to headers only. The server adds a header to it, but a producer may set that
// as well: so the durable is asked.
func (x *session) whole(msg *natsgo.Msg) error {
	if len(msg.Data) > 0 || msg.Header.Get(natsgo.MsgSize) == "" {
		return nil
	}
	return x.unless(msg, errAltered, func(info *jetstream.ConsumerInfo) bool { return altered(&info.Config) })
}

// unacknowledged refuses a message below the floor that the durable keeps, if the
// durable delivers it because it has lost its state. It may also just have been on its
// way for long.
func (x *session) unacknowledged(msg *natsgo.Msg, meta *natsgo.MsgMetadata) error {
	if meta.Sequence.Stream > x.keptFloor.Load() {
		return nil
	}
	return x.unless(msg, errStateLost, func(info *jetstream.ConsumerInfo) bool { return info.AckFloor.Stream < floorOf(info).Floor })
}

// unless asks the durable whether it is broken. If so, the session ends with cause.
// Then, or if the durable doesn't answer, the message goes back to the server.
func (x *session) unless(msg *natsgo.Msg, cause error, broken func(*jetstream.ConsumerInfo) bool) error {
	ctx, cancel := context.WithTimeout(x.closing, requestTimeout)
	defer cancel()
	info, err := x.bound.current(ctx)
	if err == nil && !broken(info) {
		return nil
	}
	if err == nil {
		x.end(cause)
		err = cause
	}
	x.acks.add([]string{msg.Reply}, true)
	return err
}

// overhead is roughly what a message takes in memory beyond its bytes.
const overhead = 400

func footprint(msg *natsgo.Msg) int64 {
	n := overhead + len(msg.Data) + len(msg.Subject) + len(msg.Reply)
	for key, values := range msg.Header {
		for _, v := range values {
			n += len(key) + 2*len(v) + 64
		}
	}
	return int64(n)
}

// connected waits until there is a connection; false: the session ends. Without one a
// fetch would be sent at the reconnect, when nobody listens for it.
func (x *session) connected() bool {
	if x.conn.IsConnected() {
		return true
	}
	changed := x.conn.StatusChanged(natsgo.CONNECTED)
	defer x.conn.RemoveStatusListener(changed)
	for !x.conn.IsConnected() {
		select {
		case <-changed:
		case <-x.closing.Done():
			return false
		case <-time.After(fetchWait): // had it connected before we listened
		}
	}
	x.refusals.n = 0 // what failed for want of a connection was no refusal
	x.inspectSoon()
	return true
}
