package nats

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// offer gives one slot what has arrived, without waiting for more. The slots compete:
// one that is full leaves the messages to the others.
func (x *session) offer(slot *consumer.Lane) {
	for {
		select {
		case d := <-x.arrived:
			batch, token := x.gather(d)
			if len(token) == 0 {
				continue
			}
			n := int64(len(token))
			err := slot.Offer(x.closing, batch, token)
			x.waiting.Add(-n)
			if err != nil {
				return
			}
			if batch.Lag == 0 {
				x.report()
			}
		case <-x.closing.Done():
			return
		}
	}
}

// gather makes a batch of a message and of those that have arrived after it.
func (x *session) gather(d delivery) (lane.Batch, []ackRef) {
	floor := x.floor.Load()
	b := lane.Batch{
		Lane: x.source.lane(), StreamID: x.assignment.StreamID, Epoch: x.assignment.Epoch, Checkpoint: x.gate.checkpoint(),
		From: int64(d.meta.Sequence.Stream), BrokerPosition: floor.position, OutstandingSince: floor.since,
	}
	var token []ackRef
	for {
		if time.Since(d.received) > keepFor {
			x.gaps.abandon(d.meta.Sequence.Stream)
			x.drop(d) // others may have more luck with it
		} else {
			token = append(token, d.ack)
			b.Messages = append(b.Messages, x.message(d))
			b.Next = max(b.Next, int64(d.meta.Sequence.Stream)+1)
			b.Bytes += d.bytes
		}
		if len(token) >= x.in.MaxMessages() || b.Bytes >= x.in.MaxBytes() {
			break
		}
		select {
		case d = <-x.arrived:
			continue
		default:
		}
		break
	}
	b.Lag = max(0, x.lag()-int64(len(token)))
	return b, token
}

// message translates. NATS has no key, and its headers have no order among keys. A
// message without payload has an empty value: there is no tombstone.
func (x *session) message(d delivery) message.Message {
	m := message.Message{
		Topic:      d.msg.Subject,
		Value:      d.msg.Data,
		Time:       d.meta.Timestamp,
		Position:   message.Position{Lane: x.source.lane(), Offset: int64(d.meta.Sequence.Stream)},
		Deliveries: int(d.meta.NumDelivered),
	}
	if lostHeaders(d.msg) {
		m.Damaged = fmt.Sprintf("its headers can't be parsed and are missing here; \"nats stream get %s %d\" shows the message", d.meta.Stream, m.Position.Offset)
	}
	if m.Value == nil {
		m.Value = []byte{}
	}
	for _, key := range slices.Sorted(maps.Keys(d.msg.Header)) {
		for _, v := range d.msg.Header[key] {
			m.Headers = append(m.Headers, message.Header{Key: key, Value: []byte(v)})
		}
	}
	return m
}
