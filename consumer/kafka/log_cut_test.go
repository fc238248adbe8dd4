package kafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// numbered are n values, from a position on.
func numbered(what string, from, n int) []string {
	values := make([]string, n)
	for i := range values {
		values[i] = fmt.Sprint(what, from+i)
	}
	return values
}

// An older copy of a log is put back, and grows past the lanes' positions before it is
// read again. Positions don't show that.
func TestALogThatWasCutAndGrewAgain(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("runs a Kafka broker")
	}
	b := kafkatest.Own(t)
	prepare := func() *rig {
		r := newRig(t, b, 1, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute) // the broker is started three times
		t.Cleanup(cancel)
		r.ctx = ctx
		r.store.ID = func(m *message.Message) string { return string(m.Value) }
		r.put(r.client(), 0, numbered("first ", 0, 9)...)
		return r
	}
	// One whose worker is away, one whose lane is idle, and one that follows.
	away, idle, follows := prepare(), prepare(), prepare()
	all := []*rig{away, idle, follows}
	skip := func(c *Config) { c.OnGap = policy.GapSkip }
	copies := t.TempDir()
	away.check(b.Stop())
	for _, r := range all {
		r.check(b.SaveLog(r.topic, 0, filepath.Join(copies, r.topic)))
	}
	away.check(b.Restart())
	for _, r := range all {
		r.put(r.client(), 0, numbered("lost ", 9, 5)...)
	}
	workers := []*work{away.start(nil), idle.start(nil), follows.start(skip)}
	for _, r := range all {
		r.untilNext(0, 14)
	}
	before := make([]string, len(all))
	for i, r := range all {
		row, _ := r.store.Row(r.lane(0))
		before[i] = row.StreamID
	}
	workers[0].stop()
	// The lanes can't read while the log is short: the broker comes back with the cut
	// log, and is filled before the lanes can reach it.
	away.check(b.Stop())
	for _, r := range all {
		r.check(b.CutLog(r.topic, 0, filepath.Join(copies, r.topic)))
	}
	away.check(b.Restart())
	for _, r := range all {
		r.put(r.client(), 0, numbered("new ", 9, 7)...)
	}

	workers[0] = away.start(nil)
	for i, r := range all[:2] {
		r.until("the lane is held", func() bool { return r.log.count("was cut at position 9, below the lane's position 14") == 1 })
		if err := workers[i].worker.Ready(); err == nil || !strings.Contains(err.Error(), "was cut") {
			t.Errorf("readiness says %v of a lane whose log was cut", err)
		}
		// Neither time nor another worker lifts the hold.
		workers[i].stop()
		workers[i] = r.start(nil)
		r.until("the lane is held again", func() bool { return r.log.count("was cut at position 9, below the lane's position 14") == 2 })
		if n := len(r.store.Effects()); n != 14 {
			t.Errorf("%d messages were handled, want 14", n)
		}
		r.store.SetPosition(r.lane(0), 9)
	}
	for i, r := range all {
		r.untilNext(0, 16)
		workers[i].untilReady()
		want := fmt.Sprint(append(append(numbered("first ", 0, 9), numbered("lost ", 9, 5)...), numbered("new ", 9, 7)...))
		if got := fmt.Sprint(r.values()); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if row, _ := r.store.Row(r.lane(0)); row.StreamID == before[i] {
			t.Error("ids made of positions would be those of other messages")
		}
	}
	if n := follows.log.count("cut=9 position=14 gone=5 from=9"); n != 1 {
		t.Errorf("following was told %d times", n)
	}
}

// epochs are a log's, as epoch and first position of each.
func epochs(pairs ...int64) (all []lane.LeaderEpoch) {
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, lane.LeaderEpoch{Epoch: int32(pairs[i]), From: pairs[i+1]})
	}
	return all
}

// endOf is the answer of a leader with these epochs and this end: where its last epoch
// that isn't above the one asked for ends.
func endOf(log []lane.LeaderEpoch, end int64, epoch int32) (int32, int64) {
	if len(log) == 0 || epoch > log[len(log)-1].Epoch {
		return -1, -1
	}
	for i := len(log) - 1; i >= 0; i-- {
		if log[i].Epoch <= epoch {
			return log[i].Epoch, end
		}
		end = log[i].From
	}
	return epoch, end // retention has removed all that is as old
}

