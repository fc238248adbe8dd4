package consumer_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a worker whose one source does what the test does: it opens lanes, and
// closes them when its context ends.
type rig struct {
	*consumer.Worker
	t        *testing.T
	store    *consumertest.Store
	ledger   *ledger
	registry *prometheus.Registry
	session  *consumer.Session
	lanes    []*openLane
	end      context.CancelFunc
	done     chan error
	patient  bool // the source gives its lanes all the time they want

	mu     sync.Mutex
	groups [][]lane.Batch
	handle func(ctx context.Context, group []lane.Batch) error // nil: the store
}

type openLane struct {
	*consumer.Lane
	rig   *rig
	name  message.Lane
	epoch int64
	next  int64

	mu        sync.Mutex
	committed []int // tokens
	abandoned []int
	position  int64
}

type script struct {
	name string
	run  func(context.Context, *consumer.Session) error
}

func (s *script) Name() string { return s.name }

func (s *script) Run(ctx context.Context, in *consumer.Session) error { return s.run(ctx, in) }

// newRig starts a worker with that many lanes, "0", "1", …, changed by
// func(*consumer.Worker) and func(*consumer.LaneOptions).
func newRig(t *testing.T, lanes int, changes ...any) *rig {
	t.Helper()
	budget := consumer.NewBudget(1 << 30)
	r := &rig{t: t, store: consumertest.NewStore(), ledger: newLedger(t), registry: prometheus.NewRegistry(), done: make(chan error, 1)}
	opened := make(chan struct{})
	r.Worker = &consumer.Worker{
		Handler: r, Lanes: r.store, Sources: []consumer.Source{&script{"test", func(ctx context.Context, in *consumer.Session) error {
			r.session = in
			for i := range lanes {
				r.open(ctx, in, i, changes)
			}
			in.Ready(true)
			close(opened)
			<-ctx.Done()
			r.closeAll(in)
			return nil
		}}},
		Writers: 2, MaxMessages: 1000, MaxBytes: 1 << 20, Budget: budget, Drain: 10 * time.Second,
		Logger: quiet(), Metrics: consumer.NewMetrics(r.registry, budget),
	}
	for _, f := range changes {
		if f, ok := f.(func(*consumer.Worker)); ok {
			f(r.Worker)
		}
	}
	ctx, end := context.WithCancel(context.Background())
	r.end = end
	t.Cleanup(end)
	go func() { r.done <- r.Run(ctx) }()
	<-opened
	return r
}

func (r *rig) open(ctx context.Context, in *consumer.Session, i int, changes []any) {
	l := &openLane{rig: r, name: message.Lane{Source: "test", Name: strconv.Itoa(i)}}
	got, err := in.Acquire(ctx, lane.Acquire{Lane: l.name, Ordered: true, Committed: -1})
	if err != nil {
		r.t.Error(err)
	}
	l.epoch, l.next = got.Epoch, got.Next
	o := consumer.LaneOptions{Lane: l.name, Epoch: got.Epoch, Next: got.Next}
	l.track(&o)
	for _, f := range changes {
		if f, ok := f.(func(*consumer.LaneOptions)); ok {
			f(&o)
		}
	}
	l.Lane = in.Open(o)
	r.lanes = append(r.lanes, l)
}

func (r *rig) closeAll(in *consumer.Session) {
	ctx, cancel := context.WithTimeout(context.Background(), in.Drain())
	defer cancel()
	if r.patient {
		ctx = context.Background()
	}
	var all sync.WaitGroup
	for _, l := range r.lanes {
		all.Go(func() { l.Close(ctx) })
	}
	all.Wait()
}

func (l *openLane) note(list *[]int, tokens []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*list = append(*list, tokens...)
}

func (l *openLane) outcome() (committed, abandoned []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]int(nil), l.committed...), append([]int(nil), l.abandoned...)
}

// wantOutcome wants that these tokens were committed and abandoned.
func (l *openLane) wantOutcome(wantCommitted, wantAbandoned []int) {
	l.rig.t.Helper()
	committed, abandoned := l.outcome()
	if !slices.Equal(committed, wantCommitted) || !slices.Equal(abandoned, wantAbandoned) {
		l.rig.t.Errorf("lane %s: committed %v, abandoned %v; want %v and %v", l.name.Name, committed, abandoned, wantCommitted, wantAbandoned)
	}
}

