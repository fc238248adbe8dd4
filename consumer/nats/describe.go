package nats

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
)

var _ consumer.Describer = (*Source)(nil)

// Describe returns where the stream begins and ends, and how far its consumer has
// everything acknowledged.
func (s *Source) Describe(ctx context.Context) (d consumer.Description, err error) {
	err = s.visit(ctx, func(ctx context.Context, stream jetstream.Stream) error {
		info := stream.CachedInfo()
		d.Consumed = info.Config.Retention != jetstream.LimitsPolicy
		l := consumer.BrokerLane{Name: laneName, First: int64(first(&info.State)), End: int64(info.State.LastSeq) + 1, Committed: -1, LogID: logIDOf(info)}
		found, err := stream.Consumer(ctx, s.config.Durable)
		switch {
		case errors.Is(err, jetstream.ErrConsumerNotFound): // it is made at the start
		case errors.Is(err, jetstream.ErrNotPullConsumer):
			return fmt.Errorf("durable %s is a push consumer; name another durable", s.config.Durable)
		case err != nil:
			return fmt.Errorf("durable %s: %w", s.config.Durable, err)
		default:
			l.Committed, l.OffsetMetadata = int64(found.CachedInfo().AckFloor.Stream)+1, offsetMetadataOf(found.CachedInfo())
			if p := pauseOf(found.CachedInfo()); p != nil {
				d.Paused = p
			}
			l.Whole = !d.Consumed && takesAll(&info.Config, &found.CachedInfo().Config)
		}
		d.Lanes = []consumer.BrokerLane{l}
		return nil
	})
	return d, err
}

// visit opens the stream over a connection of its own. Unlike Run it doesn't wait for a
// missing server or stream.
func (s *Source) visit(ctx context.Context, look func(context.Context, jetstream.Stream) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // cuts the connection off as well
	conn, err := s.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	ctx, cancel = context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	stream, err := js.Stream(ctx, s.config.Stream)
	if err != nil {
		return fmt.Errorf("stream %s: %w", s.config.Stream, err)
	}
	return look(ctx, stream)
}
