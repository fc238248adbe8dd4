package kafka

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	// commitInterval is how often positions are committed to the group. A commit
	// takes the broker several milliseconds, and is only a copy.
	commitInterval = 500 * time.Millisecond
	// reportInterval is how often the database learns what the broker has confirmed.
	// Batches carry it too, but only what was confirmed before them.
	reportInterval = 15 * time.Second
	// reportTimeout bounds that: a group waits for its members to release lanes.
	reportTimeout = time.Second
)

// groupMember is what a committer needs of the group generation.
type groupMember interface {
	// commit calls confirmed for each position that the broker confirms. The error is
	// of another position, or of all.
	commit(all map[string]map[int]committed, confirmed func(topic string, partition int)) error
}

// committer copies lanes' positions to the group, for one group generation. A commit
// that fails is counted and repeated with the next; it stops nothing.
//
// It reports what the broker has confirmed to the database, from time to time and at
// the end: an offset below that, at the next start, is an operator's reset.
type committer struct {
	member groupMember
	failed func()
	report func(ctx context.Context, all []lane.BrokerPosition) error
	log    *slog.Logger

	quit    chan struct{}
	ended   chan struct{}
	problem logonce.Problem // of commits

	mu    sync.Mutex
	marks map[*mark]struct{}
}

// mark is the position at the broker of a lane that is open.
type mark struct {
	topic     string
	partition int
	lane      message.Lane
	epoch     int64
	metadata  string       // committed with each position
	confirmed atomic.Int64 // what the group is known to have of this lane; -1: nothing

	// Guarded by the committer's mutex.
	position int64 // to commit; -1: nothing
	current  bool  // the group has the metadata
	reported int64 // the confirmed position that the database was told last
}

func newCommitter(member groupMember, failed func(), report func(context.Context, []lane.BrokerPosition) error, log *slog.Logger) *committer {
	return &committer{
		member: member, failed: failed, report: report, log: log,
		quit: make(chan struct{}), ended: make(chan struct{}),
		marks: make(map[*mark]struct{}),
	}
}

// add begins to copy the position of a lane that was acquired.
func (c *committer) add(r *partitionReader, a *lane.Assignment) *mark {
	m := &mark{
		topic: r.topic, partition: r.partition, lane: r.lane, epoch: a.Epoch, metadata: a.OffsetMetadata,
		position: -1, current: a.OffsetMetadata == "", reported: a.BrokerPosition,
	}
	m.confirmed.Store(a.BrokerPosition)
	c.mu.Lock()
	defer c.mu.Unlock()
	for old := range c.marks {
		if old.topic == m.topic && old.partition == m.partition {
			// The lane was open before in this group generation: what the old mark has
			// is older, and committed late it would look like a reset of the group.
			delete(c.marks, old)
		}
	}
	c.marks[m] = struct{}{}
	return m
}

// set has a lane's position committed with the next commit. It doesn't wait for that.
func (c *committer) set(m *mark, next int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m.position = next
}

// drop forgets a lane, and what was not yet committed of it: its position no longer
// holds.
func (c *committer) drop(m *mark) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.marks, m)
}

// stop commits what is left and ends.
func (c *committer) stop() {
	close(c.quit)
	<-c.ended
	c.commit()
	c.reportConfirmed()
}

func (c *committer) loop() {
	defer close(c.ended)
	commit, report := time.NewTicker(commitInterval), time.NewTicker(reportInterval)
	defer commit.Stop()
	defer report.Stop()
	for {
		select {
		case <-commit.C:
			c.commit()
		case <-report.C:
			c.reportConfirmed()
		case <-c.quit:
			return
		}
	}
}

// commit sends the positions that changed, in one request. It is called by one
// goroutine at a time.
func (c *committer) commit() {
	offsets, sent := c.changed()
	if len(offsets) == 0 {
		return
	}
	// A mark that was replaced meanwhile no longer matters.
	err := c.member.commit(offsets, func(topic string, partition int) {
		if m := sent[topicPartition{topic, partition}]; m != nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			m.confirmed.Store(offsets[topic][partition].offset)
			m.current = true
		}
	})
	if err == nil {
		c.problem.End()
		return
	}
	c.failed()
	if c.problem.IsNew(err) {
		c.log.Warn("the broker refused a commit, which only delays its copy", "error", err)
	}
}

// reportConfirmed tells the database what the broker has confirmed since the last
// report.
func (c *committer) reportConfirmed() {
	all, marks := c.unreported()
	if len(all) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), reportTimeout)
	defer cancel()
	if err := c.report(ctx, all); err != nil {
		c.log.Debug("report what the broker has confirmed", "error", err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, m := range marks {
		m.reported = all[i].Position
	}
}

// unreported are the lanes whose confirmed position the database doesn't know, in the
// order of their rows.
func (c *committer) unreported() (all []lane.BrokerPosition, marks []*mark) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for m := range c.marks {
		if m.confirmed.Load() != m.reported {
			marks = append(marks, m)
		}
	}
	slices.SortFunc(marks, func(a, b *mark) int { return a.lane.Compare(b.lane) })
	for _, m := range marks {
		all = append(all, lane.BrokerPosition{Lane: m.lane, Epoch: m.epoch, Position: m.confirmed.Load()})
	}
	return all, marks
}

type topicPartition struct {
	topic     string
	partition int
}

// changed are the positions that the group doesn't have, by topic and partition.
func (c *committer) changed() (offsets map[string]map[int]committed, marks map[topicPartition]*mark) {
	c.mu.Lock()
	defer c.mu.Unlock()
	offsets, marks = make(map[string]map[int]committed), make(map[topicPartition]*mark)
	for m := range c.marks {
		if m.position < 0 || m.position == m.confirmed.Load() && m.current {
			continue
		}
		if offsets[m.topic] == nil {
			offsets[m.topic] = make(map[int]committed)
		}
		offsets[m.topic][m.partition] = committed{m.position, m.metadata}
		marks[topicPartition{m.topic, m.partition}] = m
	}
	return offsets, marks
}

// offsetSender sends a member's offsets to the consumer group. kafka-go's own commit has no field for
// offset metadata.
type offsetSender struct {
	cluster         *cluster
	groupGeneration int32
	member          string
}

// commit commits positions, and calls confirmed for each that the broker confirms. The
// error is of the first that it doesn't.
func (m offsetSender) commit(all map[string]map[int]committed, confirmed func(topic string, partition int)) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	req := &offsetcommit.Request{GroupID: m.cluster.group, GenerationID: m.groupGeneration, MemberID: m.member, RetentionTimeMs: -1}
	for _, topic := range slices.Sorted(maps.Keys(all)) { // so that the error is the same each time
		t := offsetcommit.RequestTopic{Name: topic}
		for partition, c := range all[topic] {
			t.Partitions = append(t.Partitions, offsetcommit.RequestPartition{
				PartitionIndex: int32(partition), CommittedOffset: c.offset, CommittedLeaderEpoch: -1, CommittedMetadata: c.metadata,
			})
		}
		req.Topics = append(req.Topics, t)
	}
	res, err := ask[*offsetcommit.Response](ctx, m.cluster, req)
	if err != nil {
		return fmt.Errorf("commit the group's offsets: %w", err)
	}
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			switch {
			case p.ErrorCode == 0:
				confirmed(t.Name, int(p.PartitionIndex))
			case err == nil:
				err = fmt.Errorf("commit the group's offsets of topic %s: %w", t.Name, kafkago.Error(p.ErrorCode))
			}
		}
	}
	return err
}
