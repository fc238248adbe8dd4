package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// began is when the good history begins; its moves are a second apart.
var began = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

const (
	first  laneID = iota // main:orders/0
	second               // main:orders/1
	queue                // edge:queue
)

// The log of the good history: ids by position. A dash is a hole, an empty id is
// none, and "b!" is b with another value.
var goodLog = [...][]string{
	first:  {"a", "b", "a", "-", "c", "d", "", "p", "b!", "f"},
	second: {"d", "g", "h", "g"},
	queue:  {"-", "i", "a", "j", "i"},
}

// good is a history without a fault: two workers, two ordered lanes and a queue,
// a takeover, duplicates of all kinds, poison, a conflict and a redelivery.
func good() *history {
	h := &history{scope: "test"}
	for i, l := range []lane{{source: "main", name: "orders/0"}, {source: "main", name: "orders/1"}, {source: "edge", name: "queue"}} {
		id, _ := h.lane(l.source, l.name)
		if id != laneID(i) {
			panic("lanes out of order")
		}
		h.lanes[i].read, h.lanes[i].row = true, &row{ordered: id != queue, streamID: "made"}
		for position, id := range goodLog[i] {
			if id != "-" {
				h.append(laneID(i), int64(position), id)
			}
		}
		h.lanes[i].end = int64(len(goodLog[i]))
	}

	h.take(100, first, 10, "w1", 0)
	h.take(101, second, 11, "w1", 0)
	h.take(102, queue, 12, "w1", 0)
	h.land(110, first, 5, "a0 b1 c4", books{fetched: 4, applied: 3, resent: 1})
	h.land(111, second, 2, "d0 g1", books{fetched: 2, applied: 2})
	h.land(112, queue, 3, "i1", books{fetched: 2, applied: 1, crossSource: 1})
	h.take(120, first, 20, "w2", 5)
	h.land(121, first, 8, "", books{fetched: 3, resent: 1, dead: 2})
	h.land(121, second, 4, "h2", books{fetched: 2, applied: 1, resent: 1})
	h.deadLetter(121, first, 6, classNoID)
	h.deadLetter(121, first, 7, classPoison)
	h.land(122, first, 10, "f9", books{fetched: 2, applied: 1, conflicts: 1})
	h.deadLetter(122, first, 8, classConflict)
	h.land(123, queue, 5, "j3", books{fetched: 2, applied: 1, resent: 1})
	h.land(124, first, 10, "", books{}) // caught up
	h.land(125, queue, 5, "", books{fetched: 1, redelivered: 1})
	for i := range h.claims {
		h.claims[i].generation = 1
		if i >= 6 {
			h.claims[i].generation = 2
		}
	}
	for i := range int64(5) {
		at := began.Add(time.Duration(10+i) * time.Second)
		h.samples = append(h.samples,
			sample{at: at, rowAt: at, lane: first, broker: 2*i - 1, next: 2*i + 1},
			sample{at: at, rowAt: at, lane: queue, broker: i, next: i + 1})
	}
	return h
}

// append adds a message to the log.
func (h *history) append(id laneID, position int64, text string) {
	l := &h.lanes[id]
	value := []byte("value of " + text)
	r := record{position: position, at: int64(time.Duration(position) * time.Second), sum: valueSum(value), carried: textSum([]byte("sum of " + text)), raw: rawSum([]byte("orders"), nil, value, nil)}
	r.identify([]byte(strings.TrimSuffix(text, "!")), &h.texts)
	l.log = append(l.log, r)
	l.end = position + 1
}

// move notes a move, and moves the row.
func (h *history) move(xid uint64, op string, lane laneID, to, epoch int64, owner string, delta books) *move {
	n := len(h.moves)
	r := h.lanes[lane].row
	m := move{
		number: int64(n + 1), at: began.Add(time.Duration(n) * time.Second), xid: xid, op: op, lane: lane, ordered: r.ordered,
		from: r.next, to: to, epoch: epoch, owner: owner, delta: delta,
	}
	if op == opInsert {
		m.from = 0
	}
	r.next, r.epoch, r.owner = to, epoch, owner
	r.books.add(delta)
	h.moves = append(h.moves, m)
	return &h.moves[n]
}

func (h *history) take(xid uint64, lane laneID, epoch int64, owner string, next int64) {
	op := opUpdate
	if h.lanes[lane].row.epoch == 0 {
		op = opInsert
	}
	h.move(xid, op, lane, next, epoch, owner, books{})
}

// land moves a lane, with rows such as "a0": a landed by position 0.
func (h *history) land(xid uint64, lane laneID, to int64, rows string, delta books) {
	r := h.lanes[lane].row
	h.move(xid, opUpdate, lane, to, r.epoch, r.owner, delta)
	for text := range strings.FieldsSeq(rows) {
		var position int64
		_, _ = fmt.Sscan(text[1:], &position)
		h.insert(xid, lane, position, text[:1])
		h.claims = append(h.claims, claim{key: keyOf([]byte(text[:1])), lane: lane, position: position, xmin: uint32(xid)})
	}
}

