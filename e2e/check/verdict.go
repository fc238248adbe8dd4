package main

import (
	"fmt"
	"sync"
	"time"

	"github.com/dedupd/dedupd/e2e/shape"
)

// invariants are what a run is judged by. None of them asks another: each finds
// what breaks it by itself, and nothing else.
var invariants = []struct {
	name, promise string
	judge         func(*view, *finding)
}{
	{"I1", "no loss", noLoss},
	{"I2", "no double", noDouble},
	{"I3", "no phantom", noPhantom},
	{"I4", "the first copy wins", firstCopyWins},
	{"I5", "order", inOrder},
	{"I6", "atomic", atomic},
	{"I7", "never ahead", neverAhead},
	{"I8", "books balance, nothing leaks", balanced},
	{"I9", "the table is as its mode demands", asItsModeDemands},
}

// finding is what one invariant has to say.
type finding struct {
	invariant, promise string
	count              int
	// first are the first few violations. The others are only counted.
	first []violation
	// witness is all that is known of the first one's subject.
	witness witness
}

const mostShown = 5

// violation is one broken rule, and the subject whose events are its witness.
type violation struct {
	what string
	subject
}

// subject is an id, a place, a lane, or none of them.
type subject struct {
	key      key
	lane     laneID // noLane: none
	position int64  // -1: the lane as such
	at       time.Time
}

func (f *finding) add(s subject, format string, args ...any) {
	f.count++
	if len(f.first) < mostShown {
		f.first = append(f.first, violation{fmt.Sprintf(format, args...), s})
	}
}

func ofKey(k key) subject { return subject{key: k, lane: noLane, position: -1} }

func ofLane(lane laneID) subject { return subject{lane: lane, position: -1} }

func ofPlace(k key, lane laneID, position int64) subject {
	return subject{key: k, lane: lane, position: position}
}

// verdict judges a run by all invariants at once.
func verdict(h *history, t terms) []finding {
	x := newView(h, t)
	findings := make([]finding, len(invariants))
	var all sync.WaitGroup
	for i, v := range invariants {
		all.Go(func() {
			f := &findings[i]
			f.invariant, f.promise = v.name, v.promise
			v.judge(x, f)
			if f.count > 0 {
				f.witness = x.witness(f.first[0].subject)
			}
		})
	}
	all.Wait()
	return findings
}

// noLoss (I1): each message below its lane's next position has an outcome; and
// when the run has settled, so has each message.
func noLoss(x *view, f *finding) {
	for li := range x.lanes {
		id, l := laneID(li), &x.lanes[li]
		switch {
		case l.row == nil:
			if x.settled && len(l.log) > 0 {
				f.add(ofLane(id), "nobody has acquired lane %s, which holds %d messages", l, len(l.log))
			}
			continue
		case l.row.ordered && l.row.next > l.end:
			f.add(ofLane(id), "lane %s stands at %d, beyond the end of its log at %d", l, l.row.next, l.end)
		case l.row.ordered && x.settled && l.row.next < l.end:
			f.add(ofLane(id), "lane %s stands at %d, its log ends at %d", l, l.row.next, l.end)
		}
		for i := range l.log {
			r := &l.log[i]
			if !x.promised(id, r.position) {
				continue
			}
			switch o, ok := x.outcomeOf(id, r); {
			case r.identity == unwanted:
				if ok {
					f.add(ofPlace(r.key, id, r.position), "%s, of %s %d, has an outcome, and no sink wants it", x.nameOf(r), l, r.position)
				}
			case !ok:
				f.add(ofPlace(r.key, id, r.position), "%s, of %s %d, is neither in the sink nor among the dead letters", x.nameOf(r), l, r.position)
			case x.isLostConflict(id, r, o):
				f.add(ofPlace(r.key, id, r.position), "%s, of %s %d, has another value than what has landed, and is not among the dead letters", x.nameOf(r), l, r.position)
			}
		}
	}
	for i := range x.letters {
		if d := &x.letters[i]; !x.allow[d.class] {
			f.add(ofPlace(d.key, d.lane, d.position), "%s %d was dead-lettered as %s, for which this run gave no cause: %s", x.laneName(d.lane), d.position, d.class, x.texts.get(d.reason))
		}
	}
}

