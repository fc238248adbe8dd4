package kafka

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	kafkago "github.com/segmentio/kafka-go"
)

// awaitTopics waits until all topics exist, and counts their partitions; nil: ctx
// ended before.
func (r *run) awaitTopics(ctx context.Context) map[string]int {
	lastProblem := ""
	for {
		counts, problem := r.countPartitions(ctx)
		if problem == "" {
			return counts
		}
		if ctx.Err() == nil && problem != lastProblem {
			lastProblem = problem
			r.log.Warn("can't begin yet: " + problem)
		}
		if !sleep(ctx, time.Second) {
			return nil
		}
	}
}

func (r *run) countPartitions(ctx context.Context) (counts map[string]int, problem string) {
	counts, err := r.cluster.partitions(ctx)
	if err != nil {
		return nil, err.Error()
	}
	var missing []string
	for _, topic := range r.config.Topics {
		if counts[topic] == 0 {
			missing = append(missing, topic)
		}
	}
	if len(missing) > 0 {
		return counts, fmt.Sprintf("no topic %s at the broker", strings.Join(missing, ", "))
	}
	return counts, ""
}

// watchTopics returns when a topic has more partitions than the generation may
// know of, when one was created anew, or ctx ended. A topic that has vanished is
// reported by its lanes; leaving the generation for it would not bring it back.
//
// The counts to compare with are those that the assignment was made from, where we
// lead the group, and older ones where we don't: a partition that came between may
// cost a rebalance too many, but none is overlooked. They fall with what is gone, or
// a topic that comes back with fewer partitions would be read by nobody.
func (g *generation) watchTopics(ctx context.Context) {
	r, ready := g.run, g.ready
	before := r.partitions
	for sleep(ctx, time.Second) {
		ids, _ := r.cluster.identities(ctx) // of an error the lanes will tell
		// A lane whose position the new log has come to already would be read on
		// as if nothing had happened. Taken anew, it is held.
		if topic := g.logs.anew(ids); topic != "" {
			r.log.Warn("the topic was created anew: joining the group anew", "topic", topic, "id", ids[topic])
			return
		}
		counts, err := r.cluster.partitions(ctx)
		if err != nil {
			continue // the same
		}
		changed := false
		for _, topic := range r.config.Topics {
			if ready.set("topic "+topic, counts[topic] > 0) && counts[topic] == 0 {
				r.log.Warn("the topic is gone from the broker", "topic", topic)
			}
			changed = changed || counts[topic] > before[topic]
			before[topic] = min(before[topic], counts[topic])
		}
		if changed {
			r.partitions = counts
			r.log.Info("topics have grown: joining the group anew", "partitions", counts)
			return
		}
	}
}

// leader gives the group's partitions to its members, and notes which there were.
type leader struct {
	kafkago.GroupBalancer
	run *run
}

// AssignGroups is asked of the member that leads the group. The library finds no
// partition of any topic while one of them is missing; the others are read on all
// the same.
func (l leader) AssignGroups(members []kafkago.GroupMember, partitions []kafkago.Partition) kafkago.GroupMemberAssignments {
	if len(partitions) == 0 {
		partitions = l.run.partitionsThere()
	}
	counts := make(map[string]int)
	for _, p := range partitions {
		counts[p.Topic]++
	}
	// Nobody looks at them between two generations.
	l.run.partitions = counts
	return l.GroupBalancer.AssignGroups(members, partitions)
}

// partitionsThere are the partitions of the topics that exist. If they can't be
// told, nobody is given any, and the group is joined anew once they can.
func (r *run) partitionsThere() (all []kafkago.Partition) {
	counts, err := r.cluster.partitions(context.Background())
	if err != nil {
		r.log.Warn("can't assign any lanes yet", "error", err)
		return nil
	}
	for _, topic := range slices.Sorted(maps.Keys(counts)) {
		for id := range counts[topic] {
			all = append(all, kafkago.Partition{Topic: topic, ID: id})
		}
	}
	return all
}

// sleep waits and tells whether ctx still lives.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
