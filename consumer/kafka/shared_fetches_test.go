package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
)

// asked is a fetch that a fake broker got: the positions that it asks for.
type asked struct {
	at        time.Time
	node      int32
	positions map[int32]int64 // by partition
}

// watcher records each fetch at a fake cluster. answer may replace the broker's own
// answer, silent leaves it out.
type watcher struct {
	cluster *kfake.Cluster

	mu     sync.Mutex
	all    []asked
	answer func(asked, *kmsg.FetchRequest) *kmsg.FetchResponse
	silent func(asked) bool
	slow   func(asked) (until <-chan struct{})
}

func watch(cluster *kfake.Cluster) *watcher {
	w := &watcher{cluster: cluster}
	cluster.ControlKey(int16(kmsg.Fetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		res, until := w.record(req.(*kmsg.FetchRequest))
		if until != nil {
			cluster.SleepControl(func() { <-until })
		}
		return res()
	})
	return w
}

// record returns what to answer, and what to wait for before that.
func (w *watcher) record(req *kmsg.FetchRequest) (res func() (kmsg.Response, error, bool), until <-chan struct{}) {
	a := asked{at: time.Now(), node: w.cluster.CurrentNode(), positions: make(map[int32]int64)}
	for _, topic := range req.Topics {
		for _, p := range topic.Partitions {
			a.positions[p.Partition] = p.FetchOffset
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, a)
	if w.slow != nil {
		until = w.slow(a)
	}
	if w.silent != nil && w.silent(a) {
		return func() (kmsg.Response, error, bool) { return nil, nil, true }, until
	}
	if w.answer != nil {
		if own := w.answer(a, req); own != nil {
			return func() (kmsg.Response, error, bool) { return own, nil, true }, until
		}
	}
	return func() (kmsg.Response, error, bool) { return nil, nil, false }, until
}

// set changes what is answered from now on. Both functions are called one at a time.
func (w *watcher) set(answer func(asked, *kmsg.FetchRequest) *kmsg.FetchResponse, silent func(asked) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer, w.silent = answer, silent
}

// since are the fetches after the first n.
func (w *watcher) since(n int) []asked {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.all[n:])
}

// together reports whether the last fetches were each for that many partitions. Before
// them, some lanes may have sent one of their own.
func (w *watcher) together(partitions int) bool {
	all := w.since(0)
	if len(all) < 4 {
		return false
	}
	return !slices.ContainsFunc(all[len(all)-4:], func(a asked) bool { return len(a.positions) != partitions })
}

// answerEach answers a request with what change makes of each of its partitions.
func answerEach(req *kmsg.FetchRequest, change func(*kmsg.FetchResponseTopicPartition, int64)) *kmsg.FetchResponse {
	res := req.ResponseKind().(*kmsg.FetchResponse)
	for _, topic := range req.Topics {
		t := kmsg.NewFetchResponseTopic()
		t.Topic, t.TopicID = topic.Topic, topic.TopicID
		for _, asked := range topic.Partitions {
			p := kmsg.NewFetchResponseTopicPartition()
			p.Partition, p.HighWatermark, p.LastStableOffset = asked.Partition, asked.FetchOffset, asked.FetchOffset
			change(&p, asked.FetchOffset)
			t.Partitions = append(t.Partitions, p)
		}
		res.Topics = append(res.Topics, t)
	}
	return res
}

// once gives a shared fetch another answer, the first time.
func (w *watcher) once(partitions int, answer func(*kmsg.FetchRequest) *kmsg.FetchResponse) (done *atomic.Bool) {
	done = new(atomic.Bool)
	w.set(func(a asked, req *kmsg.FetchRequest) *kmsg.FetchResponse {
		if len(a.positions) != partitions || done.Swap(true) {
			return nil
		}
		return answer(req)
	}, nil)
	return done
}

