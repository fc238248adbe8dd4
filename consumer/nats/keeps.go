package nats

import (
	"context"
	"fmt"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
)

var _ consumer.Keeper = (*Source)(nil)

// Keeps tells how long the stream keeps messages. Unlike Run it doesn't wait for
// a server or a stream that is missing.
func (s *Source) Keeps(ctx context.Context) ([]consumer.Kept, error) {
	options, err := s.options()
	if err != nil {
		return nil, err
	}
	conn, err := natsgo.Connect(s.config.servers(), append(options, natsgo.NoReconnect(), natsgo.Timeout(requestTimeout))...)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	stream, err := js.Stream(ctx, s.config.Stream)
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", s.config.Stream, err)
	}
	return []consumer.Kept{{Name: s.config.Stream, For: stream.CachedInfo().Config.MaxAge}}, nil
}
