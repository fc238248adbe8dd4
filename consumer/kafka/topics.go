package kafka

import (
	"context"
	"fmt"
	"time"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
)

// awaitTopics waits until one of the topics can be read. A missing topic doesn't
// keep the others from being read. False: ctx ended before.
func (r *run) awaitTopics(ctx context.Context) (topics, bool) {
	var problem logonce.Problem
	for {
		now, err := r.cluster.lookUpTopics(ctx)
		switch {
		case err == nil && len(now.partitions) > 0:
			return now, true
		case err == nil:
			r.logTopics(now)
			for _, topic := range r.config.Topics {
				if err := now.problems[topic]; err != nil {
					r.session.NotReady(fmt.Errorf("topic %s: %w", topic, err))
					break
				}
			}
		case ctx.Err() == nil && problem.IsNew(err):
			r.log.Warn("no topic is known yet, trying again", "error", err)
		}
		if !wait.For(ctx, time.Second) {
			return topics{}, false
		}
	}
}

// logTopics logs what is wrong with topics, once until it changes, and when it is
// over.
func (r *run) logTopics(now topics) {
	for _, topic := range r.config.Topics {
		err, logged := now.problems[topic], r.topicProblems[topic]
		switch {
		case err != nil && logged.IsNew(err):
			r.log.Warn("a topic isn't read", "topic", topic, "error", err)
		case err == nil && logged.End():
			r.log.Info("a topic can be read again", "topic", topic)
		}
	}
}

// reportTopics reports problems of topics to the log and to /readyz.
func (g *groupGeneration) reportTopics(now topics) {
	g.run.logTopics(now)
	for _, topic := range g.run.config.Topics {
		g.readiness.setTopic(topic, now.problems[topic])
	}
}

// leaderFirst is how long a member that isn't the group's leader waits for the leader
// to see a change itself: each member that rejoins stops all of them. Fewer
// partitions must also last that long: a broker may be behind for a moment.
const leaderFirst = 5 * time.Second

// watchTopics returns when a topic has other partitions than were divided, when a
// topic was created anew, or when ctx ends. It reports a topic that has vanished;
// leaving the group generation would not bring it back. If the topic does come back,
// all its partitions count as new.
func (g *groupGeneration) watchTopics(ctx context.Context) {
	var noticed time.Time
	for wait.For(ctx, time.Second) {
		ids, _ := g.run.cluster.topicIDs(ctx) // the lanes report an error
		// A lane would read on if the new log already reaches its position. Acquired
		// again, it is held.
		if topic := g.createdAnew(ids); topic != "" {
			g.run.log.Warn("the topic was created anew: joining the group anew", "topic", topic, "id", ids[topic])
			return
		}
		now, err := g.run.cluster.lookUpTopics(ctx)
		if err != nil {
			continue // the same
		}
		g.reportTopics(now)
		more, fewer := g.comparePartitions(now)
		if !more && !fewer {
			noticed = time.Time{}
			continue
		}
		if noticed.IsZero() {
			noticed = time.Now()
		}
		if more && g.assignment.leader || time.Since(noticed) > leaderFirst {
			g.run.log.Info("topics have other partitions than were divided: joining the group anew", "partitions", now.partitions)
			return
		}
	}
}

// comparePartitions reports whether a topic has more partitions than were divided, or
// fewer: it was created anew between the division and the first request for its id.
func (g *groupGeneration) comparePartitions(now topics) (more, fewer bool) {
	divided := g.assignment.divided
	for _, topic := range g.run.config.Topics {
		n := now.partitions[topic]
		more = more || n > divided[topic]
		fewer = fewer || 0 < n && n < divided[topic]
		if n == 0 {
			divided[topic] = 0
		}
	}
	return more, fewer
}
