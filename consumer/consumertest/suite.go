package consumertest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/message"
)

// Config describes a source to Run.
type Config struct {
	// Open makes a topic or stream that nobody has used, with a consumer group
	// or durable of its own. What it starts ends with t.
	Open func(t *testing.T) Subscription
	// Features is what the broker guarantees; it selects the tests.
	Features Features
	// Messages is the size of the larger tests. Default 2000.
	Messages int
	// Patience is how long anything may take before a test fails, which must be
	// longer than the broker's redelivery time. Default 30 s.
	Patience time.Duration
	// Leaks are goroutines of the broker that may be left at a test's end.
	Leaks []goleak.Option
}

// Subscription is one topic or stream, read by one group.
type Subscription struct {
	// Source makes one more source for it, for one Run: a restart, or another
	// member of the group. All of them have the same name.
	Source func(t *testing.T) consumer.Source
	// Produce returns once the broker has the records, in that order.
	Produce func(t *testing.T, records []Record)
	// Acked returns how many of the records the broker regards as done, so that it
	// wouldn't deliver them to the group again.
	Acked func(t *testing.T) int
}

// Record is a message to be produced.
type Record struct {
	Partition int
	Key       []byte
	Value     []byte
	Headers   []message.Header
}

// Features is what a broker guarantees.
type Features struct {
	// Partitions is how many partitions Record.Partition may name; at least 1.
	Partitions int
	// Ordered: a lane is in the order of production and has a fence.
	Ordered bool
	// Resumes: reading starts at the database's position, also when the broker
	// has recorded a later one.
	Resumes bool
	// Elastic: several members share the messages.
	Elastic bool
	// Keys: a message has a key.
	Keys bool
	// NilValues: no value and no key differ from empty ones.
	NilValues bool
	// BinaryHeaders: a header's value is any bytes, and nil differs from empty.
	BinaryHeaders bool
}

// Run proves a source. Each property is a subtest of its own.
func Run(t *testing.T, c Config) {
	if c.Messages == 0 {
		c.Messages = 2000
	}
	if c.Patience == 0 {
		c.Patience = 30 * time.Second
	}
	tests := []struct {
		name string
		run  func(*fixture)
		skip bool
	}{
		{"everything produced is handled, in lane order", testEverything, false},
		{"nothing is acknowledged before it is durable", testAckAfterCommit, false},
		{"a transient error loses nothing", testTransient, false},
		{"nothing that failed is acknowledged", testFailedIsNotAcked, false},
		{"a lost answer to a commit loses nothing", testAmbiguous, false},
		{"a restart resumes", testRestart, false},
		{"a stop in the middle of a transaction loses nothing", testCutOff, false},
		{"a held lane goes on once it is fixed", testHeld, false},
		{"a single message does not wait for others", testLatency, false},
		{"a stop while idle is prompt", testStopIdle, false},
		{"until idle ends", testUntilIdle, false},
		{"a lane is reported as caught up when all the broker holds is durable", testHeartbeat, false},
		{"payloads survive", testPayloads, false},
		{"the byte budget is kept", testBudget, false},
		{"a message larger than the budget gets through", testHuge, false},
		{"members share the work", testMembers, !c.Features.Elastic},
		{"a fenced lane is acquired again", testFenced, !c.Features.Ordered},
		{"reading goes back with the database", testRewind, !c.Features.Resumes},
	}
	for _, test := range tests {
		if test.skip {
			continue
		}
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), c.Patience)
			t.Cleanup(cancel)
			f := &fixture{T: t, Config: c, ctx: ctx, sub: c.Open(t), store: NewStore()}
			before := goleak.IgnoreCurrent()
			test.run(f)
			f.stopAll()
			for _, v := range f.store.Violations() {
				t.Error("contract broken: ", v)
			}
			goleak.VerifyNone(t, append(c.Leaks, before)...)
		})
	}
}

// fixture is one subtest's subscription, store and workers.
type fixture struct {
	*testing.T
	Config
	ctx      context.Context
	sub      Subscription
	store    *Store
	running  []*running
	produced int
}

// running is a worker at work.
type running struct {
	worker *consumer.Worker
	cancel context.CancelFunc
	done   chan error
}

// drain is the time that the suite's workers have to stop.
const drain = 10 * time.Second

