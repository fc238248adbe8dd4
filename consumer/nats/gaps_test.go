package nats

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func skip(c *Config) { c.OnGap = policy.GapSkip }

// skipped is how many positions were counted as skipped.
func (w *work) skipped() int { return w.metric("dedupd_positions_skipped_total") }

// heldFor waits until the source is held for positions that the stream has discarded.
func (w *work) heldFor(from, to int) {
	w.Helper()
	w.untilHeld(fmt.Sprintf("data is lost: stream ORDERS has discarded positions %d to %d, of which not all were read", from, to))
}

// Ways in which a stream of 100 read messages and as many unread ones discards the
// first fifty of the latter.
var discards = map[string]struct {
	config  jetstream.StreamConfig
	discard func(*rig)
}{
	"purge": {discard: func(r *rig) { r.purge(151) }},
	"max messages": {discard: func(r *rig) {
		c := r.stream.CachedInfo().Config
		c.MaxMsgs = 50
		_, err := r.js.UpdateStream(r.Context(), c)
		r.check(err)
	}},
}

// What is discarded while nobody reads holds the queue, also after restarts, until
// somebody accepts it.
func TestGapAtStart(t *testing.T) {
	t.Parallel()
	for name, way := range discards {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, way.config)
			r.publish(0, 100)
			w := r.start(nil)
			r.wait(100)
			w.stop()
			r.publish(100, 100)
			way.discard(r)
			for range 2 {
				w = r.start(nil)
				w.heldFor(101, 150)
				if n := len(r.store.Effects()); n != 100 {
					t.Errorf("%d effects", n)
				}
				w.stop()
			}
			w = r.start(skip)
			r.wait(150)
			w.untilReady()
			if n := w.skipped(); n != 50 {
				t.Errorf("%d positions were skipped, want 50", n)
			}
			w.stop()
			r.start(nil).untilReady() // it was accepted
		})
	}
}

// A worker that is held finds by itself that somebody has accepted the gap.
func TestGapAccepted(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	w.stop()
	r.publish(100, 100)
	discards["purge"].discard(r)
	w = r.start(nil)
	w.heldFor(101, 150)
	if n := w.metric("dedupd_lanes_held"); n != 1 {
		t.Errorf("%v lanes are held", n)
	}
	r.check(r.store.AcceptGap(t.Context(), edgeQueue, 201))
	r.wait(150)
	w.untilReady()
}

// The same while a worker reads that has fallen behind. What it has in hand is applied
// although the stream no longer has it.
func TestGapWhileReading(t *testing.T) {
	t.Parallel()
	for name, way := range discards {
		for _, onGap := range []policy.Gap{policy.GapStop, policy.GapSkip} {
			t.Run(name+" "+string(onGap), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, way.config)
				r.publish(0, 200)
				release := r.store.Hold()
				w := r.start(func(c *Config) { c.OnGap = onGap }, func(w *consumer.Worker) { w.Writers, w.MaxMessages = 1, 10 })
				w.untilReady()
				inHand := r.untilFull()
				time.Sleep(2500 * time.Millisecond) // the durable is looked at every two seconds
				way.discard(r)
				if onGap == policy.GapStop {
					w.heldFor(inHand+1, 150)
					release()
					r.wait(inHand)
					r.check(r.store.AcceptGap(t.Context(), edgeQueue, 151))
				} else {
					r.until("the gap to be counted", func() bool { return w.skipped() > 0 })
					release()
				}
				r.wait(inHand + 50)
				w.untilReady()
				want := 0
				if onGap == policy.GapSkip {
					want = 150 - inHand
				}
				if n := w.skipped(); n != want {
					t.Errorf("%d positions were skipped, want %d", n, want)
				}
			})
		}
	}
}

