package kafka

import (
	"context"
	"errors"
	"fmt"

	"github.com/dedupd/dedupd/consumer"
)

var _ consumer.Surveyor = (*Source)(nil)

// Survey tells where each partition begins and ends, and where the group stands.
func (s *Source) Survey(ctx context.Context) (consumer.Survey, error) {
	conns := newConnections()
	defer conns.cut()
	cluster := newCluster(&s.config, s.mechanism, conns)
	defer cluster.close()
	var survey consumer.Survey
	counts, err := cluster.partitions(ctx)
	if err != nil {
		return survey, err
	}
	ids, err := cluster.identities(ctx)
	problems := []error{err}
	for _, topic := range s.config.Topics {
		if counts[topic] == 0 {
			problems = append(problems, fmt.Errorf("no topic %s at the broker", topic))
		}
		for partition := range counts[topic] {
			l := consumer.BrokerLane{Name: laneName(topic, partition), Log: ids[topic]}
			if l.First, l.End, err = cluster.span(ctx, topic, partition); err == nil {
				var c committed
				c, err = cluster.committed(ctx, topic, partition)
				l.Committed = c.offset
			}
			if err != nil {
				// What keeps one partition from being read keeps the others, too.
				problems = append(problems, fmt.Errorf("lane %s: %w", l.Name, err))
				break
			}
			survey.Lanes = append(survey.Lanes, l)
		}
	}
	return survey, errors.Join(problems...)
}
