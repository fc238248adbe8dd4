package nats_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

var queue = message.Lane{Source: "edge", Name: "queue"}

func skip(c *nats.Config) { c.OnGap = policy.GapSkip }

// counted has a worker's metrics counted.
func counted(registry **prometheus.Registry) func(*consumer.Worker) {
	return func(w *consumer.Worker) {
		*registry = prometheus.NewRegistry()
		w.Metrics = consumer.NewMetrics(*registry, w.Budget)
	}
}

// skipped is how many positions were counted as skipped, held how many lanes are.
func skipped(t *testing.T, registry *prometheus.Registry) int {
	return metric(t, registry, "dedupd_positions_skipped_total")
}

func held(t *testing.T, registry *prometheus.Registry) int {
	return metric(t, registry, "dedupd_lanes_held")
}

func metric(t *testing.T, registry *prometheus.Registry, name string) int {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if m := f.GetMetric(); f.GetName() == name && len(m) > 0 {
			return int(m[0].GetCounter().GetValue() + m[0].GetGauge().GetValue())
		}
	}
	return 0
}

// heldFor waits until the source is held for positions that the stream has discarded.
func (r *running) heldFor(from, to int) {
	r.t.Helper()
	want := fmt.Sprintf("data is lost: stream ORDERS has discarded positions %d to %d, of which not all were read", from, to)
	eventually(r.t, "the queue to be held", func() bool { return r.Ready() != nil && r.log.has(want) })
}

// Ways in which a stream of 100 read messages and as many unread ones discards the
// first fifty of the latter.
var discards = map[string]struct {
	config  jetstream.StreamConfig
	discard func(t *testing.T, js jetstream.JetStream, stream jetstream.Stream)
}{
	"purge": {discard: func(t *testing.T, _ jetstream.JetStream, stream jetstream.Stream) {
		if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(151)); err != nil {
			t.Fatal(err)
		}
	}},
	"max messages": {discard: func(t *testing.T, js jetstream.JetStream, stream jetstream.Stream) {
		c := stream.CachedInfo().Config
		c.MaxMsgs = 50
		if _, err := js.UpdateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}},
}

// What is discarded while nobody reads holds the queue, also after restarts, until
// somebody accepts it.
func TestGapAtStart(t *testing.T) {
	t.Parallel()
	for name, way := range discards {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, way.config)
			publish(t, js, 0, 100)
			store := consumertest.NewStore()
			r := start(t, newSource(t, s), store)
			wait(t, store, 100)
			r.stop()
			publish(t, js, 100, 100)
			way.discard(t, js, stream)
			for range 2 {
				r = start(t, newSource(t, s), store)
				r.heldFor(101, 150)
				if n := len(store.Effects()); n != 100 {
					t.Errorf("%d effects", n)
				}
				r.stop()
			}
			var registry *prometheus.Registry
			r = start(t, newSource(t, s, skip), store, counted(&registry))
			wait(t, store, 150)
			r.ready()
			if n := skipped(t, registry); n != 50 {
				t.Errorf("%d positions were skipped, want 50", n)
			}
			r.stop()
			start(t, newSource(t, s), store).ready() // it was accepted
		})
	}
}

// A worker that is held finds by itself that somebody has accepted the gap.
func TestGapAccepted(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	r.stop()
	publish(t, js, 100, 100)
	discards["purge"].discard(t, js, stream)
	var registry *prometheus.Registry
	r = start(t, newSource(t, s), store, counted(&registry))
	r.heldFor(101, 150)
	if n := held(t, registry); n != 1 {
		t.Errorf("%v lanes are held", n)
	}
	if err := store.AcceptGap(t.Context(), queue, 201); err != nil {
		t.Fatal(err)
	}
	wait(t, store, 150)
	r.ready()
}