// The same of a stream that deletes what is acknowledged, of which the queue takes a part.
func TestGapOfAWorkQueueWithAFilter(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy, Subjects: []string{"orders.>", "other"}})
	for i := range 200 {
		r.publishAsync(newMsg("orders.1", fmt.Sprint(i), ""))
		r.publishAsync(natsgo.NewMsg("other"))
	}
	r.published()
	release := r.store.Hold()
	defer release()
	w := r.start(func(c *Config) { c.Subjects = []string{"orders.>"} }, func(w *consumer.Worker) { w.Writers, w.MaxMessages = 1, 10 })
	w.untilReady()
	r.untilFull()
	time.Sleep(2500 * time.Millisecond) // the durable is looked at every two seconds
	r.purge(301)
	w.untilHeld("data is lost: stream ORDERS has discarded")
}

// What is missing while the database is away is recorded once it is back.
func TestGapWhileTheDatabaseIsAway(t *testing.T) {
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 200)
	store := &notes{Store: r.store}
	release := store.Hold()
	w := r.start(nil, func(w *consumer.Worker) { w.Lanes, w.Writers, w.MaxMessages = store, 1, 10 })
	w.untilReady()
	inHand := r.untilFull()
	store.away.Store(true)
	discards["purge"].discard(r)
	r.until("the gap to be found, and reported in vain twice", func() bool { return w.log.count("and the database can't record that") > 1 })
	store.away.Store(false)
	w.untilHeld("to 150, of which not all were read")
	release()
	r.wait(inHand)
	if n := len(store.Effects()); n != inHand {
		t.Errorf("%d effects, want those of the %d messages in hand", n, inHand)
	}
}

// notes is a store that can't always take note of gaps.
type notes struct {
	*consumertest.Store
	away atomic.Bool
}

func (n *notes) ReportGap(ctx context.Context, l message.Lane, found lane.Gap) (lane.Gap, error) {
	if n.away.Load() {
		return lane.Gap{}, errors.New("the database is away")
	}
	return n.Store.ReportGap(ctx, l, found)
}

// untilFull waits until a worker whose database hangs takes no more, and returns how
// many messages it has in hand.
func (r *rig) untilFull() (inHand int) {
	r.Helper()
	same := 0
	r.until("the worker to be full", func() bool {
		if c := r.durable(); c.NumWaiting > 0 || c.NumAckPending != inHand {
			same, inHand = 0, c.NumAckPending
		} else if inHand > 0 {
			same++
		}
		return same == 40
	})
	return inHand
}

// A message that can't be applied is given up after a while, for others to try. If the
// stream has discarded it meanwhile, nobody can.
func TestGapOfWhatWasAbandoned(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 30)
	r.store.FailBefore(1_000_000, errors.New("the table is away"))
	w := r.start(nil)
	w.untilReady()
	r.until("all to be in hand", func() bool { return r.durable().NumAckPending == 30 })
	r.check(r.stream.Purge(t.Context()))
	r.untilWithin("the queue to be held", 90*time.Second, func() bool {
		return w.worker.Ready() != nil && w.log.has("data is lost: stream ORDERS has discarded positions 1 to 30, of which not all were read")
	})
}

// A stream that keeps the last message of each subject discards in its middle.
func TestGapOfSupersededMessages(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{MaxMsgsPerSubject: 1})
	r.publish(0, 7) // to seven subjects
	w := r.start(skip)
	r.wait(7)
	w.untilReady()
	w.stop()
	r.publishAsync(newMsg("orders.kept", "kept", "")) // the eighth
	r.publish(7, 21)                                  // of which the last seven stay
	w = r.start(skip)
	r.wait(15)
	r.until("the superseded ones to be counted", func() bool { return w.skipped() >= 14 })
	if n := w.skipped(); n != 14 {
		t.Errorf("%d positions were skipped, want 14", n)
	}
}