// Where what a lane has read and a leader's log part.
func TestWhereALogWasCut(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		read   []lane.LeaderEpoch
		at     int64 // where the lane stands
		log    []lane.LeaderEpoch
		end    int64
		before int64 // where it was found cut before; 0: it wasn't
		reset  int64 // where the group was reset to; 0: it wasn't
		want   int64
		err    error
	}{
		"the same log":                         {read: epochs(3, 0), at: 14, log: epochs(3, 0), end: 20, want: -1},
		"a new leader that had all":            {read: epochs(3, 0), at: 14, log: epochs(3, 0, 4, 14), end: 20, want: -1},
		"grew past the position":               {read: epochs(3, 0), at: 14, log: epochs(3, 0, 4, 9), end: 20, want: 9},
		"is still short":                       {read: epochs(3, 0), at: 14, log: epochs(3, 0, 4, 9), end: 9, want: 9},
		"short, and it is the same leader":     {read: epochs(3, 0), at: 14, log: epochs(3, 0), end: 9, want: 9},
		"a whole epoch is gone":                {read: epochs(3, 0, 5, 8), at: 14, log: epochs(3, 0, 6, 8), end: 20, want: 8},
		"another had more of the epoch before": {read: epochs(3, 0, 5, 8), at: 14, log: epochs(3, 0, 6, 10), end: 20, want: 8},
		"two epochs are gone":                  {read: epochs(3, 0, 4, 5, 5, 8), at: 14, log: epochs(3, 0, 6, 10), end: 20, want: 5},
		"cut within the one before":            {read: epochs(3, 0, 5, 8), at: 14, log: epochs(3, 0, 6, 6), end: 20, want: 6},
		"older than what is remembered":        {read: epochs(5, 8), at: 14, log: epochs(2, 0, 6, 6), end: 20, want: 6},
		"retention has removed what was read":  {read: epochs(3, 0), at: 14, log: epochs(5, 14), end: 20, want: -1},
		"nothing is known":                     {at: 14, log: epochs(6, 0), end: 20, want: -1},
		"nothing is known, and it is short":    {at: 14, log: epochs(6, 0), end: 9, want: 9},
		"it was told, and nothing else tells":  {at: 14, log: epochs(6, 0), end: 20, before: 9, want: 9},
		"it was told, and cut again":           {read: epochs(3, 0), at: 14, log: epochs(3, 0, 7, 4), end: 20, before: 9, want: 4},
		"the leader knows older epochs only":   {read: epochs(3, 0, 5, 9), at: 14, log: epochs(3, 0), end: 20, want: -1, err: errOldLeader},
		"the leader is careful":                {read: epochs(3, 0), at: 14, log: epochs(3, 0), end: 14, want: -1},
		"the group was reset to below":         {read: epochs(3, 0), at: 14, reset: 2, log: epochs(3, 0, 4, 9), end: 20, want: 9},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stands := max(c.want, 0) // what comes after the cut
			if c.err != nil {
				stands = 9
			}
			l := laneAt(t, func(epoch int32) (int32, int64) { return endOf(c.log, c.end, epoch) }, at(stands, stands).bytes()...)
			a := lane.Assignment{Next: c.at, Reached: c.at, LeaderEpochs: c.read, Cut: -1}
			if c.before > 0 {
				a.Cut = c.before
			}
			if c.reset > 0 {
				a.Next = c.reset
			}
			if got, err := l.cutAt(&a, c.end); got != c.want || !errors.Is(err, c.err) {
				t.Errorf("cut at %d, %v, want %d, %v", got, err, c.want, c.err)
			}
			if c.err != nil { // and who says so for long is believed
				l.oldLeader = time.Now().Add(-surePause)
				if got, err := l.cutAt(&a, c.end); got != 9 || err != nil {
					t.Errorf("cut at %d, %v, want 9", got, err)
				}
			}
		})
	}
	// The leader's log doesn't reach the position yet: it may report less for a while.
	l := laneAt(t, func(int32) (int32, int64) { return 3, 14 })
	if got, err := l.cutAt(&lane.Assignment{Next: 14, Reached: 14, LeaderEpochs: epochs(3, 0), Cut: -1}, 12); got != -1 || !errors.Is(err, errBehind) {
		t.Errorf("cut at %d, %v, want %v", got, err, errBehind)
	}
}