// The same while a worker reads that has fallen behind. What it has in hand is applied
// although the stream no longer has it.
func TestGapWhileReading(t *testing.T) {
	t.Parallel()
	for name, way := range discards {
		for _, onGap := range []policy.Gap{policy.GapStop, policy.GapSkip} {
			t.Run(name+" "+string(onGap), func(t *testing.T) {
				t.Parallel()
				s := startServer(t)
				js := connect(t, s)
				stream := createStream(t, js, way.config)
				publish(t, js, 0, 200)
				store := consumertest.NewStore()
				release := store.Hold()
				var registry *prometheus.Registry
				r := start(t, newSource(t, s, func(c *nats.Config) { c.OnGap = onGap }), store, counted(&registry),
					func(w *consumer.Worker) { w.Writers, w.MaxMessages = 1, 10 })
				r.ready()
				inHand := full(t, js)
				time.Sleep(2500 * time.Millisecond) // the durable is looked at every two seconds
				way.discard(t, js, stream)
				if onGap == policy.GapStop {
					r.heldFor(inHand+1, 150)
					release()
					wait(t, store, inHand)
					if err := store.AcceptGap(t.Context(), queue, 151); err != nil {
						t.Fatal(err)
					}
				} else {
					eventually(t, "the gap to be counted", func() bool { return skipped(t, registry) > 0 })
					release()
				}
				wait(t, store, inHand+50)
				r.ready()
				want := 0
				if onGap == policy.GapSkip {
					want = 150 - inHand
				}
				if n := skipped(t, registry); n != want {
					t.Errorf("%d positions were skipped, want %d", n, want)
				}
			})
		}
	}
}

// The same of a stream that deletes what is acknowledged, of which the queue takes a part.
func TestGapOfAWorkQueueWithAFilter(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy, Subjects: []string{"orders.>", "other"}})
	for i := range 200 {
		msg := natsgo.NewMsg("orders.1")
		msg.Header.Set(consumertest.IDHeader, fmt.Sprint(i))
		publishMsg(t, js, msg)
		publishMsg(t, js, natsgo.NewMsg("other"))
	}
	published(t, js)
	store := consumertest.NewStore()
	release := store.Hold()
	defer release()
	r := start(t, newSource(t, s, func(c *nats.Config) { c.Subjects = []string{"orders.>"} }), store,
		func(w *consumer.Worker) { w.Writers, w.MaxMessages = 1, 10 })
	r.ready()
	full(t, js)
	time.Sleep(2500 * time.Millisecond) // the durable is looked at every two seconds
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(301)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the queue to be held", func() bool { return r.Ready() != nil && r.log.has("data is lost: stream ORDERS has discarded") })
}

// What is missing while the database is away is recorded once it is back.
func TestGapWhileTheDatabaseIsAway(t *testing.T) {
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 200)
	store := &notes{Store: consumertest.NewStore()}
	release := store.Hold()
	r := start(t, newSource(t, s), store.Store, func(w *consumer.Worker) { w.Lanes, w.Writers, w.MaxMessages = store, 1, 10 })
	r.ready()
	inHand := full(t, js)
	store.away.Store(true)
	discards["purge"].discard(t, js, stream)
	eventually(t, "the gap to be found, and reported in vain twice", func() bool { return r.log.count("and the database can't record that") > 1 })
	store.away.Store(false)
	eventually(t, "the queue to be held", func() bool { return r.Ready() != nil && r.log.has("to 150, of which not all were read") })
	release()
	wait(t, store.Store, inHand)
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

// full waits until a worker whose database hangs takes no more, and returns how
// many messages it has in hand.
func full(t *testing.T, js jetstream.JetStream) (inHand int) {
	t.Helper()
	same := 0
	eventually(t, "the worker to be full", func() bool {
		if c := durable(t, js); c.NumWaiting > 0 || c.NumAckPending != inHand {
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
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 30)
	store := consumertest.NewStore()
	store.FailBefore(1_000_000, errors.New("the table is away"))
	r := start(t, newSource(t, s), store)
	r.ready()
	eventually(t, "all to be in hand", func() bool { return durable(t, js).NumAckPending == 30 })
	if err := stream.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventuallyWithin(t, "the queue to be held", 90*time.Second, func() bool {
		return r.Ready() != nil && r.log.has("data is lost: stream ORDERS has discarded positions 1 to 30, of which not all were read")
	})
}

// A stream that keeps the last message of each subject discards in its middle.
func TestGapOfSupersededMessages(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{MaxMsgsPerSubject: 1})
	store := consumertest.NewStore()
	publish(t, js, 0, 7) // to seven subjects
	var registry *prometheus.Registry
	r := start(t, newSource(t, s, skip), store, counted(&registry))
	wait(t, store, 7)
	r.ready()
	r.stop()
	keep := natsgo.NewMsg("orders.kept")
	keep.Header.Set(consumertest.IDHeader, "kept")
	publishMsg(t, js, keep) // the eighth
	publish(t, js, 7, 21)   // of which the last seven stay
	start(t, newSource(t, s, skip), store, counted(&registry))
	wait(t, store, 15)
	eventually(t, "the superseded ones to be counted", func() bool { return skipped(t, registry) >= 14 })
	if n := skipped(t, registry); n != 14 {
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
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{AllowRollup: !changed})
			store := consumertest.NewStore()
			release := store.Hold()
			publish(t, js, 0, 1)
			// One message at a time, so that the stream has the rest.
			r := start(t, newSource(t, s, func(c *nats.Config) { c.MaxAckPending = 1 }), store)
			r.ready()
			kept := natsgo.NewMsg("orders.kept")
			kept.Header.Set(consumertest.IDHeader, "kept")
			publishMsg(t, js, kept) // the second
			publish(t, js, 1, 21)
			c := stream.CachedInfo().Config
			if changed {
				c.MaxMsgsPerSubject = 1
				if _, err := js.UpdateStream(t.Context(), c); err != nil {
					t.Fatal(err)
				}
				eventually(t, "the change to be noticed", func() bool { return r.log.has("somebody changed the stream's configuration") })
			} else {
				for i := range 7 {
					last := natsgo.NewMsg(fmt.Sprintf("orders.%d", i))
					last.Header.Set(consumertest.IDHeader, fmt.Sprintf("last%d", i))
					last.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
					publishMsg(t, js, last)
				}
				published(t, js)
			}
			release()
			eventually(t, "the queue to be held", func() bool { return r.Ready() != nil && r.log.has("data is lost: stream ORDERS has discarded") })
		})
	}
}

