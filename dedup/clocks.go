package dedup

import (
	"slices"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// clocks are how far the batches of a hand-over move the lanes' clocks. They are worked
// out before anything is tried: of a batch that is divided in search of poison, one
// message would otherwise speak for its lane.
//
// An ordered lane comes as far as its batch. A queue's batch says nothing of the messages
// that others have in hand, which may be delivered again: its clock comes as far as the
// oldest of them, if the broker knows.
type clocks map[message.Lane]time.Time

func clocksOf(batches []lane.Batch) clocks {
	all := make(clocks, len(batches))
	for i := range batches {
		b := &batches[i]
		if b.Ordered {
			all[b.Lane] = streamTime(b.Messages)
		} else if b.OutstandingSince.After(all[b.Lane]) { // the latest that was reported
			all[b.Lane] = b.OutstandingSince
		}
	}
	return all
}

// streamTime is how far these messages move a lane's clock: the median of their
// timestamps. Producers set timestamps. If one's clock is ahead, its first message in a
// backlog would otherwise move the lane's clock to the present, and claims would expire
// that the rest of the backlog needs. Of a large batch a sample is enough.
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
