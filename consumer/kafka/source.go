// Package kafka reads Kafka topics: membership in a consumer group decides which
// partitions are this worker's, each partition is a lane, and records are
// fetched per lane.
//
// It is the only package that knows kafka-go. It uses the library's group
// protocol and its wire protocol, not its Reader, which delivers aborted
// records and transaction markers as messages and commits without regard to the
// group's generation.
//
// The package knows nothing of Postgres: a lane begins where consumer.Lanes
// says. What is committed to the group is a copy, made after the fact, for lag
// displays and for operators who reset a group.
package kafka

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
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
	// The policies. Defaults: StartEarliest, ReadCommitted, HonourGroupReset and
	// StopOnGap.
	Start        StartPolicy
	Isolation    IsolationLevel
	OnGroupReset GroupResetPolicy
	OnGap        GapPolicy
	// TLS, if not nil, is used for every connection. An empty ServerName stands
	// for the host connected to.
	TLS *tls.Config
	// Authorities, if not nil, is asked at each handshake for those of TLS: they
	// are renewed under a running program.
	Authorities func() (*x509.CertPool, error)
	// SASL is how to log in; a zero value: not at all.
	SASL SASL
	// ClientID is told to the broker. Default: dedupd.
	ClientID string

	// SessionTimeout is how long after its last sign of life a dead member's
	// partitions are given away. Default 10 s: short, since the fence and not
	// this wait is what makes a take-over safe.
	SessionTimeout time.Duration
	// HeartbeatInterval is the time between signs of life. Default 1 s.
	HeartbeatInterval time.Duration
	// RebalanceTimeout is how long the group waits for a member that still
	// drains. Default 30 s.
	RebalanceTimeout time.Duration

	// FetchBytes bounds one lane's fetch, as the broker stores it (compressed).
	// Default 1 MiB. A single record batch may be larger.
	FetchBytes int
	// MaxInflatedBytes is what one record batch may come to in memory, decompressed
	// and as messages. A larger one holds its lane. Default 128 MiB. One that is larger
	// than the worker's whole budget is taken alone.
	MaxInflatedBytes int64
}

// Source reads the topics of one configuration. Its Run may be called again
// once it has returned.
type Source struct {
	config    Config
	mechanism sasl.Mechanism // nil: no login
}

var _ consumer.Source = (*Source)(nil)

// New checks a configuration; the error names every problem. It connects to
// nothing.
func New(c Config) (*Source, error) {
	c.setDefaults()
	mechanism, err := c.SASL.login()
	if err := errors.Join(c.validate(), err); err != nil {
		return nil, fmt.Errorf("kafka source %q: %w", c.Name, err)
	}
	return &Source{config: c, mechanism: mechanism}, nil
}

// Name is the source's name in the configuration.
func (s *Source) Name() string { return s.config.Name }

// Run reads until ctx ends, and then returns nil. It connects, joins and fetches
// again for ever by itself; an error means that the broker refuses what is
// configured.
func (s *Source) Run(ctx context.Context, in *consumer.Session) error {
	conns := newConnections(&s.config)
	defer conns.cut()
	cluster := newCluster(&s.config, s.mechanism, conns)
	defer cluster.close()
	r := &run{
		config:   &s.config,
		in:       in,
		log:      in.Logger().With("source", s.config.Name),
		cluster:  cluster,
		problems: make(map[string]*logonce.Problem),
	}
	for _, topic := range s.config.Topics {
		r.problems[topic] = new(logonce.Problem)
	}
	defer in.Ready(false)
	if !r.awaitTopics(ctx) {
		return nil
	}
	return r.join(ctx)
}

// run is what one Run shares among its generations.
type run struct {
	config  *Config
	in      *consumer.Session
	log     *slog.Logger
	cluster *cluster

	// seen are the topics as they were when the group was last joined, and assigned
	// the partitions that were then divided. leads tells that it was we who did.
	seen     topics
	assigned map[string]int
	leads    bool
	// quota tells that the log was told of a broker that throttles us.
	quota atomic.Bool
	// problems has what was last logged of each topic.
	problems map[string]*logonce.Problem
}

// leaveTimeout is how long leaving the group may take once nothing is read any
// more. A member that is cut off instead keeps its partitions for the session
// timeout.
const leaveTimeout = 3 * time.Second

// join is a member of the group until ctx ends or the broker refuses what is
// configured. It runs one generation of the group after the other.
func (r *run) join(ctx context.Context) error {
	g := &group{run: r}
	// A member that goes says so, also in the middle of a rebalance: its partitions
	// would stand still for the session timeout. That is when each of a rolling
	// restart's pods goes, since the one before it has just come.
	defer func() {
		if err := g.leave(); err != nil {
			r.log.Debug("leave the group", "group", r.config.Group, "error", err)
		}
	}()
	var problem logonce.Problem
	var failing time.Time // since when; zero: it doesn't
	for ctx.Err() == nil {
		if now, err := r.cluster.look(ctx); err == nil {
			r.seen = now
		}
		mine, err := g.join(ctx)
		switch {
		case err == nil:
			problem.End()
			failing = time.Time{}
			newGeneration(g, mine).serve(ctx)
		case ctx.Err() != nil:
			return nil
		case isRefused(err):
			return fmt.Errorf("join group %s: %w", r.config.Group, err)
		case errors.Is(err, kafkago.RebalanceInProgress):
			r.log.Debug("group rebalances again")
		default:
			if failing.IsZero() {
				failing = time.Now()
			}
			// A coordinator that moves is found within seconds.
			if (!isPassing(err) || time.Since(failing) > alarmAfter) && problem.IsNew(err) {
				r.log.Warn("not a member of the group, trying again", "group", r.config.Group, "error", err)
			}
			wait.For(ctx, joinPause/2+rand.N(joinPause))
		}
	}
	return nil
}

// joinPause is the wait before the group is joined again that couldn't be.
const joinPause = time.Second

// isRefused tells whether an answer can't change without the configuration.
func isRefused(err error) bool {
	return errors.Is(err, kafkago.InvalidSessionTimeout) || errors.Is(err, kafkago.InvalidGroupId)
}
