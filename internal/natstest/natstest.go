// Package natstest runs a NATS server with JetStream for a test, in the test's
// own process.
package natstest

import (
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Start starts a server on 127.0.0.1 and a free port, with the stream ORDERS of
// the subject orders, and connects to it. Both end with the test. With -short the
// test is skipped.
func Start(t *testing.T) (url string, js jetstream.JetStream) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a NATS server, and -short asks for tests without servers")
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("no NATS server")
	}
	conn, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	if js, err = jetstream.New(conn); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders"}}); err != nil {
		t.Fatal(err)
	}
	return s.ClientURL(), js
}
