package main

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/dedupd/dedupd/e2e/shape"
)

// keep keeps the value of the message that was added to a lane's log last, for shapes that
// judge a table by values.
func (h *history) keep(l *lane, value []byte) {
	if h.shape == nil || h.shape.Demand == nil {
		return
	}
	l.values = append(l.values, slices.Clone(value))
	if h.shape.Filtered != nil && h.shape.Filtered(value) {
		l.log[len(l.log)-1].identity = unwanted
	}
}

// reshape gives messages the keys by which they are the same, where that isn't their id.
// Where a row of the table isn't a message, claims or the lanes' moves stand for the effects:
// the invariants judge what has landed, and the shape judges the table.
func (h *history) reshape() {
	h.shape = cmp.Or(h.shape, shape.Claim)
	switch {
	case h.shape.By == shape.ByPosition:
		if h.shape.Table != "" {
			h.effectsOfMoves()
		}
		h.keyByPosition()
	case h.shape.By == shape.ByNumber:
		h.keyByNumber()
	case h.shape.Table != "":
		h.effectsOfClaims()
	}
}

// hasClaims reports whether the strategy claims ids.
func (x *view) hasClaims() bool { return x.shape.By == shape.ByID }

func (h *history) keyByPosition() {
	keyAt := func(id laneID, position int64) key {
		l := &h.lanes[id]
		streamID := ""
		if l.row != nil {
			streamID = l.row.streamID
		}
		return placeKey(streamID, l.source, l.name, position)
	}
	for li := range h.lanes {
		for i := range h.lanes[li].log {
			r := &h.lanes[li].log[i]
			r.key = keyAt(laneID(li), r.position)
			if r.identity != unwanted {
				r.identity = identified
			}
		}
	}
	for i := range h.effects {
		e := &h.effects[i]
		e.key = keyAt(e.lane, e.position)
	}
	for i := range h.letters {
		d := &h.letters[i]
		d.key = keyAt(d.lane, d.position)
	}
}

// keyByNumber gives a number at or below the highest that its producer's lane has had the
// key of that one: it is done with it. A number of an epoch that is over is known by its
// place alone.
func (h *history) keyByNumber() {
	type mark struct {
		epoch, number int64
		key           key
	}
	for li := range h.lanes {
		l := &h.lanes[li]
		marks := map[string]mark{}
		for i := range l.log {
			r := &l.log[i]
			producer, epoch, number, ok := shape.Number(h.texts.get(r.id))
			if !ok {
				continue
			}
			switch m, known := marks[producer]; {
			case !known || epoch > m.epoch || epoch == m.epoch && number > m.number:
				marks[producer] = mark{epoch, number, r.key}
			case epoch == m.epoch:
				r.key = m.key
			default:
				r.key = placeKey("", l.source, l.name, r.position)
			}
		}
	}
	for i := range h.letters { // theirs is the producer's
		d := &h.letters[i]
		if r := h.lanes[d.lane].at(d.position); r != nil {
			d.key, d.claimKey = r.key, r.key
		}
	}
}

// effectsOfClaims: who claimed an id gave it to the sink, unless it is a dead letter.
func (h *history) effectsOfClaims() {
	newest := uint64(0)
	for i := range h.moves {
		newest = max(newest, h.moves[i].xid)
	}
	deadLettered := map[place]bool{}
	for i := range h.letters {
		if d := &h.letters[i]; d.isOutcome() {
			deadLettered[place{d.lane, d.position}] = true
		}
	}
	h.effects = h.effects[:0]
	for i := range h.claims {
		c := &h.claims[i]
		if c.lane < 0 || deadLettered[place{c.lane, c.position}] {
			continue
		}
		e := effect{key: c.key, lane: c.lane, position: c.position, xid: expand(c.xmin, newest)}
		if r := h.lanes[c.lane].at(c.position); r != nil {
			e.id, e.sum = r.id, r.sum
		}
		h.effects = append(h.effects, e)
	}
	slices.SortFunc(h.effects, func(a, b effect) int {
		return cmp.Or(cmp.Compare(a.lane, b.lane), cmp.Compare(a.position, b.position))
	})
	for i := range h.effects {
		h.effects[i].number = int64(i + 1)
	}
}

