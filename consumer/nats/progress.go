package nats

import (
	"sync"
	"time"
)

// keepFor is how long a message that can't be applied is kept, to be tried again.
// Then it is left to the server, which gives it to whoever asks after the ack
// wait: a worker that is cut off from its database must not sit on messages that
// others could apply.
const keepFor = 30 * time.Second

// hands are the messages that were delivered to us and not acknowledged, by the
// fetch they came with. Only where to answer is kept of them: one that is committed
// may wait here for its acknowledgement, and holds none of the byte budget.
type hands struct {
	mu  sync.Mutex
	all map[*hand]struct{}
}

// hand is what one fetch brought.
type hand struct {
	since   time.Time
	replies []string // empty where no longer in hand
	left    int
}

// held is one message in hand.
type held struct {
	hand *hand
	at   int // where in it
	// sequence is where the message stands in the stream.
	sequence uint64
}

// reply is where the server waits for the answer.
func (m held) reply() string { return m.hand.replies[m.at] }

// hold takes a message of a fetch in hand.
func (h *hands) hold(in *hand, reply string, sequence uint64) held {
	h.mu.Lock()
	defer h.mu.Unlock()
	if in.left == 0 {
		if h.all == nil {
			h.all = make(map[*hand]struct{})
		}
		h.all[in] = struct{}{}
		in.since = time.Now()
	}
	in.left++
	in.replies = append(in.replies, reply)
	return held{in, len(in.replies) - 1, sequence}
}

// drop takes messages out of hand: the server is told, or will hear no more of
// them. It returns where to tell it.
func (h *hands) drop(all ...held) (replies []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	replies = make([]string, len(all))
	for i, m := range all {
		replies[i], m.hand.replies[m.at] = m.reply(), ""
		if m.hand.left--; m.hand.left == 0 {
			delete(h.all, m.hand)
		}
	}
	return replies
}

// olderThan are the messages that have been in hand for so long.
func (h *hands) olderThan(d time.Duration) (old []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for in := range h.all {
		if time.Since(in.since) < d {
			continue
		}
		for _, reply := range in.replies {
			if reply != "" {
				old = append(old, reply)
			}
		}
	}
	return old
}

// progress asks the server for more time for what we still have in hand, well
// before it would give it to others. So the ack wait can be short, which is how
// long the messages of a worker that died stand still, and a transaction may take
// longer. Mostly there is nothing to ask for: messages are acknowledged within
// moments.
//
// A word that is lost, or that comes late, costs a redelivery, which the claims
// see to.
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
		for _, reply := range x.hands.olderThan(every) {
			if err := x.conn.Publish(reply, ackProgress); err != nil {
				x.log.Debug("ask for more time", "error", err)
			}
		}
	}
}
