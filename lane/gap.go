package lane

import (
	"time"

	"github.com/dedupd/dedupd/message"
)

// Gap is what a broker discarded of a queue before it was read.
type Gap struct {
	// From is its first position, Next the one behind its last.
	From, Next int64
	// Before, if not zero: everything in the gap is older, and may belong to other
	// consumers. If the lane's clock has reached Before, nothing is missing.
	Before time.Time
}

// Positions is how many there are; 0: there is no gap.
func (g Gap) Positions() int64 { return max(0, g.Next-g.From) }

// LogCut reports that a broker's log lost its end below a lane's position. What is
// at At and above, now or later, isn't what was read. Causes are the election of a
// leader that lagged behind, and an older copy of a disk.
type LogCut struct {
	Lane  message.Lane
	Epoch int64
	At    int64
	// Follow: the lane goes on at At, or at its position if that is lower. Otherwise
	// the cut is only recorded, for each Acquire, until somebody sets the position.
	Follow bool
}
