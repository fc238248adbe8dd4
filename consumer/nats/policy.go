package nats

import "github.com/dedupd/dedupd/internal/policy"

// Mode says how workers share a stream.
type Mode string

const (
	// ModeQueue lets any number of workers share one durable. It keeps no order.
	ModeQueue Mode = "queue"
	// ModeLanes isn't available yet.
	ModeLanes Mode = "lanes"
)

// Values are the modes there are.
func (Mode) Values() []Mode { return []Mode{ModeQueue, ModeLanes} }

func (m *Mode) UnmarshalText(text []byte) error { return policy.Unmarshal(m, text) }

// StartPolicy says where a durable begins that doesn't exist yet.
type StartPolicy string

const (
	// StartEarliest begins with the stream's first message.
	StartEarliest StartPolicy = "earliest"
	// StartLatest begins after the stream's last message.
	StartLatest StartPolicy = "latest"
)

// Values are the policies there are.
func (StartPolicy) Values() []StartPolicy { return []StartPolicy{StartEarliest, StartLatest} }

func (p *StartPolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }

// GapPolicy says what happens when the stream has discarded messages before they
// were read.
type GapPolicy string

const (
	// StopOnGap holds the queue until somebody accepts the gap.
	StopOnGap GapPolicy = "stop"
	// SkipGap counts what is missing and goes on.
	SkipGap GapPolicy = "skip"
)

// Values are the policies there are.
func (GapPolicy) Values() []GapPolicy { return []GapPolicy{StopOnGap, SkipGap} }

func (p *GapPolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }
