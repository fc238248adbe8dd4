package kafka

import "github.com/dedupd/dedupd/consumer"

// grant is what one answer, and what is decoded from it, holds of the byte budget. A
// nil grant has no limit.
//
// It never waits for more: two lanes that wait while they hold some could wait for
// each other.
type grant struct {
	budget *consumer.Budget
	held   int64 // of the budget
	used   int64 // of that
	wanted int64 // what it would have used when it was last refused
}

// answerSlack is by how much an answer may exceed what was asked for without asking for
// room: by default, brokers take no larger batches.
const answerSlack = 1 << 20

// room reserves memory for an answer before it is read; false: there is none now.
// Whatever was asked for, a broker sends one record batch, of any size.
func (g *grant) room(bytes int64) bool {
	more := bytes - g.held
	if more <= answerSlack {
		return true
	}
	if !g.budget.TryAcquire(more) {
		g.wanted = bytes + bytes/8 // and what is decoded from it
		return false
	}
	g.held += more
	return true
}

// answer counts what a broker has sent: it is in memory, whatever was asked for.
func (g *grant) answer(bytes int64) {
	g.used = bytes
	if more := bytes - g.held; more > 0 {
		g.budget.Adjust(more)
		g.held += more
	}
}

// take reserves memory before it is used; false: there is none now.
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

// settle keeps so many bytes, and gives the rest back.
func (g *grant) settle(bytes int64) {
	g.budget.Adjust(bytes - g.held)
	g.held = bytes
}
