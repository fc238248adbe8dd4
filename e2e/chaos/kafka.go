package main

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/internal/kafkatest"
)

// kafkaTopic is a topic at a broker that several runs share.
type kafkaTopic struct {
	servers    []*kafkatest.Broker
	name       string
	partitions atomic.Int32
	client     *kgo.Client
}

func newKafkaTopic(ctx context.Context, servers []*kafkatest.Broker, name string, partitions int) (*kafkaTopic, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := servers[0].CreateTopic(ctx, name, int32(partitions), nil); err != nil {
		return nil, err
	}
	k := &kafkaTopic{servers: servers, name: name}
	k.partitions.Store(int32(partitions))
	var err error
	k.client, err = kgo.NewClient(kgo.SeedBrokers(k.addrs((*kafkatest.Broker).Addr)...), kgo.DefaultProduceTopic(name), kgo.MaxVersions(kafkatest.Versions),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(5*time.Millisecond), kgo.MaxBufferedRecords(100_000),
		kgo.RecordDeliveryTimeout(60*time.Second), kgo.MetadataMinAge(100*time.Millisecond), kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }))
	return k, err
}

// addrs are the servers' addresses of a kind.
func (k *kafkaTopic) addrs(of func(*kafkatest.Broker) string) (all []string) {
	for _, s := range k.servers {
		all = append(all, of(s))
	}
	return all
}

// grow adds partitions, and sends to them as well.
func (k *kafkaTopic) grow(ctx context.Context, by int32) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	partitions := k.partitions.Load() + by
	if err := k.servers[0].AddPartitions(ctx, k.name, partitions); err != nil {
		return err
	}
	if _, err := k.servers[0].Ends(ctx, k.name, partitions); err != nil { // until each has a leader
		return err
	}
	k.client.ForceMetadataRefresh()
	k.partitions.Store(partitions)
	return nil
}

func (k *kafkaTopic) Kind() string { return "kafka" }
func (k *kafkaTopic) Source() string {
	addrs := k.addrs((*kafkatest.Broker).Addr)
	if k.servers[0].Relayed() != "" {
		addrs = k.addrs((*kafkatest.Broker).Relayed)
	}
	// A group of its own: runs share the broker.
	return fmt.Sprintf("kafka: {brokers: [%s], topics: [%s], group: %s}", quoted(addrs), k.name, k.name)
}
func (k *kafkaTopic) Ordered() bool   { return true }
func (k *kafkaTopic) Partitions() int { return int(k.partitions.Load()) }
func (k *kafkaTopic) Close()          { k.client.Close() }
func (k *kafkaTopic) Judge() []string {
	return []string{"-kafka", strings.Join(k.addrs((*kafkatest.Broker).Addr), ","), "-topic", k.name}
}

func (k *kafkaTopic) Servers() (all []server) {
	for _, s := range k.servers {
		all = append(all, s)
	}
	return all
}

func (k *kafkaTopic) Send(ctx context.Context, m sent, done func(error)) {
	r := &kgo.Record{Partition: int32(m.partition), Value: m.value}
	if m.id != "" {
		r.Headers = []kgo.RecordHeader{{Key: idHeader, Value: []byte(m.id)}}
	}
	k.client.Produce(ctx, r, func(_ *kgo.Record, err error) { done(err) })
}

func (k *kafkaTopic) Ends(ctx context.Context) (map[string]int64, error) {
	ends, err := kafkatest.Ends(ctx, k.client, k.name, k.partitions.Load())
	return k.lanes(ends), err
}

func (k *kafkaTopic) Told(ctx context.Context) (map[string]int64, error) {
	told, err := kafkatest.Committed(ctx, k.client, k.name, k.name)
	return k.lanes(told), err
}

func (k *kafkaTopic) lanes(offsets map[int32]int64) map[string]int64 {
	lanes := map[string]int64{}
	for partition, offset := range offsets {
		lanes[fmt.Sprintf("%s/%d", k.name, partition)] = offset
	}
	return lanes
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

// quoted is a list as it stands between the brackets of YAML.
func quoted(all []string) string {
	var b strings.Builder
	for i, s := range all {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%q", s)
	}
	return b.String()
}