// noDouble (I2): each id has one outcome, and each key one claim.
func noDouble(x *view, f *finding) {
	for i := range x.effects {
		e := &x.effects[i]
		if first := x.first[e.key]; first != outcome(i) && !x.late(e.lane, e.position, first) {
			lane, position := x.where(first)
			f.add(ofKey(e.key), "%s landed by %s %d, and by %s %d before", x.texts.get(e.id), x.laneName(e.lane), e.position, x.laneName(lane), position)
		}
	}
	for i := range x.letters {
		d := &x.letters[i]
		if !d.isOutcome() {
			continue
		}
		if first := x.first[d.claimKey]; first != ^outcome(i) && !x.late(d.lane, d.position, first) {
			lane, position := x.where(first)
			f.add(ofPlace(d.claimKey, d.lane, d.position), "%s %d was dead-lettered as %s, though its key had its outcome by %s %d",
				x.laneName(d.lane), d.position, d.class, x.laneName(lane), position)
		}
	}
	for i := range x.claims {
		c := &x.claims[i]
		if first := x.claimed[c.key]; first != i {
			f.add(ofKey(c.key), "the key %s is claimed in the generations %d and %d", c.key, x.claims[first].generation, c.generation)
		}
	}
}

// noPhantom (I3): each row of the sink, and each dead letter, is what the log has
// at its place.
func noPhantom(x *view, f *finding) {
	for i := range x.effects {
		e := &x.effects[i]
		l := &x.lanes[e.lane]
		if l.deleted(e.position) || x.isCutOff(outcome(i)) {
			continue
		}
		s := ofPlace(e.key, e.lane, e.position)
		switch r := l.at(e.position); {
		case r == nil:
			f.add(s, "%s landed by %s %d, where the log has no message", x.texts.get(e.id), l, e.position)
		case r.identity != identified || r.key != e.key:
			f.add(s, "%s landed by %s %d, where the log has %s", x.texts.get(e.id), l, e.position, x.nameOf(r))
		case e.sum != r.sum && (r.carried == 0 || e.sum != r.carried):
			f.add(s, "%s landed by %s %d with another value than the log has there", x.texts.get(e.id), l, e.position)
		}
	}
	for i := range x.letters {
		d := &x.letters[i]
		if why := x.phantom(d); why != "" {
			f.add(ofPlace(d.key, d.lane, d.position), "the dead letter %d, of %s %d and class %s, %s", d.number, x.laneName(d.lane), d.position, d.class, why)
		}
	}
}

// phantom says what is wrong with a dead letter.
func (x *view) phantom(d *letter) string {
	l := &x.lanes[d.lane]
	if m := x.landing(d.xmin, d.lane); l.deleted(d.position) || m != nil && l.lost(d.position, m.at) {
		return ""
	}
	r := l.at(d.position)
	if r == nil {
		return "stands for no message of the log"
	}
	if d.raw != r.raw {
		return "isn't the message that the log has there, byte by byte"
	}
	want := identified
	switch d.class {
	case classNoID:
		want = withoutID
	case classBadID:
		want = idTooLong
	}
	claimKey := r.key
	if want != identified {
		claimKey = x.place(d.lane, d.position)
	}
	switch {
	case r.identity != want:
		return "is at odds with its id, " + x.nameOf(r)
	case want == identified && d.key != r.key:
		return "has another id than " + x.nameOf(r)
	case d.claimKey != claimKey && x.shape.By != shape.ByNumber: // there it is the producer's
		return fmt.Sprintf("goes by the key %s, not by %s", d.claimKey, claimKey)
	case d.class == classConflict && x.isCopyOfLanded(r):
		return "is no conflict: it is a copy of the message that has landed"
	}
	return ""
}

// isLostConflict reports whether a message that lost to one with another value was
// dropped without a word, where a run has conflicts. Claims that are forgotten can't
// be compared with.
func (x *view) isLostConflict(id laneID, r *record, o outcome) bool {
	if !x.allow[classConflict] || r.identity != identified || x.forgotten || o < 0 {
		return false
	}
	lane, position := x.where(o)
	landed := x.lanes[lane].at(position)
	return landed != nil && landed.sum != r.sum && !x.deadLettered[place{id, r.position}]
}

