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

// MaxResult is the most bytes that a result may have. Of a longer one only its size is kept.
const MaxResult = 64 << 10

// Batch is what one call of Write applies, and what the sink says of it. It belongs to the
// goroutine of that call.
type Batch struct {
	messages []message.Message
	outcomes []Outcome // nil: all are Written
	results  []Result  // nil: there is none
}

// Result is what a message led to, for whoever asks with a duplicate.
type Result struct {
	// Size is the result's, 0 also if there is none.
	Size int
	// Bytes are nil if there is no result, and if it was longer than MaxResult.
	Bytes []byte
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

// Result gives Messages()[i] a result, whatever its outcome: the answer that a duplicate of
// the message is to get, too. It is kept with the claim, in its transaction and for as long,
// and belongs to the caller again when Result returns. Of a result above MaxResult only the
// size is kept: a duplicate then has none. The strategies position and sequence claim no ids,
// and keep no results.
//
// The last word counts, and nil takes it back. If Write returns an error, no result is kept.
func (b *Batch) Result(i int, result []byte) {
	if b.results == nil {
		b.results = make([]Result, len(b.messages))
	}
	b.results[i] = Result{Size: len(result)}
	if result != nil && len(result) <= MaxResult {
		b.results[i].Bytes = append([]byte{}, result...)
	}
}

// CopyResult gives Messages()[i] the result of another batch's message: for a sink that has
// others write parts of its batch.
func (b *Batch) CopyResult(i int, from *Batch, at int) {
	if r, ok := from.ResultOf(at); ok {
		b.Result(i, r.Bytes)
		b.results[i].Size = r.Size
	}
}

// ResultOf is the result that the sink has given Messages()[i].
func (b *Batch) ResultOf(i int) (r Result, ok bool) {
	if b.results == nil {
		return Result{}, false
	}
	r = b.results[i]
	return r, r.Bytes != nil || r.Size > 0
}
