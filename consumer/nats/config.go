package nats

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dedupd/dedupd/internal/policy"
)

// defaultAckWait is after what time the server delivers the messages of a dead worker to
// others. It may be short, for a worker that is alive asks for more time (progress.go).
const defaultAckWait = 10 * time.Second

// Config is a source's configuration. What is empty gets its default from New.
type Config struct {
	// Name is the source's name.
	Name string
	// Servers are URLs, which may carry user and password, or a token.
	Servers []string
	// Stream must exist; it is waited for.
	Stream string
	// Subjects filter the stream; none: all of it.
	Subjects []string
	// Durable is the name of the consumer, created where it is missing.
	Durable string
	// The policies. Defaults: ModeQueue, QueueEarliest and GapStop.
	Mode  policy.Mode
	Start policy.QueueStart
	OnGap policy.Gap
	// AckWait is after what time the server redelivers a message whose worker it hasn't
	// heard of. The default is 10 s, or what the durable has if that is longer.
	AckWait time.Duration
	// MaxAckPending bounds the messages outstanding with all workers together. The
	// default is ample, or what the durable has if that is more.
	MaxAckPending int
	// CredsFile is a file with a user's JWT and seed, NkeySeedFile one with a
	// seed only. Both are read again at each connect.
	CredsFile    string
	NkeySeedFile string
	// TLS, if not nil, demands an encrypted connection.
	TLS *tls.Config
	// Authorities, if not nil, returns the certificate authorities at each handshake:
	// they may be renewed under a running program.
	Authorities func() (*x509.CertPool, error)
}

// configError says that only another configuration, or an operator's change of the
// durable, helps.
type configError struct{ text string }

func (e *configError) Error() string { return e.text }

func (c Config) withDefaults() Config {
	if c.Mode == "" {
		c.Mode = policy.ModeQueue
	}
	if c.Start == "" {
		c.Start = policy.QueueEarliest
	}
	if c.OnGap == "" {
		c.OnGap = policy.GapStop
	}
	return c
}

func (c Config) validate() error {
	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if c.Name == "" {
		bad("name is empty")
	}
	if len(c.Servers) == 0 {
		bad("servers is empty")
	}
	for i, s := range c.Servers {
		if u, err := url.Parse(s); err != nil || u.Host == "" || strings.Contains(s, ",") {
			// The text may hold a password, so it isn't repeated.
			bad("servers[%d] is not a URL such as nats://host:4222", i)
		}
	}
	if !isName(c.Stream) {
		bad("stream: %q can't be a stream's name", c.Stream)
	}
	if !isName(c.Durable) {
		bad("durable: %q can't be a durable's name", c.Durable)
	}
	for i, s := range c.Subjects {
		if s == "" || strings.ContainsAny(s, " \t\r\n") || slices.Contains(strings.Split(s, "."), "") {
			bad("subjects[%d]: %q is not a subject", i, s)
		}
	}
	if err := policy.Check(c.Mode); err != nil {
		bad("mode: %w", err)
	}
	if c.Mode == policy.ModeLanes {
		bad("mode: %s is not available yet; use %s", policy.ModeLanes, policy.ModeQueue)
	}
	if err := policy.Check(c.Start); err != nil {
		bad("start: %w", err)
	}
	if err := policy.Check(c.OnGap); err != nil {
		bad("on_gap: %w", err)
	}
	if c.AckWait < 0 || c.MaxAckPending < 0 {
		bad("the ack wait and the most pending acks can't be negative")
	}
	if c.CredsFile != "" && c.NkeySeedFile != "" {
		bad("creds_file and nkey_seed_file exclude each other")
	}
	return errors.Join(problems...)
}

// isName tells whether the server takes a name for a stream or a durable.
func isName(s string) bool { return s != "" && !strings.ContainsAny(s, " \t\r\n.*>/\\") }

func (c Config) servers() string { return strings.Join(c.Servers, ",") }
