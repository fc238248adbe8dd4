package main

import (
	"context"
	"fmt"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// queueLane is the lane of a NATS source.
const queueLane = "queue"

// readNATS reads streams again, by sequence; each is a source's.
func (h *history) readNATS(ctx context.Context, url string, streams, sources []string) error {
	conn, err := natsgo.Connect(url)
	if err != nil {
		return fmt.Errorf("connect to NATS: %w", err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return fmt.Errorf("connect to NATS: %w", err)
	}
	for i, stream := range streams {
		if err := h.readStream(ctx, js, stream, sources[i]); err != nil {
			return fmt.Errorf("read the stream %s: %w", stream, err)
		}
	}
	return nil
}

func (h *history) readStream(ctx context.Context, js jetstream.JetStream, name, source string) error {
	id, err := h.lane(source, queueLane)
	if err != nil {
		return err
	}
	stream, err := js.Stream(ctx, name)
	if err != nil {
		return err
	}
	state := stream.CachedInfo().State
	l := &h.lanes[id]
	l.read, l.end = true, int64(state.LastSeq)+1
	if state.FirstSeq > 1 { // sequences begin at 1
		l.first = int64(state.FirstSeq)
	}
	if state.Msgs == 0 {
		return nil
	}
	reader, err := js.OrderedConsumer(ctx, name, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	messages, err := reader.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	for {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return fmt.Errorf("after %d messages: %w", len(l.log), err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return err
		}
		if meta.Sequence.Stream <= state.LastSeq {
			h.addMessage(l, meta, msg)
		}
		if meta.Sequence.Stream >= state.LastSeq || meta.NumPending == 0 {
			return nil
		}
	}
}

// addMessage adds a message as dedupd keeps it: without a key, and with an empty
// value where there is none.
func (h *history) addMessage(l *lane, meta *jetstream.MsgMetadata, msg jetstream.Msg) {
	var headers []header
	for name, values := range msg.Headers() {
		for _, v := range values {
			headers = append(headers, header{[]byte(name), []byte(v)})
		}
	}
	var id []byte
	if all := msg.Headers()[idHeader]; len(all) > 0 {
		id = []byte(all[len(all)-1]) // the last one counts
	}
	value := append([]byte{}, msg.Data()...)
	m := record{position: int64(meta.Sequence.Stream), at: meta.Timestamp.UnixNano(), sum: valueSum(value), carried: carriedSum(value), raw: rawSum([]byte(msg.Subject()), nil, value, headers)}
	m.identify(id, &h.texts)
	l.log = append(l.log, m)
	h.keep(l, value)
}
