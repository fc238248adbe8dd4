package e2e

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/internal/kafkatest"
)

// idHeader carries a message's id.
const idHeader = "message-id"

// topic is a Kafka topic as a producer and an auditor see it.
type topic struct {
	t          *testing.T
	broker     *kafkatest.Broker
	name       string
	partitions int32
	client     *kgo.Client
}

// newTopic makes it at the broker that all tests share which don't hurt theirs.
func newTopic(t *testing.T, name string, partitions int32) *topic {
	t.Helper()
	needServices(t)
	return createTopic(t, kafkatest.Run(t), name, partitions)
}

func createTopic(t *testing.T, broker *kafkatest.Broker, name string, partitions int32) *topic {
	t.Helper()
	tp := &topic{t: t, broker: broker, name: name, partitions: partitions}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := tp.broker.CreateTopic(ctx, name, partitions, nil); err != nil {
		t.Fatal(err)
	}
	var err error
	tp.client, err = kgo.NewClient(kgo.SeedBrokers(tp.broker.Addr()), kgo.DefaultProduceTopic(name),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(5*time.Millisecond), kgo.MaxBufferedRecords(50_000))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tp.client.Close)
	return tp
}

func (tp *topic) lane(partition int32) string {
	return tp.name + "/" + strconv.Itoa(int(partition))
}

// produce sends records and returns when the broker has them.
func (tp *topic) produce(records ...*kgo.Record) error {
	return tp.client.ProduceSync(tp.t.Context(), records...).FirstErr()
}

// evict removes all members from a consumer group. Those that live join again; one that was
// killed would keep its partitions for the session timeout.
func (tp *topic) evict(group string) {
	tp.t.Helper()
	describe := kmsg.NewPtrDescribeGroupsRequest()
	describe.Groups = []string{group}
	described, err := describe.RequestWith(tp.t.Context(), tp.client)
	if err != nil {
		tp.t.Fatal(err)
	}
	leave := kmsg.NewPtrLeaveGroupRequest()
	leave.Group = group
	for _, m := range described.Groups[0].Members {
		member := kmsg.NewLeaveGroupRequestMember()
		member.MemberID = m.MemberID
		leave.Members = append(leave.Members, member)
	}
	if _, err := leave.RequestWith(tp.t.Context(), tp.client); err != nil {
		tp.t.Fatal(err)
	}
}

// produceAll sends a plan, so many a second as pace says at the time (0: as many
// as go), and returns when the broker has all.
func (tp *topic) produceAll(plan []send, pace func() int) error {
	var once sync.Once
	var failed error
	for len(plan) > 0 && failed == nil {
		n := len(plan)
		if rate := pace(); rate > 0 {
			n = min(n, rate/50)
			time.Sleep(time.Second / 50)
		} else {
			n = min(n, 2000)
		}
		for _, s := range plan[:n] {
			tp.client.Produce(tp.t.Context(), record(s), func(_ *kgo.Record, err error) {
				if err != nil {
					once.Do(func() { failed = err })
				}
			})
		}
		plan = plan[n:]
		if err := tp.client.Flush(tp.t.Context()); err != nil {
			return err
		}
	}
	return failed
}

func record(s send) *kgo.Record {
	return &kgo.Record{
		Partition: s.partition, Value: s.body(),
		Headers: []kgo.RecordHeader{{Key: idHeader, Value: []byte(s.id())}},
	}
}

// rawLog reads the whole topic again: for each lane the ids by position. It is
// the truth that a run is judged by, not what the producer thinks it has sent.
func (tp *topic) rawLog(ctx context.Context) (map[string][]string, error) {
	ends, err := tp.broker.Ends(ctx, tp.name, tp.partitions)
	if err != nil {
		return nil, err
	}
	from := map[int32]kgo.Offset{}
	left := int64(0)
	log := map[string][]string{}
	for p, end := range ends {
		from[p] = kgo.NewOffset().At(0)
		left += end
		log[tp.lane(p)] = make([]string, end)
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(tp.broker.Addr()), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{tp.name: from}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for left > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("read %s again, with %d messages to go: %w", tp.name, left, err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			for _, h := range r.Headers {
				if h.Key == idHeader && r.Offset < ends[r.Partition] {
					log[tp.lane(r.Partition)][r.Offset] = string(h.Value)
					left--
				}
			}
		})
	}
	return log, nil
}
