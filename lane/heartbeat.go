package lane

import (
	"time"

	"github.com/dedupd/dedupd/message"
)

// Heartbeat says that a lane is caught up: every message that the broker held was
// committed.
type Heartbeat struct {
	Lane  message.Lane
	Epoch int64
	// Next is the position of an ordered lane's row; of a queue it means nothing.
	Next int64
	// Checkpoint is what the row of a queue had reached at least.
	Checkpoint Checkpoint
	// Age is how long ago the lane was caught up: since the broker was asked, not
	// since it answered. Never negative.
	Age time.Duration
}

// BrokerPosition is the position of an ordered lane that the broker has confirmed.
type BrokerPosition struct {
	Lane     message.Lane
	Epoch    int64
	Position int64
}