// A stream whose producers may roll a subject up loses what was read of it last, and so
// does one that is set to keep less while it is read.
func TestGapInTheMiddle(t *testing.T) {
	t.Parallel()
	for name, changed := range map[string]bool{"rolled up": false, "set to keep the last of each subject while it is read": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{AllowRollup: !changed})
			release := r.store.Hold()
			r.publish(0, 1)
			// One message at a time, so that the stream has the rest.
			w := r.start(func(c *Config) { c.MaxAckPending = 1 })
			w.untilReady()
			r.publishAsync(newMsg("orders.kept", "kept", "")) // the second
			r.publish(1, 21)
			c := r.stream.CachedInfo().Config
			if changed {
				c.MaxMsgsPerSubject = 1
				_, err := r.js.UpdateStream(t.Context(), c)
				r.check(err)
				r.until("the change to be noticed", func() bool { return w.log.has("somebody changed the stream's configuration") })
			} else {
				for i := range 7 {
					last := natsgo.NewMsg(fmt.Sprintf("orders.%d", i))
					last.Header.Set(consumertest.IDHeader, fmt.Sprintf("last%d", i))
					last.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
					r.publishAsync(last)
				}
				r.published()
			}
			release()
			w.untilHeld("data is lost: stream ORDERS has discarded")
		})
	}
}

// What is no gap: messages that somebody deletes, a purge of what was read, what a
// filter leaves out, what is gone since it was acknowledged, and what stood in the
// stream before the queue was first read.
func TestNoGap(t *testing.T) {
	t.Parallel()
	age := func(r *rig) { r.check(r.stream.Purge(r.Context())) } // as limits do: all of the stream up to here
	var mine []string
	for i := range 7 {
		mine = append(mine, fmt.Sprintf("orders.%d", i))
	}
	for name, c := range map[string]noGap{
		"a purge of what was read": {discard: age},
		"others by a filter": {subjects: mine, discard: age, before: func(r *rig) {
			for range 50 {
				r.publishAsync(natsgo.NewMsg("orders.other"))
			}
			r.published()
		}},
		"acknowledged": {config: jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy}, discard: func(*rig) {}},
		"deleted messages": {discard: func(r *rig) {
			for i := uint64(20); i < 90; i++ {
				r.check(r.stream.DeleteMsg(r.Context(), i))
			}
		}},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %t", name, restart), func(t *testing.T) {
				t.Parallel()
				c.test(newRig(t, c.config), restart)
			})
		}
	}
}

type noGap struct {
	config   jetstream.StreamConfig
	subjects []string
	before   func(*rig) // what else is published, once all was read
	discard  func(*rig)
}

func (c noGap) test(r *rig, restart bool) {
	start := func() *work {
		return r.start(func(n *Config) { n.Subjects = c.subjects }, func(w *consumer.Worker) { w.HeartbeatInterval = 50 * time.Millisecond })
	}
	untilCheckedAfter := func(at time.Time) {
		r.until("another check", func() bool { row, _ := r.store.Row(edgeQueue); return row.Heartbeat.After(at) })
	}
	r.publish(0, 20)
	before := 20
	if c.config.Retention == jetstream.LimitsPolicy { // before anybody reads
		r.purge(11)
		before = 10
	}
	w := start()
	r.wait(before)
	r.publish(20, 80)
	r.wait(before + 80)
	if c.before != nil {
		c.before(r)
	}
	r.until("all to be acknowledged", func() bool { return r.durable().NumAckPending == 0 })
	untilCheckedAfter(time.Now())
	if restart {
		w.stop()
	}
	c.discard(r)
	if restart {
		w = start()
	}
	untilCheckedAfter(time.Now().Add(3 * time.Second)) // two more
	r.publish(100, 10)
	r.wait(before + 90)
	w.untilReady()
	if w.log.has("discarded") {
		r.Error("a gap was found")
	}
}

