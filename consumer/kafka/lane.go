package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// lane is one assigned partition, taken and read, and taken anew whenever it was
// lost or can't go on where it stands.
type partitionReader struct {
	*generation
	id        message.Lane
	topic     string
	partition int

	oldLeader time.Time // since when the leader knows nothing of what was read
	problem   logonce.Problem
}

const (
	// retryPause is the wait before a lane is tried again that others or the
	// network hold up.
	retryPause = time.Second
	// holdPause is the wait where a person has to do something.
	holdPause = 5 * time.Second
)

// run reads the lane until the generation ends.
func (l *partitionReader) run() {
	for l.soft.Err() == nil {
		s, err := l.take()
		if err == nil {
			err = l.read(s)
		}
		if err != nil && l.soft.Err() == nil {
			wait.For(l.soft, l.trouble(err))
		}
	}
	l.in.Hold(l.id, nil) // the next owner's affair
}

// stand is where a lane that was taken begins.
type stand struct {
	lane.Assignment
	// skipTo is the first position the broker still has, where that is above
	// Next and the gap may be skipped; else -1.
	skipTo int64
	// topicID is what brokers know the topic by; zero: not known.
	topicID [16]byte
}

// take takes the lane and checks that the broker still has, or will have, the
// position to begin at.
func (l *partitionReader) take() (stand, error) {
	// As of now: our own commits have moved what came with the assignment.
	group, err := l.cluster.committed(l.soft, l.topic, l.partition)
	if err != nil {
		return stand{}, err
	}
	start, err := l.start(group.offset)
	if err != nil {
		return stand{}, err
	}
	part, err := l.part(group.offset)
	if err != nil {
		return stand{}, err
	}
	ids, err := l.cluster.identities(l.soft)
	if err != nil {
		return stand{}, err
	}
	l.logs.note(l.topic, ids[l.topic])
	taken, err := l.in.Acquire(l.soft, lane.Acquire{
		Lane:            l.id,
		Ordered:         true,
		LogID:           ids[l.topic],
		GroupGeneration: int64(l.assignment.generation),
		Committed:       group.offset,
		OffsetMetadata:  group.origin,
		Start:           start,
		Partition:       part,
		HonourReset:     l.config.OnGroupReset == HonourGroupReset,
	})
	if errors.Is(err, lane.ErrNoStart) {
		return stand{}, &lane.HoldError{Lane: l.id, Err: errNoStart}
	}
	if err != nil {
		return stand{}, err
	}
	s := stand{Assignment: taken, skipTo: -1, topicID: ids.raw(l.topic)}
	first, end, err := l.cluster.span(l.soft, l.topic, l.partition)
	if err == nil {
		err = l.checkCut(&s.Assignment, end)
	}
	switch {
	case err != nil:
		return stand{}, err
	case taken.Next < first && l.config.OnGap == StopOnGap:
		return stand{}, &lane.HoldError{Lane: l.id, Err: &gapError{position: taken.Next, first: first}}
	case taken.Next < first:
		l.log.Warn("the broker no longer has the lane's next positions: skipping them",
			"lane", l.id.Name, "position", taken.Next, "first", first, "skipped", first-taken.Next)
		s.skipTo = first
	}
	return s, nil
}

// start is where the lane begins if the database doesn't know it.
func (l *partitionReader) start(committed int64) (int64, error) {
	switch {
	case committed >= 0:
		return committed, nil
	case l.config.Start == StartEarliest:
		return l.cluster.start(l.soft, l.topic, l.partition, firstOffset)
	case l.config.Start == StartLatest:
		return l.cluster.start(l.soft, l.topic, l.partition, endOffset)
	default:
		return -1, nil
	}
}

// part tells of the lane's partition; nil: what is known of the topic is older than
// the assignment. StartLatest is meant for what the topic holds when it is first
// read: of a partition that is added, nothing was there to be left out.
func (l *partitionReader) part(committed int64) (*lane.Partition, error) {
	open := l.config.Start == StartLatest && committed < 0
	now, err := l.cluster.look(l.soft)
	count := now.partitions[l.topic]
	switch {
	case count <= l.partition && open:
		return nil, cmp.Or(err, now.problems[l.topic], errNoPartition)
	case count <= l.partition:
		return nil, nil //nolint:nilnil // it is only noted
	}
	p := &lane.Partition{Topic: l.topic, Number: l.partition, Of: count, Added: -1}
	if !open {
		return p, nil
	}
	p.Added, err = l.cluster.start(l.soft, l.topic, l.partition, firstOffset)
	return p, err
}

var errNoPartition = errors.New("the broker tells of no such partition")

var errNoStart = errors.New("neither the database nor the group has a position, and start is group: commit an offset for the group, or choose another start")

// gapError says that retention at the broker has overtaken the lane.
type gapError struct {
	position, first int64
}

func (e *gapError) Error() string {
	return fmt.Sprintf("data is lost: the lane goes on at position %d, the broker has only %d and above; on_gap: skip goes on there", e.position, e.first)
}

// trouble tells of what keeps the lane from being read, once until it changes,
// and returns how long to wait.
func (l *partitionReader) trouble(err error) time.Duration {
	l.ready.set(l.id.Name, false)
	level, pause := slog.LevelWarn, retryPause
	var hold *lane.HoldError
	var diverged *divergedError
	switch {
	case errors.As(err, &hold):
		l.in.Hold(l.id, err)
		level, pause = slog.LevelError, holdPause
	case errors.Is(err, errLost), errors.Is(err, errFollowed):
		level, pause = slog.LevelDebug, 100*time.Millisecond // the log has been told
	case errors.As(err, &diverged):
		pause = 100 * time.Millisecond // taking the lane anew will tell more
	case errors.Is(err, kafkago.OffsetOutOfRange):
		level = slog.LevelDebug // taking the lane anew will tell which way
	}
	if l.problem.IsNew(err) {
		l.log.Log(context.Background(), level, "lane not open, trying again", "lane", l.id.Name, "error", err)
	}
	return pause/2 + rand.N(pause/2)
}

// well tells that the lane is read.
func (l *partitionReader) well() {
	l.in.Hold(l.id, nil)
	l.ready.set(l.id.Name, true)
	if l.problem.End() {
		l.log.Info("lane goes on", "lane", l.id.Name)
	}
}

// isPassing tells whether an error of a fetch is of the kind that ends by
// itself, with a change of leader.
func isPassing(err error) bool {
	var code kafkago.Error
	return errors.As(err, &code) && code.Temporary()
}
