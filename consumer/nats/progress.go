package nats

import (
	"sync"
	"time"
)

// keepFor is how long a message that can't be applied is kept, to be tried again.
// Then it is left to the server, which delivers it to anybody after the ack wait: a
// worker that can't reach its database must not keep messages that others could apply.
const keepFor = 30 * time.Second

// outstanding are the messages that were delivered to us and not acknowledged, by the
// fetch they came with. Only where to answer is kept of them: one that is committed may
// wait here for its acknowledgement, and holds none of the byte budget.
type outstanding struct {
	mu  sync.Mutex
	all map[*fetched]struct{}
}

// fetched is what one fetch brought.
type fetched struct {
	since   time.Time
	replies []string // empty where no longer outstanding
	left    int
}

// ackRef refers to one outstanding message.
type ackRef struct {
	fetched  *fetched
	at       int    // where in it
	sequence uint64 // the message's in the stream
}

// add adds a message of a fetch.
func (o *outstanding) add(f *fetched, reply string, sequence uint64) ackRef {
	o.mu.Lock()
	defer o.mu.Unlock()
	if f.left == 0 {
		if o.all == nil {
			o.all = make(map[*fetched]struct{})
		}
		o.all[f] = struct{}{}
		f.since = time.Now()
	}
	f.left++
	f.replies = append(f.replies, reply)
	return ackRef{f, len(f.replies) - 1, sequence}
}

// remove removes messages: the server is told, or will hear no more of them. It returns
// where to tell it.
func (o *outstanding) remove(refs ...ackRef) (replies []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	replies = make([]string, len(refs))
	for i, r := range refs {
		replies[i], r.fetched.replies[r.at] = r.fetched.replies[r.at], ""
		if r.fetched.left--; r.fetched.left == 0 {
			delete(o.all, r.fetched)
		}
	}
	return replies
}

// olderThan returns where to answer for the messages that are outstanding for so long.
func (o *outstanding) olderThan(d time.Duration) (old []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for f := range o.all {
		if time.Since(f.since) < d {
			continue
		}
		for _, reply := range f.replies {
			if reply != "" {
				old = append(old, reply)
			}
		}
	}
	return old
}

// progress asks the server for more time for what is still outstanding, well before it
// would deliver it to others. So the ack wait can be short (the messages of a dead
// worker wait that long) and a transaction long. Mostly there is nothing to ask for:
// messages are acknowledged within moments.
//
// A request that is lost or late costs a redelivery, which is a duplicate.
func (x *session) progress(drained <-chan struct{}) {
	every := x.ackWait / 4
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-drained:
			return
		case <-tick.C:
		}
		for _, reply := range x.outstanding.olderThan(every) {
			if err := x.conn.Publish(reply, ackProgress); err != nil {
				x.log.Debug("ask for more time", "error", err)
			}
		}
	}
}
