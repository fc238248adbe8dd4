package nats

import (
	"context"
	"log/slog"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/logonce"
)

// confirmTimeout bounds the wait for the server to confirm our acks.
const confirmTimeout = 2 * time.Second

// The answers to a message, at the subject that it names.
var (
	ackDone     = []byte("+ACK")
	ackNak      = []byte("-NAK") // deliver again at once
	ackProgress = []byte("+WPI") // not yet
)

// acker acknowledges outside the writers' goroutines. A lost ack costs a redelivery,
// which is a duplicate; it is never a reason to stop.
type acker struct {
	in   *consumer.Session
	log  *slog.Logger
	conn *natsgo.Conn
	// done is called when everything was sent and confirmed.
	done func()

	mu      sync.Mutex
	more    sync.Cond
	queue   []answer
	stopped bool
}

// answer is what the server is told of some messages.
type answer struct {
	replies []string
	nak     bool // deliver again at once
}

func newAcker(in *consumer.Session, log *slog.Logger, conn *natsgo.Conn, done func()) *acker {
	a := &acker{in: in, log: log, conn: conn, done: done}
	a.more.L = &a.mu
	return a
}

// add never blocks.
func (a *acker) add(replies []string, nak bool) {
	a.mu.Lock()
	a.queue = append(a.queue, answer{replies, nak})
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
	var problem logonce.Problem
	for {
		round := a.next()
		if len(round) == 0 {
			return
		}
		err := a.send(round)
		if err == nil {
			problem.End()
			a.done()
			continue
		}
		a.in.CommitFailed()
		if problem.IsNew(err) {
			a.log.Warn("NATS has not confirmed acknowledgements; what it delivers again is a duplicate", "error", err)
		}
	}
}

func (a *acker) next() []answer {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.queue) == 0 && !a.stopped {
		a.more.Wait()
	}
	round := a.queue
	a.queue = nil
	return round
}

// send sends all acks of a round and has the last one confirmed: the connection keeps
// their order, so that the others have arrived, too.
func (a *acker) send(round []answer) error {
	last := ""
	var failed error
	for _, v := range round {
		for _, reply := range v.replies {
			text := ackDone
			switch {
			case v.nak:
				text = ackNak
			case last == "":
				last = reply
				continue
			default:
				last, reply = reply, last
			}
			if err := a.conn.Publish(reply, text); err != nil {
				failed = err
			}
		}
	}
	if last == "" {
		return failed
	}
	ctx, cancel := context.WithTimeout(context.Background(), confirmTimeout)
	defer cancel()
	if _, err := a.conn.RequestWithContext(ctx, last, ackDone); err != nil {
		return err
	}
	return failed
}
