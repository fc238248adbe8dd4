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
