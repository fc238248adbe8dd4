package dedup

import "github.com/dedupd/dedupd/internal/policy"

// MissingPolicy says what happens to a message without an id.
type MissingPolicy string

const (
	// MissingDeadLetter makes it a dead letter.
	MissingDeadLetter MissingPolicy = "dead_letter"
	// MissingPosition makes its position its id.
	MissingPosition MissingPolicy = "position"
	// MissingStop holds the lane.
	MissingStop MissingPolicy = "stop"
)

// Values are the policies there are.
func (MissingPolicy) Values() []MissingPolicy {
	return []MissingPolicy{MissingDeadLetter, MissingPosition, MissingStop}
}

func (p *MissingPolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }

// DuplicatePolicy says what happens to a duplicate that the producer sent again.
// A message that the broker delivers again is always dropped.
type DuplicatePolicy string

const (
	// DuplicateDrop only counts it.
	DuplicateDrop DuplicatePolicy = "drop"
	// DuplicateDeadLetter makes it a dead letter.
	DuplicateDeadLetter DuplicatePolicy = "dead_letter"
	// DuplicateReply isn't available yet.
	DuplicateReply DuplicatePolicy = "reply"
)

// Values are the policies there are.
func (DuplicatePolicy) Values() []DuplicatePolicy {
	return []DuplicatePolicy{DuplicateDrop, DuplicateDeadLetter, DuplicateReply}
}

func (p *DuplicatePolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }

// ConflictPolicy says what happens to a message with a known id and another
// payload.
type ConflictPolicy string

const (
	// ConflictDeadLetter makes it a dead letter.
	ConflictDeadLetter ConflictPolicy = "dead_letter"
	// ConflictDrop only counts it.
	ConflictDrop ConflictPolicy = "drop"
	// ConflictStop holds the lane.
	ConflictStop ConflictPolicy = "stop"
)

// Values are the policies there are.
func (ConflictPolicy) Values() []ConflictPolicy {
	return []ConflictPolicy{ConflictDeadLetter, ConflictDrop, ConflictStop}
}

func (p *ConflictPolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }
