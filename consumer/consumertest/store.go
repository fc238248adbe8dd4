// Package consumertest proves sources, and workers without a database: Store
// stands for the other half of dedupd, Broker is an honest at-least-once broker
// in memory, and Run is the suite that every source must pass.
package consumertest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// IDHeader is the header in which the suite's messages carry their id.
const IDHeader = "message-id"

// Store is a database in memory: lane rows that move by compare-and-set, and the
// ids that have had their effect. It is consumer.Lanes and consumer.Handler at
// once, as the two share the rows. Faults can be injected, each for a number of
// hand-overs. All methods may be called concurrently.
type Store struct {
	// ID finds a message's id; nil: the header IDHeader. Set it before use.
	ID func(*message.Message) string
	// Grace is how long an owner of a newer broker generation keeps its lane
	// without a sign of life. Zero: for ever. Set it before use.
	Grace time.Duration

	mu         sync.Mutex
	changed    chan struct{} // closed and renewed with every change
	rows       map[message.Lane]*row
	effects    map[string]int // index into log, by id
	log        []Effect
	handled    int
	duplicates int
	calls      int
	running    map[tenure]bool
	violations []string
	faults     []fault
	delay      time.Duration
	hold       chan struct{}
	streams    int
	queues     int64 // rows of queues that were made
	lost       map[message.Lane]bool
	instance   int // rises whenever another database takes its place
	gaps       map[message.Lane]lane.Gap
	accepted   map[message.Lane]int64 // below which no gap is open
}

type row struct {
	Row
	ordered         bool
	moved           bool // by hand, since it was acquired
	began           int64
	topic           string
	of              int // partitions of the topic, when the lane was first acquired
	groupGeneration int64
	updated         time.Time
}

// tenure is the time that one owner has a lane: a zombie may still be at work on a
// lane that another worker owns.
type tenure struct {
	lane  message.Lane
	epoch int64
}

// Row is what the store knows of a lane.
type Row struct {
	Epoch, Next, BrokerPosition int64
	StreamID                    string
	// LogID is the id of the log that the lane reads; empty: the broker has none.
	LogID string
	// Heartbeat is the time as of which the lane was last reported to be caught up.
	Heartbeat time.Time
	// Checkpoint is a queue's.
	Checkpoint int64
	// LeaderEpochs are those of the last batch that was handled, up to its end.
	LeaderEpochs []lane.LeaderEpoch
	// Cut is where the source reported the lane's log cut; -1: it didn't.
	Cut int64
	// Acquired is how often an ordered lane was acquired since it moved, was caught up
	// or was released.
	Acquired int
}

// Effect is the one effect of an id.
type Effect struct {
	ID      string
	Message message.Message // a copy of its own
}

type fault struct {
	err   error
	after bool
}

var (
	_ consumer.Handler = (*Store)(nil)
	_ consumer.Lanes   = (*Store)(nil)
)

// NewStore makes an empty store.
func NewStore() *Store {
	return &Store{
		changed:  make(chan struct{}),
		rows:     make(map[message.Lane]*row),
		effects:  make(map[string]int),
		running:  make(map[tenure]bool),
		lost:     make(map[message.Lane]bool),
		gaps:     make(map[message.Lane]lane.Gap),
		accepted: make(map[message.Lane]int64),
	}
}

