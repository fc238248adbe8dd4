package dedup

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// outcome is what becomes of a message: exactly one of these.
type outcome uint8

const (
	pending        outcome = iota // not known yet
	written                       // given to the sink, which may say one of the next three of it
	alreadyPresent                // applied: the target had it
	stale                         // applied: the target has a newer state
	rejected                      // applied: the target isn't in the state that it expects
	redelivered                   // duplicate: the same place was claimed before
	resent                        // duplicate: claimed from another place of the source
	crossSource                   // duplicate: claimed from another source
	conflict                      // the id was claimed with another payload
	dead                          // no usable id, or poison
	filtered                      // no sink wants it: it has claimed nothing
	outcomes
)

// item is one message of a group.
type item struct {
	key         claimkey.Key
	fingerprint int64
	// sequenced is the message's number, with strategy sequence; key is then that of the
	// producer. Nil: it has none.
	sequenced *sequenced
	batch     int32 // index into the group's batches
	message   int32 // index into the batch's messages
	// duplicateOf is the first item of this group with the same key; -1 if this is the
	// first.
	duplicateOf int32
	outcome     outcome
	// isNew is set if this item's claim is new.
	isNew bool
	// unwanted is set if no sink wants the message. It is then filtered, unless a gap before
	// it has to be reported.
	unwanted bool
	// deadLettered is set if this item's dead letter is new: a queue may deliver a
	// message again that is a dead letter already.
	deadLettered bool
	// reject is why the message can't be given to the sink.
	reject *rejection
	// hold is why the message holds its lane, whatever the strategy makes of it.
	hold error
	// original is where the id was claimed first, for a dead letter of a duplicate or a
	// conflict.
	original *claimRow
}

// rejection is the reason of a dead letter.
type rejection struct {
	class    string
	reason   string
	sqlstate string
	attempts int32 // to apply it; 0 is 1
	// suspected, if not nil, is the error that may be the table's fault as well.
	suspected error
}

// The classes of dead letters.
const (
	classNoID      = "no_id"
	classBadID     = "bad_id"
	classPoison    = "poison"
	classConflict  = "conflict"
	classDuplicate = "duplicate"
	classSequence  = "sequence"
)

// group is what one transaction works on: the messages of a few batches, keyed, folded
// and sorted. It is made once for a hand-over, and every try uses it again.
type group struct {
	*handOver
	batches []lane.Batch
	items   []item
	// unique are the items to claim: one for each key, sorted by key, the order in which
	// every transaction of every version claims.
	unique []int32
	// keys are those of unique, and hashes what filters know them by; made if there is a
	// sealed generation to look through.
	keys   []claimkey.Key
	hashes []uint64
	// claims are what is left to claim: the unique items that no look-up has found.
	claims []int32
	// metDuplicate is set once a copy has met a concurrent duplicate.
	metDuplicate bool
	// claimed is set once ids were claimed: by strategies other than claim they aren't.
	claimed bool
	// results are those that the sink has given in the last try.
	results []result
	// marks are those of the producers, by their keys. Strategy sequence only.
	marks map[claimkey.Key]*mark
	// lanes are the numbers by which claims know the batches' lanes; nil: the claims have
	// no lane.
	lanes []int32
	// catalog is the one that the last try was built for.
	catalog *generations.Catalog
	// began is doubts.now at the last try's beginning.
	began uint64
	// ages are those of the duplicates found by the last try, in seconds.
	ages []float64
}

func (g *group) message(it *item) *message.Message {
	return &g.batches[it.batch].Messages[it.message]
}

// prepare finds the ids, keys and fingerprints of a group's messages and folds
// duplicates, so that the first copy in lane order is the new one.
func (p *Processor) prepare(batches []lane.Batch) *group {
	g := &group{batches: batches}
	// Everyone touches lane rows in one order.
	slices.SortStableFunc(g.batches, func(a, b lane.Batch) int { return a.Lane.Compare(b.Lane) })
	n := 0
	for i := range g.batches {
		n += len(g.batches[i].Messages)
	}
	g.items = make([]item, 0, n)
	selective, _ := p.Sink.(sinks.Selective)
	for bi := range g.batches {
		b := &g.batches[bi]
		for mi := range b.Messages {
			it := item{batch: int32(bi), message: int32(mi), duplicateOf: -1}
			damaged := it.judge(&b.Messages[mi], selective)
			p.identify(&it, b, &b.Messages[mi], damaged)
			g.items = append(g.items, it)
		}
	}
	if p.Strategy != policy.StrategyPosition {
		g.fold()
	}
	return g
}

