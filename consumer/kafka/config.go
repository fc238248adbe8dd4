package kafka

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"time"

	"github.com/dedupd/dedupd/internal/policy"
)

// Config describes a subscription. Zero values mean the default. Package config has
// checked what people write.
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

	// FetchBytes bounds one lane's fetch, as the broker stores it (compressed).
	// Default 1 MiB, at most maxFetchBytes. A single record batch may be larger.
	FetchBytes int
	// MaxInflatedBytes bounds one record batch in memory, decompressed and as
	// messages. A larger one holds its lane. Default 128 MiB. One that is larger than
	// the worker's whole budget is decoded alone.
	MaxInflatedBytes int64
}

func (c *Config) setDefaults() {
	c.Start = cmp.Or(c.Start, policy.StartEarliest)
	c.Isolation = cmp.Or(c.Isolation, policy.ReadCommitted)
	c.OnGroupReset = cmp.Or(c.OnGroupReset, policy.GroupResetHonour)
	c.OnGap = cmp.Or(c.OnGap, policy.GapStop)
	c.ClientID = cmp.Or(c.ClientID, "dedupd")
	c.SessionTimeout = cmp.Or(c.SessionTimeout, 10*time.Second)
	c.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, time.Second)
	c.FetchBytes = cmp.Or(c.FetchBytes, 1<<20)
	c.MaxInflatedBytes = cmp.Or(c.MaxInflatedBytes, 128<<20)
}

// drainBudget is how long we wait for in-flight transactions once the group
// rebalances: all other members wait with us. The last commit and the join follow.
func (c *Config) drainBudget() time.Duration {
	budget := min(c.SessionTimeout, rebalanceTimeout) - 2*c.HeartbeatInterval - requestTimeout
	return min(max(budget, time.Second), 15*time.Second)
}
