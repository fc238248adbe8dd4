// Package message holds what both halves of dedupd speak about: a message, the
// lane it came by, the batch that is handed over, and where its id is found.
//
// It is a leaf: it knows no broker and no database.
package message

import (
	"strings"
	"time"
)

// Lane names one stream of positions: a Kafka partition ("orders/3"), a NATS
// partition lane, or a NATS queue. Source is the name of the configured source.
type Lane struct {
	Source string
	Name   string
}

func (l Lane) String() string { return l.Source + ":" + l.Name }

// Compare orders lanes by source, then by name: the order in which every
// transaction touches their rows.
func (l Lane) Compare(o Lane) int {
	if c := strings.Compare(l.Source, o.Source); c != 0 {
		return c
	}
	return strings.Compare(l.Name, o.Name)
}

// Position is where a message stands: its lane, and the Kafka offset or the
// stream sequence within it.
type Position struct {
	Lane   Lane
	Offset int64
}

// Header is one header of a message. A key may stand more than once; the last
// one counts. A nil value differs from an empty one.
type Header struct {
	Key   string
	Value []byte
}

// Message is one delivery from a broker. Its byte slices are read-only and
// stay valid until the batch it belongs to is committed or abandoned.
type Message struct {
	// ID is the identity the producer gave the message, as raw bytes. A source
	// leaves it empty; dedup fills it in before a sink sees the message.
	ID string
	// Topic is the Kafka topic or the NATS subject.
	Topic string
	// Key is nil where there is none.
	Key []byte
	// Value is nil for a Kafka tombstone.
	Value   []byte
	Headers []Header
	// Time is the broker's timestamp of the message.
	Time     time.Time
	Position Position
	// Damaged tells what of the message could not be read, such as its headers; empty:
	// nothing. A damaged message becomes a dead letter, and no sink sees it.
	Damaged string
	// Deliveries is how often the broker has delivered it, this time included; 0
	// where the broker doesn't tell.
	Deliveries int
}

// Header returns the value of the last header with that key (compared byte by
// byte), and whether there is one.
func (m *Message) Header(key string) ([]byte, bool) {
	for i := len(m.Headers) - 1; i >= 0; i-- {
		if m.Headers[i].Key == key {
			return m.Headers[i].Value, true
		}
	}
	return nil, false
}

// Batch is a run of one lane's messages, in the order of their positions, that
// becomes durable as a whole or not at all.
type Batch struct {
	Lane Lane
	// Ordered lanes move by compare-and-set from From to Next under Epoch. An
	// unordered lane (a NATS queue) has neither fence nor resume point: its
	// safety rests on the claims alone.
	Ordered bool
	// Incarnation tells positions from those of an earlier topic or stream of the same
	// name, and of a lane that was forgotten. It is the one of Taken.
	Incarnation string
	// Epoch is the fencing number under which this worker owns the lane.
	Epoch int64
	// From and Next are the positions the lane stands at before and after the
	// batch. Next is where reading goes on, which is not "last message + 1":
	// logs have holes. Messages may be empty while Next > From.
	From, Next int64
	// LeaderEpochs tell which leaders of a Kafka partition wrote what the lane has
	// read, up to the end of the batch at least; empty: not known.
	LeaderEpochs []LeaderEpoch
	Messages     []Message
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

// Checkpoint tells a queue of a database that went back: a failover that lost
// commits, or an older copy that was put in its place. What was acknowledged at the
// broker since is lost, and no position shows it.
type Checkpoint struct {
	// Number only rises. The lane's row has it, and the broker beside what it was
	// told of (Origin), and the worker: a row below either went back.
	Number int64
	// Instance names the database as it was reached. It is another one after each
	// start of its server, and where a copy was put in its place: what was committed
	// in one instance and isn't acknowledged yet may not be in the next.
	Instance string
}

// Confirm asks whether the database still has what a queue committed in it, before
// the broker is told of that.
type Confirm struct {
	Lane       Lane
	Epoch      int64
	Checkpoint Checkpoint // the last that is known
	// Origin is what the broker keeps of the lane now.
	Origin string
	// Raise has the checkpoint raised: all that was committed before is then told
	// apart from what any older copy has.
	Raise bool
}

// Confirmed is a queue's checkpoint as the database has it now.
type Confirmed struct {
	Checkpoint Checkpoint
	// Origin is to be kept at the broker before it is told of anything that this
	// checkpoint confirms.
	Origin string
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

// Take asks for a lane: the start rule's input.
type Take struct {
	Lane    Lane
	Ordered bool
	// Incarnation is the broker's own mark of this topic or stream, such as the
	// creation time of a NATS stream; empty where the broker has none. A lane's own,
	// in Taken, is another with each mark, and with each row that is new. An ordered
	// lane that finds another mark than its own is held until somebody sets its
	// position.
	Incarnation string
	// BrokerGeneration is the consumer group's generation; an owner with a
	// higher one that is still at work keeps the lane.
	BrokerGeneration int64
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
	Origin string
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
type Taken struct {
	Epoch int64
	// Next is where reading starts.
	Next           int64
	BrokerPosition int64
	Incarnation    string
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
	Origin string
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

// LogCut tells that a broker's log has lost its end below a lane's position: what
// stands there from At on, now or later, isn't what was read. An election of a
// leader that lagged behind does this, and an older copy of a disk.
type LogCut struct {
	Lane  Lane
	Epoch int64
	At    int64
	// Follow has the lane go on at At, or where it stands if that is below. Else it
	// is only kept, for whoever takes the lane, until somebody sets its position.
	Follow bool
}

// Gap is what a broker has discarded of a queue before it was read.
type Gap struct {
	// From is the first position of it, Next the one behind it.
	From, Next int64
	// Before, if not zero, says that all of it was older, and that it may be none of
	// the lane's messages: where the lane's clock has come so far, nothing is missing.
	Before time.Time
}

// Positions is how many there are; 0: there is no gap.
func (g Gap) Positions() int64 { return max(0, g.Next-g.From) }

// Copied is a position that the broker has confirmed as its copy of a lane's.
type Copied struct {
	Lane     Lane
	Epoch    int64
	Position int64
}

// CaughtUp says that a lane had nothing left to read: every message that the
// broker held was committed.
type CaughtUp struct {
	Lane  Lane
	Epoch int64
	// Next is the position that the lane's row stands at. It says nothing of an
	// unordered lane.
	Next int64
	// Checkpoint is what the row of an unordered lane had reached at least.
	Checkpoint Checkpoint
	// Age is how long ago that was: when the broker was asked, not when it
	// answered.
	Age time.Duration
}
