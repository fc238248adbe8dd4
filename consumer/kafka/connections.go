package kafka

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/segmentio/kafka-go/protocol"
)

// dialTimeout bounds one attempt to connect, with TLS and login.
const dialTimeout = 5 * time.Second

// connections are all network connections of one Run. Nothing can outlive it: no long
// poll whose answer nobody waits for, no join that the library won't give up.
type connections struct {
	ctx         context.Context
	cancel      context.CancelFunc
	tls         *tls.Config // nil: not encrypted
	authorities func() (*x509.CertPool, error)

	brokers []string // as configured

	mu     sync.Mutex
	open   map[ends]*connection
	learnt map[int32]protocol.Broker // those of the last layout; never written to
}

func newConnections(config *Config) *connections {
	c := &connections{brokers: config.Brokers, tls: config.TLS, authorities: config.Authorities, open: make(map[ends]*connection)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// dial connects, unless cut was called. It encrypts by itself: the library would keep
// the authorities that it got first.
func (c *connections) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if network == bootstrapNetwork {
		return c.dialAny(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	// Keep-alives end a connection whose other end has vanished while we wait for an
	// answer.
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 4,
	}}
	raw, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	conn := &connection{Conn: raw, raw: raw, address: address, all: c, ends: endsOf(raw)}
	if c.tls != nil {
		if conn.Conn, err = c.encrypt(ctx, raw, address); err != nil {
			_ = raw.Close()
			return nil, fmt.Errorf("TLS with %s: %w", address, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		_ = raw.Close()
		return nil, c.ctx.Err()
	}
	c.open[conn.ends] = conn
	return conn, nil
}

// encrypt does the TLS handshake with the authorities as they are now.
func (c *connections) encrypt(ctx context.Context, raw net.Conn, address string) (net.Conn, error) {
	config := c.tls.Clone()
	if config.ServerName == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		config.ServerName = host
	}
	if c.authorities != nil {
		var err error
		if config.RootCAs, err = c.authorities(); err != nil {
			return nil, err
		}
	}
	conn := tls.Client(raw, config)
	return conn, conn.HandshakeContext(ctx)
}

// cut closes all connections and refuses new ones.
func (c *connections) cut() {
	c.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.open {
		_ = conn.raw.Close() // a farewell by TLS could take long
	}
	clear(c.open)
}

// versions are the request versions that the broker at a connection's other end
// supports. It is asked once: kafka-go asks too, but only returns those that it
// supports itself.
func (c *connections) versions(conn io.ReadWriter, clientID string) (map[int16]version, error) {
	var known *connection
	if wrapped, ok := conn.(addressed); ok { // kafka-go wraps it, to read ahead
		c.mu.Lock()
		known = c.open[endsOf(wrapped)]
		c.mu.Unlock()
	}
	// Nobody else exchanges anything over the connection meanwhile.
	if known != nil && known.supported != nil {
		return known.supported, nil
	}
	all, err := askVersions(conn, clientID)
	if err == nil && known != nil {
		known.supported = all
	}
	return all, err
}

type connection struct {
	net.Conn
	raw       net.Conn // Conn, without what encrypts it
	address   string
	all       *connections
	ends      ends
	supported map[int16]version // what the broker supports; nil: not asked yet
}

// Read adds to an alert which broker sent it: in TLS 1.3 a client learns with the first
// answer, and not in the handshake, that its certificate is missing or refused.
func (c *connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	var alert *net.OpError
	if errors.As(err, &alert) && alert.Op == "remote error" {
		err = fmt.Errorf("TLS with %s: %w (it may want a client's certificate, or another one: tls.cert_file, tls.key_file)", c.address, err)
	}
	return n, err
}

func (c *connection) Close() error {
	c.all.mu.Lock()
	if c.all.open[c.ends] == c {
		delete(c.all.open, c.ends)
	}
	c.all.mu.Unlock()
	return c.Conn.Close()
}

// ends identify an open connection.
type ends struct{ local, remote netip.AddrPort }

type addressed interface {
	LocalAddr() net.Addr
	RemoteAddr() net.Addr
}

func endsOf(a addressed) (e ends) {
	if local, ok := a.LocalAddr().(*net.TCPAddr); ok {
		e.local = local.AddrPort()
	}
	if remote, ok := a.RemoteAddr().(*net.TCPAddr); ok {
		e.remote = remote.AddrPort()
	}
	return e
}
