// Package lane is what the two halves of dedupd say to each other about lanes:
// consumer reads them from a broker, dedup keeps their rows in Postgres. All types
// are plain values. consumer.Handler and consumer.Lanes are the calls that carry
// them.
package lane

import "github.com/dedupd/dedupd/message"

// Acquire asks for a lane. Where reading starts depends on it and on the lane's row.
type Acquire struct {
	Lane message.Lane
	// Ordered: positions only rise, and one worker reads the lane (a Kafka
	// partition). Otherwise it is a queue, whose workers share the row (a JetStream
	// durable).
	Ordered bool
	// LogID is the broker's id of the topic or stream: Kafka's topic id, the creation
	// time of a JetStream stream. Empty: the broker has none. An ordered lane whose
	// row has another one is held until somebody sets its position; a queue begins
	// anew.
	LogID string
	// GroupGeneration is the consumer group's generation. An owner with a higher one
	// that is still at work keeps the lane: ErrStale.
	GroupGeneration int64
	// Committed is the position that the broker keeps for the group; -1: none. Of a
	// queue it is the one below which everything is acknowledged: where a new lane
	// begins.
	Committed int64
	// Acknowledged is the position below which, by OffsetMetadata, everything in a
	// queue was acknowledged, even if the broker delivers from below; 0: not known. The
	// row takes it over unless the database lacks commits.
	Acknowledged int64
	// OffsetMetadata is what the broker keeps beside the group's position: that of an
	// earlier Assignment or Confirmation. Empty: none of ours.
	OffsetMetadata string
	// Start is where a lane without a row begins; -1: nowhere, ErrNoStart.
	Start int64
	// Partition is nil unless the lane is a partition of a topic.
	Partition *Partition
	// HonourReset: a broker position that was moved back wins over the row.
	HonourReset bool
	// Consumed: the broker deletes what is acknowledged and can't deliver it again.
	Consumed bool
}

// Partition tells which partition of a topic a lane is.
type Partition struct {
	Topic  string
	Number int
	// Of is how many partitions the topic has.
	Of int
	// Added is where a lane without a row begins if its partition was added after
	// another lane of the topic was first acquired; -1: at Start, too.
	Added int64
}

// Assignment is a lane that this worker owns.
type Assignment struct {
	// Epoch is the fencing number. It rises with each acquisition of an ordered lane;
	// the workers of a queue share one.
	Epoch int64
	// Next is the position where reading starts.
	Next int64
	// BrokerPosition is the last position that the broker confirmed; -1: none. Of a
	// queue, everything below it is surely committed.
	BrokerPosition int64
	// StreamID is dedupd's own id of what the positions count. It is new with each
	// row, with each LogID and with each cut log, so that a position that names another
	// message gives another id.
	StreamID string
	// Rewound: the broker was ahead of the database, which must have lost commits.
	// An ordered lane reads again from Next. Of a queue, everything that was
	// acknowledged from BrokerPosition on (-1: from the start) must be delivered again
	// before the lane moves: see Lanes.ConfirmRewind.
	Rewound bool
	// Checkpoint is a queue's.
	Checkpoint Checkpoint
	// OffsetMetadata is to be kept at the broker: beside the position of an ordered
	// lane, beside the acknowledgements of a queue. It shows the next Acquire that the
	// database has lost commits or the whole row. It is opaque to the consumer. Empty:
	// nothing is to be kept.
	OffsetMetadata string
	// Reset: an operator's reset of the group was honoured.
	Reset bool
	// Outdated: the broker's position is below what was confirmed, but a worker wrote
	// it, as OffsetMetadata shows: nobody has reset the group.
	Outdated bool
	// GroupOf is the other scope whose worker wrote the broker's position; empty: none
	// did. Two scopes that share a group each get a part of the messages.
	GroupOf string
	// Reached is the lane's position before the reset; without one it is Next.
	Reached int64
	// LeaderEpochs are those of the last committed batch, see Batch. What the broker
	// has below Reached must still be of them.
	LeaderEpochs []LeaderEpoch
	// Cut is the position from which on the log was reported cut (LogCut); -1: it
	// wasn't.
	Cut int64
}
