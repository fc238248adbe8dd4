package kafka

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dedupd/dedupd/internal/policy"
)

// Config describes a subscription. Zero values mean the default.
type Config struct {
	// Name is the source's name. Required.
	Name string
	// Brokers are host:port addresses to begin with. Required.
	Brokers []string
	// Topics are the topics to read. Required.
	Topics []string
	// Group is the consumer group. Required.
	Group string
	// The policies. Defaults: StartEarliest, ReadCommitted, GroupResetHonour and
	// GapStop.
	Start        policy.Start
	Isolation    policy.Isolation
	OnGroupReset policy.GroupReset
	OnGap        policy.Gap
	// TLS, if not nil, is used for every connection. An empty ServerName means the
	// host connected to.
	TLS *tls.Config
	// Authorities, if not nil, returns those of TLS at each handshake: they are
	// renewed under a running program.
	Authorities func() (*x509.CertPool, error)
	// SASL is how to log in; a zero value: no login.
	SASL SASL
	// ClientID is the client id of every request. Default: dedupd.
	ClientID string

	// SessionTimeout is how long after its last heartbeat a dead member's
	// partitions are reassigned. Default 10 s: short, since the fence and not
	// this wait makes a take-over safe.
	SessionTimeout time.Duration
	// HeartbeatInterval is the time between heartbeats. Default 1 s.
	HeartbeatInterval time.Duration
	// RebalanceTimeout is how long the group waits for a member that still
	// drains. Default 30 s.
	RebalanceTimeout time.Duration

	// FetchBytes bounds one lane's fetch, as the broker stores it (compressed).
	// Default 1 MiB. A single record batch may be larger.
	FetchBytes int
	// MaxInflatedBytes bounds one record batch in memory, decompressed and as
	// messages. A larger one holds its lane. Default 128 MiB. One that is larger than
	// the worker's whole budget is decoded alone.
	MaxInflatedBytes int64
}

func (c *Config) setDefaults() {
	setDefault(&c.Start, policy.StartEarliest)
	setDefault(&c.Isolation, policy.ReadCommitted)
	setDefault(&c.OnGroupReset, policy.GroupResetHonour)
	setDefault(&c.OnGap, policy.GapStop)
	setDefault(&c.ClientID, "dedupd")
	setDefault(&c.SessionTimeout, 10*time.Second)
	setDefault(&c.HeartbeatInterval, time.Second)
	setDefault(&c.RebalanceTimeout, 30*time.Second)
	setDefault(&c.FetchBytes, 1<<20)
	setDefault(&c.MaxInflatedBytes, 128<<20)
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c *Config) validate() error {
	var all []error
	problem := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }
	check := func(key string, err error) {
		if err != nil {
			problem("%s: %w", key, err)
		}
	}
	if c.Name == "" {
		problem("name: required")
	}
	if len(c.Brokers) == 0 {
		problem("brokers: required")
	}
	if len(c.Topics) == 0 {
		problem("topics: required")
	}
	for i, t := range c.Topics {
		if t == "" || slices.Contains(c.Topics[:i], t) {
			problem("topics: %q is empty or listed twice", t)
		}
	}
	if c.Group == "" {
		problem("group: required")
	}
	check("start", policy.Check(c.Start))
	check("isolation", policy.Check(c.Isolation))
	check("on_group_reset", policy.Check(c.OnGroupReset))
	check("on_gap", policy.Check(c.OnGap))
	if c.HeartbeatInterval <= 0 || c.SessionTimeout < 3*c.HeartbeatInterval {
		problem("session timeout %s: less than three heartbeats of %s", c.SessionTimeout, c.HeartbeatInterval)
	}
	if c.RebalanceTimeout <= 0 {
		problem("rebalance timeout %s: not positive", c.RebalanceTimeout)
	}
	if c.FetchBytes < 0 || c.FetchBytes > maxFetchBytes {
		problem("fetch bytes %d: not between 1 and %d", c.FetchBytes, maxFetchBytes)
	}
	if c.MaxInflatedBytes < 0 || c.MaxInflatedBytes > maxInflated {
		problem("max inflated bytes %d: not between 1 and %d", c.MaxInflatedBytes, maxInflated)
	}
	return errors.Join(all...)
}

// maxInflated is the most that MaxInflatedBytes may be.
const maxInflated = 1 << 30

// drainBudget is how long we wait for in-flight transactions once the group
// rebalances: all other members wait with us. The last commit and the join follow.
func (c *Config) drainBudget() time.Duration {
	budget := min(c.SessionTimeout, c.RebalanceTimeout) - 2*c.HeartbeatInterval - requestTimeout
	return min(max(budget, time.Second), 15*time.Second)
}
