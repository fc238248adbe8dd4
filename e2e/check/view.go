package main

import (
	"sort"
	"time"
)

// terms are what a run was asked to keep.
type terms struct {
	// allow are the classes of dead letters that the run gave cause for.
	allow map[string]bool
	// settled: the workers had all the time they needed.
	settled bool
	// window is for how long ids are remembered at least; 0: for ever.
	window time.Duration
}

// view is a history with what the invariants look things up by.
type view struct {
	*history
	terms
	// first is the first outcome of each key, and claimed its claim in the lowest
	// generation.
	first        map[key]outcome
	claimed      map[key]int
	chains       []chain        // by lane
	deadLettered map[place]bool // the places of all dead letters
	// landings are the moves that took messages over, by transaction.
	landings map[transaction]int
	// settledBy tells, of a queue, by when all up to each message of its log had its
	// outcome, in Unix nanoseconds. Empty: the lane is ordered.
	settledBy [][]int64
	// newest is the last transaction that moved a lane, lowest the oldest one
	// whose claims are still there.
	newest, lowest uint64
}

// outcome is a row of the sink, or a dead letter in its place: an index into the
// effects, or the complement of one into the letters.
type outcome int32

// place is where a message stands.
type place struct {
	lane     laneID
	position int64
}

// transaction is one lane's part in a transaction, by the number's low half.
type transaction struct {
	xid  uint32
	lane laneID
}

// chain is what happened to one lane's row.
type chain struct {
	moves []int // indexes, in their order
	start int64 // where the lane began
	// skipped are the spans that people have passed over, and breaks the moves
	// behind which the lane was somewhere else than before.
	skipped []span
	breaks  map[int]bool
}

type span struct{ from, to int64 }

func newView(h *history, t terms) *view {
	h.reshape()
	x := &view{
		history: h, terms: t, chains: make([]chain, len(h.lanes)), landings: make(map[transaction]int, len(h.moves)),
		first: make(map[key]outcome, len(h.effects)+len(h.letters)), claimed: make(map[key]int, len(h.claims)), deadLettered: map[place]bool{},
	}
	h.followCuts()
	for i := range h.effects {
		x.end(h.effects[i].key, outcome(i))
	}
	for i := range h.letters {
		d := &h.letters[i]
		x.deadLettered[place{d.lane, d.position}] = true
		if d.isOutcome() {
			x.end(d.claimKey, ^outcome(i))
		}
	}
	for i := range h.moves {
		m := &h.moves[i]
		x.newest = max(x.newest, m.xid)
		x.link(i, m)
	}
	x.lowest = x.newest + 1
	for i := range h.claims {
		c := &h.claims[i]
		if _, ok := x.claimed[c.key]; !ok {
			x.claimed[c.key] = i
		}
		x.lowest = min(x.lowest, expand(c.xmin, x.newest))
	}
	x.settledBy = make([][]int64, len(h.lanes))
	for li := range h.lanes {
		if l := &h.lanes[li]; l.row != nil && !l.row.ordered {
			x.settledBy[li] = x.settling(laneID(li))
		}
	}
	return x
}

// settling runs through a queue's log: a message is settled when its id, or its
// place, had its outcome. The moves tell the time from before their COMMIT. Of what
// never had one noLoss tells.
func (x *view) settling(id laneID) []int64 {
	l := &x.lanes[id]
	all := make([]int64, len(l.log))
	latest := int64(0)
	for i := range l.log {
		at := int64(0)
		if o, ok := x.outcomeOf(id, &l.log[i]); ok {
			if m := x.moveOf(o); m != nil {
				at = m.at.UnixNano()
			}
		}
		latest = max(latest, at)
		all[i] = latest
	}
	return all
}

// durable is the position up to which everything of a sample's lane was durable
// then: of an ordered lane its row's, of a queue, whose row tells only how far it
// has come, that of the first message that had no outcome yet. What the database
// lost later with a failover can't be told any more.
func (x *view) durable(s *sample) int64 {
	all := x.settledBy[s.lane]
	if len(all) == 0 {
		return s.next
	}
	for i := range x.events {
		if x.events[i].failover && s.at.Before(x.events[i].at) {
			return s.next
		}
	}
	open := sort.Search(len(all), func(i int) bool { return all[i] > s.at.UnixNano() })
	if open == len(all) {
		return s.next
	}
	return min(s.next, x.lanes[s.lane].log[open].position)
}

// moveOf is the move of the transaction that an outcome came by; nil: there is none.
func (x *view) moveOf(o outcome) *move {
	lane, _ := x.where(o)
	if o >= 0 {
		return x.landing(uint32(x.effects[o].xid), lane)
	}
	return x.landing(x.letters[^o].xmin, lane)
}