// One request fetches for all lanes that have nothing to read. A message that it brings
// for one of them is handed on, and nothing is missed while they join and leave.
func TestQuietLanesShareAFetch(t *testing.T) {
	t.Parallel()
	const lanes = 20
	cluster := fakeCluster(t)
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), lanes, nil)
	f := watch(cluster)
	w := r.start(nil)
	w.untilReady()
	together := func() bool { return f.together(lanes) }
	r.until("each fetch is for all", together)
	before := len(f.since(0))
	c := r.client()
	for i := range int32(lanes) {
		r.put(c, i, fmt.Sprint("one ", i))
	}
	for i := range lanes {
		r.untilNext(i, 1)
	}
	for _, a := range f.since(before) {
		for partition, position := range a.positions {
			if len(a.positions) == 1 && position == 0 {
				t.Errorf("lane %d fetched again what was there for it", partition)
			}
		}
	}
	// They are quiet again, and the broker answers that it no longer leads any of them.
	r.until("each fetch is for all again", together)
	done := f.once(lanes, func(req *kmsg.FetchRequest) *kmsg.FetchResponse {
		return answerEach(req, func(p *kmsg.FetchResponseTopicPartition, _ int64) { p.ErrorCode = kerr.NotLeaderForPartition.Code })
	})
	r.until("that one is refused", done.Load)
	for i := range int32(lanes) {
		r.put(c, i, fmt.Sprint("two ", i))
	}
	for i := range lanes {
		r.untilNext(i, 2)
	}
	if n := len(r.store.Effects()); n != 2*lanes {
		t.Errorf("%d messages were handled, want %d", n, 2*lanes)
	}
	w.untilReady()
}

// A lane is about to share a fetch, and gets something before that: nothing asks for it
// again.
func TestAQuietLaneThatGetsAMessageWhileItJoins(t *testing.T) {
	t.Parallel()
	cluster := fakeCluster(t)
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), 2, nil)
	f := watch(cluster)
	w := r.start(nil)
	w.untilReady()
	r.until("each fetch is for both", func() bool { return f.together(2) })
	release, free := make(chan struct{}), sync.Once{}
	letGo := func() { free.Do(func() { close(release) }) }
	defer letGo()
	f.mu.Lock()
	f.slow = func(a asked) <-chan struct{} {
		if _, ok := a.positions[0]; ok && len(a.positions) == 1 {
			return release
		}
		return nil
	}
	f.mu.Unlock()
	c := r.client()
	r.put(c, 1, "a")
	r.untilNext(1, 1)
	alone := len(f.since(0))
	// Each fetch of its own takes a second. Meanwhile the request for the other doesn't end.
	r.until("it wants to join", func() bool {
		n := 0
		for _, a := range f.since(alone) {
			if _, ok := a.positions[1]; ok {
				n++
			}
		}
		return n >= 7
	})
	r.put(c, 1, "b")
	r.untilNext(1, 2)
	done := len(f.since(0))
	letGo()
	r.until("each fetch is for both again", func() bool { return f.together(2) })
	for _, a := range f.since(done) {
		if position, ok := a.positions[1]; ok && position < 2 {
			t.Errorf("position %d is asked for again", position)
		}
	}
	if n := r.log.count("level=WARN"); n != 0 {
		t.Errorf("%d warnings", n)
	}
	if n := len(r.store.Effects()); n != 2 {
		t.Errorf("%d messages were handled", n)
	}
}

// What a shared answer says about one lane concerns that lane only, as if it had asked
// alone.
func TestWhatIsWrongWithOneQuietLane(t *testing.T) {
	t.Parallel()
	const lanes, sick = 6, 3
	for name, test := range map[string]struct {
		change func(*kmsg.FetchResponseTopicPartition)
		again  bool // it is acquired again
	}{
		"out of range":  {func(p *kmsg.FetchResponseTopicPartition) { p.ErrorCode = kerr.OffsetOutOfRange.Code }, true},
		"another log":   {func(p *kmsg.FetchResponseTopicPartition) { p.DivergingEpoch.Epoch, p.DivergingEpoch.EndOffset = 0, 0 }, true},
		"another topic": {func(p *kmsg.FetchResponseTopicPartition) { p.ErrorCode = kerr.UnknownTopicID.Code }, false},
		"not led":       {func(p *kmsg.FetchResponseTopicPartition) { p.ErrorCode = kerr.NotLeaderForPartition.Code }, false},
		"not allowed":   {func(p *kmsg.FetchResponseTopicPartition) { p.ErrorCode = kerr.TopicAuthorizationFailed.Code }, false},
		"has an unread": {func(p *kmsg.FetchResponseTopicPartition) { p.HighWatermark, p.LastStableOffset = 9, 9 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := fakeCluster(t)
			r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), lanes, nil)
			c := r.client()
			for i := range int32(lanes) {
				r.put(c, i, "a")
			}
			f := watch(cluster)
			w := r.start(nil)
			for i := range lanes {
				r.untilNext(i, 1)
			}
			r.until("each fetch is for all", func() bool { return f.together(lanes) })
			epochs := func() (all []int64) {
				for i := range lanes {
					row, _ := r.store.Row(r.lane(i))
					all = append(all, row.Epoch)
				}
				return all
			}
			before, known := len(f.since(0)), epochs()
			done := f.once(lanes, func(req *kmsg.FetchRequest) *kmsg.FetchResponse {
				return answerEach(req, func(p *kmsg.FetchResponseTopicPartition, _ int64) {
					if p.Partition == sick {
						test.change(p)
					}
				})
			})
			r.until("one lane's answer is another", done.Load)
			alone := func(partition int32) bool {
				return slices.ContainsFunc(f.since(before), func(a asked) bool {
					_, ok := a.positions[partition]
					return ok && len(a.positions) == 1
				})
			}
			r.until("it fetches for itself", func() bool { return alone(sick) })
			r.until("all are together again", func() bool { return f.together(lanes) })
			for i, epoch := range epochs() {
				if anew := epoch != known[i]; anew != (test.again && i == sick) {
					t.Errorf("lane %d was acquired again: %v", i, anew)
				}
				if i != sick && alone(int32(i)) {
					t.Errorf("lane %d fetches for itself", i)
				}
			}
			r.put(c, sick, "b")
			r.untilNext(sick, 2)
			w.untilReady()
		})
	}
}

