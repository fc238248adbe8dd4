package nats

import (
	"context"
	"net"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
)

var _ consumer.RetentionReporter = (*Source)(nil)

// BrokerRetention returns how long the stream keeps messages. For one that keeps them
// only until they are acknowledged (WorkQueue, Interest) it returns nothing: what we
// have acknowledged doesn't come again.
func (s *Source) BrokerRetention(ctx context.Context) (all []consumer.TopicRetention, err error) {
	err = s.visit(ctx, func(_ context.Context, stream jetstream.Stream) error {
		if c := &stream.CachedInfo().Config; c.Retention == jetstream.LimitsPolicy {
			all = []consumer.TopicRetention{{Name: s.config.Stream, For: c.MaxAge}}
		}
		return nil
	})
	return all, err
}

// dial connects once, to the first server that answers. The connection is closed when
// ctx ends.
func (s *Source) dial(ctx context.Context) (*natsgo.Conn, error) {
	options, err := s.options()
	if err != nil {
		return nil, err
	}
	options = append(options,
		natsgo.NoReconnect(),
		natsgo.Timeout(requestTimeout),
		natsgo.SetCustomDialer(dialer(func(network, address string) (net.Conn, error) { return dialUntil(ctx, network, address) })),
		natsgo.SkipHostLookup(), // the dialer does that, and ctx ends it
	)
	conn, err := natsgo.Connect(s.config.servers(), options...)
	switch {
	case err == nil:
		return conn, nil
	case ctx.Err() != nil: // what the library makes of that says less
		err = ctx.Err()
	}
	return nil, s.config.explain(err)
}

// dialer dials for the library, which has no contexts: it asks one server after the
// other, and waits for each.
type dialer func(network, address string) (net.Conn, error)

func (d dialer) Dial(network, address string) (net.Conn, error) { return d(network, address) }

// dialUntil dials. The connection is closed when ctx ends.
func dialUntil(ctx context.Context, network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: requestTimeout}
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	return conn, nil
}
