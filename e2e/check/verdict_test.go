package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
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
	h.bury(121, first, 6, classNoID)
	h.bury(121, first, 7, classPoison)
	h.land(122, first, 10, "f9", books{fetched: 2, applied: 1, conflicts: 1})
	h.bury(122, first, 8, classConflict)
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

func (h *history) bury(xid uint64, lane laneID, position int64, class string) *letter {
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

// A judge that finds nothing proves nothing until it has found something: each
// broken history is flagged, and by those invariants only that it breaks.
func TestVerdict(t *testing.T) {
	at := func(seconds int) time.Time { return began.Add(time.Duration(seconds) * time.Second) }
	level := func(h *history, seconds int) {
		h.samples = append(h.samples, sample{at(seconds), at(seconds), first, 10, 10})
	}
	ahead := func(h *history, seconds int) {
		h.samples = append(h.samples, sample{at(seconds), at(seconds), first, 11, 10})
	}
	failover := func(h *history, seconds int) {
		h.events = append(h.events, event{at: at(seconds), what: "failover", failover: true})
	}
	key := func(id string) key { return keyOf([]byte(id)) }

	for _, c := range []struct {
		name      string
		do        func(h *history)
		want      string
		unsettled string // - for nothing; empty: as want
		window    time.Duration
		allow     string
	}{
		{name: "good", do: func(*history) {}},
		{name: "good, by the carried sum", do: func(h *history) { h.effectOf("c").sum = h.lanes[first].at(4).carried }},
		{name: "good, another copy of a queue", do: func(h *history) {
			e, c := h.effectOf("i"), h.claimOf(key("i"))
			e.position, e.xid, c.position, c.xmin = 4, 123, 4, 123
			h.rebook(112, queue, applied, resent)
			h.rebook(123, queue, resent, applied)
		}},
		{name: "good, rows of a queue in any order", do: func(h *history) {
			h.forget(key("j"))
			h.insert(112, queue, 2, "j").number = 1
			h.claims = append(h.claims, claim{key: key("j"), lane: queue, position: 2, xmin: 112})
			h.lanes[queue].log[1], h.lanes[queue].log[2] = h.lanes[queue].log[2], h.lanes[queue].log[1]
			h.lanes[queue].log[1].position, h.lanes[queue].log[2].position = 2, 3
			h.effectOf("j").sum = h.lanes[queue].at(2).sum
			h.rebook(112, queue, crossSource, applied)
			h.rebook(123, queue, applied, crossSource)
			h.sortEffects()
		}},

		{name: "an id is lost", do: func(h *history) {
			h.forget(key("c"))
			h.rebook(110, first, applied, resent)
		}, want: "I1"},
		{name: "a message without an id is lost", do: func(h *history) {
			h.forget(h.letterOf(classNoID).claimKey)
			h.rebook(121, first, dead, resent)
		}, want: "I1"},
		{name: "poison is lost", do: func(h *history) {
			h.forget(key("p"))
			h.rebook(121, first, dead, resent)
		}, want: "I1"},
		{name: "a message of a queue is lost", do: func(h *history) {
			h.forget(key("j"))
			h.rebook(123, queue, applied, resent)
		}, want: "I1", unsettled: "-"},
		{name: "an id is lost, of which a conflict was buried", do: func(h *history) {
			h.effects = slices.DeleteFunc(h.effects, func(e effect) bool { return e.key == key("b") })
			h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.key == key("b") })
			h.rebook(110, first, applied, resent)
		}, want: "I1"},
		{name: "the end isn't reached", do: func(h *history) { h.append(second, 4, "z") }, want: "I1", unsettled: "-"},
		{name: "a lane is never taken", do: func(h *history) {
			id, _ := h.lane("", "orders/2")
			h.append(id, 0, "z")
		}, want: "I1", unsettled: "-"},
		{name: "beyond the end", do: func(h *history) { h.lanes[second].end = 3 }, want: "I1"},
		{name: "buried without a cause", do: func(*history) {}, allow: "no_id,conflict", want: "I1"},
		{name: "a conflict without a cause", do: func(*history) {}, allow: "no_id,poison", want: "I1"},

		{name: "twice, by two lanes", do: func(h *history) {
			h.insert(121, first, 5, "d")
			h.rebook(121, first, resent, applied)
		}, want: "I2"},
		{name: "twice, by one lane", do: func(h *history) {
			h.insert(110, first, 2, "a").number = 25
			h.sortEffects()
			h.rebook(110, first, resent, applied)
		}, want: "I2"},
		{name: "twice, in a queue", do: func(h *history) {
			h.insert(123, queue, 4, "i")
			h.rebook(123, queue, resent, applied)
		}, want: "I2"},
		{name: "twice, by one place", do: func(h *history) {
			h.insert(110, first, 4, "c").number = 35
			h.sortEffects()
			h.rebook(110, first, resent, applied)
		}, want: "I2 I5"},
		{name: "landed and buried", do: func(h *history) {
			h.letterOf(classConflict).class = classPoison
			h.rebook(122, first, conflicts, dead)
		}, want: "I2"},
		{name: "twice, within the window", window: 5 * time.Second, do: func(h *history) {
			h.insert(123, queue, 4, "i")
			h.rebook(123, queue, resent, applied)
		}, want: "I2"},
		{name: "good, twice, the second time beyond the window", window: 4 * time.Second, do: func(h *history) {
			h.insert(123, queue, 4, "i")
			h.rebook(123, queue, resent, applied)
			h.lanes[queue].at(4).at += int64(time.Second)
		}},
		{name: "good, twice, and claimed by the second", window: 4 * time.Second, do: func(h *history) {
			h.insert(123, queue, 4, "i")
			h.rebook(123, queue, resent, applied)
			h.lanes[queue].at(4).at += int64(time.Second)
			c := h.claimOf(key("i"))
			c.position, c.xmin = 4, 123
		}},
		{name: "twice beyond the window, and claimed elsewhere", window: 4 * time.Second, do: func(h *history) {
			h.insert(123, queue, 4, "i")
			h.rebook(123, queue, resent, applied)
			h.lanes[queue].at(4).at += int64(time.Second)
			c := h.claimOf(key("i"))
			c.position, c.xmin = 4, 112
		}, want: "I6"},
		{name: "claimed twice", do: func(h *history) {
			c := *h.claimOf(key("a"))
			c.generation = 2
			h.claims = append(h.claims, c)
		}, want: "I2"},

		{name: "a conflict that nobody is told of", do: func(h *history) {
			h.letters = slices.DeleteFunc(h.letters, func(d letter) bool { return d.class == classConflict })
		}, want: "I1"},
		{name: "another value", do: func(h *history) { h.effectOf("g").sum++ }, want: "I3"},
		{name: "another value, in a queue", do: func(h *history) { h.effectOf("i").sum++ }, want: "I3"},
		{name: "good, a log that was cut and grew again", do: func(h *history) { regrow(h, 9) }},
		{name: "good, what was in hand when the log was cut lands after that", do: func(h *history) {
			regrow(h, 9)
			h.lanes[first].cuts[0].at = began
		}},
		{name: "a log that grew again, cut behind what has landed", do: func(h *history) { regrow(h, 10) }, want: "I3"},
		{name: "no value, and none carried", do: func(h *history) {
			h.effectOf("g").sum = 0
			h.lanes[second].at(1).carried = 0
		}, want: "I3"},
		{name: "a place without a message", do: func(h *history) {
			h.effectOf("c").position = 3
			h.claimOf(key("c")).position = 3
		}, want: "I3"},
		{name: "another message's place", do: func(h *history) {
			h.effectOf("c").key = key("z")
			h.claimOf(key("c")).key = key("z")
		}, want: "I1 I3"},
		{name: "a dead letter of other bytes", do: func(h *history) { h.letterOf(classPoison).raw++ }, want: "I3"},
		{name: "a dead letter of another id", do: func(h *history) { h.letterOf(classConflict).key = key("z") }, want: "I3"},
		{name: "a dead letter under another key", do: func(h *history) {
			h.claimOf(h.letterOf(classNoID).claimKey).key = key("z")
			h.letterOf(classNoID).claimKey = key("z")
		}, want: "I1 I3"},
		{name: "a dead letter of nothing", do: func(h *history) { h.bury(110, first, 3, classDuplicate) }, want: "I3"},
		{name: "no id, where there is one", do: func(h *history) {
			d := h.letterOf(classPoison)
			h.claimOf(d.claimKey).key = placeKey("made", "main", "orders/0", 7)
			d.class, d.claimKey = classNoID, placeKey("made", "main", "orders/0", 7)
		}, want: "I1 I3"},
		{name: "a conflict of equals", do: func(h *history) { h.lanes[first].at(8).sum = h.lanes[first].at(1).sum }, want: "I3"},

		{name: "the later copy", do: func(h *history) {
			e := h.effectOf("a")
			e.position, e.number, h.claimOf(key("a")).position = 2, 25, 2
			h.sortEffects()
		}, want: "I4"},
		{name: "the later copy, of the lane that won", do: func(h *history) {
			e, c := h.effectOf("g"), h.claimOf(key("g"))
			e.position, e.xid, e.number, c.position, c.xmin = 3, 121, 1000, 3, 121
			h.sortEffects()
			h.rebook(111, second, applied, resent)
			h.rebook(121, second, resent, applied)
		}, want: "I4"},

		{name: "out of order", do: func(h *history) {
			h.effectOf("a").number, h.effectOf("b").number = h.effectOf("b").number, h.effectOf("a").number
			h.sortEffects()
		}, want: "I5"},
		{name: "two transactions out of order", do: func(h *history) { h.swapMoves(h.moveOf(111, second), h.moveOf(121, second)) }, want: "I5 I6"},

		{name: "a row of another transaction", do: func(h *history) { h.effectOf("f").xid = 121 }, want: "I6"},
		{name: "a row of no transaction", do: func(h *history) { h.effectOf("f").xid = 999 }, want: "I6"},
		{name: "a row of another epoch of transactions", do: func(h *history) { h.effectOf("f").xid += 1 << 32 }, want: "I6"},
		{name: "a row and its claim of a later transaction", do: func(h *history) {
			h.effectOf("c").xid = 122
			h.claimOf(key("c")).xmin = 122
		}, want: "I6"},
		{name: "a row of a queue in another transaction", do: func(h *history) { h.effectOf("j").xid = 110 }, want: "I6"},
		{name: "a row of a queue beyond its move", do: func(h *history) {
			h.effectOf("j").xid = 112
			h.claimOf(key("j")).xmin = 112
		}, want: "I6"},
		{name: "a row without its claim", do: func(h *history) {
			h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.key == key("f") })
		}, want: "I6"},
		{name: "a claim without its row", do: func(h *history) {
			h.claims = append(h.claims, claim{key: key("z"), lane: first, position: 4, xmin: 110, generation: 2})
		}, want: "I6"},
		{name: "a claim of another transaction", do: func(h *history) { h.claimOf(key("f")).xmin = 121 }, want: "I6"},
		{name: "a claim for another place", do: func(h *history) { h.claimOf(key("f")).position = 8 }, want: "I6"},
		{name: "a claim for another lane", do: func(h *history) { h.claimOf(key("f")).lane = second }, want: "I6"},
		{name: "good, a claim that came by no lane", do: func(h *history) {
			h.claims = append(h.claims, claim{key: key("z"), lane: noLane, xmin: 90, generation: 1})
		}},
		{name: "a dead letter of another transaction", do: func(h *history) { h.letterOf(classConflict).xmin = 121 }, want: "I6"},
		{name: "poison without its claim", do: func(h *history) {
			h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.key == key("p") })
		}, want: "I6"},
		{name: "good, claims that expired", do: func(h *history) {
			h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.xmin <= 112 })
			h.forgotten = true
		}},
		{name: "claims that vanished", do: func(h *history) { h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.xmin <= 112 }) }, want: "I6"},
		{name: "a claim that vanished, though later ones expired", do: func(h *history) {
			h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.xmin <= 112 || c.key == key("f") })
			h.forgotten = true
		}, want: "I6"},
		{name: "a move that is gone", do: func(h *history) {
			h.moves = slices.DeleteFunc(h.moves, func(m move) bool { return m.xid == 111 })
		}, want: "I6 I8"},
		{name: "a move that nobody recorded", do: func(h *history) {
			h.moves = slices.DeleteFunc(h.moves, func(m move) bool { return m.xid == 120 })
			h.moveOf(121, first).from = 4 // 4 was read before
		}, want: "I6"},
		{name: "a takeover that was elsewhere", do: func(h *history) {
			m := h.moveOf(120, first)
			m.from, m.to = 4, 4
		}, want: "I6"},
		{name: "the row's epoch", do: func(h *history) { h.lanes[first].row.epoch++ }, want: "I6"},
		{name: "the row's position", do: func(h *history) { h.lanes[first].row.next-- }, want: "I1 I6", unsettled: "I6"},
		{name: "an epoch that falls", do: func(h *history) {
			for i := range h.moves {
				if m := &h.moves[i]; m.lane == first && m.epoch == 20 {
					m.epoch = 5
				}
			}
			h.lanes[first].row.epoch = 5
		}, want: "I6"},
		{name: "two owners of an epoch", do: func(h *history) {
			for i := range h.moves {
				if m := &h.moves[i]; m.lane == first {
					m.epoch = 10
				}
			}
			h.lanes[first].row.epoch = 10
		}, want: "I6"},
		{name: "good, another owner of a queue", do: func(h *history) { h.take(140, queue, 12, "w2", 5) }},
		{name: "a lane that is made twice", do: func(h *history) { h.moveOf(120, first).op = opInsert }, want: "I6"},
		{name: "a lane without moves", do: func(h *history) {
			id, _ := h.lane("", "orders/2")
			h.lanes[id].row = &row{ordered: true}
		}, want: "I6"},
		{name: "a row that is gone", do: func(h *history) { h.lanes[second].row = nil }, want: "I1 I6 I8", unsettled: "I6 I8"},
		{name: "moved back", do: putBack, want: "I6"},
		{name: "good, moved back by hand", do: func(h *history) {
			hands(h)
			putBack(h)
		}},
		{name: "moved back, after people were done", do: func(h *history) {
			hands(h)
			h.events[0].until = began.Add(time.Second)
			putBack(h)
		}, want: "I6"},
		{name: "moved back, before people were at it", do: func(h *history) {
			hands(h)
			h.events[0].at = began.Add(time.Minute)
			putBack(h)
		}, want: "I6"},
		{name: "moved forward", do: putForward, want: "I1 I6"},
		{name: "good, moved forward by hand", do: func(h *history) {
			hands(h)
			putForward(h)
		}},
		{name: "passed over", do: func(h *history) {
			h.append(first, 10, "x")
			h.land(130, first, 11, "", books{})
		}, want: "I1 I8"},
		{name: "good, read again after having been passed over", do: func(h *history) {
			hands(h)
			putForward(h)
			h.append(first, 12, "z")
			h.land(131, first, 13, "z12", books{fetched: 1, applied: 1})
			h.move(132, opUpdate, first, 10, 31, "w2", books{})
			h.land(133, first, 13, "x10 y11", books{fetched: 3, applied: 2, resent: 1})
		}},
		{name: "good, forgotten and begun anew by hand", do: func(h *history) {
			hands(h)
			l := &h.lanes[second]
			var gone books
			for i, n := range l.row.books {
				gone[i] = -n
			}
			h.move(140, opDelete, second, 0, 11, "w1", gone)
			h.move(141, opInsert, second, 0, 12, "w2", books{})
			h.land(142, second, 4, "", books{fetched: 4, resent: 4})
		}},
		{name: "moved after having been forgotten", do: func(h *history) {
			hands(h)
			l := &h.lanes[second]
			var gone books
			for i, n := range l.row.books {
				gone[i] = -n
			}
			h.move(140, opDelete, second, 0, 11, "w1", gone)
			h.land(142, second, 4, "", books{fetched: 4, resent: 4})
		}, want: "I6"},
		{name: "good, begun in the middle", do: func(h *history) {
			id, _ := h.lane("main", "orders/2")
			h.lanes[id].read, h.lanes[id].row = true, &row{ordered: true}
			h.append(id, 0, "u")
			h.append(id, 1, "v")
			h.append(id, 2, "u")
			h.take(140, id, 40, "w1", 1)
			h.land(141, id, 3, "v1 u2", books{fetched: 2, applied: 2})
		}},
		{name: "good, a giant id", do: func(h *history) {
			h.append(first, 10, strings.Repeat("x", longestID+1))
			h.land(140, first, 11, "", books{fetched: 1, dead: 1})
			h.bury(140, first, 10, classBadID)
		}},
		{name: "an id that isn't giant", do: func(h *history) {
			h.append(first, 10, strings.Repeat("x", longestID))
			h.land(140, first, 11, "", books{fetched: 1, dead: 1})
			h.bury(140, first, 10, classBadID)
		}, want: "I1 I3"},
		{name: "good, transactions beyond 32 bits", do: func(h *history) {
			const far = 7<<32 - 120 // between 119 and 121 the low half begins anew
			for i := range h.moves {
				h.moves[i].xid += far
			}
			for i := range h.effects {
				h.effects[i].xid += far
			}
			for i := range h.claims {
				h.claims[i].xmin = uint32(far + uint64(h.claims[i].xmin))
			}
			for i := range h.letters {
				h.letters[i].xmin = uint32(far + uint64(h.letters[i].xmin))
			}
		}},

		{name: "ahead", do: func(h *history) { ahead(h, 20) }, want: "I7"},
		{name: "ahead, in a queue", do: func(h *history) { h.samples[1].broker = 9 }, want: "I7"},
		// j, at 3, lands ten seconds after the beginning.
		{name: "ahead of a queue's transaction", do: func(h *history) {
			h.samples = append([]sample{{at(9), at(9), queue, 4, 5}}, h.samples...)
		}, want: "I7"},
		{name: "good, a queue's transaction before a failover", do: func(h *history) {
			h.samples = append([]sample{{at(9), at(9), queue, 4, 5}}, h.samples...)
			failover(h, 20)
			level(h, 21)
		}},
		{name: "good, up to a queue's transaction", do: func(h *history) {
			h.samples = append([]sample{{at(9), at(9), queue, 3, 5}}, h.samples...)
		}},
		{name: "good, ahead after a failover", do: func(h *history) {
			failover(h, 20)
			level(h, 21)
			ahead(h, 22)
			ahead(h, 23)
			level(h, 24)
		}},
		{name: "ahead before the failover", do: func(h *history) {
			ahead(h, 19)
			failover(h, 20)
			level(h, 21)
		}, want: "I7"},
		{name: "good, the failover came between the broker's answer and the row's", do: func(h *history) {
			ahead(h, 19)
			h.samples[len(h.samples)-1].rowAt = at(21)
			failover(h, 20)
			level(h, 22)
		}},
		{name: "ahead again after the failover", do: func(h *history) {
			failover(h, 20)
			ahead(h, 21)
			level(h, 22)
			ahead(h, 23)
			level(h, 24)
		}, want: "I7"},
		{name: "never taken back", do: func(h *history) {
			failover(h, 20)
			ahead(h, 21)
			ahead(h, 22)
		}, want: "I7"},
		{name: "good, put back by hand while the broker was ahead", do: func(h *history) {
			hands(h)
			ahead(h, 20)
			level(h, 21)
		}},

		{name: "a row that isn't in the books", do: func(h *history) { h.rebook(110, first, applied, resent) }, want: "I8"},
		{name: "a dead letter that isn't in the books", do: func(h *history) { h.rebook(121, first, dead, resent) }, want: "I8"},
		{name: "books that say more than the moves", do: func(h *history) {
			h.lanes[first].row.books.add(books{fetched: 1, resent: 1})
		}, want: "I8"},
		{name: "books that don't balance", do: func(h *history) {
			h.moveOf(125, queue).delta[fetched]++
			h.lanes[queue].row.books[fetched]++
		}, want: "I8"},
		{name: "more fetched than there was", do: func(h *history) {
			for _, b := range []*books{&h.moveOf(122, first).delta, &h.lanes[first].row.books} {
				b.add(books{fetched: 1, resent: 1})
			}
		}, want: "I8"},
		{name: "a complaint", do: func(h *history) { h.complaints = append(h.complaints, complaint{"w1.log", "panic: at the disco"}) }, want: "I8"},
	} {
		allow := c.allow
		if allow == "" {
			allow = "poison,no_id,bad_id,conflict,duplicate"
		}
		for _, settled := range []bool{true, false} {
			want := c.want
			if !settled && c.unsettled != "" {
				want = strings.TrimPrefix(c.unsettled, "-")
			}
			h := good()
			c.do(h)
			terms := (&options{allow: allow, settled: settled, window: c.window}).terms()
			var flagged, why []string
			for _, f := range verdict(h, terms) {
				if f.count == 0 {
					continue
				}
				flagged = append(flagged, f.invariant)
				for _, v := range f.first {
					why = append(why, f.invariant+": "+v.what)
				}
				if len(f.witness.Events) == 0 && c.name != "a complaint" {
					t.Errorf("%s: %s is broken without a witness", c.name, f.invariant)
				}
			}
			if got := strings.Join(flagged, " "); got != want {
				t.Errorf("%s, settled %t: the verdict is %q, want %q\n%s", c.name, settled, got, want, strings.Join(why, "\n"))
			}
		}
	}
}