// Compaction has removed all of the last epoch, and the leader doesn't know it. What is
// there now shows whether something else was written.
func TestACompactedEpochIsNoCut(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		stands []byte // from position 8 on
		before int64  // where it was found cut before
		want   int64
	}{
		"nothing stands there":             {at(14, 14, 15).bytes(), -1, -1},
		"nothing stands there or behind":   {nil, -1, -1},
		"nothing up to a later position":   {at(17, 18).bytes(), -1, -1},
		"something stands at the cut":      {at(8, 8, 9).bytes(), -1, 8},
		"something stands behind the cut":  {at(11, 12).bytes(), -1, 8},
		"a batch stands across":            {at(12, 15).bytes(), -1, 8},
		"what comes before is no proof":    {append(at(6, 6, 7).bytes(), at(9, 9).bytes()...), -1, 8},
		"it comes with what stands before": {append(at(6, 6, 7).bytes(), at(14, 14).bytes()...), -1, -1},
		"a person was told of it before":   {at(14, 14, 15).bytes(), 8, 8},
		"a part of a batch tells nothing":  {at(14, 14, 15).bytes()[:70], -1, 8},
		"what is there can't be parsed":    {make([]byte, 100), -1, 8},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := epochs(3, 0, 6, 14)
			l := laneAt(t, func(epoch int32) (int32, int64) { return endOf(log, 20, epoch) }, c.stands...)
			a := lane.Assignment{Next: 14, Reached: 14, LeaderEpochs: epochs(3, 0, 5, 8), Cut: c.before}
			got, err := l.cutAt(&a, 20)
			if err != nil || got != c.want {
				t.Fatalf("cut at %d, %v, want %d", got, err, c.want)
			}
			if left := len(a.LeaderEpochs); c.want < 0 && left != 1 || c.want >= 0 && left != 2 {
				t.Errorf("the lane goes on with the epochs %v", a.LeaderEpochs)
			}
		})
	}
}

// laneAt is a lane of a broker that answers requests for the end of an epoch by end, and
// has these records.
func laneAt(t *testing.T, end func(epoch int32) (int32, int64), records ...byte) *partitionReader {
	t.Helper()
	l, fake := fakeLane(t)
	fake.ControlKey(int16(kmsg.OffsetForLeaderEpoch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		asked := req.(*kmsg.OffsetForLeaderEpochRequest).Topics[0].Partitions[0]
		p := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
		p.LeaderEpoch, p.EndOffset = end(asked.LeaderEpoch)
		res := req.ResponseKind().(*kmsg.OffsetForLeaderEpochResponse)
		res.Topics = []kmsg.OffsetForLeaderEpochResponseTopic{{Topic: "orders", Partitions: []kmsg.OffsetForLeaderEpochResponseTopicPartition{p}}}
		return res, nil, true
	})
	fake.ControlKey(int16(kmsg.Fetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		return fetchedFrom(req, records), nil, true
	})
	return l
}

// fetchedFrom is an answer to a fetch of the partition, which ends at 20.
func fetchedFrom(req kmsg.Request, records []byte) kmsg.Response {
	p := kmsg.NewFetchResponseTopicPartition()
	p.HighWatermark, p.LastStableOffset, p.RecordBatches = 20, 20, records
	res := req.ResponseKind().(*kmsg.FetchResponse)
	res.Topics = []kmsg.FetchResponseTopic{{Topic: "orders", Partitions: []kmsg.FetchResponseTopicPartition{p}}}
	return res
}

// fakeLane is a lane of a fake broker, with a byte budget of 4 MiB.
func fakeLane(t *testing.T) (*partitionReader, *kfake.Cluster) {
	t.Helper()
	fake := fakeCluster(t, kfake.SeedTopics(1, "orders"))
	c := &Config{Name: "main", Brokers: fake.ListenAddrs(), Topics: []string{"orders"}, Group: "g"}
	c.setDefaults()
	cluster := newCluster(c, nil)
	t.Cleanup(cluster.close)
	r := &run{config: c, session: newSession(t, consumer.NewBudget(4<<20)), log: slog.New(slog.DiscardHandler), cluster: cluster}
	return &partitionReader{run: r, gen: &groupGeneration{run: r, readCtx: t.Context()}, topic: "orders"}, fake
}

