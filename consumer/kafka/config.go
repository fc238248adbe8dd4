package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"

	"github.com/dedupd/dedupd/internal/policy"
)

// SASL is how to log in.
type SASL struct {
	Mechanism Mechanism
	Username  string
	Password  string
	// CurrentPassword, if not nil, is asked at each login instead: passwords
	// change under a running program.
	CurrentPassword func() (string, error)
}

// login is a mechanism that is made anew for each connection.
type login struct {
	SASL
	name string
}

var _ sasl.Mechanism = (*login)(nil)

func (l *login) Name() string { return l.name }

func (l *login) Start(ctx context.Context) (sasl.StateMachine, []byte, error) {
	m, err := l.mechanism()
	if err != nil {
		return nil, nil, err
	}
	return m.Start(ctx)
}

// login checks the settings; nil: none are wanted.
func (s SASL) login() (sasl.Mechanism, error) {
	if s.Mechanism == NoLogin {
		return nil, nil
	}
	m, err := s.mechanism()
	if err != nil {
		return nil, err
	}
	if s.Username == "" {
		return nil, errors.New("sasl.username: required with a mechanism")
	}
	return &login{s, m.Name()}, nil
}

func (s SASL) mechanism() (m sasl.Mechanism, err error) {
	password := s.Password
	if s.CurrentPassword != nil {
		if password, err = s.CurrentPassword(); err != nil {
			return nil, fmt.Errorf("sasl.password: %w", err)
		}
	}
	switch s.Mechanism {
	case Plain:
		m = plain.Mechanism{Username: s.Username, Password: password}
	case ScramSHA256:
		m, err = scram.Mechanism(scram.SHA256, s.Username, password)
	case ScramSHA512:
		m, err = scram.Mechanism(scram.SHA512, s.Username, password)
	default:
		return nil, fmt.Errorf("sasl.mechanism: %q is not plain, scram-sha-256 or scram-sha-512", s.Mechanism)
	}
	if err != nil {
		return nil, fmt.Errorf("sasl: %w", err)
	}
	return m, nil
}

func (c *Config) setDefaults() {
	setDefault(&c.Start, StartEarliest)
	setDefault(&c.Isolation, ReadCommitted)
	setDefault(&c.OnGroupReset, HonourGroupReset)
	setDefault(&c.OnGap, StopOnGap)
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
			problem("topics: %q is empty or stands twice", t)
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

// drainBudget is how long batches in their transactions are waited for once the
// group wants its lanes back: for as long all others wait with us. Behind it come
// the last commit and the join.
func (c *Config) drainBudget() time.Duration {
	budget := min(c.SessionTimeout, c.RebalanceTimeout) - 2*c.HeartbeatInterval - requestTimeout
	return min(max(budget, time.Second), 15*time.Second)
}
