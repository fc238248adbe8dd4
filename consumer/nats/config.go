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
)

// ModeQueue is the mode in which any number of workers share one durable, and no
// order is kept.
const ModeQueue = "queue"

// Where a durable that doesn't exist yet begins.
const (
	StartEarliest = "earliest"
	StartLatest   = "latest"
)

// defaultAckWait is after what time the server gives the messages of a worker
// that is gone to somebody else. It may be short, for one that is at work asks for
// more time (progress.go).
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
	// Mode is "queue", the default.
	Mode string
	// Start is "earliest", the default, or "latest": where a new durable begins.
	Start string
	// AckWait is after what time the server delivers a message again of whose
	// worker it has not heard. The default is 10 s, or what the durable has if
	// that is longer.
	AckWait time.Duration
	// MaxAckPending bounds the messages that all workers together have in hand.
	// The default is ample, or what the durable has if that is more.
	MaxAckPending int
	// OnGap is StopOnGap, the default, or SkipGap: what to do when the stream has
	// discarded messages before they were read.
	OnGap string
	// CredsFile is a file with a user's JWT and seed, NkeySeedFile one with a
	// seed only. Both are read again at each connect.
	CredsFile    string
	NkeySeedFile string
	// TLS, if not nil, demands an encrypted connection.
	TLS *tls.Config
	// Authorities, if not nil, is asked at each handshake for those of TLS: they
	// are renewed under a running program.
	Authorities func() (*x509.CertPool, error)
}

// configError says that only another configuration, or an operator's hand at the
// durable, helps.
type configError struct{ text string }

func (e *configError) Error() string { return e.text }

func (c Config) withDefaults() Config {
	if c.Mode == "" {
		c.Mode = ModeQueue
	}
	if c.Start == "" {
		c.Start = StartEarliest
	}
	if c.OnGap == "" {
		c.OnGap = StopOnGap
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
	switch c.Mode {
	case ModeQueue:
	case "lanes":
		bad("mode: lanes is not available yet; use %s", ModeQueue)
	default:
		bad("mode: %q is not a mode; use %s", c.Mode, ModeQueue)
	}
	if c.Start != StartEarliest && c.Start != StartLatest {
		bad("start: %q is neither %s nor %s", c.Start, StartEarliest, StartLatest)
	}
	if c.OnGap != StopOnGap && c.OnGap != SkipGap {
		bad("on_gap: %q is neither %s nor %s", c.OnGap, StopOnGap, SkipGap)
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