// An error of the whole request concerns every lane: each asks for itself, and finds out
// what is wrong.
func TestAnErrorOfASharedFetch(t *testing.T) {
	t.Parallel()
	const lanes = 4
	cluster := fakeCluster(t)
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), lanes, nil)
	f := watch(cluster)
	w := r.start(nil)
	w.untilReady()
	r.until("each fetch is for all", func() bool { return f.together(lanes) })
	before := len(f.since(0))
	done := f.once(lanes, func(req *kmsg.FetchRequest) *kmsg.FetchResponse {
		res := req.ResponseKind().(*kmsg.FetchResponse)
		res.ErrorCode = kerr.UnknownServerError.Code
		return res
	})
	r.until("one is refused", done.Load)
	r.until("each lane asks for itself", func() bool {
		alone := make(map[int32]bool)
		for _, a := range f.since(before) {
			for partition := range a.positions {
				alone[partition] = alone[partition] || len(a.positions) == 1
			}
		}
		return !slices.Contains(slices.Collect(maps.Values(alone)), false)
	})
	r.until("all are together again", func() bool { return f.together(lanes) })
	w.untilReady()
}

// lines gets each line of a log.
type lines func(string)

func (l lines) Write(line []byte) (int, error) { l(string(line)); return len(line), nil }

// A group generation ends only after its shared fetches: they hold nothing then.
func TestAGroupGenerationWaitsForItsSharedFetches(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	fake := fakeCluster(t, kfake.SeedTopics(1, "orders"))
	f := watch(fake)
	c := &Config{Name: "main", Brokers: fake.ListenAddrs(), Topics: []string{"orders"}, Group: "g"}
	c.setDefaults()
	cluster := newCluster(c, nil)
	t.Cleanup(cluster.close)
	budget := consumer.NewBudget(1 << 20)
	begun, ended := make(chan struct{}), make(chan int64, 1)
	log := lines(func(line string) {
		switch {
		case strings.Contains(line, "lanes assigned"):
			close(begun)
		case strings.Contains(line, "lanes released"):
			ended <- budget.Used()
		}
	})
	r := &run{
		config: c, session: newSession(t, budget), cluster: cluster,
		log:           slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		topicProblems: map[string]*logonce.Problem{"orders": new(logonce.Problem)},
	}
	g := &group{config: c, cluster: cluster}
	var err error
	if g.seen, err = cluster.lookUpTopics(ctx); err != nil {
		t.Fatal(err)
	}
	mine, err := g.join(ctx)
	if err != nil {
		t.Fatal(err)
	}
	mine.partitions = nil // the lane is this test's
	gen := newGroupGeneration(r, g, mine)
	serving, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); gen.serve(serving) }()
	defer func() { end(); <-done }()
	<-begun
	want := wanted{topic: "orders", epoch: -1, maxBytes: 1000}
	_, leader, err := cluster.fetch(ctx, &want, nil)
	if err != nil {
		t.Fatal(err)
	}
	before := len(f.since(0))
	gen.shared.join(want, leader)
	for len(f.since(before)) == 0 {
		if !wait.For(ctx, time.Millisecond) {
			t.Fatal("nobody asks for the lane")
		}
	}
	gen.shared.mu.Lock() // what the request ends with can't be told
	end()
	select {
	case held := <-ended:
		t.Errorf("the group generation has ended, and %d bytes are held", held)
		gen.shared.mu.Unlock()
		return
	case <-time.After(300 * time.Millisecond): // if it doesn't wait, it ends at once
	}
	gen.shared.mu.Unlock()
	if held := <-ended; held != 0 {
		t.Errorf("%d bytes are held", held)
	}
}

