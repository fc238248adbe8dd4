package main

import (
	"context"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/e2e/kafka"
)

// kafkaTopic is a topic at a broker that several runs share.
type kafkaTopic struct {
	server     *kafka.Broker
	name       string
	partitions int
	client     *kgo.Client
}

func newKafkaTopic(ctx context.Context, server *kafka.Broker, name string, partitions int) (*kafkaTopic, error) {
	if err := server.CreateTopic(ctx, name, int32(partitions), nil); err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(server.Addr()), kgo.DefaultProduceTopic(name),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(5*time.Millisecond), kgo.MaxBufferedRecords(100_000),
		kgo.RecordDeliveryTimeout(60*time.Second), kgo.MetadataMinAge(100*time.Millisecond), kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }))
	if err != nil {
		return nil, err
	}
	return &kafkaTopic{server, name, partitions, client}, nil
}

func (k *kafkaTopic) Kind() string { return "kafka" }
func (k *kafkaTopic) Source() string {
	// A group of its own: runs share the broker.
	return fmt.Sprintf("kafka: {brokers: [%q], topics: [%s], group: %s}", k.server.Addr(), k.name, k.name)
}
func (k *kafkaTopic) Ordered() bool   { return true }
func (k *kafkaTopic) Partitions() int { return k.partitions }
func (k *kafkaTopic) Kill() error     { return k.server.Kill() }
func (k *kafkaTopic) Restart() error  { return k.server.Restart() }
func (k *kafkaTopic) Close()          { k.client.Close() }
func (k *kafkaTopic) Judge() []string { return []string{"-kafka", k.server.Addr(), "-topic", k.name} }

func (k *kafkaTopic) lane(partition int32) string { return fmt.Sprintf("%s/%d", k.name, partition) }

func (k *kafkaTopic) Send(ctx context.Context, m sent, done func(error)) {
	r := &kgo.Record{Partition: int32(m.partition), Value: m.value}
	if m.id != "" {
		r.Headers = []kgo.RecordHeader{{Key: idHeader, Value: []byte(m.id)}}
	}
	k.client.Produce(ctx, r, func(_ *kgo.Record, err error) { done(err) })
}

func (k *kafkaTopic) Ends(ctx context.Context) (map[string]int64, error) {
	rt := kmsg.NewListOffsetsRequestTopic()
	rt.Topic = k.name
	for p := range int32(k.partitions) {
		rp := kmsg.NewListOffsetsRequestTopicPartition()
		rp.Partition, rp.Timestamp = p, -1
		rt.Partitions = append(rt.Partitions, rp)
	}
	req := kmsg.NewPtrListOffsetsRequest()
	req.Topics = append(req.Topics, rt)
	res, err := req.RequestWith(ctx, k.client)
	if err != nil {
		return nil, err
	}
	ends := map[string]int64{}
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return nil, err
			}
			ends[k.lane(p.Partition)] = p.Offset
		}
	}
	if len(ends) != k.partitions {
		return nil, fmt.Errorf("the broker tells the ends of %d partitions, not of %d", len(ends), k.partitions)
	}
	return ends, nil
}

func (k *kafkaTopic) Told(ctx context.Context) (map[string]int64, error) {
	rt := kmsg.NewOffsetFetchRequestGroupTopic()
	rt.Topic = k.name
	for p := range int32(k.partitions) {
		rt.Partitions = append(rt.Partitions, p)
	}
	g := kmsg.NewOffsetFetchRequestGroup()
	g.Group, g.Topics = k.name, append(g.Topics, rt)
	req := kmsg.NewPtrOffsetFetchRequest()
	req.Groups = append(req.Groups, g)
	res, err := req.RequestWith(ctx, k.client)
	if err != nil {
		return nil, err
	}
	told := map[string]int64{}
	for _, g := range res.Groups {
		if err := kerr.ErrorForCode(g.ErrorCode); err != nil {
			return nil, err
		}
		for _, t := range g.Topics {
			for _, p := range t.Partitions {
				if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
					return nil, err
				}
				if p.Offset >= 0 {
					told[k.lane(p.Partition)] = p.Offset
				}
			}
		}
	}
	return told, nil
}

func (k *kafkaTopic) Done(ctx context.Context, ends map[string]int64) (bool, error) {
	told, err := k.Told(ctx)
	if err != nil {
		return false, err
	}
	for lane, end := range ends {
		if told[lane] < end {
			return false, nil
		}
	}
	return true, nil
}
