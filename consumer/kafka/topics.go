package kafka

import (
	"context"
	"fmt"
	"time"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
)

// awaitTopics waits until there is a topic to read: the others keep nobody from it.
// False: ctx ended before.
func (r *run) awaitTopics(ctx context.Context) bool {
	var problem logonce.Problem
	for {
		now, err := r.cluster.look(ctx)
		switch {
		case err == nil && len(now.partitions) > 0:
			r.seen = now
			return true
		case err == nil:
			r.warn(now)
			for _, topic := range r.config.Topics {
				if err := now.problems[topic]; err != nil {
					r.in.NotReady(fmt.Errorf("topic %s: %w", topic, err))
					break
				}
			}
		case ctx.Err() == nil && problem.IsNew(err):
			r.log.Warn("can't begin yet", "error", err)
		}
		if !wait.For(ctx, time.Second) {
			return false
		}
	}
}

// warn logs what is wrong with topics, once until it changes, and when it is over.
func (r *run) warn(now topics) {
	for _, topic := range r.config.Topics {
		err := now.problems[topic]
		switch {
		case err != nil && r.problems[topic].IsNew(err):
			r.log.Warn("a topic isn't read", "topic", topic, "error", err)
		case err == nil && r.problems[topic].End():
			r.log.Info("a topic can be read again", "topic", topic)
		}
	}
}

// tell tells of the topics in the log and by /readyz.
func (g *generation) tell(now topics) {
	g.warn(now)
	for _, topic := range g.config.Topics {
		g.ready.note("topic "+topic, now.problems[topic])
	}
}

// leaderFirst is how long a member that doesn't lead the group leaves it to the
// leader to see what it has seen itself: each member that joins anew stops all. It is
// also how long fewer partitions have to stand: a broker may be behind for a moment.
const leaderFirst = 5 * time.Second

// watchTopics returns when a topic has other partitions than were divided, when one
// was created anew, or ctx ended. A topic that has vanished is reported; leaving the
// generation for it would not bring it back. If it does come back, all its
// partitions count as new.
func (g *generation) watchTopics(ctx context.Context) {
	var noticed time.Time
	for wait.For(ctx, time.Second) {
		ids, _ := g.cluster.identities(ctx) // of an error the lanes will tell
		// A lane whose position the new log has come to already would be read on
		// as if nothing had happened. Taken anew, it is held.
		if topic := g.logs.anew(ids); topic != "" {
			g.log.Warn("the topic was created anew: joining the group anew", "topic", topic, "id", ids[topic])
			return
		}
		now, err := g.cluster.look(ctx)
		if err != nil {
			continue // the same
		}
		g.tell(now)
		more, fewer := g.compare(now)
		if !more && !fewer {
			noticed = time.Time{}
			continue
		}
		if noticed.IsZero() {
			noticed = time.Now()
		}
		if more && g.leads || time.Since(noticed) > leaderFirst {
			g.log.Info("topics have other partitions than were divided: joining the group anew", "partitions", now.partitions)
			return
		}
	}
}

// compare tells whether there is more of a topic than was divided, or less: it was
// created anew between the division and the first look at its id.
func (g *generation) compare(now topics) (more, fewer bool) {
	for _, topic := range g.config.Topics {
		n := now.partitions[topic]
		more = more || n > g.assigned[topic]
		fewer = fewer || 0 < n && n < g.assigned[topic]
		if n == 0 {
			g.assigned[topic] = 0
		}
	}
	return more, fewer
}