// effectsOfMoves: without claims, a lane that moves on has given the sink all that it has
// moved past, unless it is a dead letter.
func (h *history) effectsOfMoves() {
	deadLettered := map[place]bool{}
	for i := range h.letters {
		deadLettered[place{h.letters[i].lane, h.letters[i].position}] = true
	}
	h.effects = h.effects[:0]
	for i := range h.moves {
		m := &h.moves[i]
		l := &h.lanes[m.lane]
		if m.op != opUpdate || m.delta[fetched] == 0 {
			continue
		}
		for _, r := range l.log[l.from(m.from):l.from(m.to)] {
			if deadLettered[place{m.lane, r.position}] || r.identity == unwanted {
				continue
			}
			h.effects = append(h.effects, effect{number: int64(len(h.effects) + 1), id: r.id, lane: m.lane, position: r.position, sum: r.sum, xid: m.xid})
		}
	}
}

// asItsModeDemands (I9): the table holds what the shape demands of it.
func asItsModeDemands(x *view, f *finding) {
	run := shape.Run{Marks: x.marks, Ordered: true}
	var places []subject
	for li := range x.lanes {
		l := &x.lanes[li]
		if l.row != nil {
			b := &l.row.books
			run.Ordered = run.Ordered && l.row.ordered
			run.Books.Written += b[applied] - b[alreadyPresent] - b[stale] - b[rejected]
			run.Books.AlreadyPresent += b[alreadyPresent]
			run.Books.Stale += b[stale]
			run.Books.Rejected += b[rejected]
			run.Books.Filtered += b[filtered]
		}
		for i := range l.values {
			r := &l.log[i]
			places = append(places, ofPlace(r.key, laneID(li), r.position))
			run.Messages = append(run.Messages, shape.Logged{
				Lane: l.name, Position: r.position, ID: x.texts.get(r.id), Value: l.values[i], Landed: x.hasLanded(laneID(li), r),
			})
		}
	}
	for i := range x.rows {
		run.Rows = append(run.Rows, x.rows[i].columns)
	}
	x.shape.Judge(&run, func(i int, what string) {
		if i < 0 {
			f.add(subject{lane: noLane, position: -1}, "%s", what)
			return
		}
		f.add(places[i], "%s, of %s %d: %s", run.Messages[i].ID, run.Messages[i].Lane, run.Messages[i].Position, what)
	})
}

// hasLanded reports whether it was this message of its key that the sink was given.
func (x *view) hasLanded(id laneID, r *record) bool {
	o, ok := x.outcomeOf(id, r)
	if !ok || o < 0 {
		return false
	}
	lane, position := x.where(o)
	return lane == id && position == r.position
}

// rowsMoved demands of each row by a worker that its transaction has moved the lane past the
// message that the row names, unless others have touched it since. Where a sink uses
// savepoints, xmin is not the transaction's, and the column txn says it.
func (x *view) rowsMoved(f *finding) {
	for i := range x.rows {
		w := &x.rows[i]
		name, ok := w.columns["lane"]
		if !ok || w.columns["touched"] == "true" {
			continue
		}
		id := slices.IndexFunc(x.lanes, func(l lane) bool { return l.name == name })
		position, err := strconv.ParseInt(w.columns["position"], 10, 64)
		if id < 0 || err != nil {
			f.add(subject{lane: noLane, position: -1}, "a row of the table names %s %s, which is no place", name, w.columns["position"])
			continue
		}
		xid := expand(w.xmin, x.newest)
		if txn, ok := w.columns["txn"]; ok {
			xid, _ = strconv.ParseUint(txn, 10, 64) // 0 has moved nothing
		}
		x.moved(f, ofPlace(key{}, laneID(id), position), laneID(id), position, xid)
	}
}
