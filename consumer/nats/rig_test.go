package nats

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/message"
)

// edgeQueue is the lane of a rig's source.
var edgeQueue = message.Lane{Source: "edge", Name: laneName}

// rig is a server of its own with a stream, and a database in memory.
type rig struct {
	*testing.T
	server *server.Server
	port   int
	js     jetstream.JetStream // the producer's, which may do everything
	stream jetstream.Stream
	store  *consumertest.Store
}

func newRig(t *testing.T, stream jetstream.StreamConfig, change ...func(*server.Options)) *rig {
	t.Helper()
	r := rigOn(t, startServer(t, change...))
	r.createStream(stream)
	return r
}

// rigOn is a rig without a stream. The options are how the producer logs in.
func rigOn(t *testing.T, s *server.Server, options ...natsgo.Option) *rig {
	t.Helper()
	return &rig{T: t, server: s, port: port(s), js: connect(t, s, options...), store: consumertest.NewStore()}
}

// with is the same rig in a sub-test.
func (r *rig) with(t *testing.T) *rig {
	of := *r
	of.T = t
	return &of
}

// startServer runs a server on a port of its own, unless the options name one.
func startServer(t *testing.T, change ...func(*server.Options)) *server.Server {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a NATS server, and -short asks for tests without servers")
	}
	o := &server.Options{
		Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
	}
	for _, c := range change {
		c(o)
	}
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { stopServer(s) })
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the server is not ready")
	}
	return s
}

func stopServer(s *server.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}

func port(s *server.Server) int { return s.Addr().(*net.TCPAddr).Port }

