package kafka

import (
	"errors"
	"fmt"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	// keepEpochs is how many leader epochs a lane remembers: enough to find the place
	// up to which its own history and that of a new leader are the same.
	keepEpochs = 16
	// surePause is how long a leader that knows nothing of the epoch we have read is
	// taken for one that doesn't know yet that it was replaced.
	surePause = 30 * time.Second
)

// divergedError says that the leader's log isn't the one that was read.
type divergedError struct {
	position int64
	epochEnd
}

func (e *divergedError) Error() string {
	return fmt.Sprintf("the log isn't the one that was read up to position %d: the leader has its leader epoch %d up to %d only", e.position, e.epoch, e.end)
}

var (
	errOldLeader = errors.New("the partition's leader knows nothing of the leader epoch that was read last: it was replaced and doesn't know yet, or stands on an older copy of its disk")
	errBehind    = errors.New("the partition's leader doesn't tell yet of all that it has")
	errFollowed  = errors.New("the lane goes on where its log was cut")
)

// cutError says that the log lost its end below the lane's position.
type cutError struct {
	lane         message.Lane
	at, position int64
}

func (e *cutError) Error() string {
	return fmt.Sprintf("the partition's log was cut at position %d, below the lane's position %d: what was read from there, %d to %d, is gone, and what comes there instead are other messages. \"dedupd lanes set-position %s %s %d\" reads them, %d leaves them out (0, if the topic was created anew); on_gap: skip goes on at %d",
		e.at, e.position, e.at, e.position-1, e.lane.Source, e.lane.Name, e.at, e.position, e.at)
}

// checkCut returns an error if the log was cut below where the lane stood. That is
// kept in the lane's row before anything else: once the log has grown past the
// position, nothing else may tell of it.
func (l *partitionReader) checkCut(taken *lane.Assignment, end int64) error {
	at, err := l.cutAt(taken, end)
	if err != nil || at < 0 {
		return err
	}
	cut := lane.LogCut{Lane: l.id, Epoch: taken.Epoch, At: at}
	// A group that was reset to below the cut has all of it read again anyway.
	cut.Follow = l.config.OnGap == SkipGap || taken.Next <= at
	if cut.Follow || at != taken.Cut {
		if err := l.in.ReportLogCut(l.soft, cut); err != nil {
			return err
		}
	}
	if cut.Follow {
		l.log.Warn("the partition's log was cut: reading what stands there now", "lane", l.id.Name,
			"cut", at, "position", taken.Reached, "gone", taken.Reached-at, "from", min(at, taken.Next))
		return errFollowed
	}
	return &lane.HoldError{Lane: l.id, Err: &cutError{lane: l.id, at: at, position: taken.Reached}}
}

// cutAt is where the log was cut below where the lane stood; -1: nothing tells that
// it was. end is where it ends now, as far as its leader tells.
func (l *partitionReader) cutAt(taken *lane.Assignment, end int64) (int64, error) {
	at, known, err := l.common(taken)
	if err != nil {
		return -1, err
	}
	if !known { // a position beyond the end is all that shows
		at = min(at, end)
	}
	if taken.Cut >= 0 {
		at = min(at, taken.Cut)
	}
	if known && at < taken.Reached && taken.Reached <= end && taken.Cut < 0 {
		empty, err := l.isEmpty(at, taken.Reached)
		if err != nil {
			return -1, err
		}
		if empty {
			// Whoever is asked for what follows must not be told of these epochs.
			taken.LeaderEpochs = lane.EpochsBelow(taken.LeaderEpochs, at)
			return -1, nil
		}
	}
	switch {
	case at < taken.Reached:
		return at, nil
	case end < taken.Reached: // a leader is careful for a moment after its election
		return -1, errBehind
	}
	return -1, nil
}

// common is the position up to which the leader's log is the one that was read,
// found as Kafka's own followers do; known is false where nothing tells.
func (l *partitionReader) common(taken *lane.Assignment) (at int64, known bool, err error) {
	at = taken.Reached
	epochs := lane.EpochsBelow(taken.LeaderEpochs, at)
	for i := len(epochs) - 1; i >= 0; i-- {
		end, ok, err := l.cluster.epochEnd(l.soft, l.topic, l.partition, epochs[i].Epoch)
		switch {
		case err != nil || !ok:
			return at, false, err
		case end.epoch == epochs[i].Epoch:
			l.oldLeader = time.Time{}
			return min(at, end.end), true, nil
		case end.epoch >= 0:
			l.oldLeader = time.Time{}
			at = min(at, end.end)
		case l.oldLeader.IsZero():
			l.oldLeader = time.Now()
			return at, false, errOldLeader
		case time.Since(l.oldLeader) < surePause:
			return at, false, errOldLeader
		}
		at = min(at, epochs[i].From) // the leader has nothing of this epoch
	}
	// What stands before the oldest of them isn't known: the cut may be further down.
	return at, false, nil
}

// isEmpty tells that the leader's log has nothing between two positions: then nothing
// stands there that wasn't read, whatever its epochs tell. Compaction may remove all
// that the leader of an epoch wrote, and a replica that is copied afterwards doesn't know
// that epoch.
func (l *partitionReader) isEmpty(from, to int64) (bool, error) {
	memory := &grant{budget: l.in.Budget()}
	defer memory.settle(0)
	got, err := l.glance(from, memory)
	if errors.Is(err, kafkago.OffsetOutOfRange) {
		return false, nil // retention has removed what would tell
	}
	if err != nil {
		return false, err
	}
	batches, err := cutBatches(got.records)
	if err != nil {
		return false, nil //nolint:nilerr // whoever reads it tells of that
	}
	for _, b := range batches {
		if b.last >= from {
			return b.base >= to, nil
		}
	}
	return len(got.records) == 0 && l.cluster.readable(got) >= to, nil
}

// glance fetches one record batch, which may be of any size: after an election many
// lanes do that at once. What is held of the byte budget has to be settled, also with
// an error.
func (l *partitionReader) glance(from int64, memory *grant) (*fetched, error) {
	want := wanted{topic: l.topic, partition: l.partition, position: from, epoch: -1, maxBytes: 1}
	for needs := int64(idleFetchBytes); ; needs = memory.wanted {
		if err := memory.budget.Acquire(l.soft, needs); err != nil {
			return nil, err
		}
		memory.held = needs
		got, _, err := l.cluster.fetch(l.soft, &want, memory.room)
		switch {
		case errors.Is(err, errNoRoom): // the next one waits for as much, and holds nothing meanwhile
			memory.settle(0)
		case err != nil:
			return nil, err
		default:
			memory.answer(int64(len(got.records)))
			return got, nil
		}
	}
}

// appendEpochs adds the epochs of what was read next. The result has nothing in
// common with what others append to.
func appendEpochs(all, next []lane.LeaderEpoch) []lane.LeaderEpoch {
	for _, e := range next {
		if n := len(all); n > 0 && e.Epoch == all[n-1].Epoch {
			continue
		} else if n > 0 && e.Epoch < all[n-1].Epoch || e.Epoch < 0 {
			all = nil // no leader does that: nothing is known
		}
		if e.Epoch >= 0 {
			all = append(all[:len(all):len(all)], e)
		}
	}
	return all[max(len(all)-keepEpochs, 0):]
}