// identify finds a message's id, key and fingerprint. damaged says what is wrong with it.
func (p *Processor) identify(it *item, b *lane.Batch, m *message.Message, damaged string) {
	if it.unwanted && p.Strategy != policy.StrategySequence {
		return
	}
	id, err := p.Identity.ID(m, b.StreamID)
	if p.Strategy == policy.StrategySequence {
		// A message without a usable id still has its place among its producer's, and so has
		// one that no sink wants.
		at, bad := p.Sequence.read(m, b.StreamID)
		if bad == nil {
			it.sequenced, it.key = at, claimkey.Of(at.producer)
		}
		err = cmp.Or(err, bad)
	}
	switch {
	case it.unwanted:
		m.ID = id
	case err == nil:
		m.ID = id
		switch p.Strategy {
		case policy.StrategyPosition, policy.StrategySequence:
		default:
			it.key = claimkey.Of(id)
		}
	default:
		if p.Missing == policy.MissingStop {
			it.hold = fmt.Errorf("%w, and id.missing is stop", err)
		}
		// Only its place identifies it. A dead letter claims that place, too, so that a
		// redelivery doesn't make a second one.
		place := message.PositionID(b.StreamID, m.Position)
		if it.sequenced == nil {
			it.key = claimkey.OfPlace(place)
		}
		m.ID = place
		if p.Missing == policy.MissingDeadLetter || !errors.Is(err, message.ErrNoID) {
			m.ID = ""
			class := classBadID
			if errors.Is(err, message.ErrNoID) {
				class = classNoID
			}
			it.reject = &rejection{class: class, reason: err.Error()}
		}
	}
	if damaged != "" {
		if it.reject == nil {
			it.reject = &rejection{class: classPoison, reason: damaged}
		} else {
			it.reject.reason += "; " + damaged
		}
	}
	if p.comparesPayloads() {
		it.fingerprint = p.Fingerprint.Of(m)
	}
}

// judge finds out whether the sink wants a message, and returns what is wrong with it. A
// selective sink is nil if it wants all.
func (it *item) judge(m *message.Message, sink sinks.Selective) (damaged string) {
	if sink == nil || m.Damaged != "" {
		return m.Damaged
	}
	wanted, err := sink.Wants(m)
	if err != nil {
		return err.Error()
	}
	if !wanted {
		it.unwanted, it.outcome = true, filtered
	}
	return ""
}

// fold finds duplicates within the group and sorts the unique items by key: those that take
// part in claims or marks.
func (g *group) fold() {
	type entry struct {
		hi, lo uint64
		at     int32
	}
	order := make([]entry, 0, len(g.items))
	for i := range g.items {
		if it := &g.items[i]; !it.unwanted || it.sequenced != nil {
			k := &it.key
			order = append(order, entry{binary.BigEndian.Uint64(k[:8]), binary.BigEndian.Uint64(k[8:]), int32(i)})
		}
	}
	slices.SortFunc(order, func(a, b entry) int {
		if a.hi != b.hi {
			return cmp.Compare(a.hi, b.hi)
		}
		if a.lo != b.lo {
			return cmp.Compare(a.lo, b.lo)
		}
		return cmp.Compare(a.at, b.at)
	})
	g.unique = make([]int32, 0, len(order))
	for i, e := range order {
		if i > 0 && order[i-1].hi == e.hi && order[i-1].lo == e.lo {
			g.items[e.at].duplicateOf = g.unique[len(g.unique)-1]
			continue
		}
		g.unique = append(g.unique, e.at)
	}
}

// reset forgets what a try has found. Rejections stay, but for those by a mark: they are
// facts about messages.
func (g *group) reset() {
	for i := range g.items {
		it := &g.items[i]
		it.outcome, it.isNew, it.deadLettered, it.original = pending, false, false, nil
		if it.unwanted {
			it.outcome = filtered
		}
		if it.reject != nil && it.reject.class == classSequence {
			it.reject = nil // by a mark that may have moved since
		}
	}
	g.ages, g.results = g.ages[:0], nil
}

// markNew marks the item with that key as new. Keys come back in the order they were
// sent; from is where the last one was found.
func (g *group) markNew(key claimkey.Key, from int) (at int, err error) {
	for i := from; i < len(g.claims); i++ {
		if it := &g.items[g.claims[i]]; it.key == key {
			it.isNew = true
			return i + 1, nil
		}
	}
	i, ok := slices.BinarySearchFunc(g.claims, &key, func(at int32, key *claimkey.Key) int {
		return g.items[at].key.Compare(key)
	})
	if !ok {
		return 0, fmt.Errorf("claim: the server returned the key %s, which was not sent", key)
	}
	g.items[g.claims[i]].isNew = true
	return from, nil
}

// hash prepares the keys for the filters.
func (g *group) hash() {
	if g.hashes != nil {
		return
	}
	g.keys, g.hashes = make([]claimkey.Key, len(g.unique)), make([]uint64, len(g.unique))
	for i, at := range g.unique {
		g.keys[i] = g.items[at].key
		g.hashes[i] = g.keys[i].Hash()
	}
}

// applied tells whether the message was given to the sink, which has taken it or not yet
// said anything.
func (o outcome) applied() bool { return o >= written && o <= rejected }

func (o outcome) duplicate() bool { return o >= redelivered && o <= crossSource }

// outcomeNames are those of the books' columns.
var outcomeNames = [outcomes]string{
	written: "written", alreadyPresent: "already_present", stale: "stale", rejected: "rejected",
	redelivered: "redelivered", resent: "resent", crossSource: "cross_source", conflict: "conflicts", dead: "dead", filtered: "filtered",
}

// tally counts a lane's outcomes.
type tally [outcomes]int64

func (t *tally) applied() int64 { return t[written] + t[alreadyPresent] + t[stale] + t[rejected] }

func (t *tally) duplicates() int64 { return t[redelivered] + t[resent] + t[crossSource] }

// tallies counts the outcomes by batch. Every message has one, or the group is
// refused: the books must balance.
func (g *group) tallies() ([]tally, error) {
	all := make([]tally, len(g.batches))
	for i := range g.items {
		it := &g.items[i]
		if it.outcome == pending {
			m := g.message(it)
			return nil, fmt.Errorf("bug: the message at %s %d was left without an outcome", m.Position.Lane, m.Position.Offset)
		}
		all[it.batch][it.outcome]++
	}
	return all, nil
}
