package policy

// Strategy says how each message takes effect once.
type Strategy string

const (
	// StrategyClaim claims each message's id.
	StrategyClaim Strategy = "claim"
	// StrategyPosition claims nothing: the lane's position, moved in the transaction of the
	// write, makes each position's effect exactly once. What the producer sends again is
	// applied again. For ordered lanes.
	StrategyPosition Strategy = "position"
	// StrategySequence applies what is above its producer's mark, the number of the last
	// message of that producer. For ordered lanes.
	StrategySequence Strategy = "sequence"
)

func (Strategy) Values() []string {
	return Values(StrategyClaim, StrategyPosition, StrategySequence)
}

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

// SequenceGap says what a missing sequence number means.
type SequenceGap string

const (
	// SequenceGapAllow applies what comes after it.
	SequenceGapAllow SequenceGap = "allow"
	// SequenceGapDeadLetter makes the message after it a dead letter.
	SequenceGapDeadLetter SequenceGap = "dead_letter"
	// SequenceGapStop holds the lane.
	SequenceGapStop SequenceGap = "stop"
)

func (SequenceGap) Values() []string {
	return Values(SequenceGapAllow, SequenceGapDeadLetter, SequenceGapStop)
}
