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
// transaction is given up and tried again. Brokers that give a message to
// somebody else after a while (JetStream's AckWait) must wait for much longer
// than this.
const TransactionTimeout = 25 * time.Second

// Handler makes batches durable.
type Handler interface {
	// Handle has the effects of all batches: nil means they are durable, so they
	// may be acknowledged. An error means that not all are; what a part of them
	// may have done is found and not done again when they are given again.
	// *message.FencedError and *message.HoldError have the meaning their types
	// tell; any other error is transient. It is called by many goroutines, but
	// never twice at a time with the same ordered lane. It must not keep the
	// batches.
	Handle(ctx context.Context, batches []lane.Batch) error
}

// Lanes is the authority on who owns a lane and where it stands.
type Lanes interface {
	// Take makes this worker the owner of a lane under a new epoch, and says
	// where reading starts. message.ErrStale: a newer owner is at work.
	Acquire(ctx context.Context, t lane.Acquire) (lane.Assignment, error)
	// CaughtUp tells that these lanes had nothing left to read, so that their
	// clocks follow the database's: a quiet lane commits nothing that would move
	// them. gone are those that aren't ours as told any more: taken by another, or
	// lost with commits of the database, which a quiet lane learns by this alone. One
	// that has moved on since, or is just being moved, is passed over. Failures are
	// harmless: it is told again. The lanes are sorted, and each stands there once.
	Heartbeat(ctx context.Context, lanes []lane.Heartbeat) (gone []message.Lane, err error)
	// Confirm tells whether the database is the one that a queue was committed in, and
	// has not gone back. Then what was committed before may be acknowledged, once the
	// broker keeps the origin that is returned, and that was confirmed, too: the
	// database may have been replaced meanwhile. *message.FencedError: it is not, and
	// the lane has to be taken anew.
	Confirm(ctx context.Context, c lane.Confirm) (lane.Confirmation, error)
	// Copied tells what the broker has confirmed of ordered lanes since their last
	// batches: a position that it names below that was set by an operator. Lanes that
	// aren't under the epoch any more are passed over. Failures are harmless, but for
	// a reset that isn't noticed. The lanes are sorted, and each stands there once.
	BrokerConfirmed(ctx context.Context, all []lane.BrokerPosition) error
	// Resumed tells that what a queue may have lost with the database is delivered
	// again from a position on, as Taken.Rewound asks for, or is known to be gone
	// (0), and that the broker keeps the origin of that take. Until then the lane
	// doesn't move. It doesn't either where the position is beyond the one that is sure,
	// which is returned: then the database has gone back once more, and the broker has
	// to be asked again.
	ConfirmRewind(ctx context.Context, lane message.Lane, taken lane.Assignment, from int64) (sure int64, err error)
	// Gap notes what the broker of a queue has discarded before it was read, and
	// returns what is noted of the queue and not yet accepted. One without positions
	// only asks.
	ReportGap(ctx context.Context, lane message.Lane, found lane.Gap) (noted lane.Gap, err error)
	// AcceptGap ends what is noted of a queue below a position: nothing there is to be
	// missed, and no worker that finds the same gap is told of it again.
	AcceptGap(ctx context.Context, lane message.Lane, next int64) error
	// LetGo tells that a lane was let go as it should be, without having moved
	// under that epoch. An ordered lane that is taken again and again without
	// moving, and isn't let go, may be one whose messages end the process. Failures
	// are harmless.
	Release(ctx context.Context, lane message.Lane, epoch int64) error
	// LogCut tells that the log of a lane was cut below its position. An ordered
	// lane is to be taken anew after that: positions from the cut on mean other
	// messages, so that they need another incarnation. A queue's can't be followed. *message.FencedError: the
	// epoch isn't the lane's.
	ReportLogCut(ctx context.Context, cut lane.LogCut) error
}

// Source reads one configured broker subscription.
type Source interface {
	// Name is the source's name in the configuration.
	Name() string
	// Run reads until ctx ends. It then stops fetching at once, closes its lanes
	// (which waits for what is in hand), tells the broker what was committed,
	// lets go, and returns nil. It reconnects for ever by itself; an error means
	// that the source can't work as configured, and ends the program.
	Run(ctx context.Context, in *Session) error
}

// Keeper is a Source that can tell how long its broker keeps messages: for that
// long it may deliver one again, and its claim should be there.
type RetentionReporter interface {
	// Keeps asks the broker, over a connection of its own. With an error it tells
	// of what it could find out all the same. What is gone once it is acknowledged
	// is left out.
	BrokerRetention(ctx context.Context) ([]TopicRetention, error)
}

// Kept is how long a broker keeps the messages of a topic or a stream.
type TopicRetention struct {
	Name string
	// For is the limit of age that is set; 0: without a limit. Some messages are
	// there for longer, where a broker deletes many at a time, as Kafka does. A
	// limit of size is none of time, and isn't told.
	For time.Duration
}

// Surveyor is a Source that can tell what stands at its broker, without reading
// any of it.
type Describer interface {
	// Survey asks the broker, over a connection of its own. With an error, which
	// tells of all that stands in the way of reading, it tells of what it could
	// find out all the same.
	Describe(ctx context.Context) (Description, error)
}

// Survey is what stands at a broker.
type Description struct {
	Lanes []BrokerLane
	// Consumed tells that the broker deletes what is acknowledged, and can't
	// deliver it again.
	Consumed bool
	// Paused says who has to have the broker deliver again; nil: it delivers.
	Paused error
}

// BrokerLane is a lane as its broker knows it.
type BrokerLane struct {
	Name string
	// First is the first position that is there, End the one after the last.
	First, End int64
	// Committed is the broker's copy of the lane's position; -1: none.
	Committed int64
	// Origin is what the broker keeps beside that, as message.Take has it.
	OffsetMetadata string
	// Whole tells that all positions below First that weren't read are lost messages: of
	// a queue, that its consumer takes the whole stream, which doesn't discard what is
	// acknowledged.
	Whole bool
	// Log is the broker's own mark of the log; empty: it has none.
	LogID string
}

// ErrClosed is what Offer answers once a lane is closed or lost.
var ErrClosed = errors.New("the lane is closed")

// LaneOptions describe a lane that a source opens.
type LaneOptions struct {
	Lane message.Lane
	// Epoch is the epoch under which the lane was taken.
	Epoch int64
	// Next is the position where reading starts.
	Next int64
	// Checkpoint is the one that a queue was taken at.
	Checkpoint lane.Checkpoint
	// Committed is told after a commit, with the lane's new position and the
	// tokens of all that was offered since the last call, in order. It must not
	// block.
	Committed func(next int64, tokens []any)
	// Abandoned is told the tokens of what was offered but will not be
	// committed, since the lane was closed or lost or the batch was kept too
	// long. It must not block. Nil is allowed.
	Abandoned func(tokens []any)
	// KeepFor bounds how long a batch is tried; then it is abandoned, to be
	// delivered again by the broker. Zero: for ever, as an ordered lane must.
	KeepFor time.Duration
}
