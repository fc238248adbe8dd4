package crash_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const queueName = "queue"

// logQueue has no two payloads under one id: which of them comes first is chance
// where there is no order.
const logQueue = `a0 a1 a0 o0    b0 a1 bad=poison o1    c0 a0 - c1    b0 c2 c2 o2`

// TestCrashTableQueue has a source without order, whose safety rests on the
// claims alone. A lane that is lost means there that the broker, tired of
// waiting, delivers what is in hand to another worker as well.
func TestCrashTableQueue(t *testing.T) {
	t.Parallel()
	each(t, "", func(t *testing.T, by way, s step, e event) {
		c := newCell(t, by, entries(logQueue))
		c.noteKeys()
		q := newQueue(c)
		trap := newTrap(s, e, 0)
		if e == lose {
			trap.event = hold
		}
		all := []*worker{c.start("a1", trap, q.member)}
		c.reach(trap)
		switch e {
		case kill, cancel, cutOff:
			c.ended(all[0])
			all[0] = c.start("a2", nil, q.member)
		case lose:
			q.redeliver(all[0])
			all = append(all, c.start("b1", nil, q.member))
			c.await("the other worker to get as far as it can", func() bool { return q.settled() || c.waitsForLock("b1") })
			close(trap.release)
		}
		c.await("all messages to be acknowledged", q.settled)
		for _, w := range all {
			w.end()
			c.ended(w)
		}
		c.verify()
		if n := trap.fired.Load(); n != 1 {
			c.Errorf("the event happened %d times", n)
		}
	})
}

// queue is a broker without order: each message is out at one member until that
// one acknowledges it, gives it back or is gone.
type queue struct {
	cell *cell

	mu      sync.Mutex
	changed chan struct{} // closed and renewed when messages become ready
	all     []message.Message
	state   []delivery
	silent  *worker // gets nothing for now: the broker has waited for it in vain
}

type delivery struct {
	to   *worker // nil: ready
	done bool
}

func newQueue(c *cell) *queue {
	q := &queue{cell: c, changed: make(chan struct{})}
	for i, e := range c.logs[0] {
		m := e.message()
		m.Position = message.Position{Lane: queueLane(), Offset: int64(i)}
		m.Time = time.Now()
		q.all = append(q.all, m)
	}
	q.state = make([]delivery, len(q.all))
	return q
}

func queueLane() message.Lane { return message.Lane{Source: sourceName, Name: queueName} }

// redeliver hands out once more what is out and not acknowledged, and nothing of
// it to the worker that kept it.
func (q *queue) redeliver(from *worker) {
	q.mu.Lock()
	q.silent = from
	q.mu.Unlock()
	q.giveBack(func(d *delivery, _ int) bool { return !d.done })
}

func (q *queue) giveBack(which func(d *delivery, i int) bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.state {
		if d := &q.state[i]; which(d, i) {
			d.to = nil
		}
	}
	close(q.changed)
	q.changed = make(chan struct{})
}

func (q *queue) settled() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !slices.ContainsFunc(q.state, func(d delivery) bool { return !d.done })
}

func (q *queue) fetch(ctx context.Context, to *worker) (numbers []int) {
	for {
		q.mu.Lock()
		for i := range q.state {
			if d := &q.state[i]; d.to == nil && !d.done && to != q.silent && len(numbers) < perBatch {
				d.to = to
				numbers = append(numbers, i)
			}
		}
		changed := q.changed
		q.mu.Unlock()
		if numbers != nil {
			return numbers
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// ack is refused to a worker that is gone. There is no going back from it: the
// ids must have been claimed for good, or nobody will ever bring them again.
func (q *queue) ack(w *worker, tokens []any) {
	for _, token := range tokens {
		numbers := token.([]int)
		err := w.acknowledge(func() {
			for _, i := range numbers {
				q.mustBeClaimed(w, i)
			}
		}, func() error {
			q.mu.Lock()
			defer q.mu.Unlock()
			for _, i := range numbers {
				q.state[i].done = true
			}
			return nil
		})
		if err != nil { // sooner or later the broker delivers them again
			q.giveBack(func(_ *delivery, i int) bool { return slices.Contains(numbers, i) })
		}
	}
}

func (q *queue) mustBeClaimed(w *worker, i int) {
	id := q.cell.logs[0][i].id
	if id != "" && !q.cell.ask(`SELECT EXISTS (SELECT FROM dedupd.claims WHERE key = $1::uuid)`, claimkey.Of(id).String()) {
		q.cell.Errorf("%s acknowledges %q, but nobody has claimed it", w.name, id)
	}
}

// member is a worker's source: two slots, so that two batches of the queue may be
// on their way at a time.
func (q *queue) member(w *worker) consumer.Source { return &queueMember{q, w} }

type queueMember struct {
	q *queue
	w *worker
}

func (m *queueMember) Name() string { return sourceName }

func (m *queueMember) Run(ctx context.Context, in *consumer.Session) error {
	var slots sync.WaitGroup
	for range 2 {
		slots.Go(func() {
			for ctx.Err() == nil {
				m.slot(ctx, in)
			}
		})
	}
	in.Ready(true)
	slots.Wait()
	// What the broker hears at the latest when the connection is gone.
	m.q.giveBack(func(d *delivery, _ int) bool { return d.to == m.w })
	return nil
}

func (m *queueMember) slot(ctx context.Context, in *consumer.Session) {
	taken, err := in.Acquire(ctx, lane.Acquire{Lane: queueLane(), LogID: "queue-1", Committed: -1})
	if err != nil {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
		}
		return
	}
	l := in.Open(consumer.LaneOptions{
		Lane: queueLane(), Next: taken.Next, KeepFor: time.Minute,
		Committed: func(_ int64, tokens []any) { m.q.ack(m.w, tokens) },
		Abandoned: func(tokens []any) {
			m.q.giveBack(func(d *delivery, i int) bool {
				return d.to == m.w && slices.ContainsFunc(tokens, func(t any) bool { return slices.Contains(t.([]int), i) })
			})
		},
	})
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), in.Drain())
		defer cancel()
		l.Close(stop)
	}()
	for {
		numbers := m.q.fetch(ctx, m.w)
		if numbers == nil {
			return
		}
		b := lane.Batch{Lane: queueLane(), StreamID: taken.StreamID, Epoch: taken.Epoch, Checkpoint: taken.Checkpoint, BrokerPosition: -1, Lag: -1, Bytes: int64(100 * len(numbers))}
		for _, i := range numbers {
			b.Messages = append(b.Messages, m.q.all[i])
		}
		b.From, b.Next = int64(numbers[0]), int64(numbers[len(numbers)-1]+1)
		if in.Budget().Acquire(ctx, b.Bytes) != nil {
			// Given back with everything else of this member.
			return
		}
		if l.Offer(ctx, b, numbers) != nil {
			return
		}
	}
}
