package kafka

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/message"
)

// names make topics and groups that no other test of this run, nor of an earlier
// one at the same broker, has used.
var names atomic.Int64

func newName(prefix string) string {
	return fmt.Sprintf("%s-%d-%d", prefix, time.Now().UnixNano(), names.Add(1))
}

// onBrokers runs a test on a fake broker in this process and, unless -short, on
// a real one.
func onBrokers(t *testing.T, test func(t *testing.T, b *kafkatest.Broker)) {
	t.Run("kfake", func(t *testing.T) {
		t.Parallel()
		test(t, fake(t))
	})
	t.Run("kafka", func(t *testing.T) {
		t.Parallel()
		test(t, realBroker(t))
	})
}

func realBroker(t *testing.T) *kafkatest.Broker {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a Kafka broker")
	}
	return kafkatest.Run(t)
}

func fake(t *testing.T, opts ...kfake.Opt) *kafkatest.Broker {
	t.Helper()
	return kafkatest.At(fakeCluster(t, opts...).ListenAddrs()[0])
}

func fakeCluster(t *testing.T, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a fake broker through whole sessions, and -short asks for what takes seconds")
	}
	c, err := kfake.NewCluster(append([]kfake.Opt{
		kfake.NumBrokers(1),
		kfake.GroupMinSessionTimeout(time.Second),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// rig is a topic and a group at a broker, with a database in memory.
type rig struct {
	*testing.T
	ctx    context.Context
	broker *kafkatest.Broker
	topic  string
	group  string
	store  *consumertest.Store
	log    *logBuffer
}

func newRig(t *testing.T, b *kafkatest.Broker, partitions int32, configs map[string]string) *rig {
	t.Helper()
	r := rigOn(t, b, newName("topic"))
	r.check(b.CreateTopic(r.ctx, r.topic, partitions, configs))
	return r
}

// rigOn is a rig with a topic that exists.
func rigOn(t *testing.T, b *kafkatest.Broker, topic string) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	r := &rig{T: t, ctx: ctx, broker: b, topic: topic, group: newName("group"), log: &logBuffer{}}
	r.newStore()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s", r.log)
		}
	})
	return r
}

// newStore forgets what was handled, as with another database.
func (r *rig) newStore() {
	r.store = consumertest.NewStore()
	r.store.ID = func(m *message.Message) string { return fmt.Sprint(m.Position) }
}

func (r *rig) check(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) lane(partition int) message.Lane {
	return message.Lane{Source: "main", Name: laneName(r.topic, partition)}
}

// work is a worker that reads the rig's topic.
type work struct {
	*rig
	worker   *consumer.Worker
	registry *prometheus.Registry
	cancel   context.CancelFunc
	done     chan error
}