// taker is a source that only hands out its session.
type taker chan *consumer.Session

func (taker) Name() string { return "main" }

func (c taker) Run(ctx context.Context, in *consumer.Session) error {
	c <- in
	<-ctx.Done()
	return nil
}

// newSession is the session of a worker that does nothing else.
func newSession(t *testing.T, budget *consumer.Budget) *consumer.Session {
	t.Helper()
	store, taken := consumertest.NewStore(), make(taker, 1)
	w := &consumer.Worker{
		Handler: store, Lanes: store, Sources: []consumer.Source{taken},
		Writers: 1, MaxMessages: 1, MaxBytes: 1, Budget: budget, Drain: time.Second,
		Logger: slog.New(slog.DiscardHandler), Metrics: consumer.NewMetrics(prometheus.NewRegistry(), budget),
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return <-taken
}

// Whatever is asked for, a record batch comes whole: its memory is reserved before it is
// read.
func TestALookAtACutKeepsToTheBudget(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	large := at(14, 14)
	large.records[0].Value = make([]byte, 3*mib)
	answer := large.bytes()
	l, fake := fakeLane(t)
	budget := l.run.session.Budget() // of 4 MiB
	asked := make(chan int64, 9)
	fake.ControlKey(int16(kmsg.Fetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		asked <- budget.Used()
		return fetchedFrom(req, answer), nil, true
	})
	const others = 3 * mib
	if !budget.TryAcquire(others) {
		t.Fatal("the budget is used")
	}
	type result struct {
		empty bool
		err   error
	}
	done := make(chan result, 1)
	go func() {
		empty, err := l.isEmpty(8, 14)
		done <- result{empty, err}
	}()
	if held := <-asked - others; held < 0 || held > idleFetchBytes {
		t.Errorf("%d bytes are held for a first look", held)
	}
	for end := time.Now().Add(30 * time.Second); budget.Used() != others; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d bytes are held where there is no room", budget.Used()-others)
		}
	}
	select {
	case got := <-done:
		t.Errorf("got %+v without room for it", got)
		done <- got
	default:
	}
	budget.Release(others)
	if got := <-done; !got.empty || got.err != nil {
		t.Errorf("got %+v", got)
	}
	if len(asked) != 1 {
		t.Fatalf("asked %d times more, want once: with room", len(asked))
	}
	if held := <-asked; held < 3*mib {
		t.Errorf("%d bytes are held for 3 MiB", held)
	}
	if n := budget.Used(); n != 0 {
		t.Errorf("%d bytes are still held", n)
	}
	// Waiting for room ends with the lane.
	if !budget.TryAcquire(4 * mib) {
		t.Fatal("the budget is used")
	}
	ctx, cancel := context.WithCancel(t.Context())
	l.gen.readCtx = ctx
	go func() {
		empty, err := l.isEmpty(8, 14)
		done <- result{empty, err}
	}()
	cancel()
	if got := <-done; got.empty || !errors.Is(got.err, context.Canceled) {
		t.Errorf("got %+v", got)
	}
	if n := budget.Used(); n != 4*mib {
		t.Errorf("%d bytes are held besides", n-4*mib)
	}
	budget.Release(4 * mib)
}

func TestEpochsThatAreRemembered(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ all, next, want []lane.LeaderEpoch }{
		"the first":                {nil, epochs(3, 5), epochs(3, 5)},
		"the same":                 {epochs(3, 0), epochs(3, 5), epochs(3, 0)},
		"the next":                 {epochs(3, 0), epochs(3, 5, 4, 7), epochs(3, 0, 4, 7)},
		"nothing new":              {epochs(3, 0), nil, epochs(3, 0)},
		"a batch without":          {epochs(3, 0), epochs(-1, 5), nil},
		"a batch without, between": {epochs(3, 0), epochs(-1, 5, 4, 9), epochs(4, 9)},
		"an epoch that went back":  {epochs(3, 0), epochs(2, 5), epochs(2, 5)},
	} {
		if got := appendEpochs(c.all, c.next); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	var all []lane.LeaderEpoch
	for i := range int64(3 * keepEpochs) {
		all = appendEpochs(all, epochs(i, 10*i))
	}
	if len(all) != keepEpochs || all[keepEpochs-1] != (lane.LeaderEpoch{Epoch: 3*keepEpochs - 1, From: 10 * (3*keepEpochs - 1)}) {
		t.Errorf("%d are remembered: %v", len(all), all)
	}
}