// offer offers n messages of 10 bytes of the budget each; the token is the first
// position.
func (l *openLane) offer(n int) error {
	b := lane.Batch{
		Lane: l.name, Ordered: true, StreamID: "stream-1", Epoch: l.epoch,
		From: l.next, Next: l.next + int64(n), BrokerPosition: -1, Bytes: int64(10 * n),
	}
	if row, ok := l.rig.store.Row(l.name); ok {
		b.StreamID = row.StreamID
	}
	for i := range n {
		p := message.Position{Lane: l.name, Offset: l.next + int64(i)}
		id := l.name.Name + "/" + strconv.FormatInt(p.Offset, 10)
		b.Messages = append(b.Messages, message.Message{Position: p, Headers: []message.Header{{Key: consumertest.IDHeader, Value: []byte(id)}}})
	}
	_ = l.rig.Budget.Acquire(context.Background(), b.Bytes)
	token := int(l.next)
	l.next = b.Next
	return l.Offer(context.Background(), b, token)
}

func (l *openLane) mustOffer(n int) {
	l.rig.t.Helper()
	if err := l.offer(n); err != nil {
		l.rig.t.Fatal(err)
	}
}

// Handle notes the group and passes it on.
func (r *rig) Handle(ctx context.Context, group []lane.Batch) error {
	r.mu.Lock()
	r.groups = append(r.groups, group)
	handle := r.handle
	r.mu.Unlock()
	if handle == nil {
		handle = r.store.Handle
	}
	err := handle(ctx, group)
	if err == nil {
		r.ledger.handled(group)
	}
	return err
}

func (r *rig) setHandle(f func(context.Context, []lane.Batch) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.handle = f
}

// failLane has every group with a lane fail, until setHandle.
func (r *rig) failLane(name string, err error) {
	r.setHandle(func(ctx context.Context, group []lane.Batch) error {
		if holds(group, name) {
			return err
		}
		return r.store.Handle(ctx, group)
	})
}

func holds(group []lane.Batch, name string) bool {
	return slices.ContainsFunc(group, func(b lane.Batch) bool { return b.Lane.Name == name })
}

// tries is how many groups had a lane.
func (r *rig) tries(name string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.groups {
		if holds(g, name) {
			n++
		}
	}
	return n
}

// offerTogether lets three lanes be in one group, which one writer handles.
func (r *rig) offerTogether() {
	r.t.Helper()
	release := r.store.Hold()
	r.lanes[2].mustOffer(1)
	synctest.Wait()
	r.lanes[0].mustOffer(5)
	r.lanes[1].mustOffer(5)
	release()
}

// sizes are the numbers of messages of the hand-overs so far.
func (r *rig) sizes() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []int
	for _, g := range r.groups {
		n := 0
		for _, b := range g {
			n += len(b.Messages)
		}
		all = append(all, n)
	}
	return all
}

// stop ends the worker and checks what holds at every end.
func (r *rig) stop() {
	r.t.Helper()
	r.end()
	if err := <-r.done; err != nil {
		r.t.Errorf("Run: %v", err)
	}
	r.checkEnd()
}

func (r *rig) checkEnd() {
	r.t.Helper()
	if n := r.Budget.Used(); n != 0 {
		r.t.Errorf("the budget holds %d bytes", n)
	}
	for _, v := range r.store.Violations() {
		r.t.Error("contract broken: ", v)
	}
	r.ledger.check()
	if held := r.metric("dedupd_lanes_held"); held != 0 {
		r.t.Errorf("%v lanes are held", held)
	}
	if r.handle == nil {
		handled, _, _ := r.store.Counts()
		if fetched, abandoned := r.metric("dedupd_messages_fetched_total"), r.metric("dedupd_messages_abandoned_total"); fetched != float64(handled)+abandoned {
			r.t.Errorf("fetched %v, handled %d, abandoned %v", fetched, handled, abandoned)
		}
	}
}

func (r *rig) metric(name string) float64 { return sum(r.t, r.registry, name) }

// sum is a metric's sum over all labels.
func sum(t *testing.T, registry *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Error(err)
	}
	total := 0.0
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				total += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return total
}

var errTransient = errors.New("the connection was lost")

func quiet() *slog.Logger {
	if os.Getenv("CONSUMERTEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.DiscardHandler)
}
