package kafka

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/wait"
)

const (
	// quietAfter is how long a lane has had nothing to read when its fetches go with
	// those of others: a lane that comes and goes makes a request for all of them.
	quietAfter = 3 * fetchWait
	// sharedBytes is what one answer may bring of all of them, and what it is allowed
	// of the byte budget. One record batch comes in any case.
	sharedBytes = 256 << 10
	// sharedPause is the least time between two requests for all of them. With many
	// lanes there is always one that gets something, and each request costs the broker
	// a look at all.
	sharedPause = 20 * time.Millisecond
)

// polls fetch for lanes that have nothing to read: one request at a time to each
// broker, over one connection, for all that it leads. Each lane that fetches for itself
// takes a connection of its own, since a broker answers one request of a connection
// after the other.
type polls struct {
	ctx     context.Context
	cluster *cluster
	budget  *consumer.Budget
	bytes   int // of one answer

	polling sync.WaitGroup

	mu      sync.Mutex
	brokers map[int32]map[*quietLane]struct{} // those of each that is polled now
}

// quietLane is one that has nothing to read, as far as is known.
type quietLane struct {
	want   wanted
	leader int32
	// answers has the latest answer about the lane, unless it was taken. Written under
	// the polls' mutex.
	answers chan polled
	covered bool // guarded: a request that asks for it was sent, or is about to be
}

// polled is what an answer says of a lane.
type polled struct {
	outcome
	held int64     // of the byte budget
	sent time.Time // when it was asked for
	last bool      // the lane is polled no more
}

func newPolls(ctx context.Context, cluster *cluster, budget *consumer.Budget, fetchBytes int) *polls {
	return &polls{
		ctx: ctx, cluster: cluster, budget: budget, bytes: min(sharedBytes, fetchBytes),
		brokers: make(map[int32]map[*quietLane]struct{}),
	}
}

// isNews tells whether a lane should fetch for itself now. One that has something to
// read, of which nothing came, was left out of an answer that was full.
func (p *polls) isNews(want *wanted, o outcome) bool {
	return o.err != nil || len(o.records) > 0 || o.diverging != nil || p.cluster.readable(o.fetched) > want.position
}

// join has a lane asked for by the next request to its leader. Until that is sent, the
// lane goes on fetching for itself: nothing that comes meanwhile waits.
func (p *polls) join(want wanted, leader int32) *quietLane {
	q := &quietLane{want: want, leader: leader, answers: make(chan polled, 1)}
	p.mu.Lock()
	defer p.mu.Unlock()
	lanes := p.brokers[leader]
	if lanes == nil {
		lanes = make(map[*quietLane]struct{})
		p.brokers[leader] = lanes
		p.polling.Go(func() { p.poll(leader) })
	}
	lanes[q] = struct{}{}
	return q
}

// leave gives up what may be answered about a lane.
func (p *polls) leave(q *quietLane) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.brokers[q.leader], q)
	select {
	case a := <-q.answers:
		p.budget.Release(a.held)
	default:
	}
}

// covers tells whether a request asks for the lane, or has asked.
func (p *polls) covers(q *quietLane) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return q.covered
}

// poll asks one broker until there is no lane to ask for.
func (p *polls) poll(broker int32) {
	for {
		memory := &grant{budget: p.budget, held: int64(p.bytes)}
		if p.budget.Acquire(p.ctx, memory.held) != nil {
			return // the lanes end by the same
		}
		lanes := p.next(broker)
		if len(lanes) == 0 {
			memory.settle(0)
			return
		}
		all := make([]*wanted, len(lanes))
		for i, q := range lanes {
			all[i] = &q.want
		}
		sent := time.Now()
		outcomes, err := p.cluster.fetchAll(p.ctx, broker, p.bytes, all, memory.room)
		memory.settle(p.tell(lanes, outcomes, sent, err))
		pause := sharedPause - time.Since(sent)
		if throttled := (*throttledError)(nil); errors.As(err, &throttled) {
			pause = throttled.wait
		}
		if pause > 0 {
			wait.For(p.ctx, pause)
		}
	}
}

// next are the lanes to ask for, topic by topic. Where there is none, the broker is
// polled no more.
func (p *polls) next(broker int32) []*quietLane {
	p.mu.Lock()
	defer p.mu.Unlock()
	lanes := make([]*quietLane, 0, len(p.brokers[broker]))
	for q := range p.brokers[broker] {
		q.covered = true
		lanes = append(lanes, q)
	}
	if len(lanes) == 0 {
		delete(p.brokers, broker)
	}
	slices.SortFunc(lanes, func(a, b *quietLane) int {
		return cmp.Or(cmp.Compare(a.want.topic, b.want.topic), bytes.Compare(a.want.id[:], b.want.id[:]), cmp.Compare(a.want.partition, b.want.partition))
	})
	return lanes
}

// tell gives each lane its answer, and returns how many bytes they hold by that. An
// error is of all of them.
func (p *polls) tell(lanes []*quietLane, outcomes []outcome, sent time.Time, err error) (held int64) {
	answers := make([]polled, len(lanes))
	for i, q := range lanes {
		a := &answers[i]
		a.outcome, a.sent = outcome{err: err}, sent
		if err == nil {
			a.outcome = outcomes[i]
		}
		// Whom the broker makes wait, it makes wait alone as well.
		a.last = p.isNews(&q.want, a.outcome) && !errors.As(err, new(*throttledError))
	}
	own(answers)
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, q := range lanes {
		if _, waits := p.brokers[q.leader][q]; !waits {
			continue
		}
		a := answers[i]
		if a.last {
			delete(p.brokers[q.leader], q)
		}
		select {
		case <-q.answers: // which brought nothing: it wasn't the last
		default:
		}
		q.answers <- a
		held += a.held
	}
	return held
}

// own has each lane hold records of its own: those of an answer are parts of one
// buffer, which the slowest of the lanes would keep from being freed. One with most of
// them keeps the buffer.
func own(answers []polled) {
	all := 0
	for i := range answers {
		if answers[i].err == nil {
			answers[i].held = int64(len(answers[i].records))
			all += len(answers[i].records)
		}
	}
	for i := range answers {
		if n := int(answers[i].held); n > 0 && n <= all/2 {
			answers[i].records = bytes.Clone(answers[i].records)
		}
	}
}
