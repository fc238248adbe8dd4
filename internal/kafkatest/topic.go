package kafkatest

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

// CreateTopic creates a topic with a replica on each node, and waits until
// all its partitions have a leader. The configs are the broker's own names, such
// as cleanup.policy.
func (b *Broker) CreateTopic(ctx context.Context, topic string, partitions int32, configs map[string]string) error {
	return b.with(ctx, func(client *kgo.Client) error {
		t := kmsg.NewCreateTopicsRequestTopic()
		t.Topic, t.NumPartitions, t.ReplicationFactor = topic, partitions, -1
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
		return led(ctx, client, topic, partitions)
	})
}

// led waits until so many partitions have a leader.
func led(ctx context.Context, client *kgo.Client, topic string, partitions int32) error {
	for {
		if n, err := leaders(ctx, client, topic); err != nil || n == partitions {
			return err
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// AddPartitions grows a topic to a number of partitions, and waits until all have a
// leader.
func (b *Broker) AddPartitions(ctx context.Context, topic string, partitions int32) error {
	return b.with(ctx, func(client *kgo.Client) error {
		t := kmsg.NewCreatePartitionsRequestTopic()
		t.Topic, t.Count = topic, partitions
		req := kmsg.NewPtrCreatePartitionsRequest()
		req.Topics = append(req.Topics, t)
		res, err := req.RequestWith(ctx, client)
		if err == nil {
			err = kerr.ErrorForCode(res.Topics[0].ErrorCode)
		}
		if err != nil {
			return err
		}
		return led(ctx, client, topic, partitions)
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

// Topics are the names of all topics but internal ones.
func (b *Broker) Topics(ctx context.Context) (names []string, err error) {
	err = b.with(ctx, func(client *kgo.Client) error {
		req := kmsg.NewPtrMetadataRequest()
		req.Topics = nil // all
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		for _, t := range res.Topics {
			if !t.IsInternal {
				names = append(names, *t.Topic)
			}
		}
		return nil
	})
	return names, err
}

// Allow gives a user a right on a topic or a group; Revoke takes it back.
func (b *Broker) Allow(ctx context.Context, user string, kind kmsg.ACLResourceType, name string, right kmsg.ACLOperation) error {
	return b.with(ctx, func(client *kgo.Client) error {
		c := kmsg.NewCreateACLsRequestCreation()
		c.ResourceType, c.ResourceName, c.ResourcePatternType = kind, name, kmsg.ACLResourcePatternTypeLiteral
		c.Principal, c.Host, c.Operation, c.PermissionType = "User:"+user, "*", right, kmsg.ACLPermissionTypeAllow
		req := kmsg.NewPtrCreateACLsRequest()
		req.Creations = append(req.Creations, c)
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(res.Results[0].ErrorCode)
	})
}

// SetQuota limits a client id: consumer_byte_rate in bytes a second,
// request_percentage of one thread's time.
func (b *Broker) SetQuota(ctx context.Context, clientID, name string, value float64) error {
	return b.with(ctx, func(client *kgo.Client) error {
		entity := kmsg.NewAlterClientQuotasRequestEntryEntity()
		entity.Type, entity.Name = "client-id", &clientID
		op := kmsg.NewAlterClientQuotasRequestEntryOp()
		op.Key, op.Value = name, value
		e := kmsg.NewAlterClientQuotasRequestEntry()
		e.Entity, e.Ops = append(e.Entity, entity), append(e.Ops, op)
		req := kmsg.NewPtrAlterClientQuotasRequest()
		req.Entries = append(req.Entries, e)
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(res.Entries[0].ErrorCode)
	})
}

// Revoke takes back what Allow gave.
func (b *Broker) Revoke(ctx context.Context, user string, kind kmsg.ACLResourceType, name string, right kmsg.ACLOperation) error {
	return b.with(ctx, func(client *kgo.Client) error {
		principal, host := "User:"+user, "*"
		f := kmsg.NewDeleteACLsRequestFilter()
		f.ResourceType, f.ResourceName, f.ResourcePatternType = kind, &name, kmsg.ACLResourcePatternTypeLiteral
		f.Principal, f.Host, f.Operation, f.PermissionType = &principal, &host, right, kmsg.ACLPermissionTypeAllow
		req := kmsg.NewPtrDeleteACLsRequest()
		req.Filters = append(req.Filters, f)
		res, err := req.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(res.Results[0].ErrorCode)
	})
}

// Ends is the function of this name, asked over a connection of its own.
func (b *Broker) Ends(ctx context.Context, topic string, partitions int32) (ends map[int32]int64, err error) {
	err = b.with(ctx, func(client *kgo.Client) (err error) {
		ends, err = Ends(ctx, client, topic, partitions)
		return err
	})
	return ends, err
}

// Committed is the function of this name, asked over a connection of its own.
func (b *Broker) Committed(ctx context.Context, group, topic string) (offsets map[int32]int64, err error) {
	err = b.with(ctx, func(client *kgo.Client) (err error) {
		offsets, err = Committed(ctx, client, group, topic)
		return err
	})
	return offsets, err
}

// Ends are the end offsets of a topic's partitions, whether what stands below
// them is committed or not.
func Ends(ctx context.Context, client *kgo.Client, topic string, partitions int32) (map[int32]int64, error) {
	t := kmsg.NewListOffsetsRequestTopic()
	t.Topic = topic
	for number := range partitions {
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.Timestamp = number, -1
		t.Partitions = append(t.Partitions, p)
	}
	req := kmsg.NewPtrListOffsetsRequest()
	req.Topics = append(req.Topics, t)
	res, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, err
	}
	ends := map[int32]int64{}
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return nil, err
			}
			ends[p.Partition] = p.Offset
		}
	}
	if len(ends) != int(partitions) {
		return nil, fmt.Errorf("the broker tells the ends of %d partitions, not of %d", len(ends), partitions)
	}
	return ends, nil
}

// Committed are the offsets that a group has committed of a topic's partitions; a
// partition without one is missing. The client must speak no version above
// Versions.
func Committed(ctx context.Context, client *kgo.Client, group, topic string) (map[int32]int64, error) {
	g := kmsg.NewOffsetFetchRequestGroup()
	g.Group = group // no topics: all of them
	req := kmsg.NewPtrOffsetFetchRequest()
	req.Groups = append(req.Groups, g)
	res, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, err
	}
	offsets := map[int32]int64{}
	switch err := kerr.ErrorForCode(res.Groups[0].ErrorCode); {
	case errors.Is(err, kerr.GroupIDNotFound): // nobody has joined it yet
		return offsets, nil
	case err != nil:
		return nil, err
	}
	for _, t := range res.Groups[0].Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return nil, err
			}
			if t.Topic == topic && p.Offset >= 0 {
				offsets[p.Partition] = p.Offset
			}
		}
	}
	return offsets, nil
}

// Versions are the latest whose requests name topics, and don't go by their ids,
// which we would have to look up first.
var Versions = kversion.V3_8_0()

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
	client, err := kgo.NewClient(kgo.SeedBrokers(b.addr), kgo.MaxVersions(Versions))
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
