package policy

// Missing says what happens to a message without an id.
type Missing string

const (
	// MissingDeadLetter makes it a dead letter.
	MissingDeadLetter Missing = "dead_letter"
	// MissingPosition makes its position its id.
	MissingPosition Missing = "position"
	// MissingStop holds the lane.
	MissingStop Missing = "stop"
)

func (Missing) Values() []string { return Values(MissingDeadLetter, MissingPosition, MissingStop) }

// Duplicate says what happens to a duplicate that the producer sent again.
// A message that the broker delivers again is always dropped.
type Duplicate string

const (
	// DuplicateDrop only counts it.
	DuplicateDrop Duplicate = "drop"
	// DuplicateDeadLetter makes it a dead letter.
	DuplicateDeadLetter Duplicate = "dead_letter"
	// DuplicateReply isn't available yet.
	DuplicateReply Duplicate = "reply"
)

func (Duplicate) Values() []string { return Values(DuplicateDrop, DuplicateDeadLetter, DuplicateReply) }

// Conflict says what happens to a message with a known id and another payload.
type Conflict string

const (
	// ConflictDeadLetter makes it a dead letter.
	ConflictDeadLetter Conflict = "dead_letter"
	// ConflictDrop only counts it.
	ConflictDrop Conflict = "drop"
	// ConflictStop holds the lane.
	ConflictStop Conflict = "stop"
)

func (Conflict) Values() []string { return Values(ConflictDeadLetter, ConflictDrop, ConflictStop) }
