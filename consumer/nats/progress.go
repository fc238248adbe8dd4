package nats

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// keepFor is how long a message that can't be applied is kept, to be tried again.
// Then it is left to the server, which gives it to whoever asks after the ack
// wait: a worker that is cut off from its database must not sit on messages that
// others could apply.
const keepFor = 30 * time.Second

// hands are the messages that were delivered to us and not acknowledged, by the
// fetch they came with.
type hands struct {
	mu  sync.Mutex
	all map[*hand]struct{}
}

// hand is what one fetch brought.
type hand struct {
	since time.Time
	msgs  []jetstream.Msg // nil where no longer in hand
	left  int
}

// hold takes a message of a fetch in hand, and returns where in it.
func (h *hands) hold(in *hand, msg jetstream.Msg) int {
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
	in.msgs = append(in.msgs, msg)
	return len(in.msgs) - 1
}

// drop takes messages out of hand: the server is told, or will hear no more of
// them.
func (h *hands) drop(all ...delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range all {
		d.hand.msgs[d.at] = nil
		if d.hand.left--; d.hand.left == 0 {
			delete(h.all, d.hand)
		}
	}
}

// olderThan are the messages that have been in hand for so long.
func (h *hands) olderThan(d time.Duration) (old []jetstream.Msg) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for in := range h.all {
		if time.Since(in.since) < d {
			continue
		}
		for _, msg := range in.msgs {
			if msg != nil {
				old = append(old, msg)
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
		for _, msg := range x.hands.olderThan(every) {
			if err := msg.InProgress(); err != nil {
				x.log.Debug("ask for more time", "error", err) // such as that it was acknowledged at this moment
			}
		}
	}
}
