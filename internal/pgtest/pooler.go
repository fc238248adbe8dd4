package pgtest

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// NewPooler starts a transaction pooler in front of the database at a URL, as strict as
// PgBouncer in transaction mode without max_prepared_statements: every
// transaction gets a server connection that it hasn't had the last time, and
// named prepared statements are refused. It gives the URL to connect to. When
// the test ends, it fails if the sessions were left with anything that would meet
// the next client: a lock or a setting.
func NewPooler(t testing.TB, database string, connections int) (url string) {
	t.Helper()
	p := &pooler{t: t, idle: make(chan *pgconn.HijackedConn, connections)}
	for range connections {
		conn, err := pgconn.Connect(t.Context(), database)
		if err != nil {
			t.Fatal(err)
		}
		server, err := conn.Hijack()
		if err != nil {
			t.Fatal(err)
		}
		p.servers = append(p.servers, server)
		p.idle <- server
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.clients.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.open = append(p.open, conn)
			p.mu.Unlock()
			p.clients.Go(func() { p.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		p.mu.Lock()
		for _, conn := range p.open {
			_ = conn.Close()
		}
		p.mu.Unlock()
		p.clients.Wait()
		p.inspect()
	})
	config, err := pgconn.ParseConfig(database)
	if err != nil {
		t.Fatal(err)
	}
	return "postgres://" + config.User + "@" + listener.Addr().String() + "/" + config.Database + "?sslmode=disable"
}

type pooler struct {
	t       testing.TB
	clients sync.WaitGroup
	servers []*pgconn.HijackedConn
	idle    chan *pgconn.HijackedConn // first in, first out: never the same twice, if there are two

	mu   sync.Mutex
	open []net.Conn
}

// serve is one client's connection.
func (p *pooler) serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	client := pgproto3.NewBackend(conn, conn)
	if _, err := client.ReceiveStartupMessage(); err != nil {
		return
	}
	client.Send(&pgproto3.AuthenticationOk{})
	for name, value := range p.servers[0].ParameterStatuses {
		client.Send(&pgproto3.ParameterStatus{Name: name, Value: value})
	}
	client.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{1, 2, 3, 4}})
	client.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	if client.Flush() != nil {
		return
	}
	for {
		// The first message of a transaction is what a server is taken for.
		first, err := client.Receive()
		if err != nil {
			return
		}
		if _, ok := first.(*pgproto3.Terminate); ok {
			return
		}
		server := <-p.idle
		err = p.transaction(client, server, first)
		p.idle <- server
		if err != nil {
			return
		}
	}
}

var errNamed = errors.New("a statement was prepared under a name")

// transaction passes messages on until the server is idle again.
func (p *pooler) transaction(client *pgproto3.Backend, server *pgconn.HijackedConn, message pgproto3.FrontendMessage) (err error) {
	status := byte('T')
	defer func() {
		if err != nil && status != 'I' {
			p.rollback(server)
		}
	}()
	for {
		if parse, ok := message.(*pgproto3.Parse); ok && parse.Name != "" {
			p.t.Errorf("%v: %s: %s", errNamed, parse.Name, parse.Query)
			return errNamed
		}
		server.Frontend.Send(message)
		switch message.(type) {
		case *pgproto3.Sync, *pgproto3.Query, *pgproto3.CopyDone, *pgproto3.CopyFail:
			if err := server.Frontend.Flush(); err != nil {
				return err
			}
			if status, err = answer(client, server); err != nil {
				return err
			}
			if status == 'I' {
				return nil
			}
		}
		if message, err = client.Receive(); err != nil {
			return err
		}
		if _, ok := message.(*pgproto3.Terminate); ok {
			return net.ErrClosed
		}
	}
}

// answer passes a server's answer on: until it is ready, or wants to be copied to.
func answer(client *pgproto3.Backend, server *pgconn.HijackedConn) (status byte, err error) {
	for {
		message, err := server.Frontend.Receive()
		if err != nil {
			return 0, err
		}
		client.Send(message)
		switch m := message.(type) {
		case *pgproto3.ReadyForQuery:
			return m.TxStatus, client.Flush()
		case *pgproto3.CopyInResponse:
			return 'T', client.Flush()
		}
	}
}

// rollback brings the server of a client that went away back into order.
func (p *pooler) rollback(server *pgconn.HijackedConn) {
	server.Frontend.Send(&pgproto3.Sync{})
	server.Frontend.Send(&pgproto3.Query{String: "rollback"})
	if server.Frontend.Flush() != nil {
		return
	}
	for range 2 {
		for {
			message, err := server.Frontend.Receive()
			if err != nil {
				return
			}
			if _, ok := message.(*pgproto3.ReadyForQuery); ok {
				break
			}
		}
	}
}

// inspect looks for what was left in the sessions.
func (p *pooler) inspect() {
	for _, server := range p.servers {
		conn, err := pgconn.Construct(server)
		if err != nil {
			p.t.Error(err)
			continue
		}
		results, err := conn.Exec(context.Background(), `
			SELECT 'an advisory lock of class ' || classid FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'
			UNION ALL SELECT 'the setting ' || name || ' = ' || setting FROM pg_settings WHERE source = 'session' AND name NOT IN ('application_name', 'client_encoding')`).ReadAll()
		if err != nil {
			p.t.Error(err)
		}
		for _, result := range results {
			for _, row := range result.Rows {
				p.t.Errorf("a session was left with %s", row[0])
			}
		}
		if err := conn.Close(context.Background()); err != nil {
			p.t.Error(err)
		}
	}
}
