package config

import "github.com/dedupd/dedupd/internal/policy"

// Pooler is the pooler between us and Postgres.
type Pooler string

const (
	// PoolerNone is no pooler.
	PoolerNone Pooler = "none"
	// PoolerTransaction is PgBouncer in its transaction mode, or the like.
	PoolerTransaction Pooler = "pgbouncer_transaction"
)

func (Pooler) Values() []string { return policy.Values(PoolerNone, PoolerTransaction) }

// Strategy says how duplicates are recognised.
type Strategy string

const (
	// StrategyClaim claims each id once.
	StrategyClaim Strategy = "claim"
	// StrategySequence isn't available yet.
	StrategySequence Strategy = "sequence"
)

func (Strategy) Values() []string { return policy.Values(StrategyClaim, StrategySequence) }

// SequenceGapPolicy says what a missing sequence number means.
type SequenceGapPolicy string

// What may become of a gap.
const (
	SequenceGapAllow      SequenceGapPolicy = "allow"
	SequenceGapDeadLetter SequenceGapPolicy = "dead_letter"
	SequenceGapStop       SequenceGapPolicy = "stop"
)

func (SequenceGapPolicy) Values() []string {
	return policy.Values(SequenceGapAllow, SequenceGapDeadLetter, SequenceGapStop)
}

// LogLevel is a level by the name that slog reads.
type LogLevel string

// The levels of the log.
const (
	LogDebug LogLevel = "debug"
	LogInfo  LogLevel = "info"
	LogWarn  LogLevel = "warn"
	LogError LogLevel = "error"
)

func (LogLevel) Values() []string { return policy.Values(LogDebug, LogInfo, LogWarn, LogError) }

// LogFormat is the form of a line of the log.
type LogFormat string

// The formats of the log.
const (
	LogText LogFormat = "text"
	LogJSON LogFormat = "json"
)

func (LogFormat) Values() []string { return policy.Values(LogText, LogJSON) }