// What is no gap: messages that somebody deletes, a purge of what was read, what a
// filter leaves out, what is gone since it was acknowledged, and what stood in the
// stream before the queue was first read.
func TestNoGap(t *testing.T) {
	t.Parallel()
	age := func(t *testing.T, _ jetstream.JetStream, stream jetstream.Stream) {
		// As limits do: all of the stream up to here.
		if err := stream.Purge(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	other := func(t *testing.T, js jetstream.JetStream) {
		for range 50 {
			publishMsg(t, js, natsgo.NewMsg("orders.other"))
		}
		published(t, js)
	}
	var mine []string
	for i := range 7 {
		mine = append(mine, fmt.Sprintf("orders.%d", i))
	}
	for name, c := range map[string]struct {
		config   jetstream.StreamConfig
		subjects []string
		before   func(*testing.T, jetstream.JetStream)
		discard  func(*testing.T, jetstream.JetStream, jetstream.Stream)
	}{
		"a purge of what was read": {discard: age},
		"others by a filter":       {subjects: mine, before: other, discard: age},
		"acknowledged":             {config: jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy}},
		"deleted messages": {discard: func(t *testing.T, _ jetstream.JetStream, stream jetstream.Stream) {
			for i := uint64(20); i < 90; i++ {
				if err := stream.DeleteMsg(t.Context(), i); err != nil {
					t.Fatal(err)
				}
			}
		}},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %t", name, restart), func(t *testing.T) {
				t.Parallel()
				s := startServer(t)
				js := connect(t, s)
				stream := createStream(t, js, c.config)
				publish(t, js, 0, 20)
				before := 20
				if c.config.Retention == jetstream.LimitsPolicy { // before anybody reads
					if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(11)); err != nil {
						t.Fatal(err)
					}
					before = 10
				}
				store := consumertest.NewStore()
				source := func() *nats.Source { return newSource(t, s, func(n *nats.Config) { n.Subjects = c.subjects }) }
				frequent := func(w *consumer.Worker) { w.HeartbeatInterval = 50 * time.Millisecond }
				r := start(t, source(), store, frequent)
				wait(t, store, before)
				publish(t, js, 20, 80)
				wait(t, store, before+80)
				if c.before != nil {
					c.before(t, js)
				}
				eventually(t, "all to be acknowledged", func() bool { return durable(t, js).NumAckPending == 0 })
				caughtUp := time.Now()
				eventually(t, "another check", func() bool { row, _ := store.Row(queue); return row.Heartbeat.After(caughtUp) })
				if restart {
					r.stop()
				}
				if c.discard != nil {
					c.discard(t, js, stream)
				}
				if restart {
					r = start(t, source(), store, frequent)
				}
				looked := time.Now()
				eventually(t, "two more checks", func() bool {
					row, _ := store.Row(queue)
					return row.Heartbeat.After(looked.Add(3 * time.Second))
				})
				publish(t, js, 100, 10)
				wait(t, store, before+90)
				r.ready()
				if r.log.has("discarded") {
					t.Error("a gap was found")
				}
			})
		}
	}
}
