package main

// This file stands for the best that a team would write by hand, some fifty
// lines more than the first loop: each reader lands a batch in one transaction
// of four round trips, in pgx's binary formats, while its prefetch fills the
// next; offsets are committed once a second in the background, as a synchronous
// commit takes the broker 5 ms. It promises what the loop of single messages
// promises.

import (
	"bytes"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go"
)

func byHandBatched(ctx context.Context, o options, pool *pgxpool.Pool) error {
	return eachReader(ctx, o, func(ctx context.Context, reader *kafka.Reader) error {
		for {
			messages, err := collect(ctx, reader, o.batch, o.linger)
			if err != nil {
				return err
			}
			ids, payloads, err := fold(messages)
			if err != nil {
				return err
			}
			if err := untilDone(ctx, "land a batch", func() error { return landBatch(ctx, pool, ids, payloads) }); err != nil {
				return err
			}
			commit(ctx, reader, messages...)
		}
	})
}

// collect waits for a message, and then for what else comes within the linger.
func collect(ctx context.Context, reader *kafka.Reader, size int, linger time.Duration) ([]kafka.Message, error) {
	first, err := fetch(ctx, reader)
	if err != nil {
		return nil, err
	}
	messages := append(make([]kafka.Message, 0, size), first)
	ctx, cancel := context.WithTimeout(ctx, linger)
	defer cancel()
	for len(messages) < size {
		m, err := reader.FetchMessage(ctx)
		if err != nil {
			break // mostly the linger's end; a broker's trouble comes again
		}
		messages = append(messages, m)
	}
	return messages, nil
}

// fold keeps the first message of each id. The ids are sorted, so that two
// readers that claim the same ones wait for each other in one order, and never
// deadlock.
func fold(messages []kafka.Message) (ids pgtype.FlatArray[id], payloads map[id][]byte, err error) {
	payloads = make(map[id][]byte, len(messages))
	for _, m := range messages {
		id, err := messageID(m)
		if err != nil {
			return nil, nil, err
		}
		if _, again := payloads[id]; !again {
			payloads[id] = m.Value
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b id) int { return bytes.Compare(a[:], b[:]) })
	return ids, payloads, nil
}

// landBatch is land for many. It may be tried again after any error, as there.
func landBatch(ctx context.Context, pool *pgxpool.Pool, ids pgtype.FlatArray[id], payloads map[id][]byte) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `INSERT INTO claims SELECT unnest($1::uuid[]) ON CONFLICT DO NOTHING RETURNING id`, ids)
		if err != nil {
			return err
		}
		won, err := pgx.CollectRows(rows, pgx.RowTo[id])
		if err != nil || len(won) == 0 {
			return err
		}
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"rows"}, []string{"id", "payload"}, pgx.CopyFromSlice(len(won), func(i int) ([]any, error) {
			return []any{won[i], payloads[won[i]]}, nil
		}))
		return err
	})
}
