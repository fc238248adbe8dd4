package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// brokenHistory is what was done to the good history, and which invariants that breaks.
type brokenHistory struct {
	name      string
	do        func(h *history)
	want      string
	unsettled string // - for nothing; empty: as want
	window    time.Duration
	allow     string
}

// A judge that finds nothing proves nothing until it has found something: each
// broken history is flagged, and by those invariants only that it breaks.
func TestVerdict(t *testing.T) {
	for _, each := range [][]brokenHistory{
		goodHistories, losses, doubles, alterations, laterCopies, disorders, tornTransactions, wrongMoves, movedLanes, rareHistories, aheadOfTheDatabase, wrongBooks,
	} {
		for _, c := range each {
			c.judge(t, true)
			c.judge(t, false)
		}
	}
}

func (c *brokenHistory) judge(t *testing.T, settled bool) {
	t.Helper()
	want := c.want
	if !settled && c.unsettled != "" {
		want = strings.TrimPrefix(c.unsettled, "-")
	}
	h := good()
	c.do(h)
	o := options{allow: cmp.Or(c.allow, "poison,no_id,bad_id,conflict,duplicate"), settled: settled, window: c.window}
	var flagged, why []string
	for _, f := range verdict(h, o.terms()) {
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

// Histories without a fault.
var goodHistories = []brokenHistory{
	{name: "good", do: func(*history) {}},
	{name: "good, by the carried sum", do: func(h *history) { h.effectOf("c").sum = h.lanes[first].at(4).carried }},
	{name: "good, another copy of a queue", do: func(h *history) {
		e, c := h.effectOf("i"), h.claimOf(keyOf([]byte("i")))
		e.position, e.xid, c.position, c.xmin = 4, 123, 4, 123
		h.rebook(112, queue, applied, resent)
		h.rebook(123, queue, resent, applied)
	}},
	{name: "good, rows of a queue in any order", do: func(h *history) {
		h.forget(keyOf([]byte("j")))
		h.insert(112, queue, 2, "j").number = 1
		h.claims = append(h.claims, claim{key: keyOf([]byte("j")), lane: queue, position: 2, xmin: 112})
		h.lanes[queue].log[1], h.lanes[queue].log[2] = h.lanes[queue].log[2], h.lanes[queue].log[1]
		h.lanes[queue].log[1].position, h.lanes[queue].log[2].position = 2, 3
		h.effectOf("j").sum = h.lanes[queue].at(2).sum
		h.rebook(112, queue, crossSource, applied)
		h.rebook(123, queue, applied, crossSource)
		h.sortEffects()
	}},
}

// I1: an id, or the end of a log, is missing.
var losses = []brokenHistory{
	{name: "an id is lost", do: func(h *history) {
		h.forget(keyOf([]byte("c")))
		h.rebook(110, first, applied, resent)
	}, want: "I1"},
	{name: "a message without an id is lost", do: func(h *history) {
		h.forget(h.letterOf(classNoID).claimKey)
		h.rebook(121, first, dead, resent)
	}, want: "I1"},
	{name: "poison is lost", do: func(h *history) {
		h.forget(keyOf([]byte("p")))
		h.rebook(121, first, dead, resent)
	}, want: "I1"},
	{name: "a message of a queue is lost", do: func(h *history) {
		h.forget(keyOf([]byte("j")))
		h.rebook(123, queue, applied, resent)
	}, want: "I1", unsettled: "-"},
	{name: "an id is lost, of which a conflict was dead-lettered", do: func(h *history) {
		h.effects = slices.DeleteFunc(h.effects, func(e effect) bool { return e.key == keyOf([]byte("b")) })
		h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.key == keyOf([]byte("b")) })
		h.rebook(110, first, applied, resent)
	}, want: "I1"},
	{name: "the end isn't reached", do: func(h *history) { h.append(second, 4, "z") }, want: "I1", unsettled: "-"},
	{name: "a lane is never taken", do: func(h *history) {
		id, _ := h.lane("", "orders/2")
		h.append(id, 0, "z")
	}, want: "I1", unsettled: "-"},
	{name: "beyond the end", do: func(h *history) { h.lanes[second].end = 3 }, want: "I1"},
	{name: "dead-lettered without a cause", do: func(*history) {}, allow: "no_id,conflict", want: "I1"},
	{name: "a conflict without a cause", do: func(*history) {}, allow: "no_id,poison", want: "I1"},
}