func connect(t *testing.T, s *server.Server, options ...natsgo.Option) jetstream.JetStream {
	t.Helper()
	nc, err := natsgo.Connect(s.ClientURL(), append(options, natsgo.MaxReconnects(-1), natsgo.ReconnectWait(50*time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// storedIn has a server keep its streams in a folder.
func storedIn(folder string) func(*server.Options) {
	return func(o *server.Options) { o.StoreDir = folder }
}

// restart starts the server again at the same address, once it was stopped.
func (r *rig) restart(change ...func(*server.Options)) {
	r.Helper()
	r.server = startServer(r.T, append(change, func(o *server.Options) { o.Port = r.port })...)
	r.js = connect(r.T, r.server)
}

// stateOfDurable and messagesOfStream are files of a stream.
const (
	stateOfDurable   = "obs/dedupd/o.dat"
	messagesOfStream = "msgs"
)

// lose stops the server, removes files of the stream, and starts it again.
func (r *rig) lose(paths ...string) {
	r.Helper()
	folder := r.server.StoreDir()
	stopServer(r.server)
	for _, path := range paths {
		full := filepath.Join(folder, "$G", "streams", "ORDERS", path)
		_, err := os.Stat(full)
		r.check(err)
		r.check(os.RemoveAll(full))
	}
	r.restart(storedIn(filepath.Dir(folder)))
}

func (r *rig) check(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) createStream(c jetstream.StreamConfig) {
	r.Helper()
	if c.Name == "" {
		c.Name = "ORDERS"
	}
	if len(c.Subjects) == 0 {
		c.Subjects = []string{"orders.>"}
	}
	stream, err := r.js.CreateStream(r.Context(), c)
	r.check(err)
	r.stream = stream
}

// publish publishes n messages to seven subjects, with ids that count from a number on.
func (r *rig) publish(from, n int) {
	r.Helper()
	for i := from; i < from+n; i++ {
		r.publishAsync(newMsg(fmt.Sprintf("orders.%d", i%7), fmt.Sprintf("m%d", i), "value"))
	}
	r.published()
}

func newMsg(subject, id, value string) *natsgo.Msg {
	msg := natsgo.NewMsg(subject)
	msg.Header.Set(consumertest.IDHeader, id)
	msg.Data = []byte(value)
	return msg
}

// publishAsync doesn't wait for the server's answer, published does.
func (r *rig) publishAsync(msg *natsgo.Msg) {
	r.Helper()
	_, err := r.js.PublishMsgAsync(msg, jetstream.WithStallWait(10*time.Second))
	r.check(err)
}

func (r *rig) published() {
	r.Helper()
	select {
	case <-r.js.PublishAsyncComplete():
	case <-time.After(30 * time.Second):
		r.Fatal("the server has not accepted what was published")
	}
}

// config is that of the rig's source.
func (r *rig) config(change ...func(*Config)) Config {
	c := Config{Name: "edge", Servers: []string{r.server.ClientURL()}, Stream: "ORDERS", Durable: "dedupd"}
	for _, f := range change {
		if f != nil {
			f(&c)
		}
	}
	return c
}

func (r *rig) source(change ...func(*Config)) *Source {
	return New(r.config(change...))
}

// consumer is the durable, which the server is asked for.
func (r *rig) consumer() (jetstream.Consumer, error) {
	return r.js.Consumer(r.Context(), "ORDERS", "dedupd")
}

// durable is its state. There has to be one.
func (r *rig) durable() *jetstream.ConsumerInfo {
	r.Helper()
	c, err := r.consumer()
	r.check(err)
	return c.CachedInfo()
}

func (r *rig) createDurable(c jetstream.ConsumerConfig) jetstream.Consumer {
	r.Helper()
	c.Durable = "dedupd"
	durable, err := r.stream.CreateConsumer(r.Context(), c)
	r.check(err)
	return durable
}

// alter changes the durable as somebody would by hand.
func (r *rig) alter(change func(*jetstream.ConsumerConfig)) {
	r.Helper()
	c := r.durable().Config
	change(&c)
	_, err := r.js.UpdateConsumer(r.Context(), "ORDERS", c)
	r.check(err)
}

func (r *rig) deleteDurable() {
	r.Helper()
	r.check(r.js.DeleteConsumer(r.Context(), "ORDERS", "dedupd"))
}

// purge has the stream discard all messages before one.
func (r *rig) purge(first uint64) {
	r.Helper()
	r.check(r.stream.Purge(r.Context(), jetstream.WithPurgeSequence(first)))
}

// row is that of the queue.
func (r *rig) row() consumertest.Row {
	r.Helper()
	row, ok := r.store.Row(edgeQueue)
	if !ok {
		r.Fatal("the queue has no row")
	}
	return row
}

// wait waits until so many messages had their effect.
func (r *rig) wait(n int) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), 40*time.Second)
	defer cancel()
	if err := r.store.WaitEffects(ctx, n); err != nil {
		handled, dups, calls := r.store.Counts()
		r.Fatalf("%d of %d had their effect (%d handled, %d again, %d calls): %v", len(r.store.Effects()), n, handled, dups, calls, err)
	}
	for _, v := range r.store.Violations() {
		r.Error("contract broken: ", v)
	}
}

// readAll waits until the server has nothing left, and wants so many effects.
func (r *rig) readAll(want int) {
	r.Helper()
	r.wait(want)
	r.until("the server to have nothing left", func() bool {
		c, err := r.consumer()
		return err == nil && c.CachedInfo().NumPending == 0 && c.CachedInfo().NumAckPending == 0
	})
	if n := len(r.store.Effects()); n != want {
		r.Errorf("%d effects, want %d", n, want)
	}
}

// allAcknowledged waits until everything up to a message is acknowledged. After that
// nobody writes to the durable any more.
func (r *rig) allAcknowledged(last uint64) {
	r.Helper()
	r.until("all to be acknowledged", func() bool {
		c, err := r.consumer()
		return err == nil && c.CachedInfo().AckFloor.Stream == last
	})
}

// acknowledge reads a queue of 1500 messages, of which the first thousand are published,
// and acknowledges them. sure is below what position the database knows it, too.
func (r *rig) acknowledge() (sure int64) {
	r.Helper()
	r.wait(1000)
	r.allAcknowledged(1000)
	time.Sleep(2500 * time.Millisecond) // the floor is asked for every two seconds
	r.publish(1000, 500)
	r.wait(1500)
	r.allAcknowledged(1500)
	time.Sleep(2500 * time.Millisecond)
	sure = r.row().BrokerPosition
	if sure < 1001 || sure > 1501 {
		r.Fatalf("the row says that all below %d was acknowledged", sure)
	}
	return sure
}

// pass fetches so many messages from the durable, does something to each that comes, and
// returns how many came.
func (r *rig) pass(n int, do func(jetstream.Msg) error) (came int) {
	r.Helper()
	c, err := r.consumer()
	r.check(err)
	batch, err := c.Fetch(n, jetstream.FetchMaxWait(time.Second))
	r.check(err)
	for msg := range batch.Messages() {
		came++
		r.check(do(msg))
	}
	return came
}

// until polls for what no store signals.
func (r *rig) until(what string, ok func() bool) {
	r.Helper()
	r.untilWithin(what, 30*time.Second, ok)
}

// untilWithin is for what takes longer by itself.
func (r *rig) untilWithin(what string, within time.Duration, ok func() bool) {
	r.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			r.Fatalf("waited in vain for %s", what)
		}
	}
}

