package main

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/e2e/bench/connect"
	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// topic is what a topic, or a stream, holds.
type topic struct {
	nats       bool  // a stream of NATS, not a topic of Kafka
	partitions int32 // of a topic
	messages   int
	// resends of a hundred messages are copies of one of the last thousand of the
	// partition.
	resends int
	bytes   int    // of a value; 0: about 200
	ids     string // "": UUIDv4, "v7": UUIDv7, "text": 40 characters
	wide    bool   // values have twelve fields, none of them nested
	// Messages have headers with their producer, one of so many of their partition, and
	// that one's number, from 0; 0: they have none.
	producers int
	// enveloped values carry the schema that Kafka Connect needs.
	enveloped bool
}

// name tells topics apart.
func (t topic) name() string {
	name := fmt.Sprintf("orders-%d-%d-%d-%d-%s", t.partitions, t.messages, t.resends, t.bytes, cmp.Or(t.ids, "v4"))
	if t.wide {
		name += "-wide"
	}
	if t.producers > 0 {
		name += fmt.Sprintf("-of-%d", t.producers)
	}
	if t.enveloped {
		name += "-enveloped"
	}
	return name
}

func (t topic) id() []byte {
	switch t.ids {
	case "v7":
		return measure.TimedID()
	case "text":
		return fmt.Appendf(nil, "ord_%016x%020x", rand.Uint64(), rand.Uint64())
	}
	return measure.RandomID()
}

func (t topic) value(id []byte) []byte {
	var value []byte
	if t.wide {
		value = fmt.Appendf(nil, `{"id":%q,"customer":"c-204117","currency":"EUR","total":129.95,"quantity":2,"express":true,"country":"NL","channel":"web","weight":0.75,"revision":3,"placed_at":"2026-11-20T10:11:12Z","note":"leave it there"}`, id)
	} else {
		value = order(id)
	}
	if missing := t.bytes - len(value); missing > 0 {
		value = append(value[:len(value)-2], filler(missing)...)
		value = append(value, `"}`...)
	}
	if t.enveloped {
		return connect.Envelope(string(id), value)
	}
	return value
}

// order is the JSON of a small order; each message has its id in the key, in a
// header and in the value.
func order(id []byte) []byte {
	return fmt.Appendf(nil, `{"id":%q,"customer":"c-204117","currency":"EUR","total":129.95,"lines":[{"sku":"A-1002","quantity":2,"price":19.95}],"placed_at":"2026-11-20T10:11:12Z","note":"leave it there"}`, id)
}

// filler is text that can be compressed about as well as text can.
func filler(n int) []byte {
	words := strings.Fields("please ring twice and leave the parcel with a neighbour or behind the green door of number thirty seven if nobody answers")
	text := make([]byte, 0, n+20)
	for len(text) < n {
		text = append(append(text, ' '), words[rand.IntN(len(words))]...)
		text = fmt.Append(text, rand.IntN(10))
	}
	return text[:n]
}

// ids is how many different ones there are.
func (t topic) distinct() int {
	n := 0
	for i := range t.messages {
		if !t.resent(i) {
			n++
		}
	}
	return n
}

func (t topic) resent(i int) bool {
	return i >= 100*int(max(t.partitions, 1)) && i%100 < t.resends
}

// record is a message of a topic.
type record struct {
	id, value []byte
	// producer and number are nil unless the topic has producers.
	producer, number []byte
}

// each gives the topic's messages in their order, with the partition of each.
func (t topic) each(send func(partition int32, r record) error) error {
	sent := make([][]record, max(t.partitions, 1))
	const kept = 1000
	for i := range t.messages {
		p := i % len(sent)
		var r record
		if t.resent(i) {
			r = sent[p][rand.IntN(len(sent[p]))]
		} else {
			id := t.id()
			r = record{id: id, value: t.value(id)}
			if t.producers > 0 {
				r.producer, r.number = fmt.Appendf(nil, "client-%d-%d", p, i/len(sent)%t.producers), fmt.Append(nil, i/len(sent)/t.producers)
			}
			if len(sent[p]) < kept {
				sent[p] = append(sent[p], r)
			} else {
				sent[p][i/len(sent)%kept] = r
			}
		}
		if err := send(int32(p), r); err != nil {
			return err
		}
	}
	return nil
}

// fill makes the topic, if it isn't there yet.
func (b *bench) fill(ctx context.Context, t topic) error {
	if b.topics[t] {
		return nil
	}
	measure.Progress("topic %s: %d messages", t.name(), t.messages)
	fill := b.fillKafka
	if t.nats {
		fill = b.fillNATS
	}
	if err := fill(ctx, t); err != nil {
		return fmt.Errorf("fill %s: %w", t.name(), err)
	}
	b.topics[t] = true
	return nil
}

func (b *bench) fillKafka(ctx context.Context, t topic) error {
	if err := b.broker.CreateTopic(ctx, t.name(), t.partitions, map[string]string{"retention.ms": "-1"}); err != nil {
		return err
	}
	client, err := b.producer(t.name())
	if err != nil {
		return err
	}
	defer client.Close()
	var failed error
	_ = t.each(func(partition int32, r record) error {
		client.Produce(ctx, r.kafka(partition), func(_ *kgo.Record, err error) {
			if err != nil {
				failed = err // one goroutine calls all of these
			}
		})
		return nil
	})
	if err := client.Flush(ctx); err != nil {
		return err
	}
	return failed
}

func (b *bench) producer(topic string, more ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append(more, kgo.SeedBrokers(b.broker.Addr()), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic(topic))...)
}

func (r record) kafka(partition int32) *kgo.Record {
	headers := []kgo.RecordHeader{{Key: "id", Value: r.id}}
	if r.producer != nil {
		headers = append(headers, kgo.RecordHeader{Key: "client-id", Value: r.producer}, kgo.RecordHeader{Key: "client-seq", Value: r.number})
	}
	return &kgo.Record{Partition: partition, Key: r.id, Value: r.value, Headers: headers}
}

func (b *bench) fillNATS(ctx context.Context, t topic) error {
	conn, err := nats.Connect(b.nats.ClientURL())
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn, jetstream.WithPublishAsyncMaxPending(4000))
	if err != nil {
		return err
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: t.name(), Subjects: []string{t.name()}}); err != nil {
		return err
	}
	err = t.each(func(_ int32, r record) error {
		_, err := js.PublishMsgAsync(&nats.Msg{Subject: t.name(), Data: r.value, Header: nats.Header{"id": {string(r.id)}}}, jetstream.WithRetryAttempts(10), jetstream.WithRetryWait(100*time.Millisecond))
		return err
	})
	if err != nil {
		return err
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return ctx.Err()
	}
	stream, err := js.Stream(ctx, t.name())
	if err != nil {
		return err
	}
	if n := stream.CachedInfo().State.Msgs; n != uint64(t.messages) {
		return fmt.Errorf("the stream holds %d of %d messages", n, t.messages)
	}
	return nil
}
