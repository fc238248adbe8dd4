package kafka

import "github.com/dedupd/dedupd/consumer"

// grant is what one answer, and what is made of it, holds of the byte budget. Of a nil
// one there is no end.
//
// More is taken only if it is there: whoever waits while holding some may wait for
// others who do the same.
type grant struct {
	budget *consumer.Budget
	held   int64 // of the budget
	used   int64 // of that
	wanted int64 // what would have been used, when it was last refused
}

// answerSlack is how much more than was asked for an answer may have without asking for
// room: brokers take no larger batches unless they are told to.
const answerSlack = 1 << 20

// room is asked before an answer is read; false: there is none for it now. Whatever was
// asked for, a broker sends one record batch, and that may be of any size.
func (g *grant) room(bytes int64) bool {
	more := bytes - g.held
	if more <= answerSlack {
		return true
	}
	if !g.budget.TryAcquire(more) {
		g.wanted = bytes + bytes/8 // and what is made of it
		return false
	}
	g.held += more
	return true
}

// answer counts what a broker has sent: it is there, whatever was asked for.
func (g *grant) answer(bytes int64) {
	g.used = bytes
	if more := bytes - g.held; more > 0 {
		g.budget.Adjust(more)
		g.held += more
	}
}

// take is asked before memory is taken; false: there is none now.
func (g *grant) take(bytes int64) bool {
	if g == nil {
		return true
	}
	if more := g.used + bytes - g.held; more > 0 {
		if !g.budget.TryAcquire(more) {
			g.wanted = g.used + bytes
			return false
		}
		g.held += more
	}
	g.used += bytes
	return true
}

// settle keeps so much, and gives the rest back.
func (g *grant) settle(bytes int64) {
	g.budget.Adjust(bytes - g.held)
	g.held = bytes
}
