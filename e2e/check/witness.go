package main

import (
	"fmt"
	"slices"
	"time"
)

// witness is one id, or one place of a lane, with all its events.
type witness struct {
	ID     string     `json:"id,omitempty"`
	Key    string     `json:"key,omitempty"`
	Events []sighting `json:"events,omitempty"`
}

// sighting is one of them.
type sighting struct {
	Kind string `json:"kind"`
	What string `json:"what"`
}

func (w *witness) add(kind, format string, args ...any) {
	w.Events = append(w.Events, sighting{kind, fmt.Sprintf(format, args...)})
}

// witness looks through everything once more. It is asked once for each
// invariant that is broken, so it keeps no index.
func (x *view) witness(s subject) witness {
	var w witness
	around := map[int]bool{} // moves
	if s.key != (key{}) {
		w.Key = s.key.String()
		x.eventsOf(&w, s.key, around)
	} else if s.lane != noLane && s.position >= 0 {
		if r := x.lanes[s.lane].at(s.position); r != nil {
			w.add("log", "%s %d: %s", x.laneName(s.lane), s.position, x.nameOf(r))
		}
	}
	if s.lane != noLane {
		x.eventsAt(&w, s, around)
	}
	for i := range x.moves {
		if around[i] {
			m := &x.moves[i]
			w.add("move", "%d: %s %s from %d to %d, epoch %d, owner %s, transaction %d, WAL %s, at %s, fetched %d, applied %d, dead %d", m.number, m.op, x.laneName(m.lane),
				m.from, m.to, m.epoch, m.owner, m.xid, m.wal, m.at.Format(time.RFC3339Nano), m.delta[fetched], m.delta[applied], m.delta[dead])
		}
	}
	return w
}

// eventsOf are those of a key, and the moves that they belong to.
func (x *view) eventsOf(w *witness, k key, around map[int]bool) {
	for li := range x.lanes {
		l := &x.lanes[li]
		for i := range l.log {
			r := &l.log[i]
			if r.key != k {
				continue
			}
			w.ID = x.texts.get(r.id)
			w.add("log", "%s %d, value %016x", l, r.position, r.sum)
			if l.row != nil && l.row.ordered {
				x.neighbours(laneID(li), around, func(m *move) bool { return m.from <= r.position && r.position < m.to })
			}
		}
	}
	for i := range x.intents {
		in := &x.intents[i]
		if in.key != k {
			continue
		}
		w.ID = x.texts.get(in.id)
		state := "unknown"
		if in.acked {
			state = "acked"
		}
		w.add("intent", "copy %d to %s, value %016x, %s", in.copy, x.laneName(in.lane), in.sum, state)
	}
	for i := range x.effects {
		e := &x.effects[i]
		if e.key != k {
			continue
		}
		w.ID = x.texts.get(e.id)
		w.add("sink", "row %d: %s %d, value %016x, transaction %d", e.number, x.laneName(e.lane), e.position, e.sum, e.xid)
		x.neighbours(e.lane, around, func(m *move) bool { return m.xid == e.xid })
	}
	for i := range x.claims {
		if c := &x.claims[i]; c.key == k {
			w.add("claim", "generation %d: %s %d, transaction ends in %d", c.generation, x.laneName(c.lane), c.position, c.xmin)
		}
	}
	for i := range x.letters {
		d := &x.letters[i]
		if d.key != k && d.claimKey != k {
			continue
		}
		w.ID = x.texts.get(d.id)
		w.add("dead letter", "%d: %s %d, class %s, key %s, transaction ends in %d", d.number, x.laneName(d.lane), d.position, d.class, d.claimKey, d.xmin)
		x.neighbours(d.lane, around, func(m *move) bool { return uint32(m.xid) == d.xmin })
	}
}

// eventsAt are those around a place of a lane, or at its end.
func (x *view) eventsAt(w *witness, s subject, around map[int]bool) {
	l := &x.lanes[s.lane]
	if l.row != nil {
		w.add("lane", "%s stands at %d, epoch %d, owner %s; its log spans %d to %d", l, l.row.next, l.row.epoch, l.row.owner, l.first, l.end)
	} else {
		w.add("lane", "%s has no row; its log spans %d to %d", l, l.first, l.end)
	}
	for i := range x.letters {
		if d := &x.letters[i]; s.key == (key{}) && d.lane == s.lane && d.position == s.position {
			w.add("dead letter", "%d: %s %d, class %s, transaction ends in %d", d.number, l, d.position, d.class, d.xmin)
		}
	}
	if !s.at.IsZero() {
		at, _ := slices.BinarySearchFunc(x.samples, s.at, func(m sample, at time.Time) int { return m.at.Compare(at) })
		for _, m := range x.samples[max(0, at-20):min(len(x.samples), at+20)] {
			if m.lane == s.lane && m.at.Sub(s.at).Abs() < time.Second/4 {
				w.add("sample", "at %s: broker %d, lane %d", m.at.Format(time.RFC3339Nano), m.broker, m.next)
			}
		}
		for _, e := range x.events {
			if e.at.Sub(s.at).Abs() < 5*time.Second {
				w.add("fault", "at %s: %s", e.at.Format(time.RFC3339Nano), e.what)
			}
		}
		x.neighbours(s.lane, around, func(m *move) bool { return m.at.Equal(s.at) })
		return
	}
	if s.position < 0 {
		moves := x.chains[s.lane].moves
		for _, i := range moves[max(0, len(moves)-3):] {
			around[i] = true
		}
	} else if l.row != nil && l.row.ordered {
		x.neighbours(s.lane, around, func(m *move) bool { return m.from <= s.position && s.position < m.to })
	}
}

// neighbours marks the moves that are meant, and the ones before and behind each.
func (x *view) neighbours(id laneID, around map[int]bool, isMeant func(*move) bool) {
	moves := x.chains[id].moves
	for at, i := range moves {
		if isMeant(&x.moves[i]) {
			for _, near := range moves[max(0, at-1):min(len(moves), at+2)] {
				around[near] = true
			}
		}
	}
}
