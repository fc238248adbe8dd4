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
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// partitionReader acquires the lane of one assigned partition and reads it, and
// acquires it again whenever it was lost or can't go on at its position.
type partitionReader struct {
	run *run
	gen *groupGeneration

	lane      message.Lane
	topic     string
	partition int

	oldLeader time.Time // since when the leader doesn't know the epochs that were read; zero: it does
	problem   logonce.Problem
}

const (
	// retryPause is the wait before the next attempt where others or the network
	// hold a lane up.
	retryPause = time.Second
	// holdPause is the wait where a person has to do something.
	holdPause = 5 * time.Second
)

// read reads the lane until the group generation ends.
func (r *partitionReader) read() {
	for r.gen.readCtx.Err() == nil {
		a, err := r.acquire()
		if err == nil {
			err = r.readOpen(a)
		}
		if err != nil && r.gen.readCtx.Err() == nil {
			wait.For(r.gen.readCtx, r.failed(err))
		}
	}
	r.run.session.Hold(r.lane, nil) // the next owner reports it
}

// acquired is a lane that was acquired, and where to begin.
type acquired struct {
	lane.Assignment
	// skipTo is the first position that the broker still has, where that is above
	// Next and the gap may be skipped; else -1.
	skipTo int64
	// topicID is how brokers know the topic; zero: not known.
	topicID [16]byte
}

// acquire acquires the lane, and checks that the broker still has the position to
// begin at, or will have it.
func (r *partitionReader) acquire() (acquired, error) {
	ctx, config, cluster := r.gen.readCtx, r.run.config, r.run.cluster
	// Asked for now: our own commits have moved what came with the assignment.
	group, err := cluster.committed(ctx, r.topic, r.partition)
	if err != nil {
		return acquired{}, err
	}
	start, err := r.start(group.offset)
	if err != nil {
		return acquired{}, err
	}
	partition, err := r.describe(group.offset)
	if err != nil {
		return acquired{}, err
	}
	ids, err := cluster.topicIDs(ctx)
	if err != nil {
		return acquired{}, err
	}
	if id := ids[r.topic]; id != "" {
		r.gen.topicIDs.LoadOrStore(r.topic, id)
	}
	assignment, err := r.run.session.Acquire(ctx, lane.Acquire{
		Lane:            r.lane,
		Ordered:         true,
		LogID:           ids[r.topic],
		GroupGeneration: int64(r.gen.assignment.groupGeneration),
		Committed:       group.offset,
		OffsetMetadata:  group.metadata,
		Start:           start,
		Partition:       partition,
		HonourReset:     config.OnGroupReset == policy.GroupResetHonour,
	})
	if errors.Is(err, lane.ErrNoStart) {
		return acquired{}, &lane.HoldError{Lane: r.lane, Err: errNoStart}
	}
	if err != nil {
		return acquired{}, err
	}
	a := acquired{Assignment: assignment, skipTo: -1, topicID: ids.raw(r.topic)}
	if err := r.checkPosition(&a); err != nil {
		return acquired{}, err
	}
	return a, nil
}

// checkPosition compares a lane's position with what its log has now.
func (r *partitionReader) checkPosition(a *acquired) error {
	first, end, err := r.run.cluster.span(r.gen.readCtx, r.topic, r.partition)
	if err == nil {
		err = r.checkCut(&a.Assignment, end)
	}
	switch {
	case err != nil:
		return err
	case a.Next < first && r.run.config.OnGap == policy.GapStop:
		return &lane.HoldError{Lane: r.lane, Err: &gapError{position: a.Next, first: first}}
	case a.Next < first:
		r.run.log.Warn("the broker no longer has the lane's next positions: skipping them",
			"lane", r.lane.Name, "position", a.Next, "first", first, "skipped", first-a.Next)
		a.skipTo = first
	}
	return nil
}

// start is where the lane begins if the database doesn't know it.
func (r *partitionReader) start(committed int64) (int64, error) {
	switch {
	case committed >= 0:
		return committed, nil
	case r.run.config.Start == policy.StartEarliest:
		return r.run.cluster.start(r.gen.readCtx, r.topic, r.partition, firstOffset)
	case r.run.config.Start == policy.StartLatest:
		return r.run.cluster.start(r.gen.readCtx, r.topic, r.partition, endOffset)
	default:
		return -1, nil
	}
}

// describe describes the lane's partition; nil: what we know of the topic is older
// than the assignment. StartLatest leaves out what the topic holds when it is first
// read: a partition that is added later held nothing then.
func (r *partitionReader) describe(committed int64) (*lane.Partition, error) {
	atStart := r.run.config.Start == policy.StartLatest && committed < 0
	now, err := r.run.cluster.lookUpTopics(r.gen.readCtx)
	count := now.partitions[r.topic]
	switch {
	case count <= r.partition && atStart:
		return nil, cmp.Or(err, now.problems[r.topic], errNoPartition)
	case count <= r.partition:
		return nil, nil //nolint:nilnil // the lane does without
	}
	p := &lane.Partition{Topic: r.topic, Number: r.partition, Of: count, Added: -1}
	if !atStart {
		return p, nil
	}
	p.Added, err = r.run.cluster.start(r.gen.readCtx, r.topic, r.partition, firstOffset)
	return p, err
}

var errNoPartition = errors.New("the broker reports no such partition")

var errNoStart = errors.New("neither the database nor the group has a position, and start is group: commit an offset for the group, or choose another start")

// gapError says that retention at the broker has overtaken the lane.
type gapError struct {
	position, first int64
}

func (e *gapError) Error() string {
	return fmt.Sprintf("data is lost: the lane goes on at position %d, the broker has only %d and above; on_gap: skip goes on there", e.position, e.first)
}

// failed logs what keeps the lane from being read, once until it changes, and
// returns how long to wait.
func (r *partitionReader) failed(err error) time.Duration {
	r.gen.readiness.setLane(r.lane.Name, false)
	level, pause := slog.LevelWarn, retryPause
	var hold *lane.HoldError
	var diverged *divergedError
	switch {
	case errors.As(err, &hold):
		r.run.session.Hold(r.lane, err)
		level, pause = slog.LevelError, holdPause
	case errors.Is(err, errLost), errors.Is(err, errFollowed):
		level, pause = slog.LevelDebug, 100*time.Millisecond // it has been logged
	case errors.As(err, &diverged):
		pause = 100 * time.Millisecond // acquiring the lane again finds out more
	case errors.Is(err, kafkago.OffsetOutOfRange):
		level = slog.LevelDebug // acquiring the lane again finds out at which end
	}
	if r.problem.IsNew(err) {
		r.run.log.Log(context.Background(), level, "lane not open, trying again", "lane", r.lane.Name, "error", err)
	}
	return pause/2 + rand.N(pause/2)
}

// recovered reports that the lane is read.
func (r *partitionReader) recovered() {
	r.run.session.Hold(r.lane, nil)
	r.gen.readiness.setLane(r.lane.Name, true)
	if r.problem.End() {
		r.run.log.Info("lane goes on", "lane", r.lane.Name)
	}
}
