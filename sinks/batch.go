package sinks

import "github.com/dedupd/dedupd/message"

// Outcome is what became of a message that was given to a sink. Only the sink knows. Every
// outcome but Written means that the target stayed as it was.
type Outcome uint8

const (
	// Written means that the message changed the target. A sink that says nothing means this.
	Written Outcome = iota
	// AlreadyPresent means that the target had it before dedupd did, such as a row with that key.
	AlreadyPresent
	// Stale means that the target has a newer state.
	Stale
	// Rejected means that the target isn't in the state that the message expects.
	Rejected
)

// Batch is what one call of Write applies, and what the sink says of it. It belongs to the
// goroutine of that call.
type Batch struct {
	messages []message.Message
	outcomes []Outcome // nil: all are Written
}

// NewBatch makes a batch, for callers of Write.
func NewBatch(messages []message.Message) *Batch { return &Batch{messages: messages} }

// Messages are those to apply. They and everything that they point to must not be kept or
// changed.
func (b *Batch) Messages() []message.Message { return b.messages }

// Outcome says what became of Messages()[i]. The last word counts; if Write returns an
// error, none does.
func (b *Batch) Outcome(i int, o Outcome) {
	if b.outcomes == nil {
		b.outcomes = make([]Outcome, len(b.messages))
	}
	b.outcomes[i] = o
}

// OutcomeOf is what the sink has said of Messages()[i].
func (b *Batch) OutcomeOf(i int) Outcome {
	if b.outcomes == nil {
		return Written
	}
	return b.outcomes[i]
}
