package nats

import (
	"bufio"
	"context"
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
)

// proxy is between clients and a server, and keeps from it what clients publish
// below a subject. The server never answers that.
type proxy struct {
	address string
	subject string
	kept    atomic.Int64
	hears   atomic.Bool // again
	down    atomic.Bool // takes no connections

	mu      sync.Mutex
	clients []net.Conn
}

// cut ends all connections.
func (d *proxy) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.clients {
		_ = c.Close()
	}
	d.clients = nil
}

// accept notes a connection, unless it is down.
func (d *proxy) accept(client net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clients = append(d.clients, client)
	return !d.down.Load()
}

func newProxy(t *testing.T, upstreamAddress, subject string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	d := &proxy{address: "nats://" + listener.Addr().String(), subject: subject}
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
			if !d.accept(client) {
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
func (d *proxy) pass(from *bufio.Reader, to io.Writer) error {
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
	r := newRig(t, jetstream.StreamConfig{})
	d := newProxy(t, r.server.Addr().String(), "$JS.API.CONSUMER.MSG.NEXT.")
	w := r.start(func(c *Config) { c.Servers = []string{d.address} })
	r.until("the reason", func() bool {
		err := w.worker.Ready()
		return err != nil && strings.Contains(err.Error(), "refuses every pull")
	})
	d.down.Store(true)
	d.cut()
	time.Sleep(4 * time.Second) // so that the pull under way has come to its end, and none follows
	d.hears.Store(true)
	d.down.Store(false)
	r.publish(0, 10)
	r.wait(10)
	w.untilReady()
	w.mustLog("answers pulls again")
}

// Nothing waits for the broker after COMMIT: one that never confirms an
// acknowledgement doesn't hold up the transactions that follow. Here each message is
// sent when the one before has had its effect, so that a wait for each would add up.
func TestABrokerThatNeverConfirmsHoldsUpNothing(t *testing.T) {
	t.Parallel()
	const messages = 40
	r := newRig(t, jetstream.StreamConfig{})
	d := newProxy(t, r.server.Addr().String(), "$JS.ACK.")
	w := r.start(func(c *Config) { c.Servers, c.AckWait = []string{d.address}, 10*time.Minute }, func(w *consumer.Worker) { w.Writers = 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for n := range messages {
		r.publish(n, 1)
		if err := r.store.WaitEffects(ctx, n+1); err != nil {
			t.Fatalf("%d of %d messages had their effect while no acknowledgement is confirmed", n, messages)
		}
	}
	r.until("an acknowledgement that is kept", func() bool { return d.kept.Load() > 0 })
	if floor := r.durable().AckFloor; floor.Stream != 0 {
		t.Errorf("acknowledged: %+v", floor)
	}
	w.stop()
}
