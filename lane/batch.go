package lane

import (
	"time"

	"github.com/dedupd/dedupd/message"
)

// Batch is a run of one lane's messages, in the order of their positions, that
// becomes durable as a whole or not at all.
type Batch struct {
	Lane message.Lane
	// Ordered lanes move by compare-and-set from From to Next under Epoch. An
	// unordered lane (a NATS queue) has neither fence nor resume point: its
	// safety rests on the claims alone.
	Ordered bool
	// Incarnation tells positions from those of an earlier topic or stream of the same
	// name, and of a lane that was forgotten. It is the one of Taken.
	StreamID string
	// Epoch is the fencing number under which this worker owns the lane.
	Epoch int64
	// From and Next are the positions the lane stands at before and after the
	// batch. Next is where reading goes on, which is not "last message + 1":
	// logs have holes. Messages may be empty while Next > From.
	From, Next int64
	// LeaderEpochs tell which leaders of a Kafka partition wrote what the lane has
	// read, up to the end of the batch at least; empty: not known.
	LeaderEpochs []LeaderEpoch
	Messages     []message.Message
	// Lag is how many messages the broker held behind this batch when it was
	// fetched; -1 where that isn't known.
	Lag int64
	// BrokerPosition is the last position the broker has confirmed as its copy
	// of ours; -1 where there is none.
	BrokerPosition int64
	// OutstandingSince is, of an unordered lane, a time that nothing which the broker
	// may still deliver is older than: the lane's clock may come so far, and not as
	// far as the batch, while an older message is elsewhere. Zero: not known.
	OutstandingSince time.Time
	// Checkpoint is what a queue's database must have reached, and which one it must
	// be: an ordered lane sees by its position that the database went back.
	Checkpoint Checkpoint
	// Bytes is the memory the batch holds of the byte budget.
	Bytes int64
}

// LeaderEpoch tells that a log was written by the leader of that epoch, from a
// position on. They stand in the order of their positions.
type LeaderEpoch struct {
	Epoch int32
	From  int64
}

// EpochsBelow are those of what stands below a position.
func EpochsBelow(all []LeaderEpoch, position int64) []LeaderEpoch {
	n := len(all)
	for n > 0 && all[n-1].From >= position {
		n--
	}
	return all[:n:n]
}
