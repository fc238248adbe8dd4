package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/e2e/bench/connect"
	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// topic is what a topic holds.
type topic struct {
	partitions int32
	messages   int
	// resends of a hundred messages are copies of one of the last thousand of the
	// partition.
	resends int
	// enveloped values carry the schema that Kafka Connect needs.
	enveloped bool
}

func (t topic) name() string {
	name := fmt.Sprintf("orders-%d-%d-%d", t.partitions, t.messages, t.resends)
	if t.enveloped {
		name += "-enveloped"
	}
	return name
}

func (t topic) value(id []byte) []byte {
	if t.enveloped {
		return connect.Envelope(string(id), order(id))
	}
	return order(id)
}

// ids is how many different ones there are.
func (t topic) ids() int {
	n := 0
	for i := range t.messages {
		if !t.resent(i) {
			n++
		}
	}
	return n
}

func (t topic) resent(i int) bool { return i >= 100*int(t.partitions) && i%100 < t.resends }

// order is the JSON of a small order; each message has its id in the key, in a
// header and in the value.
func order(id []byte) []byte {
	return fmt.Appendf(nil, `{"id":%q,"customer":"c-204117","currency":"EUR","total":129.95,"lines":[{"sku":"A-1002","quantity":2,"price":19.95}],"placed_at":"2026-11-20T10:11:12Z","note":"leave it there"}`, id)
}

// fill makes the topic, if it isn't there yet.
func (b *bench) fill(ctx context.Context, t topic) error {
	if b.topics[t] {
		return nil
	}
	measure.Progress("topic %s: %d messages", t.name(), t.messages)
	if err := b.broker.CreateTopic(ctx, t.name(), t.partitions, map[string]string{"retention.ms": "-1"}); err != nil {
		return err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(b.broker.Addr()), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic(t.name()))
	if err != nil {
		return err
	}
	defer client.Close()
	var failed error
	sent := make([][]*kgo.Record, t.partitions)
	for i := range t.messages {
		p := i % int(t.partitions)
		var r *kgo.Record
		if t.resent(i) {
			last := sent[p][max(0, len(sent[p])-1000):]
			old := last[rand.IntN(len(last))]
			r = &kgo.Record{Partition: int32(p), Key: old.Key, Value: old.Value, Headers: old.Headers}
		} else {
			id := measure.RandomID()
			r = &kgo.Record{Partition: int32(p), Key: id, Value: t.value(id), Headers: []kgo.RecordHeader{{Key: "id", Value: id}}}
			sent[p] = append(sent[p], r)
		}
		client.Produce(ctx, r, func(_ *kgo.Record, err error) {
			if err != nil {
				failed = err // one goroutine calls all of these
			}
		})
	}
	if err := client.Flush(ctx); err != nil {
		return err
	}
	if failed != nil {
		return failed
	}
	b.topics[t] = true
	return nil
}
