package kafka

import (
	"errors"
	"fmt"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	// keepEpochs is how many leader epochs a lane remembers: enough to find the
	// position up to which a new leader's log is the one that was read.
	keepEpochs = 16
	// surePause is how long a leader that doesn't know the epoch that was read counts
	// as one that was replaced and hasn't noticed.
	surePause = 30 * time.Second
)

// divergedError says that the leader's log isn't the one that was read.
type divergedError struct {
	position int64
	leader   epochEnd // what the leader has of the epoch that was read last, or one before it
}

func (e *divergedError) Error() string {
	return fmt.Sprintf("the log isn't the one that was read up to position %d: the leader has leader epoch %d only up to %d", e.position, e.leader.epoch, e.leader.end)
}

var (
	errOldLeader = errors.New("the partition's leader doesn't know the leader epoch that was read last: it was replaced and hasn't noticed, or has an older copy of its disk")
	errBehind    = errors.New("the partition's leader doesn't report all that it has yet")
	errFollowed  = errors.New("the lane goes on where its log was cut")
)

// cutError says that the log lost its end below the lane's position.
type cutError struct {
	lane         message.Lane
	at, position int64
}

func (e *cutError) Error() string {
	return fmt.Sprintf("the partition's log was cut at position %d, below the lane's position %d: positions %d to %d, which were read, are gone, and other messages take their place. \"dedupd lanes set-position %s %s %d\" reads them, %d skips them (0, if the topic was created anew); on_gap: skip goes on at %d",
		e.at, e.position, e.at, e.position-1, e.lane.Source, e.lane.Name, e.at, e.position, e.at)
}

// checkCut returns an error if the log was cut below the lane's position. It writes
// that to the lane's row first: once the log has grown past the position, nothing
// else may show it.
func (r *partitionReader) checkCut(a *lane.Assignment, end int64) error {
	at, err := r.cutAt(a, end)
	if err != nil || at < 0 {
		return err
	}
	cut := lane.LogCut{Lane: r.lane, Epoch: a.Epoch, At: at}
	// A group that was reset to below the cut has all of it read again anyway.
	cut.Follow = r.run.config.OnGap == policy.GapSkip || a.Next <= at
	if cut.Follow || at != a.Cut {
		if err := r.run.session.ReportLogCut(r.gen.readCtx, cut); err != nil {
			return err
		}
	}
	if cut.Follow {
		r.run.log.Warn("the partition's log was cut: reading what is there now", "lane", r.lane.Name,
			"cut", at, "position", a.Reached, "gone", a.Reached-at, "from", min(at, a.Next))
		return errFollowed
	}
	return &lane.HoldError{Lane: r.lane, Err: &cutError{lane: r.lane, at: at, position: a.Reached}}
}

// cutAt is where the log was cut below the lane's position; -1: nothing shows that it
// was. end is where the log ends now, as far as its leader reports.
func (r *partitionReader) cutAt(a *lane.Assignment, end int64) (int64, error) {
	at, known, err := r.commonPosition(a)
	if err != nil {
		return -1, err
	}
	if !known { // only a position beyond the end shows a cut
		at = min(at, end)
	}
	if a.Cut >= 0 {
		at = min(at, a.Cut)
	}
	if known && at < a.Reached && a.Reached <= end && a.Cut < 0 {
		empty, err := r.isEmpty(at, a.Reached)
		if err != nil {
			return -1, err
		}
		if empty {
			// The next fetch must not name these epochs.
			a.LeaderEpochs = lane.EpochsBelow(a.LeaderEpochs, at)
			return -1, nil
		}
	}
	switch {
	case at < a.Reached:
		return at, nil
	case end < a.Reached: // a leader reports less for a moment after its election
		return -1, errBehind
	}
	return -1, nil
}

// commonPosition is the position up to which the leader's log is the one that was
// read, found as Kafka's own followers find it; known is false where nothing shows it.
func (r *partitionReader) commonPosition(a *lane.Assignment) (at int64, known bool, err error) {
	at = a.Reached
	epochs := lane.EpochsBelow(a.LeaderEpochs, at)
	for i := len(epochs) - 1; i >= 0; i-- {
		end, ok, err := r.run.cluster.epochEnd(r.gen.readCtx, r.topic, r.partition, epochs[i].Epoch)
		switch {
		case err != nil || !ok:
			return at, false, err
		case end.epoch == epochs[i].Epoch:
			r.oldLeader = time.Time{}
			return min(at, end.end), true, nil
		case end.epoch >= 0:
			r.oldLeader = time.Time{}
			at = min(at, end.end)
		case r.oldLeader.IsZero():
			r.oldLeader = time.Now()
			return at, false, errOldLeader
		case time.Since(r.oldLeader) < surePause:
			return at, false, errOldLeader
		}
		at = min(at, epochs[i].From) // the leader has nothing of this epoch
	}
	// Older epochs aren't remembered: the cut may be further down.
	return at, false, nil
}

// isEmpty reports whether the leader's log has nothing between two positions. Then
// nothing is there that wasn't read, whatever the epochs are. Compaction may remove
// everything that the leader of an epoch wrote, and a replica that is copied afterwards
// doesn't know that epoch.
func (r *partitionReader) isEmpty(from, to int64) (bool, error) {
	memory := &grant{budget: r.run.session.Budget()}
	defer memory.settle(0)
	got, err := r.fetchOneBatch(from, memory)
	if errors.Is(err, kafkago.OffsetOutOfRange) {
		return false, nil // retention has removed what would show it
	}
	if err != nil {
		return false, err
	}
	batches, err := splitBatches(got.records)
	if err != nil {
		return false, nil //nolint:nilerr // reading it reports the error
	}
	for _, b := range batches {
		if b.last >= from {
			return b.base >= to, nil
		}
	}
	return len(got.records) == 0 && r.run.cluster.readable(got) >= to, nil
}

// fetchOneBatch fetches one record batch, which may be of any size: after an election
// many lanes do that at once. The grant has to be settled, also with an error.
func (r *partitionReader) fetchOneBatch(from int64, memory *grant) (*fetched, error) {
	want := wanted{topic: r.topic, partition: r.partition, position: from, epoch: -1, maxBytes: 1}
	for needs := int64(idleFetchBytes); ; needs = memory.wanted {
		if err := memory.budget.Acquire(r.gen.readCtx, needs); err != nil {
			return nil, err
		}
		memory.held = needs
		got, _, err := r.run.cluster.fetch(r.gen.readCtx, &want, memory.room)
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

// appendEpochs adds the epochs of what was read next. The result shares no memory that
// others append to.
func appendEpochs(all, next []lane.LeaderEpoch) []lane.LeaderEpoch {
	for _, e := range next {
		if n := len(all); n > 0 && e.Epoch == all[n-1].Epoch {
			continue
		} else if n > 0 && e.Epoch < all[n-1].Epoch || e.Epoch < 0 {
			all = nil // no leader writes such epochs: nothing is known
		}
		if e.Epoch >= 0 {
			all = append(all[:len(all):len(all)], e)
		}
	}
	return all[max(len(all)-keepEpochs, 0):]
}
