package crash_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"sync/atomic"
)

var (
	errDead = errors.New("this worker was killed by the test")
	errCut  = errors.New("this connection was cut by the test")
)

// conn is a worker's connection to Postgres. It stops where the trap says, by
// the statements that pass: a round trip is divided, its first part sent, and
// the rest held back until the fault has happened.
type conn struct {
	net.Conn
	worker *worker

	dead     atomic.Bool
	withheld atomic.Pointer[chan struct{}] // the server's answers wait for it
	once     sync.Once
	copies   bool // claims are on their way
}

// port is how the server knows this connection.
func (c *conn) port() int { return c.LocalAddr().(*net.TCPAddr).Port }

// vanish is what the end of a process does to its connections: no farewell.
func (c *conn) vanish() {
	c.dead.Store(true)
	_ = c.Conn.Close()
}

func (c *conn) Close() error {
	c.once.Do(func() { c.worker.forget(c) })
	return c.Conn.Close()
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if w := c.withheld.Load(); w != nil {
		<-*w
	}
	if c.dead.Load() {
		return 0, errCut
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	if c.dead.Load() {
		return 0, errCut
	}
	if at := behindEnter(b); at >= 0 {
		return c.writeIn(b, at, begun, "state = 'active' AND wait_event = 'ClientRead' AND query LIKE '%enter%'")
	}
	switch {
	case b[0] == 'Q' && bytes.HasPrefix(b[5:], []byte("COPY ")):
		c.copies = true
		return c.writeIn(b, 0, looked, "state = 'idle in transaction'")
	case b[0] == 'c' && c.copies: // CopyDone
		c.copies = false
		return c.writeIn(b, 0, copied, "state = 'active' AND query LIKE 'COPY %'")
	}
	at := bindOf(b, "dedupd_commit")
	if at < 0 {
		return c.Conn.Write(b)
	}
	if c.worker.due(committed) {
		return c.commitUnheard(b)
	}
	n, err := c.writeIn(b, at, fenced, "state = 'active' AND wait_event = 'ClientRead' AND query LIKE '%advance%'")
	if err == nil {
		c.worker.commits.Add(1)
	}
	return n, err
}

// writeIn sends what stands before the offset, waits until the server has done
// it, lets the fault happen, and sends the rest if there is still somebody to
// send it.
func (c *conn) writeIn(b []byte, at int, s step, done string) (int, error) {
	if !c.worker.due(s) {
		return c.Conn.Write(b)
	}
	if n, err := c.Conn.Write(b[:at]); err != nil {
		return n, err
	}
	c.worker.cell.awaitBackend(c.port(), done)
	if c.worker.strike(s, c) == cut {
		c.vanish()
		return at, errCut
	}
	n, err := c.Conn.Write(b[at:])
	return at + n, err
}

// commitUnheard has the COMMIT done and keeps its answer back. Unless the fault
// lets it arrive late, it is lost.
func (c *conn) commitUnheard(b []byte) (int, error) {
	release := make(chan struct{})
	c.withheld.Store(&release)
	n, err := c.Conn.Write(b)
	if err == nil {
		c.worker.commits.Add(1)
		c.worker.cell.awaitBackend(c.port(), "state = 'idle' AND query = 'commit'")
		if c.worker.strike(committed, c) != late {
			c.vanish()
		}
	}
	c.withheld.Store(nil)
	close(release)
	return n, err // a kernel would have taken it, too
}

// behindEnter finds what follows enter() in its round trip: a look for claims, or
// the claim.
func behindEnter(b []byte) int {
	enter := bindOf(b, "dedupd_enter")
	if enter < 0 {
		return -1
	}
	next := enter + 1 + int(binary.BigEndian.Uint32(b[enter+1:]))
	if at := bindOf(b[next:], "dedupd_"); at >= 0 {
		return next + at
	}
	return -1
}

// bindOf finds, in whole messages of Postgres' protocol, the one that binds a
// prepared statement whose name begins so; -1: none does. (A Bind is 'B', the
// length, the portal's name and the statement's name, each ended by a zero.)
func bindOf(b []byte, prefix string) int {
	for at := 0; at+5 <= len(b); {
		length := int(binary.BigEndian.Uint32(b[at+1:]))
		if length < 4 || at+1+length > len(b) {
			return -1 // a start-up message, which has no type
		}
		if body := b[at+5 : at+1+length]; b[at] == 'B' && len(body) > 0 && body[0] == 0 && bytes.HasPrefix(body[1:], []byte(prefix)) {
			return at
		}
		at += 1 + length
	}
	return -1
}

// dial connects a worker that is alive.
func (w *worker) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	inner, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: inner, worker: w}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead.Load() {
		_ = inner.Close()
		return nil, errDead
	}
	w.conns[c] = struct{}{}
	return c, nil
}

func (w *worker) forget(c *conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, c)
}