// insert adds a row to the sink, leaving room for others between the numbers.
func (h *history) insert(xid uint64, lane laneID, position int64, id string) *effect {
	e := effect{number: 10 * int64(len(h.effects)+1), key: keyOf([]byte(id)), id: h.texts.add([]byte(id)), lane: lane, position: position, xid: xid}
	if r := h.lanes[lane].at(position); r != nil {
		e.sum = r.sum
	}
	h.effects = append(h.effects, e)
	return &h.effects[len(h.effects)-1]
}

func (h *history) deadLetter(xid uint64, lane laneID, position int64, class string) *letter {
	l := &h.lanes[lane]
	d := letter{number: int64(len(h.letters) + 1), lane: lane, position: position, class: class, xmin: uint32(xid)}
	if r := l.at(position); r != nil {
		d.key, d.claimKey, d.id, d.raw = r.key, r.key, r.id, r.raw
	}
	if class == classNoID || class == classBadID {
		d.claimKey = placeKey(l.row.streamID, l.source, l.name, position)
	}
	h.letters = append(h.letters, d)
	if d.isOutcome() {
		h.claims = append(h.claims, claim{key: d.claimKey, lane: lane, position: position, xmin: uint32(xid)})
	}
	return &h.letters[len(h.letters)-1]
}

func (h *history) effectOf(id string) *effect {
	return &h.effects[slices.IndexFunc(h.effects, func(e effect) bool { return e.key == keyOf([]byte(id)) })]
}

func (h *history) claimOf(k key) *claim {
	return &h.claims[slices.IndexFunc(h.claims, func(c claim) bool { return c.key == k })]
}

func (h *history) moveOf(xid uint64, lane laneID) *move {
	return &h.moves[slices.IndexFunc(h.moves, func(m move) bool { return m.xid == xid && m.lane == lane })]
}

func (h *history) letterOf(class string) *letter {
	return &h.letters[slices.IndexFunc(h.letters, func(d letter) bool { return d.class == class })]
}

// rebook has one message of a transaction booked as another outcome than it was.
func (h *history) rebook(xid uint64, lane laneID, from, to int) {
	for _, b := range []*books{&h.moveOf(xid, lane).delta, &h.lanes[lane].row.books} {
		b[from]--
		b[to]++
	}
}

// forget removes a key's row, dead letter and claim.
func (h *history) forget(k key) {
	h.effects = slices.DeleteFunc(h.effects, func(e effect) bool { return e.key == k })
	h.letters = slices.DeleteFunc(h.letters, func(d letter) bool { return d.claimKey == k })
	h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.key == k })
}

func (h *history) sortEffects() {
	slices.SortFunc(h.effects, func(a, b effect) int { return int(a.number - b.number) })
}

// swapMoves puts each of two moves in the other's place.
func (h *history) swapMoves(a, b *move) {
	a.number, b.number = b.number, a.number
	slices.SortFunc(h.moves, func(a, b move) int { return int(a.number - b.number) })
}

// putBack has the first lane read again from 5.
func putBack(h *history) {
	h.move(130, opUpdate, first, 5, 30, "w2", books{})
	h.land(131, first, 10, "", books{fetched: 5, resent: 5})
}

// putForward has the first lane pass over two messages.
func putForward(h *history) {
	h.append(first, 10, "x")
	h.append(first, 11, "y")
	h.move(130, opUpdate, first, 12, 30, "w2", books{})
}

// regrow has the first lane's log lose f, at 9, and have x there. The cut is told of
// from a position on.
func regrow(h *history, from int64) {
	hands(h)
	l := &h.lanes[first]
	l.cuts = []cut{{began.Add(12500 * time.Millisecond), from}}
	l.log = l.log[:len(l.log)-1]
	h.append(first, 9, "x")
	h.move(130, opUpdate, first, 9, 30, "w2", books{})
	h.land(131, first, 10, "x9", books{fetched: 1, applied: 1})
}

// hands is an event that lets people move lanes from then on.
func hands(h *history) {
	h.events = append(h.events, event{at: began, what: "by hand", until: began.Add(time.Hour)})
}

// seconds is a time after the beginning.
func seconds(n int) time.Time { return began.Add(time.Duration(n) * time.Second) }

func (h *history) sample(at int, broker int64) {
	h.samples = append(h.samples, sample{at: seconds(at), rowAt: seconds(at), lane: first, broker: broker, next: 10})
}

// level samples a broker that has what the database has, ahead one that has more.
func (h *history) level(at int) { h.sample(at, 10) }
func (h *history) ahead(at int) { h.sample(at, 11) }

func (h *history) failover(at int) {
	h.events = append(h.events, event{at: seconds(at), what: "failover", failover: true})
}

// sampleFirst is a sample of the queue before all others.
func (h *history) sampleFirst(at int, broker, next int64) {
	h.samples = append([]sample{{at: seconds(at), rowAt: seconds(at), lane: queue, broker: broker, next: next}}, h.samples...)
}
