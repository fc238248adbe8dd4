package nats_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

func TestMain(m *testing.M) {
	// A test mostly waits for its server, so more of them than there are cores run at
	// a time. The command line still has the last word.
	_ = flag.Set("test.parallel", "8")
	goleak.VerifyTestMain(m)
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
	go s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the server is not ready")
	}
	return s
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

func createStream(t *testing.T, js jetstream.JetStream, c jetstream.StreamConfig) jetstream.Stream {
	t.Helper()
	if c.Name == "" {
		c.Name = "ORDERS"
	}
	if len(c.Subjects) == 0 {
		c.Subjects = []string{"orders.>"}
	}
	stream, err := js.CreateStream(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func publish(t *testing.T, js jetstream.JetStream, from, n int) {
	t.Helper()
	for i := from; i < from+n; i++ {
		msg := natsgo.NewMsg(fmt.Sprintf("orders.%d", i%7))
		msg.Header.Set(consumertest.IDHeader, fmt.Sprintf("m%d", i))
		msg.Data = []byte("value")
		publishMsg(t, js, msg)
	}
	published(t, js)
}

func publishMsg(t *testing.T, js jetstream.JetStream, msg *natsgo.Msg) {
	t.Helper()
	if _, err := js.PublishMsgAsync(msg, jetstream.WithStallWait(10*time.Second)); err != nil {
		t.Fatal(err)
	}
}

func published(t *testing.T, js jetstream.JetStream) {
	t.Helper()
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(30 * time.Second):
		t.Fatal("the server has not accepted what was published")
	}
}

func newSource(t *testing.T, s *server.Server, change ...func(*nats.Config)) *nats.Source {
	t.Helper()
	c := nats.Config{Name: "edge", Servers: []string{s.ClientURL()}, Stream: "ORDERS", Durable: "dedupd"}
	for _, f := range change {
		f(&c)
	}
	source, err := nats.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return source
}

// running is a worker with one source.
type running struct {
	*consumer.Worker
	t    *testing.T
	log  *logged
	stop func() // waits; may be called twice
}

func start(t *testing.T, source consumer.Source, store *consumertest.Store, change ...func(*consumer.Worker)) *running {
	t.Helper()
	budget := consumer.NewBudget(64 << 20)
	log := &logged{}
	w := &consumer.Worker{
		Handler: store, Lanes: store, Sources: []consumer.Source{source},
		Writers: 3, MaxMessages: 4000, MaxBytes: 8 << 20, Budget: budget, Drain: 5 * time.Second,
		Logger: slog.New(slog.NewTextHandler(log, nil)), Metrics: consumer.NewMetrics(prometheus.NewRegistry(), budget),
	}
	for _, f := range change {
		f(w)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	r := &running{Worker: w, t: t, log: log}
	r.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("Run has not returned")
		}
		if n := budget.Used(); n != 0 {
			t.Errorf("the budget holds %d bytes", n)
		}
	})
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Log("log:\n" + log.String())
		}
	})
	return r
}

func (r *running) ready() {
	r.t.Helper()
	eventually(r.t, "readiness", func() bool { return r.Ready() == nil })
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	eventuallyWithin(t, what, 30*time.Second, ok)
}

// eventuallyWithin is for what takes longer by itself.
func eventuallyWithin(t *testing.T, what string, within time.Duration, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func wait(t *testing.T, store *consumertest.Store, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	if err := store.WaitEffects(ctx, n); err != nil {
		handled, dups, calls := store.Counts()
		t.Fatalf("%d of %d had their effect (%d handled, %d again, %d calls): %v", len(store.Effects()), n, handled, dups, calls, err)
	}
	for _, v := range store.Violations() {
		t.Error("contract broken: ", v)
	}
}

// logged keeps what was logged.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if os.Getenv("NATS_TEST_LOG") != "" {
		_, _ = os.Stderr.Write(p)
	}
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logged) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

// count is how many times it was logged.
func (l *logged) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), s)
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