// I2: an id has more than one outcome.
var doubles = []brokenHistory{
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
	{name: "landed and dead-lettered", do: func(h *history) {
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
		c := h.claimOf(keyOf([]byte("i")))
		c.position, c.xmin = 4, 123
	}},
	{name: "twice beyond the window, and claimed elsewhere", window: 4 * time.Second, do: func(h *history) {
		h.insert(123, queue, 4, "i")
		h.rebook(123, queue, resent, applied)
		h.lanes[queue].at(4).at += int64(time.Second)
		c := h.claimOf(keyOf([]byte("i")))
		c.position, c.xmin = 4, 112
	}, want: "I6"},
	{name: "claimed twice", do: func(h *history) {
		c := *h.claimOf(keyOf([]byte("a")))
		c.generation = 2
		h.claims = append(h.claims, c)
	}, want: "I2"},
}

// I3: an outcome is not of the message it claims to be of.
var alterations = []brokenHistory{
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
		h.claimOf(keyOf([]byte("c"))).position = 3
	}, want: "I3"},
	{name: "another message's place", do: func(h *history) {
		h.effectOf("c").key = keyOf([]byte("z"))
		h.claimOf(keyOf([]byte("c"))).key = keyOf([]byte("z"))
	}, want: "I1 I3"},
	{name: "a dead letter of other bytes", do: func(h *history) { h.letterOf(classPoison).raw++ }, want: "I3"},
	{name: "a dead letter of another id", do: func(h *history) { h.letterOf(classConflict).key = keyOf([]byte("z")) }, want: "I3"},
	{name: "a dead letter under another key", do: func(h *history) {
		h.claimOf(h.letterOf(classNoID).claimKey).key = keyOf([]byte("z"))
		h.letterOf(classNoID).claimKey = keyOf([]byte("z"))
	}, want: "I1 I3"},
	{name: "a dead letter of nothing", do: func(h *history) { h.deadLetter(110, first, 3, classDuplicate) }, want: "I3"},
	{name: "no id, where there is one", do: func(h *history) {
		d := h.letterOf(classPoison)
		h.claimOf(d.claimKey).key = placeKey("made", "main", "orders/0", 7)
		d.class, d.claimKey = classNoID, placeKey("made", "main", "orders/0", 7)
	}, want: "I1 I3"},
	{name: "a conflict of equals", do: func(h *history) { h.lanes[first].at(8).sum = h.lanes[first].at(1).sum }, want: "I3"},
}

// I4: a later copy of an ordered lane won.
var laterCopies = []brokenHistory{
	{name: "the later copy", do: func(h *history) {
		e := h.effectOf("a")
		e.position, e.number, h.claimOf(keyOf([]byte("a"))).position = 2, 25, 2
		h.sortEffects()
	}, want: "I4"},
	{name: "the later copy, of the lane that won", do: func(h *history) {
		e, c := h.effectOf("g"), h.claimOf(keyOf([]byte("g")))
		e.position, e.xid, e.number, c.position, c.xmin = 3, 121, 1000, 3, 121
		h.sortEffects()
		h.rebook(111, second, applied, resent)
		h.rebook(121, second, resent, applied)
	}, want: "I4"},
}

// I5: rows out of the order of their log.
var disorders = []brokenHistory{
	{name: "out of order", do: func(h *history) {
		h.effectOf("a").number, h.effectOf("b").number = h.effectOf("b").number, h.effectOf("a").number
		h.sortEffects()
	}, want: "I5"},
	{name: "two transactions out of order", do: func(h *history) { h.swapMoves(h.moveOf(111, second), h.moveOf(121, second)) }, want: "I5 I6"},
}

