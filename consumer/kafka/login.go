package kafka

import (
	"context"
	"fmt"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"

	"github.com/dedupd/dedupd/internal/policy"
)

// SASL is how to log in.
type SASL struct {
	Mechanism policy.Mechanism
	Username  string
	// CurrentPassword is asked at each login: passwords change under a running program.
	CurrentPassword func() (string, error)
}

// login is a mechanism that is made anew for each connection.
type login struct {
	settings SASL
	name     string
}

var _ sasl.Mechanism = (*login)(nil)

func (l *login) Name() string { return l.name }

func (l *login) Start(ctx context.Context) (sasl.StateMachine, []byte, error) {
	m, err := l.settings.mechanism()
	if err != nil {
		return nil, nil, err
	}
	return m.Start(ctx)
}

// login checks the settings. Nil: no login is configured.
func (s SASL) login() (sasl.Mechanism, error) {
	if s.Mechanism == policy.MechanismNone {
		return nil, nil
	}
	m, err := s.mechanism()
	if err != nil {
		return nil, err
	}
	return &login{s, m.Name()}, nil
}

func (s SASL) mechanism() (m sasl.Mechanism, err error) {
	password, err := s.CurrentPassword()
	if err != nil {
		return nil, fmt.Errorf("sasl.password: %w", err)
	}
	switch s.Mechanism {
	case policy.MechanismPlain:
		m = plain.Mechanism{Username: s.Username, Password: password}
	case policy.MechanismScramSHA256:
		m, err = scram.Mechanism(scram.SHA256, s.Username, password)
	case policy.MechanismScramSHA512:
		m, err = scram.Mechanism(scram.SHA512, s.Username, password)
	default:
		return nil, fmt.Errorf("sasl.mechanism: %q is not plain, scram-sha-256 or scram-sha-512", s.Mechanism)
	}
	if err != nil {
		return nil, fmt.Errorf("sasl: %w", err)
	}
	return m, nil
}