// A broker that throttles a client makes all its lanes wait, once: they don't come back
// one by one.
func TestThrottledQuietLanes(t *testing.T) {
	t.Parallel()
	const lanes, times = 10, 3
	cluster := fakeCluster(t)
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), lanes, nil)
	f := watch(cluster)
	w := r.start(nil)
	w.untilReady()
	r.until("each fetch is for all", func() bool { return f.together(lanes) })
	before, left := len(f.since(0)), times
	const wait = 300 * time.Millisecond
	var told []time.Time
	f.set(func(a asked, req *kmsg.FetchRequest) *kmsg.FetchResponse {
		if left == 0 {
			return nil
		}
		left--
		told = append(told, a.at)
		res := req.ResponseKind().(*kmsg.FetchResponse)
		res.ThrottleMillis = int32(wait / time.Millisecond)
		return res
	}, nil)
	r.until("they are throttled, and no more", func() bool { return len(f.since(before)) >= times+4 })
	for _, a := range f.since(before) {
		if len(a.positions) != lanes {
			t.Errorf("a fetch asks for %d lanes", len(a.positions))
		}
	}
	for i := 1; i < times; i++ { // told is written no more
		if d := told[i].Sub(told[i-1]); d < wait {
			t.Errorf("asked again after %s of %s", d, wait)
		}
	}
	w.untilReady()
	if n := r.log.count("over its quota"); n != 1 {
		t.Errorf("the log tells %d times", n)
	}
	if n := r.log.count("level=ERROR") + r.log.count("level=WARN"); n != 1 {
		t.Errorf("%d warnings", n)
	}
	c := r.client()
	for i := range int32(lanes) {
		r.put(c, i, "a")
	}
	for i := range lanes {
		r.untilNext(i, 1)
	}
}

// A broker that doesn't answer holds up the lanes that it leads, and no others. A worker
// that ends doesn't wait for it.
func TestABrokerThatHangsHoldsUpItsOwnLanes(t *testing.T) {
	t.Parallel()
	const lanes = 12
	cluster := fakeCluster(t, kfake.NumBrokers(2))
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), lanes, nil)
	for i := range int32(lanes) {
		r.check(cluster.MoveTopicPartition(r.topic, i, i%2))
	}
	f := watch(cluster)
	w := r.start(nil)
	w.untilReady()
	r.until("each fetch is for half of them", func() bool { return f.together(lanes / 2) })
	var hangs atomic.Bool
	f.set(nil, func(a asked) bool {
		hangs.Store(hangs.Load() || a.node == 0)
		return a.node == 0
	})
	r.until("one broker hangs", hangs.Load)
	c := r.client()
	for i := range int32(lanes) {
		r.put(c, i, "a")
	}
	for i := 1; i < lanes; i += 2 {
		r.untilNext(i, 1)
	}
	for i := 0; i < lanes; i += 2 {
		if n := r.next(i); n != 0 {
			t.Errorf("lane %d stands at %d: its broker doesn't hang", i, n)
		}
	}
	w.stop()
	for i := 1; i < lanes; i += 2 {
		r.untilCommitted(int32(i), 1)
	}
}

