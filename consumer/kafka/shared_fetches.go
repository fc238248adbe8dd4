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
	// quietAfter is how long a lane must have had nothing to read before it shares a
	// fetch: a lane that comes and goes costs a request for all of them.
	quietAfter = 3 * fetchWait
	// sharedBytes bounds one answer for all of them, and is what it reserves of the
	// byte budget. One record batch comes in any case.
	sharedBytes = 256 << 10
	// sharedPause is the least time between two shared fetches. Among many lanes
	// there is always one that gets something, and each request has the broker look
	// at all of them.
	sharedPause = 20 * time.Millisecond
)

// sharedFetches fetch for lanes that have nothing to read: one request at a time to
// each broker, over one connection, for all the lanes that it leads. A lane that
// fetches for itself takes a connection of its own, since a broker answers the
// requests of a connection one after the other.
type sharedFetches struct {
	ctx     context.Context
	cluster *cluster
	budget  *consumer.Budget
	bytes   int // of one answer

	polling sync.WaitGroup

	mu      sync.Mutex
	brokers map[int32]map[*quietLane]struct{} // the lanes of each broker that is polled now
}

// quietLane is a lane that has nothing to read, as far as is known.
type quietLane struct {
	want   wanted
	leader int32
	// answers has the latest answer, until it is received. It is sent to under
	// sharedFetches.mu.
	answers chan laneAnswer
	covered bool // guarded by sharedFetches.mu: a request for the lane was sent, or is about to be
}

// laneAnswer is the answer to a fetch about one lane.
type laneAnswer struct {
	outcome
	held int64     // of the byte budget
	sent time.Time // when the request was sent
	last bool      // the lane no longer shares fetches
}

func newSharedFetches(ctx context.Context, cluster *cluster, budget *consumer.Budget, fetchBytes int) *sharedFetches {
	return &sharedFetches{
		ctx: ctx, cluster: cluster, budget: budget, bytes: min(sharedBytes, fetchBytes),
		brokers: make(map[int32]map[*quietLane]struct{}),
	}
}

// isNews reports whether a lane should fetch for itself now. A lane that has something
// to read, but got nothing, was left out of an answer that was full.
func (s *sharedFetches) isNews(want *wanted, o outcome) bool {
	return o.err != nil || len(o.fetched.records) > 0 || o.fetched.diverging != nil || s.cluster.readable(o.fetched) > want.position
}

// join adds a lane to the next request to its leader. Until that is sent, the lane
// goes on fetching for itself: nothing that comes meanwhile waits.
func (s *sharedFetches) join(want wanted, leader int32) *quietLane {
	q := &quietLane{want: want, leader: leader, answers: make(chan laneAnswer, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	lanes := s.brokers[leader]
	if lanes == nil {
		lanes = make(map[*quietLane]struct{})
		s.brokers[leader] = lanes
		s.polling.Go(func() { s.poll(leader) })
	}
	lanes[q] = struct{}{}
	return q
}

// leave takes a lane out, and gives up an answer about it.
func (s *sharedFetches) leave(q *quietLane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.brokers[q.leader], q)
	select {
	case a := <-q.answers:
		s.budget.Release(a.held)
	default:
	}
}

// covers reports whether a request asks for the lane, or has asked.
func (s *sharedFetches) covers(q *quietLane) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return q.covered
}

// poll asks one broker until there is no lane to ask for.
func (s *sharedFetches) poll(broker int32) {
	for {
		memory := &grant{budget: s.budget, held: int64(s.bytes)}
		if s.budget.Acquire(s.ctx, memory.held) != nil {
			return // the lanes end by the same context
		}
		lanes := s.next(broker)
		if len(lanes) == 0 {
			memory.settle(0)
			return
		}
		all := make([]*wanted, len(lanes))
		for i, q := range lanes {
			all[i] = &q.want
		}
		sent := time.Now()
		outcomes, err := s.cluster.fetchAll(s.ctx, broker, s.bytes, all, memory.room)
		memory.settle(s.deliver(lanes, outcomes, sent, err))
		pause := sharedPause - time.Since(sent)
		if throttled := (*throttledError)(nil); errors.As(err, &throttled) {
			pause = throttled.wait
		}
		if pause > 0 {
			wait.For(s.ctx, pause)
		}
	}
}

// next are the lanes to ask for, topic by topic. Where there is none, it ends the
// polling of the broker.
func (s *sharedFetches) next(broker int32) []*quietLane {
	s.mu.Lock()
	defer s.mu.Unlock()
	lanes := make([]*quietLane, 0, len(s.brokers[broker]))
	for q := range s.brokers[broker] {
		q.covered = true
		lanes = append(lanes, q)
	}
	if len(lanes) == 0 {
		delete(s.brokers, broker)
	}
	slices.SortFunc(lanes, func(a, b *quietLane) int {
		return cmp.Or(cmp.Compare(a.want.topic, b.want.topic), bytes.Compare(a.want.id[:], b.want.id[:]), cmp.Compare(a.want.partition, b.want.partition))
	})
	return lanes
}

// deliver gives each lane its answer, and returns how many bytes these answers hold.
// An error goes to all of them.
func (s *sharedFetches) deliver(lanes []*quietLane, outcomes []outcome, sent time.Time, err error) (held int64) {
	answers := make([]laneAnswer, len(lanes))
	for i, q := range lanes {
		a := &answers[i]
		a.outcome, a.sent = outcome{err: err}, sent
		if err == nil {
			a.outcome = outcomes[i]
		}
		// Throttled, a lane would be throttled alone as well.
		a.last = s.isNews(&q.want, a.outcome) && !errors.As(err, new(*throttledError))
	}
	separate(answers)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, q := range lanes {
		if _, waits := s.brokers[q.leader][q]; !waits {
			continue
		}
		a := answers[i]
		if a.last {
			delete(s.brokers[q.leader], q)
		}
		select {
		case <-q.answers: // it brought nothing: it wasn't the last
		default:
		}
		q.answers <- a
		held += a.held
	}
	return held
}

// separate gives each lane a copy of its records: those of an answer are parts of one
// buffer, which the slowest lane would keep from being freed. A lane with most of the
// records keeps the buffer.
func separate(answers []laneAnswer) {
	all := 0
	for i := range answers {
		if answers[i].err == nil {
			answers[i].held = int64(len(answers[i].fetched.records))
			all += len(answers[i].fetched.records)
		}
	}
	for i := range answers {
		if n := int(answers[i].held); n > 0 && n <= all/2 {
			answers[i].fetched.records = bytes.Clone(answers[i].fetched.records)
		}
	}
}
