package config

import (
	"slices"
	"time"

	"github.com/dedupd/dedupd/internal/policy"
)

// Default is the configuration of an empty file. It isn't valid: scope, sources and
// sink have no default.
func Default() *Config {
	c := new(Config)
	c.setDefaults()
	return c
}

const (
	day = Duration(24 * time.Hour)
	kib = Size(1 << 10)
	mib = Size(1 << 20)
)

func (c *Config) setDefaults() {
	c.Database = Database{Schema: "dedupd", MaxConnections: 4, Migrate: true, Pooler: PoolerNone}
	c.ID = ID{From: StringList{"header:message-id"}, Missing: policy.MissingDeadLetter, MaxBytes: 64 * kib}
	c.Dedup = Dedup{
		Strategy: policy.StrategyClaim, OnDuplicate: policy.DuplicateDrop, OnConflict: policy.ConflictDeadLetter, Fingerprint: StringList{"value"},
		Sequence: Sequence{Producer: StringList{"header:client-id"}, Seq: "header:client-seq", Gaps: policy.SequenceGapAllow},
	}
	c.Batch = Batch{MaxMessages: 4000, MaxBytes: 8 * mib, InflightBytes: 128 * mib}
	c.Retention = Retention{
		Window: 7 * day, Generation: day / 4, GenerationMaxClaims: 20_000_000,
		FilterMemory: 256 * mib, Schedule: Duration(time.Minute), MaxHold: 28 * day,
	}
	c.DeadLetters = DeadLetters{MaxShare: 0.05, Window: 1000, Retention: 30 * day}
	c.HTTP = HTTP{Listen: "127.0.0.1:9464"}
	c.Shutdown = Shutdown{Drain: Duration(15 * time.Second)}
	c.Log = Log{Level: LogInfo, Format: LogText}
}

func (k *Kafka) setDefaults() {
	k.Start, k.Isolation, k.OnGroupReset, k.OnGap = policy.StartEarliest, policy.ReadCommitted, policy.GroupResetHonour, policy.GapStop
}

func (n *NATS) setDefaults() {
	n.Mode, n.Start, n.OnGap = policy.ModeQueue, policy.QueueEarliest, policy.GapStop
}

// setDerived sets the keys that default to another key's value.
func (c *Config) setDerived() {
	for i := range c.Sources {
		s := &c.Sources[i]
		at := index("sources", i)
		if k := s.Kafka; k != nil {
			c.derive(at+".name", &s.Name, "kafka", "the kind")
			c.derive(at+".kafka.group", &k.Group, c.Scope, "the scope")
			if at += ".kafka.on_group_reset"; c.byStrategy(at) && c.Dedup.Strategy == policy.StrategyPosition {
				k.OnGroupReset = policy.GroupResetIgnore
			}
		}
		if n := s.NATS; n != nil {
			c.derive(at+".name", &s.Name, "nats", "the kind")
			c.derive(at+".nats.durable", &n.Durable, c.Scope, "the scope")
		}
	}
	if c.byStrategy("id.from") {
		switch c.Dedup.Strategy {
		case policy.StrategyPosition:
			c.ID.From = StringList{"position"}
		case policy.StrategySequence:
			c.ID.From = slices.Clone(c.Dedup.Sequence.Producer)
			if epoch := c.Dedup.Sequence.Epoch; epoch != "" {
				c.ID.From = append(c.ID.From, epoch)
			}
			c.ID.From = append(c.ID.From, c.Dedup.Sequence.Seq)
		}
	}
	if at := "batch.max_inflated_bytes"; c.Batch.MaxInflatedBytes == 0 && c.Batch.InflightBytes >= mib {
		c.Batch.MaxInflatedBytes = min(c.Batch.InflightBytes, maxInflated)
		p := c.places[at]
		p.origin = "default: batch.inflight_bytes"
		c.places[at] = p
	}
}

// byStrategy tells whether a key isn't set, and its default is that of a strategy without
// claims.
func (c *Config) byStrategy(path string) bool {
	p := c.places[path]
	if c.Dedup.Strategy == policy.StrategyClaim || p.line > 0 {
		return false
	}
	p.origin = "default: dedup.strategy"
	c.places[path] = p
	return true
}

// maxInflated is the most that batch.max_inflated_bytes may be.
const maxInflated = 1 << 30

func (c *Config) derive(path string, to *string, value, from string) {
	if *to != "" || value == "" {
		return
	}
	*to = value
	p := c.places[path] // the line of an empty value, if there is one
	p.origin = "default: " + from
	c.places[path] = p
}
