package main

// lostByBroker finds publishes that the broker has acknowledged, and that aren't
// in the log. That is no fault of the product's, but a run in which it happens
// proves less.
func lostByBroker(h *history) finding {
	f := finding{invariant: "broker", promise: "every acknowledged publish is in the log"}
	type message struct {
		key key
		sum checksum
	}
	missing := make(map[message]int32, len(h.intents))
	for i := range h.intents {
		if in := &h.intents[i]; in.acked {
			missing[message{in.key, in.sum}]++
		}
	}
	pruned := false
	for li := range h.lanes {
		l := &h.lanes[li]
		pruned = pruned || l.first > 0
		for i := range l.log {
			m := message{l.log[i].key, l.log[i].sum}
			if n := missing[m]; n > 1 {
				missing[m] = n - 1
			} else if n == 1 {
				delete(missing, m)
			}
		}
	}
	for i := range h.intents {
		in := &h.intents[i]
		m := message{in.key, in.sum}
		if !in.acked || missing[m] == 0 {
			continue
		}
		missing[m]--
		if in.lane == noLane && pruned || in.lane != noLane && h.lanes[in.lane].first > 0 {
			continue // it may have been there, and was deleted for its age
		}
		f.add(ofKey(in.key), "%s, copy %d, was acknowledged and isn't in the log", h.texts.get(in.id), in.copy)
	}
	return f
}