// A broker that has lost a partition without noticing goes on answering that there is
// nothing to read. If the cluster's layout names another leader, that one is asked.
func TestAQuietLaneFollowsItsLeader(t *testing.T) {
	t.Parallel()
	const lanes, moved = 6, 2
	cluster := fakeCluster(t, kfake.NumBrokers(2))
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), lanes, nil)
	for i := range int32(lanes) {
		r.check(cluster.MoveTopicPartition(r.topic, i, 0))
	}
	f := watch(cluster)
	w := r.start(nil)
	w.untilReady()
	r.until("each fetch is for all", func() bool { return f.together(lanes) })
	f.set(func(a asked, req *kmsg.FetchRequest) *kmsg.FetchResponse {
		if _, ok := a.positions[moved]; !ok || a.node != 0 {
			return nil
		}
		return answerEach(req, func(*kmsg.FetchResponseTopicPartition, int64) {})
	}, nil)
	// The request that waits at the broker itself would show it.
	before := len(f.since(0))
	r.until("the old leader is asked", func() bool { return len(f.since(before)) >= 2 })
	r.check(cluster.MoveTopicPartition(r.topic, moved, 1))
	r.put(r.client(), moved, "a")
	r.untilNext(moved, 1)
	w.untilReady()
	if n := r.log.count("level=WARN") + r.log.count("level=ERROR"); n != 0 {
		t.Errorf("%d warnings", n)
	}
}

// counted counts a listener's open connections.
type counted struct {
	net.Listener
	open *atomic.Int64
}

func (c counted) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c.open.Add(1)
	return &countedConn{Conn: conn, open: c.open}, nil
}

type countedConn struct {
	net.Conn
	once sync.Once
	open *atomic.Int64
}

func (c *countedConn) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

// Many lanes without traffic need no more connections than few.
func TestQuietLanesHoldFewConnections(t *testing.T) {
	t.Parallel()
	const lanes, brokers = 90, 3
	var open atomic.Int64
	cluster := fakeCluster(t, kfake.NumBrokers(brokers), kfake.ListenFn(func(network, address string) (net.Listener, error) {
		l, err := net.Listen(network, address)
		return counted{l, &open}, err
	}))
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), lanes, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // idle connections are closed after a while, twice
	defer cancel()
	r.ctx = ctx
	others := open.Load()
	w := r.start(nil)
	w.untilReady()
	// For each broker one that waits, and one or two for other requests.
	r.until("few connections are open", func() bool { return open.Load()-others <= 4*brokers })
	c := r.client()
	for i := range int32(lanes) {
		r.put(c, i, "a")
	}
	for i := range lanes {
		r.untilNext(i, 1)
	}
	c.Close()
	r.until("few connections are open again", func() bool { return open.Load()-others <= 4*brokers })
	w.untilReady()
}

// untilShared waits until all lanes have shared the fetches of one broker for a while:
// nothing else holds memory then.
func (w *work) untilShared() {
	w.Helper()
	since := time.Now()
	w.until("the lanes share a fetch", func() bool {
		if n := w.worker.Budget.Used(); n != 0 && n != sharedBytes {
			since = time.Now()
		}
		return time.Since(since) > fetchWait/2
	})
}

// An answer that is full leaves some lanes out: they get theirs later.
func TestQuietLanesThatGetManyMessagesAtOnce(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		const lanes, each = 8, 500
		r := newRig(t, b, lanes, nil)
		w := r.start(nil)
		w.untilReady()
		c := r.client()
		for round := range 2 {
			w.untilShared()
			for i := range int32(lanes) {
				r.fill(c, i, each)
			}
			for i := range lanes {
				r.untilNext(i, int64((round+1)*each))
			}
		}
		if n := len(r.store.Effects()); n != 2*lanes*each {
			t.Errorf("%d messages were handled, want %d", n, 2*lanes*each)
		}
	})
}

