package nats

import (
	"slices"
	"sync"
	"time"
)

const (
	// maxMarks bounds what is remembered, however long the ack floor stands still.
	maxMarks = 512
	// firstSpacing is how far apart in time the marks are at first.
	firstSpacing = 250 * time.Millisecond
)

// arrivals remembers when the stream received messages, by their sequences, as they pass
// through this worker. From a sequence, such as the ack floor's next, it then finds a
// time that no message from there on is older than. So nobody has to ask the server for
// a message, which requires a right that reading doesn't need.
//
// A stream stamps its messages in their order. The sequences of what passes through
// other workers are between those of what passes through this one, and so are the times;
// only where the servers' clocks differ may one be older, by that difference.
//
// The marks are at least a spacing apart, which grows when there are too many. What is
// left out makes the answer earlier, never later.
type arrivals struct {
	mu      sync.Mutex
	marks   []mark // by sequence, and their times never fall
	last    uint64 // the highest sequence that has passed
	spacing time.Duration
}

// mark says that no message from a sequence on that has passed is older.
type mark struct {
	sequence uint64
	at       time.Time
}

// record remembers a message. A redelivered one comes late: it becomes a mark only below
// all others, for of what has passed above it since no more is known than that it isn't
// older than the mark below.
func (p *arrivals) record(sequence uint64, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.spacing == 0 {
		p.spacing = firstSpacing
	}
	next := p.afterLocked(sequence)
	for i := next - 1; i >= 0 && p.marks[i].at.After(at); i-- {
		p.marks[i].at = at // a server's clock went back
	}
	switch {
	case len(p.marks) == 0 || sequence > p.last && at.Sub(p.marks[next-1].at) >= p.spacing:
		p.marks = append(p.marks, mark{sequence, at})
	case next == 0:
		if p.marks[0].at.Before(at) {
			at = p.marks[0].at
		}
		p.marks = slices.Insert(p.marks, 0, mark{sequence, at})
	}
	p.last = max(p.last, sequence)
	for len(p.marks) > maxMarks {
		p.thinLocked()
	}
}

// thinLocked doubles the spacing.
func (p *arrivals) thinLocked() {
	p.spacing *= 2
	last := p.marks[0]
	p.marks = slices.DeleteFunc(p.marks, func(m mark) bool {
		if m != last && m.at.Sub(last.at) < p.spacing {
			return true
		}
		last = m
		return false
	})
}

// afterLocked is the index of the first mark above a sequence.
func (p *arrivals) afterLocked(sequence uint64) int {
	i, _ := slices.BinarySearchFunc(p.marks, sequence, func(m mark, sequence uint64) int {
		if m.sequence <= sequence {
			return -1
		}
		return 1
	})
	return i
}

// since is a time that no message from a sequence on is older than; zero where
// nothing at or below it has passed. What lies below isn't asked for again.
func (p *arrivals) since(sequence uint64) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := p.afterLocked(sequence)
	if next == 0 {
		return time.Time{}
	}
	p.marks = slices.Delete(p.marks, 0, next-1)
	return p.marks[0].at
}
