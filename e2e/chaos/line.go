package main

import (
	"context"
	"fmt"
	"strings"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// line is what connections to a broker pass through, and what can become of it.
type line struct{ proxy *toxiproxy.Proxy }

func newLine(upstream string) (*line, error) {
	zerolog.SetGlobalLevel(zerolog.Disabled) // its toxics log to a logger of their own
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	l := &line{toxiproxy.NewProxy(server, upstream, "127.0.0.1:0", upstream)}
	return l, l.proxy.Start()
}

func (l *line) addr() string { return l.proxy.Listen }

// disturb has something wrong with all connections, in both directions, until mend.
// The kinds are Toxiproxy's.
func (l *line) disturb(kind, attributes string) error {
	for _, stream := range []string{"upstream", "downstream"} {
		_, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(
			`{"name": %q, "type": %q, "stream": %q, "attributes": %s}`, stream, kind, stream, attributes)))
		if err != nil {
			return fmt.Errorf("disturb a line by %s: %w", kind, err)
		}
	}
	return nil
}

func (l *line) mend(ctx context.Context) { l.proxy.Toxics.ResetToxics(ctx) }

// down cuts all connections and refuses new ones until up.
func (l *line) down()     { l.proxy.Stop() }
func (l *line) up() error { return l.proxy.Start() }
