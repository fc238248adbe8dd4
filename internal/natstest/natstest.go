// Package natstest runs a NATS server with JetStream for a test, in the test's
// own process.
package natstest

import (
	"errors"
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
	s, err := Run(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Stop(s) })
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

// Run starts a server on 127.0.0.1 and a free port, which keeps its streams in
// the folder, until Stop.
func Run(folder string) (*server.Server, error) {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: folder, NoLog: true, NoSigs: true})
	if err != nil {
		return nil, err
	}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		Stop(s)
		return nil, errors.New("the NATS server is not ready after 10 s")
	}
	return s, nil
}

// Stop stops a server and waits for its end.
func Stop(s *server.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}