func (f *fixture) start(changes ...func(*consumer.Worker)) *running {
	f.Helper()
	budget := consumer.NewBudget(8 << 20)
	w := &consumer.Worker{
		Handler: f.store, Lanes: f.store,
		Sources: []consumer.Source{f.sub.Source(f.T)},
		Writers: 3, MaxMessages: 500, MaxBytes: 1 << 20,
		Budget: budget, Drain: drain, Logger: logger(),
		Metrics: consumer.NewMetrics(prometheus.NewRegistry(), budget),
	}
	for _, change := range changes {
		change(w)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{w, cancel, make(chan error, 1)}
	go func() { r.done <- w.Run(ctx) }()
	f.running = append(f.running, r)
	return r
}

// stop ends a worker, which must be prompt, without error, and with nothing held.
func (f *fixture) stop(r *running) {
	f.Helper()
	begun := time.Now()
	r.cancel()
	f.ended(r)
	if d := time.Since(begun); d > drain+time.Second {
		f.Errorf("Run took %s to return after its context had ended; the drain is %s", d, drain)
	}
}

func (f *fixture) ended(r *running) {
	f.Helper()
	for i, other := range f.running {
		if other == r {
			f.running = append(f.running[:i:i], f.running[i+1:]...)
		}
	}
	select {
	case err := <-r.done:
		if err != nil {
			f.Errorf("Run: %v", err)
		}
	case <-time.After(max(f.Patience, 2*drain)):
		f.Fatal("Run has not returned")
	}
	r.cancel()
	if n := r.worker.Budget.Used(); n != 0 {
		f.Errorf("the byte budget holds %d bytes after Run has returned", n)
	}
}

func (f *fixture) stopAll() {
	for len(f.running) > 0 {
		f.stop(f.running[0])
	}
}

// produce appends n records, over all partitions in turn, with ids that go on
// from the last call's.
func (f *fixture) produce(n int) {
	f.Helper()
	records := make([]Record, n)
	for i := range records {
		id := f.id(f.produced + i)
		records[i] = Record{
			Partition: (f.produced + i) % f.Features.Partitions,
			Value:     []byte("value of " + id),
			Headers:   []message.Header{{Key: IDHeader, Value: []byte(id)}},
		}
	}
	f.sub.Produce(f.T, records)
	f.produced += n
}

func (f *fixture) id(n int) string { return fmt.Sprintf("m%07d", n) }

// all waits until every record that was produced has had its effect, and checks
// that nothing else has, and the order where there is one.
func (f *fixture) all() {
	f.Helper()
	if err := f.store.WaitEffects(f.ctx, f.produced); err != nil {
		handled, dups, calls := f.store.Counts()
		f.Fatalf("%d of %d records had their effect (%d handled, %d of them again, in %d hand-overs): %v", len(f.store.Effects()), f.produced, handled, dups, calls, err)
	}
	f.check()
}

func (f *fixture) check() {
	f.Helper()
	last := make([]string, f.Features.Partitions)
	seen := make(map[string]bool)
	for _, e := range f.store.Effects() {
		var n int
		if _, err := fmt.Sscanf(e.ID, "m%d", &n); err != nil || n >= f.produced || e.ID != f.id(n) {
			f.Errorf("an effect of %q, which was not produced", e.ID)
			continue
		}
		p := n % f.Features.Partitions
		if f.Features.Ordered && e.ID < last[p] {
			f.Fatalf("partition %d: %s came after %s", p, e.ID, last[p])
		}
		last[p] = e.ID
		seen[e.ID] = true
		if want := "value of " + e.ID; string(e.Message.Value) != want {
			f.Errorf("%s: the value is %q", e.ID, e.Message.Value)
		}
	}
	for n := range f.produced {
		if !seen[f.id(n)] {
			f.Errorf("%s had no effect", f.id(n))
		}
	}
}

// acked waits until the broker regards everything as done.
func (f *fixture) acked() {
	f.Helper()
	f.eventually("the broker to regard everything as done", func() bool { return f.sub.Acked(f.T) == f.produced })
}

func (f *fixture) eventually(what string, ok func() bool) {
	f.Helper()
	for !ok() {
		select {
		case <-f.ctx.Done():
			f.Fatalf("waited in vain for %s", what)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// logger is quiet unless a failure is being looked into.
func logger() *slog.Logger {
	var to io.Writer = io.Discard
	if os.Getenv("CONSUMERTEST_LOG") != "" {
		to = os.Stderr
	}
	return slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