// isCopyOfLanded reports whether the value that landed under a message's id is its
// own.
func (x *view) isCopyOfLanded(r *record) bool {
	o, ok := x.first[r.key]
	if !ok {
		return false
	}
	lane, position := x.where(o)
	landed := x.lanes[lane].at(position)
	return landed != nil && landed.sum == r.sum
}

// firstCopyWins (I4): within an ordered lane, the first copy wins. Among lanes any
// may, and in a queue any copy.
func firstCopyWins(x *view, f *finding) {
	for li := range x.lanes {
		id, l := laneID(li), &x.lanes[li]
		if l.row == nil || !l.row.ordered {
			continue
		}
		for i := range l.log {
			r := &l.log[i]
			if r.identity != identified || !x.promised(id, r.position) {
				continue
			}
			o, ok := x.first[r.key]
			if !ok {
				continue
			}
			lane, position := x.where(o)
			if lane != id || position <= r.position {
				continue
			}
			if landed := l.at(position); landed != nil && landed.key == r.key {
				f.add(ofKey(r.key), "%s landed by %s %d, though a copy stands at %d", x.texts.get(r.id), l, position, r.position)
			}
		}
	}
}

// inOrder (I5): along the moves of an ordered lane, the positions of the rows
// rise; within one move, in the order of their insertion.
func inOrder(x *view, f *finding) {
	type run struct{ first, last int64 }
	runs := make(map[int]run, len(x.landings)) // by move
	for i := range x.effects {
		e := &x.effects[i]
		mi, ok := x.landings[transaction{uint32(e.xid), e.lane}]
		if !ok || !x.moves[mi].ordered {
			continue
		}
		r, ok := runs[mi]
		switch {
		case !ok:
			r.first = e.position
		case e.position <= r.last:
			f.add(ofPlace(e.key, e.lane, e.position), "%s: position %d landed after %d, in the transaction %d", x.laneName(e.lane), e.position, r.last, e.xid)
		}
		r.last = e.position
		runs[mi] = r
	}
	for li := range x.chains {
		last := int64(-1)
		for _, mi := range x.chains[li].moves {
			if x.chains[li].breaks[mi] {
				last = -1
			}
			r, ok := runs[mi]
			if !ok {
				continue
			}
			if r.first <= last {
				f.add(ofPlace(key{}, laneID(li), r.first), "%s: position %d landed after %d, which an earlier transaction had landed", x.laneName(laneID(li)), r.first, last)
			}
			last = r.last
		}
	}
}

// atomic (I6): rows, claims and dead letters stand in the transaction that moved
// their lane past them, and the moves of a lane are one chain.
func atomic(x *view, f *finding) {
	for li := range x.lanes {
		x.chained(laneID(li), f)
	}
	for i := range x.effects {
		e := &x.effects[i]
		s := ofPlace(e.key, e.lane, e.position)
		x.moved(f, s, e.lane, e.position, e.xid)
		if x.claimant(e.key, e.lane, e.position, outcome(i)) {
			x.sameAsClaim(f, s, e.key, e.lane, e.position, e.xid)
		}
	}
	for i := range x.letters {
		d := &x.letters[i]
		s, xid := ofPlace(d.key, d.lane, d.position), expand(d.xmin, x.newest)
		x.moved(f, s, d.lane, d.position, xid)
		if d.isOutcome() && x.claimant(d.claimKey, d.lane, d.position, ^outcome(i)) {
			x.sameAsClaim(f, s, d.claimKey, d.lane, d.position, xid)
		}
	}
	x.rowsMoved(f)
	for i := range x.claims {
		c := &x.claims[i]
		if !x.hasClaims() {
			f.add(ofKey(c.key), "the key %s is claimed, and the strategy claims nothing", c.key)
		} else if _, ok := x.first[c.key]; !ok && c.lane != noLane {
			f.add(ofKey(c.key), "the key %s is claimed by %s %d, but has no outcome", c.key, x.laneName(c.lane), c.position)
		}
	}
}