// What a broker answers about lanes that share a fetch, each in another state, and what
// the answers hold of the byte budget.
func TestWhatASharedFetchBrings(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 4, nil)
		gone := rigOn(t, b, newName("gone"))
		r.check(b.CreateTopic(r.ctx, gone.topic, 1, nil))
		client := r.client()
		r.put(client, 2, "a", "b", "c")
		c := Config{Name: "main", Brokers: []string{b.Addr()}, Topics: []string{r.topic, gone.topic}, Group: r.group}
		c.setDefaults()
		cluster := newCluster(&c, nil)
		defer cluster.close()
		ids, err := cluster.topicIDs(r.ctx)
		r.check(err)
		budget := consumer.NewBudget(1 << 20)
		p := newSharedFetches(r.ctx, cluster, budget, c.FetchBytes)
		defer p.polling.Wait()
		want := func(topic string, partition int, position int64, epoch int32) wanted {
			return wanted{topic: topic, id: ids.raw(topic), partition: partition, position: position, epoch: epoch, maxBytes: 1000}
		}
		var leader int32
		r.until("the topics are led", func() bool {
			first := want(r.topic, 0, 0, -1)
			_, leader, err = cluster.fetch(r.ctx, &first, nil)
			last := want(gone.topic, 0, 0, -1)
			_, _, other := cluster.fetch(r.ctx, &last, nil)
			return err == nil && other == nil
		})
		quiet := p.join(want(r.topic, 0, 0, -1), leader)
		defer p.leave(quiet)
		gets := p.join(want(r.topic, 1, 0, -1), leader)
		deleted := p.join(want(gone.topic, 0, 0, -1), leader)
		next := func(q *quietLane) laneAnswer {
			t.Helper()
			for {
				select {
				case a := <-q.answers:
					if a.last {
						return a
					}
				case <-r.ctx.Done():
					t.Fatal("no answer")
				}
			}
		}
		r.until("they are asked for", func() bool { return p.covers(quiet) && p.covers(gets) && p.covers(deleted) })

		r.put(client, 1, "first")
		a := next(gets)
		if a.err != nil || a.held == 0 || a.held != int64(len(a.fetched.records)) || a.sent.IsZero() {
			t.Fatalf("got %+v", a)
		}
		if got, err := (&decoder{topic: r.topic, limit: 1 << 20}).decode(a.fetched, 0, nil); err != nil || len(got.messages) != 1 || string(got.messages[0].Value) != "first" {
			t.Errorf("got %v, %v", got.messages, err)
		}
		budget.Release(a.held)

		if a := next(p.join(want(r.topic, 2, 9, -1), leader)); !errors.Is(a.err, kafkago.OffsetOutOfRange) || a.held != 0 {
			t.Errorf("a position that isn't there: %+v", a)
		}
		if !strings.HasSuffix(t.Name(), "kfake") { // which knows nothing of leader epochs
			if a := next(p.join(want(r.topic, 2, 9, 0), leader)); a.err != nil || a.fetched.diverging == nil || a.fetched.diverging.end != 3 {
				t.Errorf("a log that was cut: %+v", a)
			}
		}
		r.check(b.DeleteTopic(r.ctx, gone.topic))
		if a := next(deleted); !errors.Is(a.err, kafkago.UnknownTopicID) && !errors.Is(a.err, kafkago.UnknownTopicOrPartition) && !errors.Is(a.err, errMoved) {
			t.Errorf("a topic that was deleted: %+v", a)
		}
		if a := next(p.join(want(r.topic, 99, 0, -1), leader)); !errors.Is(a.err, errMoved) {
			t.Errorf("a partition that nobody leads: %+v", a)
		}

		// A lane that leaves gives back what came for it.
		leaves := p.join(want(r.topic, 3, 0, -1), leader)
		r.until("it is asked for", func() bool { return p.covers(leaves) })
		r.put(client, 3, "for nobody")
		r.until("it has an answer", func() bool { return budget.Used()%int64(p.bytes) != 0 })
		p.leave(leaves)
		p.leave(quiet)
		r.until("nothing is held", func() bool { return budget.Used() == 0 })
	})
}

// Lanes that share an answer don't share its memory: the slowest would keep all of it.
func TestRecordsOfASharedAnswer(t *testing.T) {
	t.Parallel()
	of := func(sizes ...int) []laneAnswer {
		buffer := bytes.Repeat([]byte{'r'}, 1000)
		answers := []laneAnswer{{outcome: outcome{err: errMoved}}}
		for _, n := range sizes {
			answers = append(answers, laneAnswer{outcome: outcome{fetched: &fetched{records: buffer[:n:n]}}})
			buffer = buffer[n:]
		}
		return answers
	}
	for _, test := range []struct {
		sizes  []int
		copied []bool
	}{
		{[]int{100}, []bool{false}},
		{[]int{100, 0}, []bool{false, true}},
		{[]int{100, 500, 50}, []bool{true, false, true}},
		{[]int{100, 100, 100}, []bool{true, true, true}},
	} {
		answers := of(test.sizes...)
		var before [][]byte
		for _, a := range answers[1:] {
			before = append(before, a.fetched.records)
		}
		separate(answers)
		for i, n := range test.sizes {
			a := answers[i+1]
			if a.held != int64(n) || !bytes.Equal(a.fetched.records, before[i]) {
				t.Errorf("of %v, %d holds %d bytes", test.sizes, i, a.held)
			}
			if n > 0 && (&a.fetched.records[0] != &before[i][0]) != test.copied[i] {
				t.Errorf("of %v, %d is copied: %v", test.sizes, i, !test.copied[i])
			}
		}
	}
}
