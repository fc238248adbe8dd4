package main

import (
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/dedupd/dedupd/e2e/shape"
)

// history is everything that is known of a run. A run may have ten million
// messages: what there are many of holds no pointers, ids stand in it as keys,
// and payloads as checksums.
type history struct {
	scope   string
	lanes   []lane
	names   map[string][]laneID
	texts   texts
	intents []intent
	effects []effect // by number, the order in which they were inserted
	claims  []claim  // of all generations that are not about to be dropped
	letters []letter
	moves   []move   // by number
	samples []sample // by time
	events  []event
	// complaints are lines of the workers' logs that no run may have.
	complaints []complaint
	// forgotten is set when the claims of the first generations are gone.
	forgotten bool
	// shape is how the workers were idempotent. If it has a table, rows are that table's, and
	// the claims stand for effects.
	shape *shape.Shape
	rows  []tableRow
	marks []shape.Mark
}

// tableRow is a row of the shape's table.
type tableRow struct {
	columns shape.Row
	xmin    uint32
}

// laneID is an index into history.lanes.
type laneID int32

const (
	noLane   laneID = -1 // claimed by no lane
	goneLane laneID = -2 // claimed by a lane of which nothing is known any more
)

// lane is a Kafka partition ("orders/3") or a NATS queue ("queue").
type lane struct {
	source, name string
	row          *row // nil: nobody has taken it
	// read is set when its log was; the log spans [first, end), with holes.
	read       bool
	first, end int64
	log        []record // by position
	values     [][]byte // of the log's messages, where the shape asks for them
	cuts       []cut
}

// cut is the loss of a log's end: what stood from a position on is gone, and other
// messages may have come in its place since.
type cut struct {
	at       time.Time
	position int64
}

// followCuts puts each cut off until its lane was taken back to it: a batch that was
// read before the log lost its end may land after that.
func (h *history) followCuts() {
	followed := make(map[*cut]bool)
	for i := range h.moves {
		m := &h.moves[i]
		cuts := h.lanes[m.lane].cuts
		for j := range cuts {
			if c := &cuts[j]; !followed[c] && m.at.After(c.at) && m.to < m.from && m.to <= c.position {
				c.at, followed[c] = m.at, true
			}
		}
	}
}

// lost reports whether what stood at a position then is gone.
func (l *lane) lost(position int64, then time.Time) bool {
	for _, c := range l.cuts {
		if position >= c.position && then.Before(c.at) {
			return true
		}
	}
	return false
}

func (l *lane) String() string {
	if l.source == "" {
		return l.name
	}
	return l.source + ":" + l.name
}

// at finds a message by its position. Most logs have no holes.
func (l *lane) at(position int64) *record {
	if len(l.log) == 0 {
		return nil
	}
	if i := position - l.log[0].position; i >= 0 && i < int64(len(l.log)) && l.log[i].position == position {
		return &l.log[i]
	}
	if i := l.from(position); i < len(l.log) && l.log[i].position == position {
		return &l.log[i]
	}
	return nil
}

// deleted reports whether the broker may have deleted what stood at a position.
func (l *lane) deleted(position int64) bool { return position >= 0 && position < l.first }

// count is how many messages stand in [from, to).
func (l *lane) count(from, to int64) int64 { return int64(l.from(to) - l.from(from)) }

// from is the index of the first message at a position or above it.
func (l *lane) from(position int64) int {
	i, _ := slices.BinarySearchFunc(l.log, position, func(r record, position int64) int {
		return int(min(1, max(-1, r.position-position)))
	})
	return i
}

// record is one message of the log.
type record struct {
	position int64
	at       int64 // the broker's time, in Unix nanoseconds
	key      key   // zero without a usable id
	id       textID
	identity identity
	sum      checksum // of the value's SHA-256
	carried  checksum // of what the value itself says is its sum; 0: it says nothing
	raw      checksum // of all its bytes
}

// identity is how a message stands to its id.
type identity uint8

const (
	identified identity = iota
	withoutID
	idTooLong
	unwanted // by any sink: it claims nothing
)

// longestID in bytes: dedupd's id.max_bytes, unless it is configured otherwise.
const longestID = 64 << 10

func (r *record) identify(id []byte, t *texts) {
	r.id = t.add(id)
	switch {
	case len(id) == 0:
		r.identity = withoutID
	case len(id) > longestID:
		r.identity = idTooLong
	default:
		r.key = keyOf(id)
	}
}

// intent is one publish, as the producer noted it.
type intent struct {
	key   key
	id    textID
	sum   checksum
	lane  laneID // noLane: the producer doesn't know
	copy  int32
	acked bool // else nobody knows whether it is in the log
}

// effect is a row of the sink.
type effect struct {
	number   int64
	key      key
	id       textID
	lane     laneID
	position int64
	sum      checksum
	xid      uint64
}

