package lane

import (
	"time"

	"github.com/dedupd/dedupd/message"
)

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

// LogCut tells that a broker's log has lost its end below a lane's position: what
// stands there from At on, now or later, isn't what was read. An election of a
// leader that lagged behind does this, and an older copy of a disk.
type LogCut struct {
	Lane  message.Lane
	Epoch int64
	At    int64
	// Follow has the lane go on at At, or where it stands if that is below. Else it
	// is only kept, for whoever takes the lane, until somebody sets its position.
	Follow bool
}