// Acquire follows the start rule: the row; without one the broker's position; without
// that the configured start. A broker position above the row means that the database
// has lost commits; one below what the broker had confirmed, that an operator moved it.
func (s *Store) Acquire(ctx context.Context, a lane.Acquire) (lane.Assignment, error) {
	if err := ctx.Err(); err != nil {
		return lane.Assignment{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r, rewound, err := s.acquireRow(a)
	if err != nil {
		return lane.Assignment{}, err
	}
	if r.moved {
		r.Cut = -1
	}
	r.moved = false
	if a.Ordered { // the members of a queue share its row
		r.Epoch++
		r.Acquired++
	}
	r.groupGeneration, r.updated = a.GroupGeneration, time.Now()
	got := lane.Assignment{Epoch: r.Epoch, Rewound: rewound, Reached: r.Next, LeaderEpochs: r.LeaderEpochs, Cut: r.Cut}
	if a.Ordered {
		s.placeOrdered(r, a, &got)
	} else {
		s.placeQueue(r, a, &got)
	}
	got.Next, got.BrokerPosition, got.StreamID = r.Next, r.BrokerPosition, r.StreamID
	return got, nil
}

// acquireRow finds or makes the lane's row, and compares the ids of the logs.
func (s *Store) acquireRow(a lane.Acquire) (r *row, rewound bool, err error) {
	r, ok := s.rows[a.Lane]
	if ok && r.groupGeneration > a.GroupGeneration && (s.Grace == 0 || time.Since(r.updated) < s.Grace) {
		return nil, false, lane.ErrStale
	}
	switch {
	case !ok && a.Start < 0:
		return nil, false, lane.ErrNoStart
	case !ok:
		r = s.newRow(a)
		if m, ok := parseMetadata(a.OffsetMetadata); ok && a.Ordered && m.logID == a.LogID && m.began < r.Next {
			r.Next, r.began, r.BrokerPosition, rewound = m.began, m.began, -1, true
		}
	case a.LogID == "":
	case !a.Ordered:
		if r.StreamID != a.LogID {
			r.StreamID, r.BrokerPosition, r.began, r.Next, r.Cut = a.LogID, -1, -1, a.Start, -1
			delete(s.gaps, a.Lane)
			delete(s.accepted, a.Lane)
		}
	case r.LogID == "": // the broker has no ids until now
		r.LogID = a.LogID
	case r.LogID == a.LogID && r.moved && r.Cut >= 0:
		r.StreamID = s.newStreamID()
	case r.LogID == a.LogID:
	case r.moved:
		r.LogID, r.StreamID, r.began = a.LogID, a.LogID, r.Next
	default:
		return nil, false, &lane.HoldError{Lane: a.Lane, Err: fmt.Errorf("it was created anew: %s, was %s", a.LogID, r.LogID)}
	}
	return r, rewound, nil
}

// placeOrdered compares an ordered lane's row with the broker's position.
func (s *Store) placeOrdered(r *row, a lane.Acquire, got *lane.Assignment) {
	_, ours := parseMetadata(a.OffsetMetadata)
	switch {
	case a.Committed < 0:
	case a.Committed > r.Next:
		got.Rewound = true
	case a.Committed < r.BrokerPosition && ours:
		got.Outdated = true
	case a.Committed < r.BrokerPosition && a.HonourReset:
		got.Reset = true
		r.Next, r.BrokerPosition = a.Committed, a.Committed
		if r.Cut >= r.Next {
			r.Cut, r.StreamID, got.Cut = -1, s.newStreamID(), -1
		}
	default:
		r.BrokerPosition = max(r.BrokerPosition, a.Committed)
	}
	r.began = min(r.began, r.Next)
	got.OffsetMetadata = metadata{epoch: r.Epoch, began: r.began, logID: r.LogID}.String()
}

// Heartbeat records since when lanes are caught up. One that has moved since is passed
// over.
func (s *Store) Heartbeat(ctx context.Context, lanes []lane.Heartbeat) (gone []message.Lane, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	for i, c := range lanes {
		if i > 0 && lanes[i-1].Lane.Compare(c.Lane) >= 0 {
			s.violate("the heartbeat has lane %s after lane %s", c.Lane, lanes[i-1].Lane)
		}
		if c.Age < 0 {
			s.violate("lane %s has a heartbeat %s from now", c.Lane, -c.Age)
		}
		r := s.rows[c.Lane]
		if r == nil {
			s.notAcquired(c.Lane, "has a heartbeat")
			gone = append(gone, c.Lane)
			continue
		}
		switch {
		case r.Epoch != c.Epoch, !r.ordered && !s.reached(r, c.Checkpoint), r.ordered && r.Next < c.Next:
			gone = append(gone, c.Lane)
			continue
		case r.ordered && r.Next != c.Next:
			continue
		}
		r.Acquired = 0
		if at := time.Now().Add(-c.Age); at.After(r.Heartbeat) {
			r.Heartbeat = at
		}
	}
	return gone, nil
}

// ReportGap records a gap. The store has no clocks, so one that may be none isn't
// recorded once the queue was reported to be caught up.
func (s *Store) ReportGap(ctx context.Context, l message.Lane, found lane.Gap) (lane.Gap, error) {
	if err := ctx.Err(); err != nil {
		return lane.Gap{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[l]
	if r == nil {
		s.notAcquired(l, "has a gap")
		return lane.Gap{}, nil
	}
	open := s.gaps[l]
	found.From = max(found.From, s.accepted[l])
	if found.Positions() == 0 || !found.Before.IsZero() && !found.Before.After(r.Heartbeat) {
		return open, nil
	}
	if open.Positions() > 0 {
		found.From, found.Next = min(found.From, open.From), max(found.Next, open.Next)
	}
	s.gaps[l] = lane.Gap{From: found.From, Next: found.Next}
	return s.gaps[l], nil
}

// AcceptGap accepts a gap.
func (s *Store) AcceptGap(ctx context.Context, l message.Lane, next int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	s.accepted[l] = max(s.accepted[l], next)
	open := s.gaps[l]
	if r := s.rows[l]; r != nil {
		r.Next = max(r.Next, min(next, open.Next))
	}
	if open.Next <= next {
		delete(s.gaps, l)
	}
	return nil
}

// BrokerConfirmed records what the broker has confirmed of lanes whose row is there or
// beyond.
func (s *Store) BrokerConfirmed(ctx context.Context, all []lane.BrokerPosition) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	for i, c := range all {
		if i > 0 && all[i-1].Lane.Compare(c.Lane) >= 0 {
			s.violate("lane %s is reported as confirmed after lane %s", c.Lane, all[i-1].Lane)
		}
		r := s.rows[c.Lane]
		switch {
		case r == nil:
			s.notAcquired(c.Lane, "is reported as confirmed by the broker")
		case !r.ordered:
			s.violate("the queue %s is reported as confirmed by the broker", c.Lane)
		case r.Epoch == c.Epoch && c.Position <= r.Next:
			r.BrokerPosition = c.Position
		}
	}
	return nil
}

// Release records that the owner released a lane.
func (s *Store) Release(ctx context.Context, l message.Lane, epoch int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[l]
	switch {
	case r == nil:
		s.notAcquired(l, "is released")
	case r.Epoch == epoch:
		r.Acquired = 0
	}
	return nil
}

func (s *Store) newRow(a lane.Acquire) *row {
	r := &row{ordered: a.Ordered}
	r.Cut = -1
	r.Next, r.BrokerPosition, r.StreamID = a.Start, -1, a.LogID
	if a.Committed >= 0 {
		r.Next, r.BrokerPosition = a.Committed, a.Committed
	}
	if a.Ordered {
		r.LogID = a.LogID
	} else {
		s.queues++
		r.Epoch = s.queues
	}
	r.began = r.Next
	if !a.Ordered {
		r.began, r.BrokerPosition = -1, -1 // until it is known that it isn't lost
	}
	if r.StreamID == "" {
		r.StreamID = s.newStreamID()
	}
	if p := a.Partition; p != nil {
		for l, other := range s.rows {
			if l.Source == a.Lane.Source && other.topic == p.Topic && other.of <= p.Number && p.Added >= 0 && a.Committed < 0 {
				r.Next, r.began = p.Added, p.Added // it was added since
			}
		}
		r.topic, r.of = p.Topic, p.Of
	}
	s.rows[a.Lane] = r
	return r
}

func (s *Store) newStreamID() string {
	s.streams++
	return fmt.Sprintf("stream-%d", s.streams)
}

// ReportLogCut records that a lane's log was cut.
func (s *Store) ReportLogCut(ctx context.Context, cut lane.LogCut) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[cut.Lane]
	switch {
	case r == nil:
		s.notAcquired(cut.Lane, "has its log cut")
	case r.Epoch != cut.Epoch:
		return &lane.FencedError{Lanes: []message.Lane{cut.Lane}}
	case cut.Follow:
		r.Next = min(r.Next, cut.At)
		r.began, r.BrokerPosition, r.Cut, r.StreamID = min(r.began, r.Next), -1, -1, s.newStreamID()
		r.LeaderEpochs = lane.EpochsBelow(r.LeaderEpochs, r.Next)
	default:
		r.Cut = cut.At
	}
	return nil
}

// Handle applies all batches at once, or none.
func (s *Store) Handle(ctx context.Context, batches []lane.Batch) error {
	f, hold, delay := s.enter(batches)
	defer s.leave(batches)
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if f.err != nil && !f.after {
		return f.err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.commit(batches); err != nil {
		return err
	}
	return f.err
}

func (s *Store) enter(batches []lane.Batch) (f fault, hold chan struct{}, delay time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	s.calls++
	for _, b := range batches {
		if !b.Ordered {
			continue
		}
		if s.running[tenure{b.Lane, b.Epoch}] {
			s.violate("lane %s is in two hand-overs at a time", b.Lane)
		}
		s.running[tenure{b.Lane, b.Epoch}] = true
	}
	if len(s.faults) > 0 {
		f, s.faults = s.faults[0], s.faults[1:]
	}
	return f, s.hold, s.delay
}

func (s *Store) leave(batches []lane.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range batches {
		delete(s.running, tenure{b.Lane, b.Epoch})
	}
}

func (s *Store) commit(batches []lane.Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	var fenced []message.Lane
	for i := range batches {
		b := &batches[i]
		s.inspect(b)
		r := s.rows[b.Lane]
		if r == nil || !r.ordered && !s.reached(r, b.Checkpoint) || r.Epoch != b.Epoch || b.Ordered && r.Next != b.From {
			fenced = append(fenced, b.Lane)
		}
	}
	if len(fenced) > 0 {
		return &lane.FencedError{Lanes: fenced}
	}
	for i := range batches {
		s.apply(&batches[i])
	}
	return nil
}

// inspect records what no source may do, whatever state the store is in.
func (s *Store) inspect(b *lane.Batch) {
	r := s.rows[b.Lane]
	if r == nil {
		s.notAcquired(b.Lane, "is handed over")
	} else if r.ordered != b.Ordered {
		s.violate("lane %s was acquired with Ordered=%t and handed over with %t", b.Lane, r.ordered, b.Ordered)
	}
	if r != nil && b.StreamID != r.StreamID {
		s.violate("lane %s: a batch of stream %q, but the lane was acquired as %q", b.Lane, b.StreamID, r.StreamID)
	}
	if b.Ordered && b.Next <= b.From {
		s.violate("lane %s: a batch from %d to %d goes nowhere", b.Lane, b.From, b.Next)
	}
	last := b.From - 1
	for i := range b.Messages {
		p := b.Messages[i].Position
		if p.Lane != b.Lane {
			s.violate("lane %s: a message of lane %s in its batch", b.Lane, p.Lane)
		}
		if b.Ordered && (p.Offset <= last || p.Offset >= b.Next) {
			s.violate("lane %s: position %d after %d in a batch from %d to %d", b.Lane, p.Offset, last, b.From, b.Next)
		}
		last = p.Offset
	}
}

func (s *Store) apply(b *lane.Batch) {
	if r := s.rows[b.Lane]; r != nil {
		r.updated, r.Acquired = time.Now(), 0
		r.Next = max(r.Next, b.Next)
		r.LeaderEpochs = lane.EpochsBelow(b.LeaderEpochs, r.Next)
		r.BrokerPosition = min(max(r.BrokerPosition, b.BrokerPosition), r.Next)
	}
	for i := range b.Messages {
		m := &b.Messages[i]
		s.handled++
		id := s.id(m)
		if id == "" {
			s.violate("lane %s: the message at %d has no id", b.Lane, m.Position.Offset)
		}
		if _, dup := s.effects[id]; dup {
			s.duplicates++
			continue
		}
		s.effects[id] = len(s.log)
		s.log = append(s.log, Effect{ID: id, Message: clone(m)})
	}
}

func (s *Store) id(m *message.Message) string {
	if s.ID != nil {
		return s.ID(m)
	}
	v, _ := m.Header(IDHeader)
	return string(v)
}

// clone copies what a message holds, for its memory is the source's again after
// the commit.
func clone(m *message.Message) message.Message {
	c := *m
	c.Key, c.Value = bytes.Clone(m.Key), bytes.Clone(m.Value)
	c.Headers = slices.Clone(m.Headers)
	for i := range c.Headers {
		c.Headers[i].Value = bytes.Clone(c.Headers[i].Value)
	}
	return c
}

// notAcquired records what is done to a lane without a row, unless the store has lost
// it.
func (s *Store) notAcquired(l message.Lane, what string) {
	if !s.lost[l] {
		s.violate("lane %s %s, and was never acquired", l, what)
	}
}

func (s *Store) violate(format string, args ...any) {
	if len(s.violations) < 20 {
		s.violations = append(s.violations, fmt.Sprintf(format, args...))
	}
}

func (s *Store) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}
