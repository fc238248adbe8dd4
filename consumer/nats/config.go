package nats

import (
	"crypto/tls"
	"crypto/x509"
	"strings"
	"time"

	"github.com/dedupd/dedupd/internal/policy"
)

// defaultAckWait is after what time the server delivers the messages of a dead worker to
// others. It may be short, for a worker that is alive asks for more time (progress.go).
const defaultAckWait = 10 * time.Second

// Config is a source's configuration. Package config has checked it.
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
	// The policies. Defaults: QueueEarliest and GapStop.
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

func (c Config) servers() string { return strings.Join(c.Servers, ",") }
