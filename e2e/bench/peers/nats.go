package main

// This file stands for a consumer of nats.go as its examples have it, with care:
// a durable consumer, a transaction a message that holds both the claim and the
// row, and the acknowledgement afterwards.

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func natsConsumer(ctx context.Context, o options, pool *pgxpool.Pool) error {
	conn, err := nats.Connect(o.brokers)
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	durable, err := js.CreateOrUpdateConsumer(ctx, o.topic, jetstream.ConsumerConfig{Durable: o.group, AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	for range o.members {
		messages, err := durable.Messages()
		if err != nil {
			return err
		}
		all.Go(func() {
			for {
				m, err := messages.Next(jetstream.NextContext(ctx))
				if ctx.Err() != nil {
					messages.Stop()
					return
				}
				if err != nil {
					log.Printf("next: %v", err)
					if sleep(ctx) != nil {
						return
					}
					continue
				}
				if err := landNATS(ctx, pool, m); err != nil {
					log.Printf("land: %v", err) // it is delivered again
				}
			}
		})
	}
	all.Wait()
	return ctx.Err()
}

func landNATS(ctx context.Context, pool *pgxpool.Pool, m jetstream.Msg) error {
	id, err := parseID([]byte(m.Headers().Get(idHeader)))
	if err != nil {
		return fmt.Errorf("%s: %w", m.Subject(), err)
	}
	if err := untilDone(ctx, "land", func() error { return land(ctx, pool, id, m.Data()) }); err != nil {
		return err
	}
	return m.Ack()
}
