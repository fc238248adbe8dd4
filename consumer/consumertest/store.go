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
	accepted   map[message.Lane]int64 // below which no gap is noted
}

type row struct {
	Row
	ordered   bool
	moved     bool // by hand, since it was taken
	began     int64
	topic     string
	of        int // partitions of the topic, when it was first taken
	brokerGen int64
	updated   time.Time
}

// tenure is the time that one owner has a lane: a zombie may still be at work on
// a lane that another worker has taken.
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
	// CaughtUp is the time as of which the lane was last told to have nothing
	// left to read.
	Heartbeat time.Time
	// Checkpoint is a queue's.
	Checkpoint int64
	// LeaderEpochs are those of the last batch that was handled, up to its end.
	LeaderEpochs []lane.LeaderEpoch
	// Cut is where the lane's log was cut, as the source has told; -1: it wasn't.
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

// Take follows the start rule: the row; without one the broker's copy; without
// that the configured start. A copy above the row means that the row has lost
// commits, one below what the broker had confirmed that an operator moved it.
func (s *Store) Acquire(ctx context.Context, t lane.Acquire) (lane.Assignment, error) {
	if err := ctx.Err(); err != nil {
		return lane.Assignment{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	rewound := false
	r, ok := s.rows[t.Lane]
	if ok && r.brokerGen > t.GroupGeneration && (s.Grace == 0 || time.Since(r.updated) < s.Grace) {
		return lane.Assignment{}, lane.ErrStale
	}
	switch {
	case !ok && t.Start < 0:
		return lane.Assignment{}, lane.ErrNoStart
	case !ok:
		r = s.newRow(t)
		if o, ok := parseOrigin(t.OffsetMetadata); ok && t.Ordered && o.log == t.LogID && o.began < r.Next {
			r.Next, r.began, r.BrokerPosition, rewound = o.began, o.began, -1, true
		}
	case t.LogID == "":
	case !t.Ordered:
		if r.StreamID != t.LogID {
			r.StreamID, r.BrokerPosition, r.began, r.Next, r.Cut = t.LogID, -1, -1, t.Start, -1
			delete(s.gaps, t.Lane)
			delete(s.accepted, t.Lane)
		}
	case r.LogID == "": // the broker has learnt to tell
		r.LogID = t.LogID
	case r.LogID == t.LogID && r.moved && r.Cut >= 0:
		r.StreamID = s.newStreamID()
	case r.LogID == t.LogID:
	case r.moved:
		r.LogID, r.StreamID, r.began = t.LogID, t.LogID, r.Next
	default:
		return lane.Assignment{}, &lane.HoldError{Lane: t.Lane, Err: fmt.Errorf("it was created anew: %s, was %s", t.LogID, r.LogID)}
	}
	if r.moved {
		r.Cut = -1
	}
	r.moved = false
	if t.Ordered { // the members of a queue share its row
		r.Epoch++
		r.Acquired++
	}
	r.brokerGen, r.updated = t.GroupGeneration, time.Now()
	taken := lane.Assignment{Epoch: r.Epoch, Rewound: rewound, Reached: r.Next, LeaderEpochs: r.LeaderEpochs, Cut: r.Cut}
	_, ours := parseOrigin(t.OffsetMetadata)
	switch {
	case !t.Ordered:
		s.takeQueue(r, t, &taken)
	case t.Committed < 0:
	case t.Committed > r.Next:
		taken.Rewound = true
	case t.Committed < r.BrokerPosition && ours:
		taken.Outdated = true
	case t.Committed < r.BrokerPosition && t.HonourReset:
		taken.Reset = true
		r.Next, r.BrokerPosition = t.Committed, t.Committed
		if r.Cut >= r.Next {
			r.Cut, r.StreamID, taken.Cut = -1, s.newStreamID(), -1
		}
	default:
		r.BrokerPosition = max(r.BrokerPosition, t.Committed)
	}
	if t.Ordered {
		r.began = min(r.began, r.Next)
		taken.OffsetMetadata = origin{epoch: r.Epoch, began: r.began, log: r.LogID}.String()
	}
	taken.Next, taken.BrokerPosition, taken.StreamID = r.Next, r.BrokerPosition, r.StreamID
	return taken, nil
}

// CaughtUp notes since when lanes had nothing left to read. One that has moved on
// since is passed over.
func (s *Store) Heartbeat(ctx context.Context, lanes []lane.Heartbeat) (gone []message.Lane, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	for i, c := range lanes {
		if i > 0 && lanes[i-1].Lane.Compare(c.Lane) >= 0 {
			s.violate("lane %s is told to be caught up after lane %s", c.Lane, lanes[i-1].Lane)
		}
		if c.Age < 0 {
			s.violate("lane %s is told to be caught up in %s from now", c.Lane, -c.Age)
		}
		r := s.rows[c.Lane]
		if r == nil {
			s.untaken(c.Lane, "is told to be caught up")
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

// ReportGap notes a gap. It knows no clock, so one that may be none isn't noted once the
// queue was told to be caught up.
func (s *Store) ReportGap(ctx context.Context, l message.Lane, found lane.Gap) (lane.Gap, error) {
	if err := ctx.Err(); err != nil {
		return lane.Gap{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[l]
	if r == nil {
		s.untaken(l, "misses something")
		return lane.Gap{}, nil
	}
	noted := s.gaps[l]
	found.From = max(found.From, s.accepted[l])
	if found.Positions() == 0 || !found.Before.IsZero() && !found.Before.After(r.Heartbeat) {
		return noted, nil
	}
	if noted.Positions() > 0 {
		found.From, found.Next = min(found.From, noted.From), max(found.Next, noted.Next)
	}
	s.gaps[l] = lane.Gap{From: found.From, Next: found.Next}
	return s.gaps[l], nil
}

// AcceptGap forgets a gap.
func (s *Store) AcceptGap(ctx context.Context, lane message.Lane, next int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	s.accepted[lane] = max(s.accepted[lane], next)
	noted := s.gaps[lane]
	if r := s.rows[lane]; r != nil {
		r.Next = max(r.Next, min(next, noted.Next))
	}
	if noted.Next <= next {
		delete(s.gaps, lane)
	}
	return nil
}

// Copied notes what the broker has confirmed of lanes whose row stands there or
// above.
func (s *Store) BrokerConfirmed(ctx context.Context, all []lane.BrokerPosition) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	for i, c := range all {
		if i > 0 && all[i-1].Lane.Compare(c.Lane) >= 0 {
			s.violate("lane %s is told to be copied after lane %s", c.Lane, all[i-1].Lane)
		}
		r := s.rows[c.Lane]
		switch {
		case r == nil:
			s.untaken(c.Lane, "is told to be copied")
		case !r.ordered:
			s.violate("the queue %s is told to be copied", c.Lane)
		case r.Epoch == c.Epoch && c.Position <= r.Next:
			r.BrokerPosition = c.Position
		}
	}
	return nil
}

// LetGo notes that a lane was let go by its owner.
func (s *Store) Release(ctx context.Context, lane message.Lane, epoch int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[lane]
	switch {
	case r == nil:
		s.untaken(lane, "is let go")
	case r.Epoch == epoch:
		r.Acquired = 0
	}
	return nil
}

func (s *Store) newRow(t lane.Acquire) *row {
	r := &row{ordered: t.Ordered}
	r.Cut = -1
	r.Next, r.BrokerPosition, r.StreamID = t.Start, -1, t.LogID
	if t.Committed >= 0 {
		r.Next, r.BrokerPosition = t.Committed, t.Committed
	}
	if t.Ordered {
		r.LogID = t.LogID
	} else {
		s.queues++
		r.Epoch = s.queues
	}
	r.began = r.Next
	if !t.Ordered {
		r.began, r.BrokerPosition = -1, -1 // until it is known that it isn't lost
	}
	if r.StreamID == "" {
		r.StreamID = s.newStreamID()
	}
	if p := t.Partition; p != nil {
		for l, other := range s.rows {
			if l.Source == t.Lane.Source && other.topic == p.Topic && other.of <= p.Number && p.Added >= 0 && t.Committed < 0 {
				r.Next, r.began = p.Added, p.Added // it was added since
			}
		}
		r.topic, r.of = p.Topic, p.Of
	}
	s.rows[t.Lane] = r
	return r
}

func (s *Store) newStreamID() string {
	s.streams++
	return fmt.Sprintf("stream-%d", s.streams)
}

// ReportLogCut notes that a lane's log was cut.
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
		s.untaken(cut.Lane, "has its log cut")
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

// Handle has the effects of all batches at once, or of none.
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

// inspect notes what no source may do, whatever state the store is in.
func (s *Store) inspect(b *lane.Batch) {
	r := s.rows[b.Lane]
	if r == nil {
		s.untaken(b.Lane, "is handed over")
	} else if r.ordered != b.Ordered {
		s.violate("lane %s was taken with Ordered=%t and handed over with %t", b.Lane, r.ordered, b.Ordered)
	}
	if r != nil && b.StreamID != r.StreamID {
		s.violate("lane %s: a batch of incarnation %q, where the lane was taken as %q", b.Lane, b.StreamID, r.StreamID)
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

// untaken notes what is done to a lane without a row, unless the store has lost it.
func (s *Store) untaken(l message.Lane, what string) {
	if !s.lost[l] {
		s.violate("lane %s %s, and was never taken", l, what)
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
