package main

// This file stands for the loop that a team writes first, with care: kafka-go's
// Reader in a group, a transaction a message that holds both the claim and the
// row, and the offset committed afterwards. With CommitMessages for each message
// it waits for the broker each time; with a commit interval it commits in the
// background, which the claims make as safe.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go"
	"golang.org/x/sync/errgroup"
)

func byHand(ctx context.Context, o options, pool *pgxpool.Pool) error {
	return eachReader(ctx, o, func(ctx context.Context, reader *kafka.Reader) error {
		for {
			m, err := fetch(ctx, reader)
			if err != nil {
				return err
			}
			id, err := messageID(m)
			if err != nil {
				return err
			}
			if err := untilDone(ctx, "land", func() error { return land(ctx, pool, id, m.Value) }); err != nil {
				return err
			}
			commit(ctx, reader, m)
		}
	})
}

// eachReader runs the loop for as many readers as are wanted. The first that
// fails ends them all.
func eachReader(ctx context.Context, o options, loop func(context.Context, *kafka.Reader) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for range o.members {
		group.Go(func() error {
			reader := kafka.NewReader(kafka.ReaderConfig{
				Brokers: o.brokerList(), Topic: o.topic, GroupID: o.group, StartOffset: kafka.FirstOffset,
				CommitInterval: o.commitInterval,
				// The prefetch: fetches large enough, and a queue that holds more than
				// a batch, so that the next one is there when a transaction ends.
				MinBytes: 1, MaxBytes: 4 << 20, QueueCapacity: max(100, 4*o.batch),
				// Of an idle partition. A rebalance and Close wait for it, and the
				// default is 10 s.
				MaxWait:     time.Second,
				ErrorLogger: kafka.LoggerFunc(log.Printf),
			})
			return errors.Join(loop(ctx, reader), reader.Close())
		})
	}
	return group.Wait()
}

// fetch waits for the next message. The reader tells of the broker's troubles
// and mends them itself, so an error is only a reason to wait.
func fetch(ctx context.Context, reader *kafka.Reader) (kafka.Message, error) {
	for {
		m, err := reader.FetchMessage(ctx)
		if err == nil {
			return m, nil
		}
		if ctx.Err() != nil || errors.Is(err, io.EOF) {
			return m, err
		}
		log.Printf("fetch: %v", err)
		if err := sleep(ctx); err != nil {
			return m, err
		}
	}
}

// commit may fail, for example in a rebalance: what is delivered again finds its
// claim, and the next commit covers this one.
func commit(ctx context.Context, reader *kafka.Reader, messages ...kafka.Message) {
	if err := reader.CommitMessages(ctx, messages...); err != nil && ctx.Err() == nil {
		log.Printf("commit offsets: %v", err)
	}
}

func messageID(m kafka.Message) (id, error) {
	for _, h := range m.Headers {
		if h.Key == idHeader {
			return parseID(h.Value)
		}
	}
	return id{}, fmt.Errorf("partition %d, offset %d: no header %s", m.Partition, m.Offset, idHeader)
}
