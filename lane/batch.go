package lane

import (
	"time"

	"github.com/dedupd/dedupd/message"
)

// Batch is a run of one lane's messages that becomes durable as a whole or not at
// all. It belongs to the worker until the handler returns; a handler keeps nothing of
// it.
type Batch struct {
	Lane message.Lane
	// Ordered lanes move by compare-and-set from From to Next under Epoch. A queue
	// has neither fence nor resume point: only the claims protect it.
	Ordered bool
	// StreamID is the Assignment's.
	StreamID string
	// Epoch is the Assignment's.
	Epoch int64
	// From and Next are the lane's positions before and after the batch. Next is
	// where reading goes on, which is not "last message + 1": logs have holes.
	// Messages may be empty while Next > From.
	From, Next int64
	// LeaderEpochs are the leaders of a Kafka partition that wrote what the lane has
	// read, at least up to Next; empty: not known.
	LeaderEpochs []LeaderEpoch
	// Messages are in the order of their positions; those of a queue in the order of
	// delivery.
	Messages []message.Message
	// Lag is how many messages the broker held behind this batch when it was
	// fetched; -1: not known.
	Lag int64
	// BrokerPosition is the last position that the broker has confirmed; -1: none.
	BrokerPosition int64
	// OutstandingSince, of a queue, is a time that is not after any message that the
	// broker may still deliver. The lane's clock doesn't pass it: an older message may
	// be with another worker. Zero: not known.
	OutstandingSince time.Time
	// Checkpoint is the one that a queue's row must have reached. (An ordered lane
	// sees by its position that the database went back.)
	Checkpoint Checkpoint
	// Bytes is how much of the byte budget the batch holds.
	Bytes int64
}

// LeaderEpoch says that the leader of that epoch wrote the log from a position on.
// Slices of them are sorted by position.
type LeaderEpoch struct {
	Epoch int32
	From  int64
}

// EpochsBelow returns those that begin below a position. It shares memory with all.
func EpochsBelow(all []LeaderEpoch, position int64) []LeaderEpoch {
	n := len(all)
	for n > 0 && all[n-1].From >= position {
		n--
	}
	return all[:n:n]
}
