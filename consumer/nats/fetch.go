package nats

import (
	"errors"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// fetchWait is how long the server keeps a fetch open. A session that ends waits
// for its last fetch rather than to cut it off: what is under way to a fetch
// that is gone comes again only after the ack wait.
const fetchWait = time.Second

// errors after which the consumer is looked at, or the next fetch waits.
const fetchPause = 100 * time.Millisecond

// fetch keeps one fetch open at a time, so that the next batch arrives while the
// slots are at work, and hands its messages on as they come.
func (x *session) fetch() {
	large := false
	for x.closing.Err() == nil {
		if !x.connected() {
			return
		}
		n, err := x.fetchOnce(large)
		switch {
		case err == nil:
			// The server ends a fetch at once, and the library hides why, when the
			// next message is larger than the fetch may be.
			large = n == tooLarge && !large
			if n == tooLarge && !large {
				sleep(x.closing, fetchPause)
			}
		case x.closing.Err() != nil:
		case errors.Is(err, jetstream.ErrConsumerDeleted):
			x.end(errGone)
		default:
			// A server that goes away, a new leader, no one who answers: watch
			// finds out whether the consumer is still there.
			x.log.Debug("fetch", "error", err)
			sleep(x.closing, fetchPause)
			x.lookSoon()
		}
	}
}

const tooLarge = -1

// fetchOnce asks for a batch. It returns how many messages came, or tooLarge. A
// large fetch takes one message of whatever size.
func (x *session) fetchOnce(large bool) (int, error) {
	n, bytes := x.in.MaxMessages(), x.in.MaxBytes()
	options := []jetstream.FetchOpt{jetstream.FetchMaxWait(fetchWait), jetstream.FetchMaxBytes(int(bytes))}
	if large {
		n, bytes = 1, max(bytes, x.conn.MaxPayload())
		options = options[:1]
	}
	if err := x.in.Budget().Acquire(x.closing, bytes); err != nil {
		return 0, err
	}
	defer func() { x.in.Budget().Release(bytes) }() // what is left of it

	begun := time.Now()
	batch, err := x.bound.consumer.Fetch(n, options...)
	if err != nil {
		return 0, err
	}
	came := 0
	var h hand
	for msg := range batch.Messages() {
		meta, err := msg.Metadata()
		if err != nil {
			return came, err
		}
		x.passed.note(meta.Sequence.Stream, meta.Timestamp)
		d := delivery{msg: msg, meta: meta, bytes: footprint(msg), received: time.Now(), hand: &h}
		d.at = x.hands.hold(&h, msg)
		came++
		x.inHand.Add(1)
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
			x.acks.add([]jetstream.Msg{msg}, true)
			x.drop(d)
		}
	}
	if err := batch.Error(); err != nil {
		return came, err
	}
	if came == 0 && time.Since(begun) < fetchWait/2 {
		return tooLarge, nil
	}
	return came, nil
}

// overhead is what a message takes in memory beyond its bytes, roughly.
const overhead = 400

func footprint(msg jetstream.Msg) int64 {
	n := overhead + len(msg.Data()) + len(msg.Subject()) + len(msg.Reply())
	for key, values := range msg.Headers() {
		for _, v := range values {
			n += len(key) + 2*len(v) + 64
		}
	}
	return int64(n)
}

// connected waits until there is a connection; false: the session ends. Without
// one a fetch would be sent at the reconnect, when nobody listens for it.
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
	x.lookSoon()
	return true
}
