package nats

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/message"
)

// A producer may set any header. None makes the server's word of a message, which would
// never be read then, nor does one change what is asked for.
func TestHeadersOfTheServer(t *testing.T) {
	t.Parallel()
	for _, c := range [][]string{
		{"Status", "100"},
		{"Status", "404"},
		{"Status", "408"},
		{"Status", "400"},
		{"Status", "409", "Description", "Consumer Deleted"},
		{"Status", "409", "Description", "Message Size Exceeds MaxBytes"},
		{"Status", "shipped"},
		{"Nats-Pin-Id", "a"},
		{"Nats-Msg-Size", "3"},
	} {
		t.Run(strings.Join(c, " "), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			msg := natsgo.NewMsg("orders.1") // no payload
			msg.Header.Set(consumertest.IDHeader, "bare")
			for i := 0; i < len(c); i += 2 {
				msg.Header.Set(c[i], c[i+1])
			}
			r.publish(0, 5)
			r.publishAsync(msg)
			r.publish(5, 5)
			w := r.start(nil)
			r.wait(11)
			r.publish(10, 5) // by later pulls
			r.wait(16)
			if handled, _, _ := r.store.Counts(); handled != 16 {
				t.Errorf("%d messages were handed over, of which some came again", handled)
			}
			if err := w.worker.Ready(); err != nil {
				t.Error(err)
			}
		})
	}
}

// publishRaw publishes a message with a block of headers that no library would send.
func (r *rig) publishRaw(subject, headers, value string) {
	r.Helper()
	conn, err := net.Dial("tcp", r.server.Addr().String())
	r.check(err)
	defer func() { _ = conn.Close() }()
	_, err = fmt.Fprintf(conn, "CONNECT {\"verbose\":false,\"headers\":true}\r\nHPUB %s %d %d\r\n%s%s\r\nPING\r\n",
		subject, len(headers), len(headers)+len(value), headers, value)
	r.check(err)
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "-ERR") {
			r.Fatal(lines.Text())
		}
		if strings.HasPrefix(lines.Text(), "PONG") {
			return
		}
	}
	r.Fatal("the server closed the connection")
}

// A message whose headers can't be parsed comes without any, and says so.
func TestHeadersThatDoNotParse(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	for _, headers := range []string{
		"NATS/1.0\r\nmessage-id: a\r\nno colon\r\n\r\n",
		"NATS/1.0\r\nmessage-id: a\r\n", // it doesn't end
		"HTTP/1.1\r\nmessage-id: a\r\n\r\n",
		"NATS/1.0\r\n\r\n", // this one is right: there are none
		"NATS/1.0\r\nmessage-id: a\r\n\r\n",
	} {
		r.publishRaw("orders.1", headers, fmt.Sprint("value ", len(headers)))
	}
	msg := natsgo.NewMsg("orders.1")
	msg.Data = []byte("plain")
	r.publishAsync(msg)
	r.published()
	r.store.ID = func(m *message.Message) string { return fmt.Sprint(m.Position.Offset) }
	r.start(nil)
	r.wait(6)
	damaged := map[int64]bool{1: true, 2: true, 3: true}
	for _, e := range r.store.Effects() {
		m := e.Message
		if (m.Damaged != "") != damaged[m.Position.Offset] {
			t.Errorf("message %d, with %d headers, says %q", m.Position.Offset, len(m.Headers), m.Damaged)
		}
		if m.Damaged != "" && !strings.Contains(m.Damaged, fmt.Sprintf("nats stream get ORDERS %d", m.Position.Offset)) {
			t.Errorf("message %d doesn't tell where it is: %s", m.Position.Offset, m.Damaged)
		}
	}
}
