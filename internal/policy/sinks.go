package policy

// Present says what happens to a message whose row is in the table already, with the same
// key.
type Present string

const (
	// PresentIgnore leaves the row as it is, and counts the message as already present.
	PresentIgnore Present = "ignore"
	// PresentCompare does so if the row is what the message would have written, and
	// dead-letters the message if not.
	PresentCompare Present = "compare"
	// PresentDeadLetter makes the message a dead letter.
	PresentDeadLetter Present = "dead_letter"
)

func (Present) Values() []string {
	return Values(PresentIgnore, PresentCompare, PresentDeadLetter)
}

// Stale says what happens to a message that is older than its row.
type Stale string

const (
	// StaleIgnore counts it.
	StaleIgnore Stale = "ignore"
	// StaleDeadLetter makes it a dead letter.
	StaleDeadLetter Stale = "dead_letter"
)

func (Stale) Values() []string { return Values(StaleIgnore, StaleDeadLetter) }

// Mismatch says what happens to a message whose row or stream isn't in the state that the
// message expects.
type Mismatch string

const (
	// MismatchDeadLetter makes it a dead letter.
	MismatchDeadLetter Mismatch = "dead_letter"
	// MismatchIgnore counts it as rejected.
	MismatchIgnore Mismatch = "ignore"
	// MismatchStop holds the lane.
	MismatchStop Mismatch = "stop"
)

func (Mismatch) Values() []string { return Values(MismatchDeadLetter, MismatchIgnore, MismatchStop) }

// Absent says what happens to a column whose place isn't there in a message: a header that it
// doesn't have, or a path that leads nowhere. A null is there.
type Absent string

const (
	// AbsentKeep leaves the column as it is. A new row gets the column's default.
	AbsentKeep Absent = "keep"
	// AbsentNull writes NULL.
	AbsentNull Absent = "null"
)

func (Absent) Values() []string { return Values(AbsentKeep, AbsentNull) }
