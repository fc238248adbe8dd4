package kafka

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dedupd/dedupd/consumer"
)

var _ consumer.RetentionReporter = (*Source)(nil)

const (
	cleanupPolicy = "cleanup.policy"
	retentionMS   = "retention.ms"
)

// BrokerRetention returns how long each topic's messages are kept, at least. It needs
// the right to describe the topics' configuration, which reading them doesn't need.
func (s *Source) BrokerRetention(ctx context.Context) ([]consumer.TopicRetention, error) {
	cluster := newCluster(&s.config, s.mechanism)
	defer cluster.close()
	settings, err := cluster.settings(ctx, cleanupPolicy, retentionMS)
	problems := []error{err}
	var all []consumer.TopicRetention
	for _, topic := range s.config.Topics {
		known, ok := settings[topic]
		if !ok {
			continue // the error says why
		}
		d, err := keptFor(known)
		if err != nil {
			problems = append(problems, fmt.Errorf("topic %s: %w", topic, err))
			continue
		}
		all = append(all, consumer.TopicRetention{Name: topic, For: d})
	}
	return all, errors.Join(problems...)
}

// keptFor is how long messages are kept at least, by a topic's settings; 0: without
// a limit. Compaction alone keeps the last message of each key for ever.
//
// Messages may be kept longer: segments are deleted whole, when their newest message
// is too old. The segment being written spans up to segment.ms (a week by default), if
// it isn't full before.
func keptFor(settings map[string]string) (time.Duration, error) {
	policy, ok := settings[cleanupPolicy]
	if ok && !slices.Contains(strings.Split(strings.ReplaceAll(policy, " ", ""), ","), "delete") {
		return 0, nil
	}
	ms, err := strconv.ParseInt(settings[retentionMS], 10, 64)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s: %w", retentionMS, err)
	case ms < 0 || ms > math.MaxInt64/int64(time.Millisecond): // people write the largest number for "for ever"
		return 0, nil
	default:
		return max(time.Duration(ms), 1) * time.Millisecond, nil
	}
}
