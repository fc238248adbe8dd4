package e2e

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// sampler looks at a Kafka group and at the lanes' rows ten times a second. It
// proves that the broker is never told more than what is durable, and sees who
// has the lanes.
type sampler struct {
	t     *testing.T
	db    *database
	topic *topic
	scope string
	quit  chan struct{}
	ended chan struct{}

	mu        sync.Mutex
	samples   int
	ahead     []string
	errors    int
	lastError error
	history   []point
	lanes     map[string]page // as of the last sample
	handovers []*handover
}

type point struct {
	at      time.Time
	fetched int64
}

// handover is the passing on of one worker's lanes.
type handover struct {
	what  string
	owner string
	lanes []string
	began time.Time
	took  time.Duration // zero: not yet
}

func newSampler(db *database, tp *topic, scope string) *sampler {
	s := &sampler{t: db.t, db: db, topic: tp, scope: scope, quit: make(chan struct{}), ended: make(chan struct{})}
	go s.run()
	db.t.Cleanup(s.stop)
	return s
}

func (s *sampler) stop() {
	s.mu.Lock()
	select {
	case <-s.quit:
	default:
		close(s.quit)
	}
	s.mu.Unlock()
	<-s.ended
}

func (s *sampler) run() {
	defer close(s.ended)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.sample()
		case <-s.quit:
			return
		}
	}
}

func (s *sampler) sample() {
	ctx, cancel := context.WithTimeout(s.t.Context(), 5*time.Second)
	defer cancel()
	committed, err := s.topic.broker.Committed(ctx, s.scope, s.topic.name)
	var lanes map[string]page
	if err == nil {
		// After the broker's value: between the two the lane may only have gone on.
		lanes, err = s.db.books(ctx, s.scope)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		if s.t.Context().Err() == nil {
			s.errors++
			s.lastError = err
		}
		return
	}
	s.samples++
	s.lanes = lanes
	now := time.Now()
	sum := int64(0)
	for p, offset := range committed {
		if lane, ok := lanes[s.topic.lane(p)]; !ok || offset > lane.NextPosition {
			s.ahead = append(s.ahead, fmt.Sprintf("%s: the broker was told %d, the lane's row stood at %d", s.topic.lane(p), offset, lane.NextPosition))
		}
	}
	for _, lane := range lanes {
		sum += lane.Fetched
	}
	s.history = append(s.history, point{now, sum})
	for _, h := range s.handovers {
		if h.took == 0 && !slices.ContainsFunc(h.lanes, func(l string) bool { return lanes[l].Owner == h.owner }) {
			h.took = now.Sub(h.began)
		}
	}
}

// lose notes that the process with that id was told to end, or killed, just now.
func (s *sampler) lose(what string, pid int, began time.Time) {
	lanes, err := s.db.books(s.t.Context(), s.scope)
	if err != nil {
		s.t.Fatal(err)
	}
	h := &handover{what: what, owner: ownerOf(pid), began: began}
	for name, lane := range lanes {
		if lane.Owner == h.owner {
			h.lanes = append(h.lanes, name)
		}
	}
	slices.Sort(h.lanes)
	s.mu.Lock()
	s.handovers = append(s.handovers, h)
	s.mu.Unlock()
}

// owned is how many lanes a process has.
func (s *sampler) owned(pid int) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, lane := range s.lanes {
		if lane.Owner == ownerOf(pid) {
			n++
		}
	}
	return n
}

// judge demands that the broker was never ahead, and tells what was measured.
func (s *sampler) judge() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, text := range s.ahead {
		if i < 5 {
			s.t.Error("ahead: ", text)
		}
	}
	if s.samples < 20 || s.errors > s.samples/10 {
		s.t.Errorf("only %d samples, and %d that failed, such as by: %v", s.samples, s.errors, s.lastError)
	}
	for _, h := range s.handovers {
		switch {
		case len(h.lanes) == 0:
			s.t.Logf("%s: it had no lanes", h.what)
		case h.took == 0:
			s.t.Errorf("%s: its lanes %v were never taken over", h.what, h.lanes)
		default:
			s.t.Logf("%s: %d lanes taken over after %.1f s", h.what, len(h.lanes), h.took.Seconds())
		}
	}
	s.t.Logf("%d samples, %d failed; at best %d msg/s over a second", s.samples, s.errors, s.best())
}

// best is the most messages booked within a second.
func (s *sampler) best() (most int64) {
	from := 0
	for _, p := range s.history {
		for p.at.Sub(s.history[from].at) > time.Second {
			from++
		}
		most = max(most, p.fetched-s.history[from].fetched)
	}
	return most
}