// I6: a row, a claim or a dead letter isn't its transaction's.
var tornTransactions = []brokenHistory{
	{name: "a row of another transaction", do: func(h *history) { h.effectOf("f").xid = 121 }, want: "I6"},
	{name: "a row of no transaction", do: func(h *history) { h.effectOf("f").xid = 999 }, want: "I6"},
	{name: "a row of another epoch of transactions", do: func(h *history) { h.effectOf("f").xid += 1 << 32 }, want: "I6"},
	{name: "a row and its claim of a later transaction", do: func(h *history) {
		h.effectOf("c").xid = 122
		h.claimOf(keyOf([]byte("c"))).xmin = 122
	}, want: "I6"},
	{name: "a row of a queue in another transaction", do: func(h *history) { h.effectOf("j").xid = 110 }, want: "I6"},
	{name: "a row of a queue beyond its move", do: func(h *history) {
		h.effectOf("j").xid = 112
		h.claimOf(keyOf([]byte("j"))).xmin = 112
	}, want: "I6"},
	{name: "a row without its claim", do: func(h *history) {
		h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.key == keyOf([]byte("f")) })
	}, want: "I6"},
	{name: "a claim without its row", do: func(h *history) {
		h.claims = append(h.claims, claim{key: keyOf([]byte("z")), lane: first, position: 4, xmin: 110, generation: 2})
	}, want: "I6"},
	{name: "a claim of another transaction", do: func(h *history) { h.claimOf(keyOf([]byte("f"))).xmin = 121 }, want: "I6"},
	{name: "a claim for another place", do: func(h *history) { h.claimOf(keyOf([]byte("f"))).position = 8 }, want: "I6"},
	{name: "a claim for another lane", do: func(h *history) { h.claimOf(keyOf([]byte("f"))).lane = second }, want: "I6"},
	{name: "good, a claim that came by no lane", do: func(h *history) {
		h.claims = append(h.claims, claim{key: keyOf([]byte("z")), lane: noLane, xmin: 90, generation: 1})
	}},
	{name: "a dead letter of another transaction", do: func(h *history) { h.letterOf(classConflict).xmin = 121 }, want: "I6"},
	{name: "poison without its claim", do: func(h *history) {
		h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.key == keyOf([]byte("p")) })
	}, want: "I6"},
	{name: "good, claims that expired", do: func(h *history) {
		h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.xmin <= 112 })
		h.forgotten = true
	}},
	{name: "claims that vanished", do: func(h *history) { h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.xmin <= 112 }) }, want: "I6"},
	{name: "a claim that vanished, though later ones expired", do: func(h *history) {
		h.claims = slices.DeleteFunc(h.claims, func(c claim) bool { return c.xmin <= 112 || c.key == keyOf([]byte("f")) })
		h.forgotten = true
	}, want: "I6"},
}

// I6: the moves of a lane are no chain.
var wrongMoves = []brokenHistory{
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
}

// I6: a lane was moved, by people or without them.
var movedLanes = []brokenHistory{
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
}

// Histories of an unusual kind.
var rareHistories = []brokenHistory{
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
		h.deadLetter(140, first, 10, classBadID)
	}},
	{name: "an id that isn't giant", do: func(h *history) {
		h.append(first, 10, strings.Repeat("x", longestID))
		h.land(140, first, 11, "", books{fetched: 1, dead: 1})
		h.deadLetter(140, first, 10, classBadID)
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
}

// I7: the broker was told of more than the database has.
var aheadOfTheDatabase = []brokenHistory{
	{name: "ahead", do: func(h *history) { h.ahead(20) }, want: "I7"},
	{name: "ahead, in a queue", do: func(h *history) { h.samples[1].broker = 9 }, want: "I7"},
	// j, at 3, lands ten seconds after the beginning.
	{name: "ahead of a queue's transaction", do: func(h *history) {
		h.sampleFirst(9, 4, 5)
	}, want: "I7"},
	{name: "good, a queue's transaction before a failover", do: func(h *history) {
		h.sampleFirst(9, 4, 5)
		h.failover(20)
		h.level(21)
	}},
	{name: "good, up to a queue's transaction", do: func(h *history) {
		h.sampleFirst(9, 3, 5)
	}},
	{name: "good, ahead after a failover", do: func(h *history) {
		h.failover(20)
		h.level(21)
		h.ahead(22)
		h.ahead(23)
		h.level(24)
	}},
	{name: "ahead before the failover", do: func(h *history) {
		h.ahead(19)
		h.failover(20)
		h.level(21)
	}, want: "I7"},
	{name: "good, the failover came between the broker's answer and the row's", do: func(h *history) {
		h.ahead(19)
		h.samples[len(h.samples)-1].rowAt = seconds(21)
		h.failover(20)
		h.level(22)
	}},
	{name: "ahead again after the failover", do: func(h *history) {
		h.failover(20)
		h.ahead(21)
		h.level(22)
		h.ahead(23)
		h.level(24)
	}, want: "I7"},
	{name: "never taken back", do: func(h *history) {
		h.failover(20)
		h.ahead(21)
		h.ahead(22)
	}, want: "I7"},
	{name: "good, put back by hand while the broker was ahead", do: func(h *history) {
		hands(h)
		h.ahead(20)
		h.level(21)
	}},
}

// I8: the books don't say what happened, or somebody complained.
var wrongBooks = []brokenHistory{
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
