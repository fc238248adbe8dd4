// Package pgrelay stands between a client and Postgres and knows what passes: where
// in a claim transaction of dedupd a connection is. At a chosen point it holds
// the connection still and lets a test have its way: kill the client, stop it,
// cut the line before or behind a COMMIT, answer with an error of its own.
//
// So the binary that people run is what is tested: it has no switch for faults,
// and no wrapper. The points are found by the statements' texts, which pass in
// Parse messages, and not by anything that the client would have to tell.
package pgrelay

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Point is a place on a transaction's way.
type Point string

// The points at which a connection can be held. At a "before" the statement has
// not been sent on, and all that comes before it has been done; at an "after" the
// server has answered, and the client has not heard of it.
const (
	TxBefore     Point = "tx.before"     // the transaction is open, the rotation lock not asked for
	ClaimBefore  Point = "claim.before"  // ids may have been looked up, nothing is claimed
	ClaimAfter   Point = "claim.after"   // all of a group's ids are claimed
	SinkBefore   Point = "sink.before"   // the client has heard of its claims; the sink's first statement waits
	SinkAfter    Point = "sink.after"    // the sink has written; dead letters and lanes are to come
	CommitBefore Point = "commit.before" // the lanes have moved
	CommitAfter  Point = "commit.after"  // the COMMIT is done, its answer held back
	FlipBefore   Point = "flip.before"   // a rotation is to begin
	FlipAfter    Point = "flip.after"    // it is done but for its COMMIT
	DropBefore   Point = "drop.before"   // an expired generation's table is to be dropped
	TakeBefore   Point = "take.before"   // a lane is to be taken
	TakeAfter    Point = "take.after"    // it is taken but for the COMMIT
)

// Points are all of them.
var Points = []Point{
	TxBefore, ClaimBefore, ClaimAfter, SinkBefore, SinkAfter, CommitBefore, CommitAfter,
	FlipBefore, FlipAfter, DropBefore, TakeBefore, TakeAfter,
}

// Verdict says how a connection goes on after a point.
type Verdict int

const (
	// GoOn sends on what was held.
	GoOn Verdict = iota
	// Cut ends the connection on both sides, and what was held is lost.
	Cut
	// Mute sends on what was held, and ends the client's side at once: the server
	// may or may not come to do it.
	Mute
)

// Relay relays connections to one server. Its methods may be called by several
// goroutines.
type Relay struct {
	listener net.Listener
	upstream string

	mu     sync.Mutex
	closed bool
	conns  map[*connection]struct{}
	rule   *rule
	delay  time.Duration
	down   bool
	passed map[Point]int
	wait   sync.WaitGroup
}

// rule holds the nth connection that comes to a point from now on.
type rule struct {
	point Point
	left  int
	act   func(*Held) Verdict
}

// Held is a connection that is held at a point.
type Held struct {
	// Server is the port by which the server knows the connection: client_port in
	// pg_stat_activity.
	Server     int
	connection *connection
}

// Refuse makes the relay answer in the server's place with an error of this
// SQLSTATE, once the point's function returns GoOn; what was held is thrown away.
// Only for points "before".
func (h *Held) Refuse(sqlstate string) { h.connection.refuse = sqlstate }

// Listen starts a relay on 127.0.0.1 and a free port, in front of the server at
// host:port.
func Listen(upstream string) (*Relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	t := &Relay{listener: l, upstream: upstream, conns: map[*connection]struct{}{}, passed: map[Point]int{}}
	t.wait.Go(t.accept)
	return t, nil
}

// Addr is host:port of the relay.
func (t *Relay) Addr() string { return t.listener.Addr().String() }

// Close cuts all connections and takes no more. A point's function that still
// runs is waited for.
func (t *Relay) Close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	_ = t.listener.Close()
	t.CutAll()
	t.wait.Wait()
}

// Set holds the nth connection, from 1, that comes to the point from now on, and
// calls act with it, in the place of whatever was set before. It is called once.
func (t *Relay) Set(point Point, nth int, act func(*Held) Verdict) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rule = &rule{point, nth, act}
}

// Clear forgets what was set and has not happened, and reports whether there was
// such a thing.
func (t *Relay) Clear() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.rule != nil
	t.rule = nil
	return was
}

// Passed is how often connections have come to a point.
func (t *Relay) Passed(p Point) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.passed[p]
}

// Down cuts all connections and refuses new ones until Up.
func (t *Relay) Down() {
	t.mu.Lock()
	t.down = true
	t.mu.Unlock()
	t.CutAll()
}

// Up takes connections again.
func (t *Relay) Up() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.down = false
}

// Redirect sends connections that are made from now on to another server.
func (t *Relay) Redirect(upstream string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.upstream = upstream
}

// Delay makes each message to the server that ends a round trip wait for so long.
func (t *Relay) Delay(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.delay = d
}

// CutAll ends all connections, in the middle of whatever they do.
func (t *Relay) CutAll() {
	t.mu.Lock()
	all := make([]*connection, 0, len(t.conns))
	for r := range t.conns {
		all = append(all, r)
	}
	t.mu.Unlock()
	for _, r := range all {
		r.cut()
	}
}

func (t *Relay) accept() {
	for {
		client, err := t.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // such as too many open files
			continue
		}
		t.wait.Go(func() { t.serve(client) })
	}
}

func (t *Relay) serve(client net.Conn) {
	t.mu.Lock()
	upstream, refused := t.upstream, t.down || t.closed
	t.mu.Unlock()
	if refused {
		reset(client)
		return
	}
	server, err := net.DialTimeout("tcp", upstream, 5*time.Second)
	if err != nil {
		reset(client)
		return
	}
	r := &connection{relay: t, client: client, server: server, statements: map[string]kind{}}
	t.mu.Lock()
	if t.down || t.closed {
		refused = true
	} else {
		t.conns[r] = struct{}{}
	}
	t.mu.Unlock()
	if refused {
		r.cut()
		return
	}
	var both sync.WaitGroup
	both.Go(func() { r.toServer(bufio.NewReaderSize(client, 64<<10), bufio.NewWriterSize(server, 64<<10)) })
	both.Go(func() { r.toClient(bufio.NewReaderSize(server, 64<<10), bufio.NewWriterSize(client, 64<<10)) })
	both.Wait()
	t.mu.Lock()
	delete(t.conns, r)
	t.mu.Unlock()
}

// come tells that a connection has come to a point, and holds it there if that
// was asked for.
func (t *Relay) come(r *connection, p Point) Verdict {
	t.mu.Lock()
	t.passed[p]++
	var act func(*Held) Verdict
	if t.rule != nil && t.rule.point == p {
		if t.rule.left--; t.rule.left <= 0 {
			act = t.rule.act
			t.rule = nil
		}
	}
	t.mu.Unlock()
	if act == nil {
		return GoOn
	}
	return act(&Held{Server: r.server.LocalAddr().(*net.TCPAddr).Port, connection: r})
}

func (t *Relay) pause() {
	t.mu.Lock()
	d := t.delay
	t.mu.Unlock()
	time.Sleep(d)
}

// reset ends a connection with a reset: no farewell, as when a machine is gone.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}

func protocolError(what string, n int) error { return fmt.Errorf("pgrelay: %s of %d bytes", what, n) }
