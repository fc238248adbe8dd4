package kafka

import "github.com/dedupd/dedupd/internal/policy"

// StartPolicy says where a lane begins that has no position, if the group has
// committed none either.
type StartPolicy string

const (
	// StartEarliest begins with the partition's first message.
	StartEarliest StartPolicy = "earliest"
	// StartLatest begins after what is committed now. A partition that is added
	// later begins with its first message.
	StartLatest StartPolicy = "latest"
	// StartGroup begins nowhere: the lane is held until somebody commits an offset
	// to the group.
	StartGroup StartPolicy = "group"
)

// Values are the policies there are.
func (StartPolicy) Values() []StartPolicy {
	return []StartPolicy{StartEarliest, StartLatest, StartGroup}
}

func (p *StartPolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }

// IsolationLevel says whether messages of open and aborted transactions are read.
type IsolationLevel string

const (
	// ReadCommitted leaves them out.
	ReadCommitted IsolationLevel = "read_committed"
	// ReadUncommitted reads them.
	ReadUncommitted IsolationLevel = "read_uncommitted"
)

// Values are the levels there are.
func (IsolationLevel) Values() []IsolationLevel {
	return []IsolationLevel{ReadCommitted, ReadUncommitted}
}

func (l *IsolationLevel) UnmarshalText(text []byte) error { return policy.Unmarshal(l, text) }

// GroupResetPolicy says whether a lane follows when the group's offset was moved
// back.
type GroupResetPolicy string

const (
	// HonourGroupReset reads again from the group's offset.
	HonourGroupReset GroupResetPolicy = "honour"
	// IgnoreGroupReset goes on at the lane's own position.
	IgnoreGroupReset GroupResetPolicy = "ignore"
)

// Values are the policies there are.
func (GroupResetPolicy) Values() []GroupResetPolicy {
	return []GroupResetPolicy{HonourGroupReset, IgnoreGroupReset}
}

func (p *GroupResetPolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }

// GapPolicy says what happens when the broker no longer has a lane's next
// position, or its log was cut below.
type GapPolicy string

const (
	// StopOnGap holds the lane.
	StopOnGap GapPolicy = "stop"
	// SkipGap goes on with what is left.
	SkipGap GapPolicy = "skip"
)

// Values are the policies there are.
func (GapPolicy) Values() []GapPolicy { return []GapPolicy{StopOnGap, SkipGap} }

func (p *GapPolicy) UnmarshalText(text []byte) error { return policy.Unmarshal(p, text) }

// Mechanism is a SASL mechanism.
type Mechanism string

// The mechanisms that a configuration may name.
const (
	// NoLogin is for brokers that ask for none.
	NoLogin     Mechanism = ""
	Plain       Mechanism = "plain"
	ScramSHA256 Mechanism = "scram-sha-256"
	ScramSHA512 Mechanism = "scram-sha-512"
	// OAuthBearer isn't available yet.
	OAuthBearer Mechanism = "oauthbearer"
)

// Values are the mechanisms there are.
func (Mechanism) Values() []Mechanism {
	return []Mechanism{NoLogin, Plain, ScramSHA256, ScramSHA512, OAuthBearer}
}

func (m *Mechanism) UnmarshalText(text []byte) error { return policy.Unmarshal(m, text) }