// What the log no longer has can't be judged.
func TestDeletedByTheBroker(t *testing.T) {
	h := good()
	l := &h.lanes[first]
	l.log, l.first = slices.Clone(l.log[l.from(9):]), 9
	for _, f := range verdict(h, (&options{allow: "poison,no_id,conflict", settled: true}).terms()) {
		if f.count > 0 {
			t.Errorf("%s: %v", f.invariant, f.first)
		}
	}
}

func TestLostByTheBroker(t *testing.T) {
	h := good()
	send := func(id string, number int32, acked bool) {
		value := []byte("value of " + id)
		id = strings.TrimSuffix(id, "!")
		in := intent{id: h.texts.add([]byte(id)), sum: valueSum(value), lane: noLane, copy: number, acked: acked}
		if id != "" {
			in.key = keyOf([]byte(id))
		}
		h.intents = append(h.intents, in)
	}
	for _, log := range goodLog {
		for i, id := range log {
			if id != "-" {
				send(id, int32(i), true)
			}
		}
	}
	send("never came", 0, false)
	if f := lostByBroker(h); f.count != 0 {
		t.Fatal("nothing is lost, but: ", f.first)
	}
	send("a", 4, true) // a fourth copy
	send("b!", 0, true)
	send("lost", 0, true)
	f := lostByBroker(h)
	if f.count != 3 {
		t.Errorf("%d lost, want 3: %v", f.count, f.first)
	}
	h.lanes[second].first = 1
	if f := lostByBroker(h); f.count != 0 {
		t.Error("the broker has deleted some, but: ", f.first)
	}
}

