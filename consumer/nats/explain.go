package nats

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
)

// explain adds what the library leaves out of an error of connecting: which servers were
// tried, and what may cause a failure of TLS. With TLS 1.3 a server refuses a client's
// certificate, or the lack of one, after the handshake, and may have hung up before its
// reason is read.
func (c Config) explain(err error) error {
	var hosts []string
	for _, s := range c.Servers {
		if u, err := url.Parse(s); err == nil { // it may hold a password
			hosts = append(hosts, u.Host)
		}
	}
	hint := ""
	var unverified *tls.CertificateVerificationError
	var network *net.OpError
	if errors.As(err, &network) {
		if (errors.Is(err, natsgo.ErrTLS) || network.Op == "remote error") && !errors.As(err, &unverified) {
			hint = " (it may want a client's certificate, or another one: tls.cert_file, tls.key_file)"
		}
		if network.Source != nil { // our port is another each time, and the log has each reason once
			stable := *network
			stable.Source = nil
			if err = &stable; hint != "" {
				err = fmt.Errorf("%w: %w", natsgo.ErrTLS, &stable)
			}
		}
	}
	return fmt.Errorf("connect to %s: %w%s", strings.Join(hosts, ", "), err, hint)
}

// refusalsTold is how often a connection that is down is asked why.
const refusalsTold = time.Second

// tellRefusals logs why a server that is reached refuses us when we reconnect: the
// library reports servers that can't be reached, but not a handshake that fails. The
// function that it returns ends it.
func (s *Source) tellRefusals(conn *natsgo.Conn, log *slog.Logger) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var telling sync.WaitGroup
	telling.Go(func() {
		var problem logonce.Problem
		for wait.For(ctx, refusalsTold) {
			err := conn.LastError()
			if conn.IsConnected() {
				problem.End()
			} else if conn.IsReconnecting() && err != nil {
				err = s.config.explain(err)
				if problem.IsNew(err) {
					log.Warn("NATS doesn't let us in; trying again", "error", err)
				}
			}
		}
	})
	return func() {
		cancel()
		telling.Wait()
	}
}