// isCutOff tells that an outcome is of a message that the log has lost since.
func (x *view) isCutOff(o outcome) bool {
	lane, position := x.where(o)
	m := x.moveOf(o)
	return m != nil && x.lanes[lane].lost(position, m.at)
}

// late reports whether a copy came so much later than another one of its id that it
// may have landed again: by the messages' own times, as the window is counted.
func (x *view) late(lane laneID, position int64, first outcome) bool {
	if x.window == 0 {
		return false
	}
	firstLane, firstPosition := x.where(first)
	a, b := x.lanes[firstLane].at(firstPosition), x.lanes[lane].at(position)
	return a != nil && b != nil && time.Duration(b.at-a.at) >= x.window-timeSlack
}

// claimant reports whether a key's claim must be this outcome's: the first one's, or
// where a late copy has landed again, and has the claim by now, that one's.
func (x *view) claimant(k key, lane laneID, position int64, o outcome) bool {
	if i, ok := x.claimed[k]; ok {
		if c := &x.claims[i]; c.lane != noLane && x.late(c.lane, c.position, x.first[k]) {
			return c.lane == lane && c.position == position
		}
	}
	return x.first[k] == o
}

// timeSlack is by how much the times of a lane's messages may be out of order.
const timeSlack = time.Second

func (x *view) end(k key, o outcome) {
	if _, ok := x.first[k]; !ok {
		x.first[k] = o
	}
}

// link hangs a move on its lane's chain.
func (x *view) link(i int, m *move) {
	c := &x.chains[m.lane]
	switch {
	case len(c.moves) == 0 && m.op != opInsert:
		c.start = m.from // its beginning was not recorded
	case len(c.moves) == 0:
		c.start = m.to
	case m.op == opInsert:
		c.start = min(c.start, m.to)
	}
	switch {
	case x.isByHand(c, m):
		if c.breaks == nil {
			c.breaks = map[int]bool{}
		}
		c.breaks[i] = true
		if m.op == opUpdate && m.to > m.from && x.handsAllowed(m) {
			c.skipped = append(c.skipped, span{m.from, m.to})
		}
	case m.op == opUpdate && (m.to > m.from || m.delta != books{}):
		x.landings[transaction{uint32(m.xid), m.lane}] = i
	}
	c.moves = append(c.moves, i)
}

// isByHand tells that a lane was put somewhere: a worker moves its lanes forward
// only, under the epoch that it has taken them by.
func (x *view) isByHand(c *chain, m *move) bool {
	switch {
	case m.op == opDelete:
		return true
	case m.op == opInsert:
		return false
	case m.to < m.from:
		return true
	}
	return m.to > m.from && len(c.moves) > 0 && x.moves[c.moves[len(c.moves)-1]].epoch != m.epoch
}

// handsAllowed reports whether the fault timeline has people move lanes then.
func (x *view) handsAllowed(m *move) bool {
	for _, e := range x.events {
		if !e.until.IsZero() && !m.at.Before(e.at) && !m.at.After(e.until) {
			return true
		}
	}
	return false
}

// promised reports whether what stands at a position must have had its outcome.
func (x *view) promised(id laneID, position int64) bool {
	l := &x.lanes[id]
	switch {
	case l.row == nil:
		return false
	case !l.row.ordered:
		return x.settled // the broker alone knows how far a queue has come
	case position < x.chains[id].start || position >= l.row.next:
		return false
	}
	for _, s := range x.chains[id].skipped {
		if position >= s.from && position < s.to {
			return false
		}
	}
	return true
}

// outcomeOf finds what became of a message of the log: the first outcome of its
// id or, without one, of its place.
func (x *view) outcomeOf(id laneID, r *record) (outcome, bool) {
	k := r.key
	if r.identity == withoutID || r.identity == idTooLong {
		k = x.place(id, r.position)
	}
	o, ok := x.first[k]
	return o, ok
}

func (x *view) place(id laneID, position int64) key {
	l := &x.lanes[id]
	if l.row == nil {
		return key{}
	}
	return placeKey(l.row.streamID, l.source, l.name, position)
}

// where is the place that an outcome came by.
func (x *view) where(o outcome) (laneID, int64) {
	if o >= 0 {
		return x.effects[o].lane, x.effects[o].position
	}
	return x.letters[^o].lane, x.letters[^o].position
}

// landing is the move of a transaction and lane; nil: there is none.
func (x *view) landing(xid uint32, id laneID) *move {
	if i, ok := x.landings[transaction{xid, id}]; ok {
		return &x.moves[i]
	}
	return nil
}
