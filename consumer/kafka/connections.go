package kafka

import (
	"context"
	"net"
	"sync"
	"time"
)

// dialTimeout bounds one attempt to connect, with TLS and login.
const dialTimeout = 5 * time.Second

// connections are all network connections of one Run, so that nothing of it can
// outlive it: not a long poll whose answer nobody waits for, nor a join that the
// library won't give up.
type connections struct {
	ctx    context.Context
	cancel context.CancelFunc

	mu   sync.Mutex
	open map[*connection]struct{}
}

func newConnections() *connections {
	c := &connections{open: make(map[*connection]struct{})}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// dial connects, unless cut was called.
func (c *connections) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	// Keep-alives are what ends a connection whose other end has vanished while
	// we wait for an answer.
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 4,
	}}
	raw, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	conn := &connection{Conn: raw, all: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		_ = raw.Close()
		return nil, c.ctx.Err()
	}
	c.open[conn] = struct{}{}
	return conn, nil
}

// cut closes all connections and refuses new ones.
func (c *connections) cut() {
	c.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.open {
		_ = conn.Conn.Close()
	}
	clear(c.open)
}

type connection struct {
	net.Conn
	all *connections
}

func (c *connection) Close() error {
	c.all.mu.Lock()
	delete(c.all.open, c)
	c.all.mu.Unlock()
	return c.Conn.Close()
}
