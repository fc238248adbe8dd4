package lane

import "github.com/dedupd/dedupd/message"

// Take asks for a lane: the start rule's input.
type Acquire struct {
	Lane    message.Lane
	Ordered bool
	// Incarnation is the broker's own mark of this topic or stream, such as the
	// creation time of a NATS stream; empty where the broker has none. A lane's own,
	// in Taken, is another with each mark, and with each row that is new. An ordered
	// lane that finds another mark than its own is held until somebody sets its
	// position.
	LogID string
	// GroupGeneration is the consumer group's generation; an owner with a
	// higher one that is still at work keeps the lane.
	GroupGeneration int64
	// Committed is the position that the broker keeps for the group; -1: none. Of a
	// queue it is the one below which the broker has had all acknowledged: where a new
	// lane begins.
	Committed int64
	// Acknowledged is the position below which a queue's broker keeps that all was
	// acknowledged under Origin, where it may deliver from below; 0: it keeps none. The
	// row has it from then on, if the database lacks nothing of that.
	Acknowledged int64
	// Origin is what the broker keeps of the lane: the Origin of a Taken or a
	// Confirmed. Empty: nothing of ours.
	OffsetMetadata string
	// Start is where a lane without a row begins; -1: nowhere, ErrNoStart.
	Start int64
	// Partition is what the lane is of a topic. Nil: it is no partition.
	Partition *Partition
	// HonourReset lets a broker position that was moved back win over the row.
	HonourReset bool
	// Consumed tells that the broker deletes what it was told of, and can't
	// deliver it again.
	Consumed bool
}

// Partition tells which partition of a topic a lane is.
type Partition struct {
	Topic  string
	Number int
	// Of is how many partitions the topic has.
	Of int
	// Added is where a lane without a row begins if the topic didn't have the
	// partition yet when another of its lanes was first taken; -1: at Start, too.
	Added int64
}

// Taken is a lane that is now ours.
type Assignment struct {
	Epoch int64
	// Next is where reading starts.
	Next           int64
	BrokerPosition int64
	StreamID       string
	// Rewound tells that the broker was ahead of the database, which must have
	// lost commits: reading goes back to the database's position, or to where the
	// lane began if its row is among what was lost. Of a queue, all that the broker
	// was told of from BrokerPosition on (-1: from the start) must come again, before
	// the lane moves: see Lanes.Resumed.
	Rewound bool
	// Checkpoint is a queue's.
	Checkpoint Checkpoint
	// Origin is to be kept at the broker: beside the position of an ordered lane,
	// beside what was acknowledged of a queue. It tells the next Take of commits, or of
	// a whole row, that the database has lost. Only who gave it can read it. Empty:
	// nothing is to be kept.
	OffsetMetadata string
	// Reset tells that an operator's reset of the group was honoured.
	Reset bool
	// Outdated tells that the broker's position is below what was confirmed, and yet
	// nobody's reset: a worker of ours has written it, as the origin beside it says.
	Outdated bool
	// GroupOf is the other scope whose worker wrote the broker's position: two scopes
	// that share a group each get a part of what they read. Empty: none did.
	GroupOf string
	// Reached is where the lane stood before the reset; otherwise it is Next.
	Reached int64
	// LeaderEpochs are those of the last batch that was committed, see Batch. What
	// the broker has below Reached must still be of them.
	LeaderEpochs []LeaderEpoch
	// Cut is where the broker's log was found cut, as LogCut has told; -1: it wasn't.
	Cut int64
}