// A replica that is copied after compaction has removed all of an epoch doesn't know the
// epoch. As the leader, it lacks what a lane has read of it, and has nothing else there.
func TestALaneBehindACompactedEpoch(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("runs a Kafka broker")
	}
	b := kafkatest.Own(t)
	r := newRig(t, b, 1, map[string]string{
		"cleanup.policy": "compact", "segment.ms": "200", "segment.bytes": "1048576", "delete.retention.ms": "0",
		"min.cleanable.dirty.ratio": "0.001", "min.compaction.lag.ms": "0", "max.compaction.lag.ms": "200",
	})
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute) // the broker is started four times
	t.Cleanup(cancel)
	r.ctx = ctx
	r.store.ID = func(m *message.Message) string { return fmt.Sprint(m.Position.Offset) }
	// Without a producer id: the broker would keep the last batch of each, empty.
	write := func(keys ...string) {
		c := r.client(kgo.DisableIdempotentWrite())
		defer c.Close()
		for _, k := range keys {
			r.check(c.ProduceSync(r.ctx, &kgo.Record{Key: []byte(k), Value: []byte("value")}).FirstErr())
		}
	}
	restart := func(before func()) {
		r.check(b.Stop())
		before()
		r.check(b.Restart())
	}
	write(numbered("first ", 0, 10)...)
	restart(func() {})
	write(numbered("again ", 0, 5)...)
	w := r.start(nil)
	r.untilNext(0, 15)
	w.stop()
	row, _ := r.store.Row(r.lane(0))
	if len(row.LeaderEpochs) != 2 || row.LeaderEpochs[1].From != 10 {
		t.Fatalf("the lane was read under the epochs %v", row.LeaderEpochs)
	}
	restart(func() {})
	write(numbered("again ", 0, 5)...)
	n := int64(20)
	r.until("the epoch is compacted away", func() bool {
		write("tick") // a new segment lets the old one be cleaned
		n++
		c := r.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{r.topic: {0: kgo.NewOffset().At(10)}}))
		defer c.Close()
		records := c.PollFetches(r.ctx).Records()
		time.Sleep(300 * time.Millisecond) // longer than segment.ms
		return len(records) > 0 && records[0].Offset >= 15
	})
	restart(func() {
		copied := filepath.Join(t.TempDir(), "log")
		r.check(b.SaveLog(r.topic, 0, copied))
		forgetEpoch(t, filepath.Join(copied, "leader-epoch-checkpoint"), row.LeaderEpochs[1].Epoch)
		r.check(b.CutLog(r.topic, 0, copied))
	})
	w = r.start(nil)
	r.until("the lane goes on, or is held", func() bool { return r.next(0) == n || r.log.count("was cut") > 0 })
	if r.log.count("was cut") > 0 {
		t.Fatalf("a log that has lost nothing was taken for cut:\n%s", r.log)
	}
	w.untilReady()
	// The lane goes on, and its fetches don't name the epoch that the leader doesn't know.
	write("behind")
	r.untilNext(0, n+1)
	if n := r.log.count("isn't the one that was read"); n != 0 {
		t.Errorf("the leader was told of an epoch that it doesn't know:\n%s", r.log)
	}
}

// forgetEpoch removes a leader epoch from a broker's checkpoint of a log.
func forgetEpoch(t *testing.T, path string, epoch int32) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n") // a version, how many there are, and these
	left := slices.DeleteFunc(slices.Clone(lines[2:]), func(l string) bool { return strings.HasPrefix(l, fmt.Sprint(epoch, " ")) })
	if len(left) != len(lines)-3 {
		t.Fatalf("no epoch %d among %q", epoch, lines)
	}
	text = []byte(strings.Join(slices.Concat(lines[:1], []string{fmt.Sprint(len(left))}, left), "\n") + "\n")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