// moved demands that a row's transaction has moved its lane past it.
func (x *view) moved(f *finding, s subject, lane laneID, position int64, xid uint64) {
	m := x.landing(uint32(xid), lane)
	switch {
	case m == nil || m.xid != xid:
		f.add(s, "%s %d: its transaction %d hasn't moved the lane", x.laneName(lane), position, xid)
	case position >= m.to || m.ordered && position < m.from:
		f.add(s, "%s %d: its transaction %d has moved the lane from %d to %d, which is elsewhere", x.laneName(lane), position, xid, m.from, m.to)
	}
}

// sameAsClaim demands that a row's key was claimed with it, for its place.
func (x *view) sameAsClaim(f *finding, s subject, k key, lane laneID, position int64, xid uint64) {
	if !x.hasClaims() {
		return
	}
	i, ok := x.claimed[k]
	if !ok {
		if !x.forgotten || xid >= x.lowest {
			f.add(s, "%s %d: its key %s is not claimed", x.laneName(lane), position, k)
		}
		return
	}
	switch c := &x.claims[i]; {
	case c.xmin != uint32(xid):
		f.add(s, "%s %d: it stands in the transaction %d, its claim in one that ends in %d", x.laneName(lane), position, xid, c.xmin)
	case c.lane == goneLane:
	case c.lane != lane || c.position != position:
		f.add(s, "%s %d: its key is claimed for %s %d", x.laneName(lane), position, x.laneName(c.lane), c.position)
	}
}

// chained demands that each move of a lane begins where the last one ended, that
// only people put a lane elsewhere, and only when they were meant to, and that
// the last one ends where the row stands.
func (x *view) chained(id laneID, f *finding) {
	c, l := &x.chains[id], &x.lanes[id]
	var last *move
	for _, mi := range c.moves {
		m := &x.moves[mi]
		s := subject{lane: id, position: m.from, at: m.at}
		if last == nil || last.op == opDelete {
			if last != nil && m.op != opInsert {
				f.add(s, "%s: the move %d is of a row that was deleted", l, m.number)
			}
			last = m
			continue
		}
		switch {
		case m.op == opInsert:
			f.add(s, "%s: the move %d makes a row that was there", l, m.number)
		case m.from != last.to:
			f.add(s, "%s: the move %d begins at %d, the one before ended at %d", l, m.number, m.from, last.to)
		case c.breaks[mi] && !x.handsAllowed(m):
			f.add(s, "%s: the move %d puts the lane from %d to %d (%s), which no event allows", l, m.number, m.from, m.to, m.op)
		}
		switch {
		case m.epoch < last.epoch:
			f.add(s, "%s: the epoch falls from %d to %d with the move %d", l, last.epoch, m.epoch, m.number)
		case m.ordered && m.epoch == last.epoch && m.owner != last.owner:
			f.add(s, "%s: %s and %s own the lane under one epoch, %d", l, last.owner, m.owner, m.epoch)
		}
		last = m
	}
	s := ofLane(id)
	isThere := last != nil && last.op != opDelete
	switch {
	case l.row == nil:
		if isThere {
			f.add(s, "%s: its row is gone, and no move tells of that", l)
		}
	case !isThere:
		f.add(s, "%s: its row was never made, as far as moves tell", l)
	case last.to != l.row.next || last.epoch != l.row.epoch:
		f.add(s, "%s: the last move leaves it at %d, epoch %d; its row stands at %d, epoch %d", l, last.to, last.epoch, l.row.next, l.row.epoch)
	}
}

