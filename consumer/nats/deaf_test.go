package nats_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

// deaf is between clients and a server, and keeps from it what clients publish
// below a subject. The server never answers that.
type deaf struct {
	address string
	subject string
	kept    atomic.Int64
	hears   atomic.Bool // again
	down    atomic.Bool // takes no connections

	mu      sync.Mutex
	clients []net.Conn
}

// cut ends all connections.
func (d *deaf) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.clients {
		_ = c.Close()
	}
	d.clients = nil
}

// take notes a connection, unless it is down.
func (d *deaf) take(client net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clients = append(d.clients, client)
	return !d.down.Load()
}

func newDeaf(t *testing.T, upstreamAddress, subject string) *deaf {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	d := &deaf{address: "nats://" + listener.Addr().String(), subject: subject}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			upstream, err := net.Dial("tcp", upstreamAddress)
			if err != nil {
				_ = client.Close()
				continue
			}
			if !d.take(client) {
				_, _ = client.Close(), upstream.Close()
				continue
			}
			go func() {
				_, _ = io.Copy(client, upstream)
				_ = client.Close()
			}()
			go func() {
				_ = d.pass(bufio.NewReader(client), upstream)
				_ = upstream.Close()
			}()
		}
	}()
	return d
}

// pass hands on all but what is published below the subject: PUB and HPUB name it
// first, and the size of what follows last.
func (d *deaf) pass(from *bufio.Reader, to io.Writer) error {
	for {
		line, err := from.ReadString('\n')
		if err != nil {
			return err
		}
		words := strings.Fields(line)
		payload := ""
		if len(words) > 2 && (words[0] == "PUB" || words[0] == "HPUB") {
			n, err := strconv.Atoi(words[len(words)-1])
			if err != nil {
				return err
			}
			rest := make([]byte, n+len("\r\n"))
			if _, err := io.ReadFull(from, rest); err != nil {
				return err
			}
			if strings.HasPrefix(words[1], d.subject) && !d.hears.Load() {
				d.kept.Add(1)
				continue
			}
			payload = string(rest)
		}
		if _, err := io.WriteString(to, line+payload); err != nil {
			return err
		}
	}
}

// A line that carries nothing from us to the server ends as a lost connection. Once there
// is another one, the source is ready.
func TestPullsAreAnsweredOnTheNextConnection(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	d := newDeaf(t, s.Addr().String(), "$JS.API.CONSUMER.MSG.NEXT.")
	store := consumertest.NewStore()
	r := start(t, newSource(t, s, func(c *nats.Config) { c.Servers = []string{d.address} }), store)
	eventually(t, "the reason", func() bool {
		err := r.Ready()
		return err != nil && strings.Contains(err.Error(), "refuses every pull")
	})
	d.down.Store(true)
	d.cut()
	time.Sleep(4 * time.Second) // so that the pull under way has come to its end, and none follows
	d.hears.Store(true)
	d.down.Store(false)
	publish(t, js, 0, 10)
	wait(t, store, 10)
	r.ready()
	if !r.log.has("answers pulls again") {
		t.Error("the end of it wasn't logged")
	}
}

// Nothing waits for the broker after COMMIT: one that never confirms an
// acknowledgement doesn't hold up the transactions that follow. Here each message is
// sent when the one before has had its effect, so that a wait for each would add up.
func TestABrokerThatNeverConfirmsHoldsUpNothing(t *testing.T) {
	t.Parallel()
	const messages = 40
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	d := newDeaf(t, s.Addr().String(), "$JS.ACK.")
	store := consumertest.NewStore()
	r := start(t, newSource(t, s, func(c *nats.Config) { c.Servers, c.AckWait = []string{d.address}, 10*time.Minute }), store, func(w *consumer.Worker) { w.Writers = 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for n := range messages {
		publish(t, js, n, 1)
		if err := store.WaitEffects(ctx, n+1); err != nil {
			t.Fatalf("%d of %d messages had their effect while no acknowledgement is confirmed", n, messages)
		}
	}
	eventually(t, "an acknowledgement that is kept", func() bool { return d.kept.Load() > 0 })
	stream, err := js.Stream(t.Context(), "ORDERS")
	if err != nil {
		t.Fatal(err)
	}
	durable, err := stream.Consumer(t.Context(), "dedupd")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := durable.Info(t.Context()); err != nil || info.AckFloor.Stream != 0 {
		t.Errorf("acknowledged: %s, %v", fmt.Sprint(info.AckFloor), err)
	}
	r.stop()
}
