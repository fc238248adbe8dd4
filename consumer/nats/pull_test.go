package nats_test

import (
	"strings"
	"testing"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
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
			s := startServer(t)
			js := connect(t, s)
			createStream(t, js, jetstream.StreamConfig{})
			msg := natsgo.NewMsg("orders.1") // no payload
			msg.Header.Set(consumertest.IDHeader, "bare")
			for i := 0; i < len(c); i += 2 {
				msg.Header.Set(c[i], c[i+1])
			}
			publish(t, js, 0, 5)
			publishMsg(t, js, msg)
			publish(t, js, 5, 5)
			store := consumertest.NewStore()
			r := start(t, newSource(t, s), store)
			wait(t, store, 11)
			publish(t, js, 10, 5) // by later pulls
			wait(t, store, 16)
			if handled, _, _ := store.Counts(); handled != 16 {
				t.Errorf("%d messages were handed over, of which some came again", handled)
			}
			if err := r.Ready(); err != nil {
				t.Error(err)
			}
		})
	}
}