// neverAhead (I7): the broker is told nothing that isn't durable: no offset above
// the lane's row, and of a queue no message that has no outcome yet. After a
// failover it may know more, until the lane is seen to be level again, which must
// follow.
func neverAhead(x *view, f *finding) {
	type excuse struct {
		lane  laneID
		event int
	}
	const used, over = 1, 2
	excuses := map[excuse]int{}
	ahead := map[laneID]*sample{} // by an excuse, up to now
	for i := range x.samples {
		s := &x.samples[i]
		next := x.durable(s)
		isAhead, excused := s.broker > next, false
		for ei := range x.events {
			e := &x.events[ei]
			// A row that is read after a failover lacks what the broker, asked
			// before it, rightly knew.
			if s.rowAt.Before(e.at) || !e.until.IsZero() && s.at.After(e.until) {
				continue
			}
			if !e.failover {
				// People may put a lane back while the broker keeps what it was told.
				excused = excused || !e.until.IsZero()
				continue
			}
			by := excuse{s.lane, ei}
			switch {
			case isAhead && excuses[by] != over:
				excuses[by], excused = used, true
			case !isAhead && excuses[by] == used:
				excuses[by] = over
			}
		}
		switch {
		case !isAhead:
			delete(ahead, s.lane)
		case excused:
			ahead[s.lane] = s
		default:
			f.add(subject{lane: s.lane, position: next, at: s.at}, "%s: at %s the broker was told %d, %d was not durable yet (the lane stood at %d)",
				x.laneName(s.lane), s.at.Format(time.RFC3339Nano), s.broker, next, s.next)
		}
	}
	for li := range x.lanes {
		if s := ahead[laneID(li)]; s != nil {
			f.add(subject{lane: s.lane, position: s.next, at: s.at}, "%s: the broker is ahead to the last, %d before %d: the lane was never seen to be taken back",
				x.laneName(s.lane), s.broker, s.next)
		}
	}
}

// balanced (I8): each lane's books account for what was fetched, are the sum of
// its moves, and agree with the log, the sink and the dead letters. And the
// workers' logs have no complaint.
func balanced(x *view, f *finding) {
	type sums struct {
		all, landed   books // of all moves; of those that took messages over
		effects, dead int64
	}
	lanes := make([]sums, len(x.lanes))
	for i := range x.effects {
		lanes[x.effects[i].lane].effects++
	}
	for i := range x.letters {
		if d := &x.letters[i]; d.isOutcome() {
			lanes[d.lane].dead++
		}
	}
	for i := range x.moves {
		m := &x.moves[i]
		sum := &lanes[m.lane]
		sum.all.add(m.delta)
		if m.op == opDelete {
			continue
		}
		sum.landed.add(m.delta)
		l := &x.lanes[m.lane]
		if !m.ordered || m.op != opUpdate || x.chains[m.lane].breaks[i] || m.from < l.first || l.lost(m.to-1, m.at) {
			continue
		}
		if n := l.count(m.from, m.to); n != m.delta[fetched] {
			f.add(subject{lane: m.lane, position: m.from, at: m.at}, "%s: the move %d from %d to %d books %d messages fetched, the log has %d there",
				l, m.number, m.from, m.to, m.delta[fetched], n)
		}
	}
	for li := range x.lanes {
		l, sum := &x.lanes[li], &lanes[li]
		s := ofLane(laneID(li))
		var b books
		if l.row != nil {
			b = l.row.books
		}
		if b[fetched] != b.outcomes() {
			f.add(s, "%s: %d messages were fetched, and %d have an outcome in the books", l, b[fetched], b.outcomes())
		}
		for i, name := range bookNames {
			if b[i] != sum.all[i] {
				f.add(s, "%s: the books say %d %s, the moves add up to %d", l, b[i], name, sum.all[i])
			}
		}
		if n := b[alreadyPresent] + b[stale] + b[rejected]; n != 0 && x.shape.Table == "" {
			f.add(s, "%s: the books say of %d messages that the sink has not written them, and it writes all", l, n)
		}
		if n := sum.landed[applied]; n != sum.effects {
			f.add(s, "%s: the books say %d applied, the sink has %d rows of it", l, n, sum.effects)
		}
		if n := sum.landed[dead]; n != sum.dead {
			f.add(s, "%s: the books say %d dead, and %d dead letters are an outcome", l, n, sum.dead)
		}
	}
	for _, c := range x.complaints {
		f.add(subject{lane: noLane, position: -1}, "%s: %s", c.file, c.line)
	}
}

// nameOf is how a message is called.
func (x *view) nameOf(r *record) string {
	switch r.identity {
	case withoutID:
		return "a message without an id"
	case idTooLong:
		return "a message with a giant id"
	}
	return x.texts.get(r.id)
}
