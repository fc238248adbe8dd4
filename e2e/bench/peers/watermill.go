package main

// This file stands for Watermill with the claim in the handler's transaction,
// the exact way to deduplicate with it; its Deduplicator middleware claims
// before the handler runs, and loses what then fails. A handler that returns an
// error has its message delivered again after the pause. Watermill handles the
// partitions of a subscriber side by side, each one message at a time.

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	wkafka "github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

func watermillRouter(ctx context.Context, o options, pool *pgxpool.Pool) error {
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	config := wkafka.DefaultSaramaSubscriberConfig()
	config.Version = sarama.V3_6_0_0 // the default speaks what Kafka 4 no longer understands
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	for i := range o.members {
		subscriber, err := wkafka.NewSubscriber(wkafka.SubscriberConfig{
			Brokers: o.brokerList(), ConsumerGroup: o.group, Unmarshaler: fromHeader{},
			OverwriteSaramaConfig: config, NackResendSleep: pause,
		}, logger)
		if err != nil {
			return err
		}
		router.AddConsumerHandler(fmt.Sprint("land-", i), o.topic, subscriber, func(m *message.Message) error {
			id, err := parseID([]byte(m.UUID))
			if err != nil {
				return err
			}
			return land(m.Context(), pool, id, m.Payload)
		})
	}
	return router.Run(ctx)
}

// fromHeader takes the message's UUID from the header: Watermill's own
// unmarshaler takes it from a header that only its publisher sets.
type fromHeader struct{ wkafka.DefaultMarshaler }

func (u fromHeader) Unmarshal(record *sarama.ConsumerMessage) (*message.Message, error) {
	m, err := u.DefaultMarshaler.Unmarshal(record)
	if err == nil {
		m.UUID = m.Metadata.Get(idHeader)
	}
	return m, err
}
