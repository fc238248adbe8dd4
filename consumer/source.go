// Package consumer is the half of dedupd that knows brokers: sources read lanes,
// and the Worker gathers what they read into groups, hands each group over to be
// made durable, and tells the lanes afterwards.
//
// It knows nothing of Postgres. It meets the other half at two interfaces:
// Handler and Lanes.
package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// TransactionTimeout bounds one hand-over of a group: after it the group's
// transaction is rolled back and tried again. A broker that redelivers after a while
// (JetStream's AckWait) must wait for much longer.
const TransactionTimeout = 25 * time.Second

// Handler makes batches durable.
type Handler interface {
	// Handle applies all batches. Nil: they are durable, and may be acknowledged. An
	// error: not all of them are; those that are get recognized when the batches are
	// handed over again. *lane.FencedError and *lane.HoldError mean what they say; any
	// other error is transient. Many goroutines call it, but never two at a time with
	// the same ordered lane. It must not keep the batches.
	Handle(ctx context.Context, batches []lane.Batch) error
}

// Lanes is the authority on who owns a lane and what its position is. All methods may
// be called by many goroutines.
type Lanes interface {
	// Acquire makes this worker the lane's owner, an ordered lane's under a new epoch,
	// and says where reading starts. lane.ErrStale: a newer owner is at work. It
	// may also end with lane.ErrNoStart, lane.ErrLoss or a *lane.HoldError.
	Acquire(ctx context.Context, a lane.Acquire) (lane.Assignment, error)
	// Release says that an owner stops without having moved the lane under that epoch.
	// An ordered lane that is acquired again and again, neither moves nor is released,
	// may have messages that end the process. Failures are harmless.
	Release(ctx context.Context, l message.Lane, epoch int64) error
	// Heartbeat says that these lanes were caught up, so that their clocks follow the
	// database's: a quiet lane commits nothing that would move them. gone lists the
	// lanes we no longer own, or whose commits the database has lost: a quiet lane
	// learns that from this alone. One that has moved since is neither moved nor
	// gone. Failures are harmless: the next heartbeat repeats it. The lanes are sorted
	// and unique.
	Heartbeat(ctx context.Context, lanes []lane.Heartbeat) (gone []message.Lane, err error)
	// BrokerConfirmed reports the positions that the broker has confirmed for ordered
	// lanes since their last batches. If the broker names a lower one later, an operator
	// has set it. Lanes under another epoch are passed over. Failures are harmless,
	// except that such a reset may go unnoticed. The lanes are sorted and unique.
	BrokerConfirmed(ctx context.Context, all []lane.BrokerPosition) error
	// Confirm checks that the database still has everything that was committed in it
	// for a queue. What was committed before the call may be acknowledged once the
	// broker keeps the returned offset metadata and a second Confirm, after that, has
	// succeeded: the database may have been replaced in between. *lane.FencedError: it
	// lacks something, and the lane has to be acquired again.
	Confirm(ctx context.Context, c lane.Confirm) (lane.Confirmation, error)
	// ConfirmRewind says that, as Assignment.Rewound asks for, the broker delivers a queue again
	// from a position on (0: what is lost can't be delivered again), and keeps the
	// offset metadata of that assignment. Until then the lane doesn't move. Nor does it
	// move if from is above sure, the position that the database has now: it has gone
	// back once more, and the broker has to begin there.
	ConfirmRewind(ctx context.Context, l message.Lane, a lane.Assignment, from int64) (sure int64, err error)
	// ReportGap records what the broker discarded of a queue before it was read, and
	// returns all that is recorded and not yet accepted. Without positions it only asks.
	ReportGap(ctx context.Context, l message.Lane, found lane.Gap) (open lane.Gap, err error)
	// AcceptGap accepts everything recorded below a position: it isn't missed any more,
	// and no worker that reports the same gap later gets it back.
	AcceptGap(ctx context.Context, l message.Lane, next int64) error
	// ReportLogCut reports that a lane's log was cut below its position. An ordered lane
	// has to be acquired again afterwards: positions from the cut on mean other
	// messages, under another stream id. A queue can't follow a cut. *lane.FencedError:
	// the lane has another epoch.
	ReportLogCut(ctx context.Context, cut lane.LogCut) error
}

// Source reads one configured broker subscription.
type Source interface {
	// Name is the source's name in the configuration.
	Name() string
	// Run reads until ctx ends. Then it stops fetching at once, closes its lanes
	// (which waits for their transactions), tells the broker what was committed,
	// leaves the group, and returns nil. It reconnects for ever by itself; an error
	// means that the source can't work as configured, and ends the program.
	Run(ctx context.Context, in *Session) error
}

// RetentionReporter is a Source that knows how long its broker keeps messages: for
// that long it may deliver one again, and its claim should be there.
type RetentionReporter interface {
	// BrokerRetention asks the broker over a connection of its own. Messages that are
	// deleted once they are acknowledged are left out. With an error it still returns
	// what it found out.
	BrokerRetention(ctx context.Context) ([]TopicRetention, error)
}

// TopicRetention is how long a broker keeps the messages of a topic or a stream.
type TopicRetention struct {
	Name string
	// For is the configured limit of age; 0: none. Some messages stay longer where the
	// broker deletes many at a time, as Kafka does. A limit of size says nothing about
	// time, and is left out.
	For time.Duration
}

// Describer is a Source that describes what its broker has, without reading any of
// it.
type Describer interface {
	// Describe asks the broker over a connection of its own. With an error, which names
	// everything that prevents reading, it still returns what it found out.
	Describe(ctx context.Context) (Description, error)
}

// Description is what a broker has for a source.
type Description struct {
	Lanes []BrokerLane
	// Consumed: the broker deletes what is acknowledged and can't deliver it again.
	Consumed bool
	// Paused says who has to make the broker deliver again; nil: it delivers.
	Paused error
}

// BrokerLane is a lane as its broker knows it.
type BrokerLane struct {
	Name string
	// First is the first position that is there, End the one after the last.
	First, End int64
	// Committed is the group's position at the broker; -1: none.
	Committed int64
	// OffsetMetadata is what the broker keeps beside it, see lane.Acquire.
	OffsetMetadata string
	// Whole: all positions below First that weren't read are lost messages. Of a queue:
	// its durable takes the whole stream, which doesn't delete what is acknowledged.
	Whole bool
	// LogID is the broker's id of the log; empty: it has none.
	LogID string
}

// ErrClosed is what Offer returns once a lane is closed or lost.
var ErrClosed = errors.New("the lane is closed")

// LaneOptions describe a lane that a source opens.
type LaneOptions struct {
	Lane message.Lane
	// Epoch is the Assignment's.
	Epoch int64
	// Next is the position where reading starts.
	Next int64
	// Checkpoint is the Assignment's, of a queue.
	Checkpoint lane.Checkpoint
	// Committed is called after a commit, with the lane's new position and the tokens
	// of everything committed since the last call, in order. It must not block.
	Committed func(next int64, tokens []any)
	// Abandoned is called with the tokens of what was offered and will not be committed:
	// the lane was closed or lost, or the batch is older than KeepFor. It must not block
	// nor call the worker. Nil is allowed.
	Abandoned func(tokens []any)
	// KeepFor bounds how long a batch is tried; then it is abandoned, and the broker
	// delivers it again. Zero: for ever, as an ordered lane needs it.
	KeepFor time.Duration
}