func (r *rig) start(change func(*Config), changes ...func(*consumer.Worker)) *work {
	r.Helper()
	c := Config{
		Name: "main", Brokers: []string{r.broker.Addr()}, Topics: []string{r.topic}, Group: r.group,
		SessionTimeout: 6 * time.Second, HeartbeatInterval: 200 * time.Millisecond,
	}
	if change != nil {
		change(&c)
	}
	s, err := New(c)
	r.check(err)
	budget := consumer.NewBudget(64 << 20)
	registry := prometheus.NewRegistry()
	w := &work{
		rig:      r,
		registry: registry,
		worker: &consumer.Worker{
			Handler: r.store, Lanes: r.store, Sources: []consumer.Source{s},
			Writers: 2, MaxMessages: 500, MaxBytes: 8 << 20, Budget: budget, Drain: 5 * time.Second,
			Logger:  slog.New(slog.NewTextHandler(r.log, nil)),
			Metrics: consumer.NewMetrics(registry, budget),
		},
		done: make(chan error, 1),
	}
	for _, change := range changes {
		change(w.worker)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	go func() { w.done <- w.worker.Run(ctx); close(w.done) }()
	r.Cleanup(w.stop)
	return w
}

// stop ends the worker, which must neither fail nor leave bytes of the budget held.
func (w *work) stop() {
	w.Helper()
	w.cancel()
	select {
	case err := <-w.done: // nil as well once it was received
		if err != nil {
			w.Errorf("the worker ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		w.Error("the worker does not end")
	}
	if n := w.worker.Budget.Used(); n != 0 {
		w.Errorf("%d bytes of the budget are still held", n)
	}
	for _, v := range w.store.Violations() {
		w.Error("contract broken: ", v)
	}
}

// until polls for what no store signals.
func (r *rig) until(what string, ok func() bool) {
	r.Helper()
	for !ok() {
		select {
		case <-r.ctx.Done():
			r.Fatal("never happened: ", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (r *rig) untilNext(partition int, next int64) {
	r.Helper()
	if err := r.store.Wait(r.ctx, func() bool { return r.next(partition) >= next }); err != nil {
		r.Fatalf("lane %d stands at %d, never came to %d", partition, r.next(partition), next)
	}
}

func (r *rig) next(partition int) int64 {
	row, ok := r.store.Row(r.lane(partition))
	if !ok {
		return -1
	}
	return row.Next
}

func (r *rig) committed(partition int32) int64 {
	r.Helper()
	offsets, err := r.broker.Committed(r.ctx, r.group, r.topic)
	r.check(err)
	if offset, ok := offsets[partition]; ok {
		return offset
	}
	return -1
}

// deleteCommitted deletes the offset of a group without members, as
// kafka-consumer-groups.sh --delete-offsets does.
func (r *rig) deleteCommitted(partition int32) {
	r.Helper()
	p := kmsg.NewOffsetDeleteRequestTopicPartition()
	p.Partition = partition
	t := kmsg.NewOffsetDeleteRequestTopic()
	t.Topic, t.Partitions = r.topic, append(t.Partitions, p)
	req := kmsg.NewPtrOffsetDeleteRequest()
	req.Group, req.Topics = r.group, append(req.Topics, t)
	res, err := req.RequestWith(r.ctx, r.client())
	r.check(err)
	r.check(kerr.ErrorForCode(res.ErrorCode))
	r.check(kerr.ErrorForCode(res.Topics[0].Partitions[0].ErrorCode))
}

func (r *rig) untilCommitted(partition int32, offset int64) {
	r.Helper()
	r.until(fmt.Sprintf("the group's offset of %d is %d", partition, offset), func() bool { return r.committed(partition) == offset })
}

func (w *work) untilReady() {
	w.Helper()
	w.until("the worker is ready", func() bool { return w.worker.Ready() == nil })
}

// metric is the sum of a gauge's values.
func (w *work) metric(name string) (sum float64) {
	w.Helper()
	families, err := w.registry.Gather()
	w.check(err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			sum += m.GetGauge().GetValue()
		}
	}
	return sum
}

// values are those that had their effect, in order.
func (r *rig) values() []string {
	var all []string
	for _, e := range r.store.Effects() {
		all = append(all, string(e.Message.Value))
	}
	return all
}

// offsets are the positions of what had its effect, in order.
func (r *rig) offsets() []int64 {
	var all []int64
	for _, e := range r.store.Effects() {
		all = append(all, e.Message.Position.Offset)
	}
	return all
}

func (r *rig) client(opts ...kgo.Opt) *kgo.Client {
	r.Helper()
	c, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(r.broker.Addr()), kgo.DefaultProduceTopic(r.topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	}, opts...)...)
	r.check(err)
	r.Cleanup(c.Close)
	return c
}

// put produces n records to a partition, each as a record batch of its own.
func (r *rig) put(c *kgo.Client, partition int32, values ...string) {
	r.Helper()
	for _, v := range values {
		r.check(c.ProduceSync(r.ctx, &kgo.Record{Partition: partition, Value: []byte(v)}).FirstErr())
	}
}

// fill produces n records to a partition, in large batches.
func (r *rig) fill(c *kgo.Client, partition int32, n int) {
	r.Helper()
	records := make([]*kgo.Record, n)
	for i := range records {
		records[i] = &kgo.Record{Partition: partition, Value: fmt.Appendf(nil, "value %d of %d", i, partition)}
	}
	r.check(c.ProduceSync(r.ctx, records...).FirstErr())
}

// transact produces values in a transaction, and commits or aborts it. Its
// marker takes one more position.
func (r *rig) transact(c *kgo.Client, commit kgo.TransactionEndTry, values ...string) {
	r.Helper()
	r.check(c.BeginTransaction())
	r.put(c, 0, values...)
	r.check(c.EndTransaction(r.ctx, commit))
}

func (r *rig) transactional() *kgo.Client {
	return r.client(kgo.TransactionalID(newName("producer")))
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) count(s string) int { return strings.Count(l.String(), s) }
