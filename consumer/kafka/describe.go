package kafka

import (
	"context"
	"errors"
	"fmt"

	"github.com/dedupd/dedupd/consumer"
)

var _ consumer.Describer = (*Source)(nil)

// Describe returns where each partition begins and ends, and the group's offsets.
func (s *Source) Describe(ctx context.Context) (consumer.Description, error) {
	cluster := newCluster(&s.config, s.mechanism)
	defer cluster.close()
	var d consumer.Description
	now, err := cluster.lookUpTopics(ctx)
	if err != nil {
		return d, err
	}
	ids, err := cluster.topicIDs(ctx)
	problems := []error{err}
	for _, topic := range s.config.Topics {
		if problem := now.problems[topic]; problem != nil {
			problems = append(problems, fmt.Errorf("topic %s: %w", topic, problem))
		}
		if now.partitions[topic] > 0 {
			if err := cluster.mayRead(ctx, topic); err != nil {
				problems = append(problems, fmt.Errorf("topic %s: %w", topic, err))
			}
		}
		for partition := range now.partitions[topic] {
			l := consumer.BrokerLane{Name: laneName(topic, partition), LogID: ids[topic]}
			if l.First, l.End, err = cluster.span(ctx, topic, partition); err == nil {
				var c committed
				c, err = cluster.committed(ctx, topic, partition)
				l.Committed, l.OffsetMetadata = c.offset, c.metadata
			}
			if err != nil {
				// What keeps one partition from being read keeps the topic's others, too.
				problems = append(problems, fmt.Errorf("lane %s: %w", l.Name, err))
				break
			}
			d.Lanes = append(d.Lanes, l)
		}
	}
	return d, errors.Join(problems...)
}
