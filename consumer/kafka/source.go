// Package kafka reads Kafka topics: membership in a consumer group decides which
// partitions are this worker's, each partition is a lane, and records are
// fetched per lane.
//
// It is the only package that knows kafka-go. It uses the library's group
// protocol and its wire protocol, not its Reader: that delivers aborted records
// and transaction markers as messages, and commits without regard to the group
// generation.
//
// The package knows nothing of Postgres: a lane begins where consumer.Lanes
// says. What is committed to the group is a copy, made afterwards, for lag
// displays and for operators who reset a group.
package kafka

import (
	"context"
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

// Source reads the topics of one configuration. Its Run may be called again
// once it has returned.
type Source struct {
	config    Config
	mechanism sasl.Mechanism // nil: no login
}

var _ consumer.Source = (*Source)(nil)

// New makes a source. It connects to nothing. The error is about the login.
func New(c Config) (*Source, error) {
	c.setDefaults()
	mechanism, err := c.SASL.login()
	if err != nil {
		return nil, fmt.Errorf("kafka source %q: %w", c.Name, err)
	}
	return &Source{config: c, mechanism: mechanism}, nil
}

// Name is the source's name in the configuration.
func (s *Source) Name() string { return s.config.Name }

// Run reads until ctx ends, and then returns nil. It connects, joins and fetches
// again by itself for ever; an error means that the broker refuses the
// configuration.
func (s *Source) Run(ctx context.Context, session *consumer.Session) error {
	cluster := newCluster(&s.config, s.mechanism)
	defer cluster.close()
	r := &run{
		config:  &s.config,
		session: session,
		log:     session.Logger().With("source", s.config.Name),
		cluster: cluster,
	}
	r.topicProblems = make(map[string]*logonce.Problem)
	for _, topic := range s.config.Topics {
		r.topicProblems[topic] = new(logonce.Problem)
	}
	defer session.Ready(false)
	seen, ok := r.awaitTopics(ctx)
	if !ok {
		return nil
	}
	return r.serve(ctx, &group{config: r.config, cluster: cluster, seen: seen})
}

// run is one call of Source.Run: what everything in it uses.
type run struct {
	config  *Config
	session *consumer.Session
	log     *slog.Logger
	cluster *cluster

	topicProblems map[string]*logonce.Problem // by topic
	throttled     atomic.Bool                 // the log has been told that a broker throttles us
}

// serve is a member of the group until ctx ends or the broker refuses the
// configuration. It serves one group generation after the other.
func (r *run) serve(ctx context.Context, g *group) error {
	// A member that ends leaves the group, also in the middle of a rebalance, or its
	// partitions would stand still for the session timeout. A rolling restart ends
	// each pod in a rebalance: the pod before it has just come.
	defer func() {
		if err := g.leave(); err != nil {
			r.log.Debug("leave the group", "group", r.config.Group, "error", err)
		}
	}()
	var problem logonce.Problem
	var failing time.Time // since when joining fails; zero: it doesn't
	for ctx.Err() == nil {
		if now, err := r.cluster.lookUpTopics(ctx); err == nil {
			g.seen = now
		}
		mine, err := g.join(ctx)
		switch {
		case err == nil:
			problem.End()
			failing = time.Time{}
			newGroupGeneration(r, g, mine).serve(ctx)
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

// joinPause is the wait after a failed attempt to join the group.
const joinPause = time.Second

// isRefused: only another configuration can change this answer.
func isRefused(err error) bool {
	return errors.Is(err, kafkago.InvalidSessionTimeout) || errors.Is(err, kafkago.InvalidGroupId)
}

// isPassing: the error ends by itself, with a change of leader.
func isPassing(err error) bool {
	var code kafkago.Error
	return errors.As(err, &code) && code.Temporary()
}
