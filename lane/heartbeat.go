package lane

import (
	"time"

	"github.com/dedupd/dedupd/message"
)

// CaughtUp says that a lane had nothing left to read: every message that the
// broker held was committed.
type Heartbeat struct {
	Lane  message.Lane
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

// Copied is a position that the broker has confirmed as its copy of a lane's.
type BrokerPosition struct {
	Lane     message.Lane
	Epoch    int64
	Position int64
}
