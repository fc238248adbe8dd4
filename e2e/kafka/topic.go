package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// CreateTopic creates a topic with a replication factor of 1, and waits until
// all its partitions have a leader. The configs are the broker's own names, such
// as cleanup.policy.
func (b *Broker) CreateTopic(ctx context.Context, topic string, partitions int32, configs map[string]string) error {
	return b.with(ctx, func(client *kgo.Client) error {
		t := kmsg.NewCreateTopicsRequestTopic()
		t.Topic, t.NumPartitions, t.ReplicationFactor = topic, partitions, 1
		for name, value := range configs {
			c := kmsg.NewCreateTopicsRequestTopicConfig()
			c.Name, c.Value = name, &value
			t.Configs = append(t.Configs, c)
		}
		req := kmsg.NewPtrCreateTopicsRequest()
		req.Topics = append(req.Topics, t)
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return fmt.Errorf("create topic %s: %w", topic, err)
		}
		if err := kerr.ErrorForCode(res.Topics[0].ErrorCode); err != nil {
			return fmt.Errorf("create topic %s: %w", topic, err)
		}
		for {
			if n, err := leaders(ctx, client, topic); err != nil || n == partitions {
				return err
			}
			if err := pause(ctx, 20*time.Millisecond); err != nil {
				return err
			}
		}
	})
}

// AddPartitions grows a topic to a number of partitions.
func (b *Broker) AddPartitions(ctx context.Context, topic string, partitions int32) error {
	return b.with(ctx, func(client *kgo.Client) error {
		t := kmsg.NewCreatePartitionsRequestTopic()
		t.Topic, t.Count = topic, partitions
		req := kmsg.NewPtrCreatePartitionsRequest()
		req.Topics = append(req.Topics, t)
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(res.Topics[0].ErrorCode)
	})
}

// DeleteTopic deletes a topic.
func (b *Broker) DeleteTopic(ctx context.Context, topic string) error {
	return b.with(ctx, func(client *kgo.Client) error {
		t := kmsg.NewDeleteTopicsRequestTopic()
		t.Topic = &topic
		req := kmsg.NewPtrDeleteTopicsRequest()
		req.Topics, req.TopicNames = append(req.Topics, t), []string{topic}
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(res.Topics[0].ErrorCode)
	})
}

// DeleteRecords removes all records of a partition below an offset, as retention
// would.
func (b *Broker) DeleteRecords(ctx context.Context, topic string, partition int32, below int64) error {
	return b.with(ctx, func(client *kgo.Client) error {
		p := kmsg.NewDeleteRecordsRequestTopicPartition()
		p.Partition, p.Offset = partition, below
		t := kmsg.NewDeleteRecordsRequestTopic()
		t.Topic, t.Partitions = topic, append(t.Partitions, p)
		req := kmsg.NewPtrDeleteRecordsRequest()
		req.Topics, req.TimeoutMillis = append(req.Topics, t), 5000
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(res.Topics[0].Partitions[0].ErrorCode)
	})
}

// Committed is a group's committed offset of a partition; -1: none.
func (b *Broker) Committed(ctx context.Context, group, topic string, partition int32) (offset int64, err error) {
	err = b.with(ctx, func(client *kgo.Client) error {
		t := kmsg.NewOffsetFetchRequestGroupTopic()
		t.Topic, t.Partitions = topic, []int32{partition}
		g := kmsg.NewOffsetFetchRequestGroup()
		g.Group, g.Topics = group, append(g.Topics, t)
		req := kmsg.NewPtrOffsetFetchRequest()
		req.Groups = append(req.Groups, g)
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		switch err := kerr.ErrorForCode(res.Groups[0].ErrorCode); {
		case errors.Is(err, kerr.GroupIDNotFound): // nobody has joined it yet
			offset = -1
			return nil
		case err != nil:
			return err
		}
		if len(res.Groups[0].Topics) == 0 {
			return errors.New("no such topic in the answer")
		}
		p := res.Groups[0].Topics[0].Partitions[0]
		offset = p.Offset
		return kerr.ErrorForCode(p.ErrorCode)
	})
	return offset, err
}

// SetCommitted moves the offset of a group without members, as the stock reset
// command does.
func (b *Broker) SetCommitted(ctx context.Context, group, topic string, partition int32, offset int64) error {
	return b.with(ctx, func(client *kgo.Client) error {
		p := kmsg.NewOffsetCommitRequestTopicPartition()
		p.Partition, p.Offset = partition, offset
		t := kmsg.NewOffsetCommitRequestTopic()
		t.Topic, t.Partitions = topic, append(t.Partitions, p)
		req := kmsg.NewPtrOffsetCommitRequest()
		req.Group, req.Generation, req.Topics = group, -1, append(req.Topics, t)
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(res.Topics[0].Partitions[0].ErrorCode)
	})
}

// with tries again while the broker says that it will soon be able to: a young
// one has no group coordinator before it was asked for it.
func (b *Broker) with(ctx context.Context, do func(*kgo.Client) error) error {
	// Later versions name topics by an id that we would have to look up first.
	client, err := kgo.NewClient(kgo.SeedBrokers(b.addr), kgo.MaxVersions(kversion.V3_8_0()))
	if err != nil {
		return err
	}
	defer client.Close()
	for {
		err := do(client)
		if !kerr.IsRetriable(err) {
			return err
		}
		if pause(ctx, 100*time.Millisecond) != nil {
			return err
		}
	}
}

// serves asks whether the broker is registered, and so can lead partitions.
func serves(ctx context.Context, client *kgo.Client) error {
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = []kmsg.MetadataRequestTopic{}
	res, err := req.RequestWith(ctx, client)
	if err == nil && len(res.Brokers) == 0 {
		err = errors.New("no broker is registered yet")
	}
	return err
}

func leaders(ctx context.Context, client *kgo.Client, topic string) (n int32, err error) {
	t := kmsg.NewMetadataRequestTopic()
	t.Topic = &topic
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = append(req.Topics, t)
	res, err := req.RequestWith(ctx, client)
	if err != nil {
		return 0, err
	}
	for _, p := range res.Topics[0].Partitions {
		if p.ErrorCode == 0 && p.Leader >= 0 {
			n++
		}
	}
	return n, nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
