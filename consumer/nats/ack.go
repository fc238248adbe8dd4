package nats

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
)

// confirmTimeout bounds the wait for the server's word that it has our acks.
const confirmTimeout = 2 * time.Second

// acker acknowledges off the writers' goroutines. An ack that is lost costs a
// redelivery, which the claims then see to; it is never a reason to stop.
type acker struct {
	in  *consumer.Intake
	log *slog.Logger

	mu      sync.Mutex
	more    sync.Cond
	queue   []verdict
	stopped bool
}

// verdict is what the server is told of some messages.
type verdict struct {
	msgs []jetstream.Msg
	back bool // deliver again at once
}

func newAcker(in *consumer.Intake, log *slog.Logger) *acker {
	a := &acker{in: in, log: log}
	a.more.L = &a.mu
	return a
}

// add never blocks.
func (a *acker) add(msgs []jetstream.Msg, back bool) {
	a.mu.Lock()
	a.queue = append(a.queue, verdict{msgs, back})
	a.mu.Unlock()
	a.more.Signal()
}

// stop lets run return once the queue is empty.
func (a *acker) stop() {
	a.mu.Lock()
	a.stopped = true
	a.mu.Unlock()
	a.more.Signal()
}

func (a *acker) run() {
	said := ""
	for {
		round := a.next()
		if len(round) == 0 {
			return
		}
		err := tell(round)
		if err == nil {
			said = ""
			continue
		}
		a.in.CommitFailed()
		if err.Error() != said {
			said = err.Error()
			a.log.Warn("NATS has not confirmed acknowledgements; what it delivers again is a duplicate", "error", err)
		}
	}
}

func (a *acker) next() []verdict {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.queue) == 0 && !a.stopped {
		a.more.Wait()
	}
	round := a.queue
	a.queue = nil
	return round
}

// tell sends all acks of a round and has the last one confirmed: the connection
// keeps their order, so that the others have arrived, too.
func tell(round []verdict) error {
	var last jetstream.Msg
	var failed error
	for _, v := range round {
		for _, msg := range v.msgs {
			if v.back {
				if err := msg.Nak(); err != nil {
					failed = err
				}
				continue
			}
			if last != nil {
				if err := last.Ack(); err != nil {
					failed = err
				}
			}
			last = msg
		}
	}
	if last == nil {
		return failed
	}
	ctx, cancel := context.WithTimeout(context.Background(), confirmTimeout)
	defer cancel()
	if err := last.DoubleAck(ctx); err != nil {
		return err
	}
	return failed
}
