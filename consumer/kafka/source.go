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
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/dedupd/dedupd/consumer"
)

// The values of Config's enumerations.
const (
	StartEarliest = "earliest"
	StartLatest   = "latest"
	StartGroup    = "group"

	ReadCommitted   = "read_committed"
	ReadUncommitted = "read_uncommitted"

	HonourGroupReset = "honour"
	IgnoreGroupReset = "ignore"

	StopOnGap = "stop"
	SkipGap   = "skip"
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
	// Start says where a lane without a position begins, if the group has
	// committed none either: StartEarliest (default), StartLatest (after what is
	// committed now; a partition that is added later begins with its first
	// message), or StartGroup (nowhere: a lane without an offset of the group is
	// held until somebody commits one).
	Start string
	// Isolation is ReadCommitted (default) or ReadUncommitted.
	Isolation string
	// OnGroupReset is HonourGroupReset (default) or IgnoreGroupReset: whether a
	// lane follows when the group's offset was moved back.
	OnGroupReset string
	// OnGap is StopOnGap (default) or SkipGap: what to do when the broker no
	// longer has the position a lane goes on at.
	OnGap string
	// TLS, if not nil, is used for every connection. An empty ServerName stands
	// for the host connected to.
	TLS *tls.Config
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
func (s *Source) Run(ctx context.Context, in *consumer.Intake) error {
	conns := newConnections()
	defer conns.cut()
	cluster := newCluster(&s.config, s.mechanism, conns)
	defer cluster.close()
	r := &run{
		config:  &s.config,
		in:      in,
		log:     in.Logger().With("source", s.config.Name),
		cluster: cluster,
		conns:   conns,
	}
	defer in.Ready(false)
	r.partitions = r.awaitTopics(ctx)
	if r.partitions == nil {
		return nil
	}
	return r.join(ctx, &kafkago.Dialer{
		ClientID:      s.config.ClientID,
		DialFunc:      conns.dial,
		Timeout:       dialTimeout,
		TLS:           s.config.TLS,
		SASLMechanism: s.mechanism,
	})
}

// run is what one Run shares among its generations.
type run struct {
	config  *Config
	in      *consumer.Intake
	log     *slog.Logger
	cluster *cluster
	conns   *connections
	// partitions are the counts per topic that the current generation's assignment
	// was made from, or that were seen before: see watchTopics.
	partitions map[string]int
	// member is our name in the group, as of the last generation; empty: none yet.
	member string
}

// leaveTimeout is how long leaving the group may take once nothing is read any
// more. A member that is cut off instead keeps its partitions for the session
// timeout.
const leaveTimeout = 5 * time.Second

// join is a member of the group until ctx ends.
func (r *run) join(ctx context.Context, dialer *kafkago.Dialer) error {
	group, err := kafkago.NewConsumerGroup(kafkago.ConsumerGroupConfig{
		ID:                r.config.Group,
		Brokers:           r.config.Brokers,
		Topics:            r.config.Topics,
		Dialer:            dialer,
		HeartbeatInterval: r.config.HeartbeatInterval,
		SessionTimeout:    r.config.SessionTimeout,
		RebalanceTimeout:  r.config.RebalanceTimeout,
		GroupBalancers:    []kafkago.GroupBalancer{leader{kafkago.RangeGroupBalancer{}, r}, leader{kafkago.RoundRobinGroupBalancer{}, r}},
		JoinGroupBackoff:  time.Second,
		Timeout:           requestTimeout,
		// The library's own watch of partitions ends the generation again and
		// again while a topic is missing: see watchTopics.
		WatchPartitionChanges: false,
		Logger:                kafkago.LoggerFunc(r.debugf),
		ErrorLogger:           kafkago.LoggerFunc(r.debugf),
	})
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	err = r.generations(ctx, group, &running)
	r.leave(group, &running)
	return err
}

// generations runs one generation after the other until ctx ends or the broker
// refuses what is configured.
func (r *run) generations(ctx context.Context, group *kafkago.ConsumerGroup, running *sync.WaitGroup) error {
	lastError := ""
	for {
		// The next generation comes only after the last one's function has
		// returned, which is what keeps two of them from running at a time.
		gen, err := group.Next(ctx)
		switch {
		case err == nil:
			lastError = ""
			r.member = gen.MemberID
			running.Add(1)
			// The only function that is started: whichever returns first would
			// end the generation for all.
			gen.Start(func(member context.Context) {
				defer running.Done()
				newGeneration(r, gen).serve(ctx, member)
			})
		case ctx.Err() != nil || errors.Is(err, kafkago.ErrGroupClosed):
			return nil
		case isRefused(err):
			return fmt.Errorf("join group %s: %w", r.config.Group, err)
		case errors.Is(err, kafkago.RebalanceInProgress):
			r.log.Debug("group rebalances again")
		default:
			if text := err.Error(); text != lastError {
				lastError = text
				r.log.Warn("not a member of the group, trying again", "group", r.config.Group, "error", err)
			}
		}
	}
}

// isRefused tells whether an answer can't change without the configuration.
func isRefused(err error) bool {
	return errors.Is(err, kafkago.InvalidSessionTimeout) || errors.Is(err, kafkago.InvalidGroupId)
}

// leave waits for what is in hand and leaves the group. We say so ourselves: in the
// middle of a rebalance the library may end without a word, and the partitions
// would stand still for the session timeout. That is when each of a rolling
// restart's pods goes, since the one before it has just come. A join that is under
// way ends by it, too; the library waits for that, and if it takes long, the
// connections are cut.
func (r *run) leave(group *kafkago.ConsumerGroup, running *sync.WaitGroup) {
	left := make(chan struct{})
	go func() {
		defer close(left)
		_ = group.Close() // it has no errors
	}()
	running.Wait()
	if r.member != "" {
		if err := r.cluster.leave(r.member); err != nil {
			r.log.Debug("leave the group", "group", r.config.Group, "error", err)
		}
	}
	select {
	case <-left:
	case <-time.After(leaveTimeout):
		r.log.Warn("leaving the group took too long: it will notice by the session timeout", "group", r.config.Group)
		r.conns.cut()
		<-left
	}
}

func (r *run) debugf(format string, args ...any) {
	if r.log.Enabled(context.Background(), slog.LevelDebug) {
		r.log.Debug("kafka client: " + fmt.Sprintf(format, args...))
	}
}
