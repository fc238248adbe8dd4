package kafka

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// commitInterval is how often the group is told of what was committed. A commit
// takes the broker several milliseconds, and is only a copy.
const commitInterval = 500 * time.Millisecond

const (
	// tellInterval is how often the database is told what the broker has confirmed.
	// Batches tell it, too, but only of those before them.
	tellInterval = 15 * time.Second
	// tellTimeout bounds that: a group waits for its members to let go.
	tellTimeout = time.Second
)

// groupMember is what a committer needs of its generation.
type groupMember interface {
	// commit calls taken for each position that the broker has taken. The error
	// tells of another.
	commit(all map[string]map[int]committed, taken func(topic string, partition int)) error
}

// committer copies lanes' positions to the group, for one generation. A commit
// that fails is counted and tried again with the next; it stops nobody.
//
// What the broker has confirmed is told to the database, from time to time and at the
// end: an offset below it, at the next start, is an operator's reset.
type committer struct {
	member groupMember
	failed func()
	tell   func(ctx context.Context, all []lane.BrokerPosition) error
	log    *slog.Logger

	quit  chan struct{}
	ended chan struct{}

	problem logonce.Problem // of commit

	mu    sync.Mutex
	marks map[*mark]struct{}
}

// mark is one opened lane's position at the broker.
type mark struct {
	topic     string
	partition int
	lane      message.Lane
	epoch     int64
	origin    string       // goes with each position
	confirmed atomic.Int64 // what the group is known to hold of this lane; -1: nothing
	wanted    int64        // guarded by the committer's mutex; -1: nothing to tell
	told      bool         // guarded, too: the group has the origin
	noted     int64        // guarded, too: the confirmed position that the database was told last
}

func newCommitter(member groupMember, failed func(), tell func(context.Context, []lane.BrokerPosition) error, log *slog.Logger) *committer {
	return &committer{
		member: member, failed: failed, tell: tell, log: log,
		quit: make(chan struct{}), ended: make(chan struct{}),
		marks: make(map[*mark]struct{}),
	}
}

// add begins to copy a lane's position.
func (c *committer) add(l *partitionReader, taken *lane.Assignment) *mark {
	m := &mark{
		topic: l.topic, partition: l.partition, lane: l.id, epoch: taken.Epoch, origin: taken.OffsetMetadata,
		wanted: -1, told: taken.OffsetMetadata == "", noted: taken.BrokerPosition,
	}
	m.confirmed.Store(taken.BrokerPosition)
	c.mu.Lock()
	defer c.mu.Unlock()
	for old := range c.marks {
		if old.topic == m.topic && old.partition == m.partition {
			// The lane was opened before in this generation: what that one knew is
			// older, and told late it would look like a reset of the group.
			delete(c.marks, old)
		}
	}
	c.marks[m] = struct{}{}
	return m
}

// set notes a lane's next position. It does not block.
func (c *committer) set(m *mark, next int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m.wanted = next
}

// drop forgets a lane, with what was not yet told: its position no longer holds.
func (c *committer) drop(m *mark) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.marks, m)
}

func (c *committer) start() { go c.loop() }

// stop commits what is left and ends.
func (c *committer) stop() {
	close(c.quit)
	<-c.ended
	c.commit()
	c.note()
}

func (c *committer) loop() {
	defer close(c.ended)
	tick, slow := time.NewTicker(commitInterval), time.NewTicker(tellInterval)
	defer tick.Stop()
	defer slow.Stop()
	for {
		select {
		case <-tick.C:
			c.commit()
		case <-slow.C:
			c.note()
		case <-c.quit:
			return
		}
	}
}

// commit sends the positions that changed, in one request. It is called by one
// goroutine at a time.
func (c *committer) commit() {
	offsets, sent := c.collect()
	if len(offsets) == 0 {
		return
	}
	// Marks of lanes that were opened anew meanwhile don't matter any more.
	err := c.member.commit(offsets, func(topic string, partition int) {
		if m := sent[place{topic, partition}]; m != nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			m.confirmed.Store(offsets[topic][partition].offset)
			m.told = true
		}
	})
	if err == nil {
		c.problem.End()
		return
	}
	c.failed()
	if c.problem.IsNew(err) {
		c.log.Warn("the broker did not take a commit, which only delays its copy", "error", err)
	}
}

// note tells the database what the broker has confirmed since the last time.
func (c *committer) note() {
	all, marks := c.confirmed()
	if len(all) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), tellTimeout)
	defer cancel()
	if err := c.tell(ctx, all); err != nil {
		c.log.Debug("tell what the broker has confirmed", "error", err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, m := range marks {
		m.noted = all[i].Position
	}
}

// confirmed are the lanes of which the database was told another position last, in
// the order of their rows.
func (c *committer) confirmed() (all []lane.BrokerPosition, marks []*mark) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for m := range c.marks {
		if m.confirmed.Load() != m.noted {
			marks = append(marks, m)
		}
	}
	slices.SortFunc(marks, func(a, b *mark) int { return a.lane.Compare(b.lane) })
	for _, m := range marks {
		all = append(all, lane.BrokerPosition{Lane: m.lane, Epoch: m.epoch, Position: m.confirmed.Load()})
	}
	return all, marks
}

// place is a partition.
type place struct {
	topic     string
	partition int
}

func (c *committer) collect() (offsets map[string]map[int]committed, marks map[place]*mark) {
	c.mu.Lock()
	defer c.mu.Unlock()
	offsets, marks = make(map[string]map[int]committed), make(map[place]*mark)
	for m := range c.marks {
		if m.wanted < 0 || m.wanted == m.confirmed.Load() && m.told {
			continue
		}
		if offsets[m.topic] == nil {
			offsets[m.topic] = make(map[int]committed)
		}
		offsets[m.topic][m.partition] = committed{m.wanted, m.origin}
		marks[place{m.topic, m.partition}] = m
	}
	return offsets, marks
}