// What a check finds, by what the last one saw.
func TestGapCheck(t *testing.T) {
	t.Parallel()
	type seen struct {
		first, last uint64
		delivered   uint64 // sequence
		count       uint64 // deliveries
		pending     uint64
		again       int64
	}
	for name, c := range map[string]struct {
		filter      string
		before, now seen
		want        gap
	}{
		"nothing is discarded":                   {before: seen{first: 1, last: 100, delivered: 50, count: 50, pending: 50}, now: seen{first: 1, last: 120, delivered: 80, count: 80, pending: 40}},
		"discarded behind the reader":            {before: seen{first: 1, last: 100, delivered: 50, count: 50, pending: 50}, now: seen{first: 51, last: 120, delivered: 80, count: 80, pending: 40}},
		"discarded before it was read":           {before: seen{first: 1, last: 100, delivered: 50, count: 50, pending: 50}, now: seen{first: 71, last: 120, delivered: 50, count: 50, pending: 50}, want: gap{from: 51, next: 71, messages: 20}},
		"and the reader went on behind":          {before: seen{first: 1, last: 100, delivered: 50, count: 50, pending: 50}, now: seen{first: 71, last: 120, delivered: 90, count: 70, pending: 30}, want: gap{from: 51, next: 71, messages: 20}},
		"read, then discarded":                   {before: seen{first: 1, last: 100, delivered: 50, count: 50, pending: 50}, now: seen{first: 71, last: 120, delivered: 90, count: 90, pending: 30}},
		"some came again":                        {before: seen{first: 1, last: 100, delivered: 50, count: 50, pending: 50}, now: seen{first: 71, last: 120, delivered: 90, count: 80, pending: 30, again: 10}, want: gap{from: 51, next: 71, messages: 20}},
		"all of it, and nothing came":            {before: seen{first: 1, last: 100, delivered: 50, count: 50, pending: 50}, now: seen{first: 201, last: 200, delivered: 50, count: 50}, want: gap{from: 51, next: 201, messages: 150}},
		"a small stream that is read in time":    {before: seen{first: 1, last: 100, delivered: 100, count: 100}, now: seen{first: 5001, last: 5100, delivered: 5100, count: 5100}},
		"a small stream, and one message isn't":  {before: seen{first: 1, last: 100, delivered: 100, count: 100}, now: seen{first: 5001, last: 5100, delivered: 5100, count: 5099}, want: gap{from: 101, next: 5001, messages: 1}},
		"filter: nothing was waiting":            {filter: "a", before: seen{first: 1, last: 100, delivered: 50, count: 5}, now: seen{first: 101, last: 300, delivered: 50, count: 5}},
		"filter: what waited is gone":            {filter: "a", before: seen{first: 1, last: 100, delivered: 50, count: 5, pending: 10}, now: seen{first: 101, last: 100, delivered: 50, count: 5}, want: gap{from: 51, next: 101, messages: 10}},
		"filter: some of what waited may be":     {filter: "a", before: seen{first: 1, last: 100, delivered: 50, count: 5, pending: 10}, now: seen{first: 71, last: 120, delivered: 50, count: 5, pending: 10}, want: gap{from: 51, next: 71, messages: 10}},
		"filter: what waited was delivered":      {filter: "a", before: seen{first: 1, last: 100, delivered: 50, count: 5, pending: 10}, now: seen{first: 71, last: 120, delivered: 100, count: 15, pending: 3}},
		"filter: what waited waits, none arrive": {filter: "a", before: seen{first: 1, last: 100, delivered: 50, count: 5, pending: 10}, now: seen{first: 71, last: 100, delivered: 50, count: 5, pending: 10}},
	} {
		t.Run(name, func(t *testing.T) {
			stream := func(s seen) *jetstream.StreamInfo {
				return &jetstream.StreamInfo{
					Config: jetstream.StreamConfig{Subjects: []string{"a", "b"}},
					State:  jetstream.StreamState{FirstSeq: s.first, LastSeq: s.last, Msgs: s.last - s.first + 1},
				}
			}
			info := func(s seen) *jetstream.ConsumerInfo {
				return &jetstream.ConsumerInfo{
					Config:    jetstream.ConsumerConfig{FilterSubject: c.filter},
					Delivered: jetstream.SequenceInfo{Consumer: s.count, Stream: s.delivered}, NumPending: s.pending,
				}
			}
			g := newGaps(stream(c.before), info(c.before))
			g.redelivered.Store(c.now.again)
			if got := g.check(&stream(c.now).State, info(c.now)); got != c.want {
				t.Errorf("found %+v, want %+v", got, c.want)
			}
			// It isn't found a second time.
			if got := g.check(&stream(c.now).State, info(c.now)); !got.empty() {
				t.Errorf("found %+v again", got)
			}
		})
	}
}
