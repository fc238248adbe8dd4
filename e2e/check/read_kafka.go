package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// idHeader carries a message's id.
const idHeader = "message-id"

// readKafka reads the topics again, from the first to the last message that is
// committed. This is the truth, not what a producer thinks it has sent.
func (h *history) readKafka(ctx context.Context, brokers string, topics []string) error {
	for _, topic := range topics {
		if err := h.readTopic(ctx, strings.Split(brokers, ","), topic); err != nil {
			return fmt.Errorf("read the topic %s: %w", topic, err)
		}
	}
	return nil
}

func (h *history) readTopic(ctx context.Context, brokers []string, topic string) error {
	// Later versions name topics by an id that we would have to look up first.
	admin, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.MaxVersions(kversion.V3_8_0()))
	if err != nil {
		return err
	}
	defer admin.Close()
	partitions, err := partitionsOf(ctx, admin, topic)
	if err != nil {
		return err
	}
	const latest, earliest = -1, -2
	first, err := offsets(ctx, admin, topic, partitions, earliest)
	if err != nil {
		return err
	}
	end, err := offsets(ctx, admin, topic, partitions, latest)
	if err != nil {
		return err
	}
	ids, unread := map[int32]laneID{}, map[int32]bool{}
	from := map[int32]kgo.Offset{}
	for _, p := range partitions {
		if ids[p], err = h.lane("", topic+"/"+strconv.Itoa(int(p))); err != nil {
			return err
		}
		l := &h.lanes[ids[p]]
		l.read, l.first, l.end = true, first[p], end[p]
		if l.first < l.end {
			from[p], unread[p] = kgo.NewOffset().At(l.first), true
		}
	}
	if len(unread) == 0 {
		return nil
	}
	// Control records tell that the end was reached where a transaction's marker,
	// or one that was aborted, stands there.
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords())
	if err != nil {
		return err
	}
	defer client.Close()
	for len(unread) > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("%d partitions are not read to their end: %w", len(unread), err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			l := &h.lanes[ids[r.Partition]]
			if r.Offset < l.end && !r.Attrs.IsControl() {
				h.addRecord(l, r)
			}
			if r.Offset >= l.end-1 {
				delete(unread, r.Partition)
			}
		})
	}
	return nil
}

func (h *history) addRecord(l *lane, r *kgo.Record) {
	var id []byte
	headers := make([]header, len(r.Headers))
	for i, hd := range r.Headers {
		headers[i] = header{[]byte(hd.Key), hd.Value}
		if hd.Key == idHeader {
			id = hd.Value // the last one counts
		}
	}
	m := record{position: r.Offset, at: r.Timestamp.UnixNano(), sum: valueSum(r.Value), carried: carriedSum(r.Value), raw: rawSum([]byte(r.Topic), r.Key, r.Value, headers)}
	m.identify(id, &h.texts)
	l.log = append(l.log, m)
	h.keep(l, r.Value)
}

// carriedSum is what a JSON object says is its sum, for sinks that can write
// what a message carries and can't compute.
func carriedSum(value []byte) checksum {
	if !bytes.Contains(value, []byte(`"sum"`)) {
		return 0
	}
	var v struct{ Sum string }
	if json.Unmarshal(value, &v) != nil {
		return 0
	}
	return textSum([]byte(v.Sum))
}

func partitionsOf(ctx context.Context, client *kgo.Client, topic string) ([]int32, error) {
	t := kmsg.NewMetadataRequestTopic()
	t.Topic = &topic
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = append(req.Topics, t)
	res, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, err
	}
	if err := kerr.ErrorForCode(res.Topics[0].ErrorCode); err != nil {
		return nil, err
	}
	var all []int32
	for _, p := range res.Topics[0].Partitions {
		all = append(all, p.Partition)
	}
	return all, nil
}

// offsets asks for each partition's first offset, or for the one behind its last
// committed message.
func offsets(ctx context.Context, client *kgo.Client, topic string, partitions []int32, which int64) (map[int32]int64, error) {
	rt := kmsg.NewListOffsetsRequestTopic()
	rt.Topic = topic
	for _, p := range partitions {
		rp := kmsg.NewListOffsetsRequestTopicPartition()
		rp.Partition, rp.Timestamp = p, which
		rt.Partitions = append(rt.Partitions, rp)
	}
	req := kmsg.NewPtrListOffsetsRequest()
	req.IsolationLevel = 1 // read committed
	req.Topics = append(req.Topics, rt)
	res, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, err
	}
	all := map[int32]int64{}
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return nil, fmt.Errorf("offsets of partition %d: %w", p.Partition, err)
			}
			all[p.Partition] = p.Offset
		}
	}
	if len(all) != len(partitions) {
		return nil, fmt.Errorf("the broker tells the offsets of %d partitions, not of %d", len(all), len(partitions))
	}
	return all, nil
}