func TestWitness(t *testing.T) {
	h := good()
	h.forget(keyOf([]byte("c")))
	f := verdict(h, (&options{allow: "poison,no_id,conflict"}).terms())[0]
	var kinds []string
	for _, e := range f.witness.Events {
		kinds = append(kinds, e.Kind)
	}
	if f.witness.ID != "c" || strings.Join(kinds, " ") != "log lane move move move" {
		t.Errorf("the witness of a lost id is %+v", f.witness)
	}
}

// A generated run of ten million messages, a fifth of them duplicates.
func BenchmarkVerdict(b *testing.B) {
	const messages, lanes, batch = 10_000_000, 8, 500
	h := generated(messages, lanes, batch)
	b.ResetTimer()
	for range b.N {
		for _, f := range verdict(h, terms{settled: true}) {
			if f.count > 0 {
				b.Fatalf("%s: %v", f.invariant, f.first)
			}
		}
		if f := lostByBroker(h); f.count > 0 {
			b.Fatal(f.first)
		}
	}
	b.ReportMetric(float64(messages)*float64(b.N)/b.Elapsed().Seconds(), "messages/s")
}

func generated(messages, lanes, batch int) *history {
	h := &history{scope: "bench"}
	for i := range lanes {
		id, _ := h.lane("main", fmt.Sprintf("orders/%d", i))
		l := &h.lanes[id]
		l.read, l.row = true, &row{ordered: true}
		h.take(uint64(1+i), id, int64(1+i), "w1", 0)
	}
	xid := uint64(lanes)
	next := 0
	for done := 0; done < messages; done += batch {
		xid++
		lane := laneID(done / batch % lanes)
		l := &h.lanes[lane]
		var delta books
		for n := range batch {
			position := l.end
			number := next
			isCopy := n%5 == 4
			if isCopy {
				number -= 2
			} else {
				next++
			}
			id := fmt.Appendf(nil, "order-%010d", number)
			sum := checksum(number + 1)
			r := record{position: position, sum: sum, raw: sum}
			r.identify(id, &h.texts)
			l.log = append(l.log, r)
			l.end++
			h.intents = append(h.intents, intent{key: r.key, id: r.id, sum: sum, lane: noLane, acked: true})
			delta[fetched]++
			if isCopy {
				delta[resent]++
				continue
			}
			delta[applied]++
			h.effects = append(h.effects, effect{number: int64(len(h.effects) + 1), key: r.key, id: r.id, lane: lane, position: position, sum: sum, xid: xid})
			h.claims = append(h.claims, claim{key: r.key, lane: lane, generation: int32(1 + done*4/messages), position: position, xmin: uint32(xid)})
		}
		h.move(xid, opUpdate, lane, l.end, l.row.epoch, "w1", delta)
	}
	return h
}