type claim struct {
	key        key
	lane       laneID
	generation int32
	position   int64
	xmin       uint32 // the transaction's low half
}

// letter is a dead letter.
type letter struct {
	number   int64
	lane     laneID
	position int64
	class    string
	reason   textID
	claimKey key
	key      key // of its id; zero where there is none
	id       textID
	raw      checksum
	xmin     uint32
}

// The classes of dead letters. Conflicts and duplicates are of messages whose id was
// claimed before; the others are the outcome of their message, and so claim its id or its
// place, unless the strategy claims nothing.
const (
	classNoID      = "no_id"
	classBadID     = "bad_id"
	classPoison    = "poison"
	classConflict  = "conflict"
	classDuplicate = "duplicate"
	classSequence  = "sequence"
)

func (d *letter) isOutcome() bool { return d.class != classConflict && d.class != classDuplicate }

// row is a lane's row as the run has left it.
type row struct {
	ordered  bool
	streamID string
	epoch    int64
	owner    string
	next     int64
	books    books
}

// books count a lane's messages.
type books [11]int64

const (
	fetched = iota
	applied
	redelivered
	resent
	crossSource
	conflicts
	dead
	filtered
	// What the sink said of those applied. The others were written.
	alreadyPresent
	stale
	rejected
)

var bookNames = [len(books{})]string{"fetched", "applied", "redelivered", "resent", "cross_source", "conflicts", "dead", "filtered", "already_present", "stale", "rejected"}

func (b *books) add(o books) {
	for i := range b {
		b[i] += o[i]
	}
}

// outcomes is how many messages the books say what became of.
func (b *books) outcomes() (n int64) {
	for _, count := range b[applied : filtered+1] {
		n += count
	}
	return n
}

// move is what one statement did to a lane's row.
type move struct {
	number  int64
	at      time.Time
	wal     string
	xid     uint64
	op      string // insert, update or delete
	lane    laneID
	ordered bool
	// from and to are the next position before and after; 0 where there was, or
	// is, no row.
	from, to int64
	epoch    int64
	owner    string
	delta    books
}

const (
	opInsert = "insert"
	opUpdate = "update"
	opDelete = "delete"
)

// sample is where broker and lane stood at one moment. The broker was asked
// first: between the two the lane may only have gone on.
type sample struct {
	at     time.Time // when the broker was asked
	rowAt  time.Time // when the lane's row was read; never earlier
	lane   laneID
	broker int64 // -1: the broker has no position
	next   int64
}

// event is a line of the fault timeline.
type event struct {
	at   time.Time
	what string
	// until is how long people may move lanes as they like; zero: they may not.
	until time.Time
	// failover: the database may have lost commits that brokers know of.
	failover bool
}

type complaint struct{ file, line string }

// lane finds a lane, or makes it known. Those who don't know the source leave it
// empty, and get the only lane of that name.
func (h *history) lane(source, name string) (laneID, error) {
	known := h.names[name]
	for _, id := range known {
		if h.lanes[id].source == source {
			return id, nil
		}
	}
	switch {
	case len(known) == 1 && (source == "" || h.lanes[known[0]].source == ""):
		if source != "" {
			h.lanes[known[0]].source = source
		}
		return known[0], nil
	case len(known) > 1 && source == "":
		return 0, fmt.Errorf("several sources have a lane %s (%s, %s): say which source is meant", name, &h.lanes[known[0]], &h.lanes[known[1]])
	}
	id := laneID(len(h.lanes))
	h.lanes = append(h.lanes, lane{source: source, name: name})
	if h.names == nil {
		h.names = map[string][]laneID{}
	}
	h.names[name] = append(known, id)
	return id, nil
}

func (h *history) laneName(id laneID) string {
	switch id {
	case noLane:
		return "no lane"
	case goneLane:
		return "a lane that is gone"
	}
	return h.lanes[id].String()
}

// texts keeps ids for witnesses, one behind the other: millions of strings would
// take three times as much, and the collector would look at each.
type texts []byte

// textID is where a text stands; 0 is the empty one.
type textID uint32

// longestText is how much of an id a witness shows.
const longestText = 200

func (t *texts) add(s []byte) textID {
	if len(*t) == 0 {
		*t = append(*t, 0)
	}
	if len(s) == 0 || len(*t) > math.MaxUint32-longestText-2 {
		return 0
	}
	id := textID(len(*t))
	s = s[:min(len(s), longestText)]
	*t = append(append(*t, byte(len(s))), s...)
	return id
}

func (t texts) get(id textID) string {
	if id == 0 {
		return ""
	}
	return string(t[id+1:][:t[id]])
}

// expand makes a whole transaction number of its low half, given one that isn't
// older.
func expand(xmin uint32, newest uint64) uint64 {
	return newest - uint64(uint32(newest)-xmin)
}

func (k key) String() string {
	h := hex.EncodeToString(k[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