// work is a worker that reads the rig's stream.
type work struct {
	*rig
	worker   *consumer.Worker
	registry *prometheus.Registry
	log      *logBuffer
	stop     func() // waits; may be called twice
}

func (r *rig) start(change func(*Config), changes ...func(*consumer.Worker)) *work {
	r.Helper()
	return r.startSource(r.source(change), changes...)
}

func (r *rig) startSource(source consumer.Source, changes ...func(*consumer.Worker)) *work {
	r.Helper()
	w := &work{rig: r, log: &logBuffer{}, registry: prometheus.NewRegistry()}
	w.worker = newWorker(r.store, source, w.registry)
	w.worker.Logger = slog.New(slog.NewTextHandler(w.log, nil))
	for _, f := range changes {
		f(w.worker)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.worker.Run(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				r.Errorf("Run: %v", err)
			}
		case <-time.After(20 * time.Second):
			r.Error("Run has not returned")
		}
		if n := w.worker.Budget.Used(); n != 0 {
			r.Errorf("the budget holds %d bytes", n)
		}
	})
	r.Cleanup(func() {
		w.stop()
		if r.Failed() {
			r.Log("log:\n" + w.log.String())
		}
	})
	return w
}

// newWorker is a worker that logs nothing.
func newWorker(store *consumertest.Store, source consumer.Source, registry *prometheus.Registry) *consumer.Worker {
	budget := consumer.NewBudget(64 << 20)
	return &consumer.Worker{
		Handler: store, Lanes: store, Sources: []consumer.Source{source},
		Writers: 3, MaxMessages: 4000, MaxBytes: 8 << 20, Budget: budget, Drain: 5 * time.Second,
		Logger: slog.New(slog.DiscardHandler), Metrics: consumer.NewMetrics(registry, budget),
	}
}

func (w *work) untilReady() {
	w.Helper()
	w.until("readiness", func() bool { return w.worker.Ready() == nil })
}

// untilHeld waits until the worker isn't ready and has logged a reason.
func (w *work) untilHeld(why string) {
	w.Helper()
	w.until("the queue to be held", func() bool { return w.worker.Ready() != nil && w.log.has(why) })
}

// mustLog wants it in the log.
func (w *work) mustLog(want ...string) {
	w.Helper()
	for _, s := range want {
		if !w.log.has(s) {
			w.Errorf("nothing about %q was logged", s)
		}
	}
}

// metric is the value of a counter or a gauge.
func (w *work) metric(name string) int {
	w.Helper()
	families, err := w.registry.Gather()
	w.check(err)
	for _, f := range families {
		if m := f.GetMetric(); f.GetName() == name && len(m) > 0 {
			return int(m[0].GetCounter().GetValue() + m[0].GetGauge().GetValue())
		}
	}
	return 0
}

// logBuffer keeps what was logged.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if os.Getenv("NATS_TEST_LOG") != "" {
		_, _ = os.Stderr.Write(p)
	}
	return l.text.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logBuffer) has(s string) bool { return strings.Contains(l.String(), s) }

// count is how many times it was logged.
func (l *logBuffer) count(s string) int { return strings.Count(l.String(), s) }
