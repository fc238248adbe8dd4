package dedup

import (
	"slices"
	"time"

	"github.com/dedupd/dedupd/message"
)

// clocks are how far the lanes' clocks come with the batches of a hand-over. They
// are worked out before anything is tried: of a batch that is divided in search
// of poison, one message would else speak for its lane.
type clocks map[message.Lane]time.Time

func clocksOf(batches []message.Batch) clocks {
	all := make(clocks, len(batches))
	for i := range batches {
		lane, at := batches[i].Lane, streamTime(batches[i].Messages)
		// A queue's row is shared by several batches: it goes by the one that is
		// furthest behind.
		if other := all[lane]; other.IsZero() || !at.IsZero() && at.Before(other) {
			all[lane] = at
		}
	}
	return all
}

// streamTime is how far a lane's clock comes with these messages: the median of
// their timestamps. Producers set timestamps, and one whose clock is ahead would
// otherwise, with its first message in a backlog, carry the lane's clock to the
// present, and claims would expire that the rest of the backlog needs. Of a
// large batch a sample is enough.
func streamTime(messages []message.Message) time.Time {
	const sample = 63
	times := make([]time.Time, 0, sample)
	step := max(1, len(messages)/sample)
	for i := len(messages) - 1; i >= 0 && len(times) < sample; i -= step {
		if t := messages[i].Time; !t.IsZero() {
			times = append(times, t)
		}
	}
	if len(times) == 0 {
		return time.Time{}
	}
	slices.SortFunc(times, time.Time.Compare)
	return times[(len(times)-1)/2]
}
