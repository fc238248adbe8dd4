// Package nats reads NATS JetStream: one durable pull consumer shared by any
// number of workers, whose messages are acknowledged one by one after their
// commit. It is the only package that knows the NATS client.
package nats

import (
	"context"
	"errors"
	"log/slog"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/message"
)

var _ consumer.Source = (*Source)(nil)

// Source reads one stream.
type Source struct {
	config Config
}

// New checks a configuration. The error tells all that is wrong with it.
func New(c Config) (*Source, error) {
	c = c.withDefaults()
	if err := c.validate(); err != nil {
		return nil, err
	}
	return &Source{c}, nil
}

// Name is the source's name in the configuration.
func (s *Source) Name() string { return s.config.Name }

// Run reads until ctx ends. A missing server, stream or consumer is waited for;
// the error is one that only another configuration can mend.
func (s *Source) Run(ctx context.Context, in *consumer.Intake) error {
	log := in.Logger().With("source", s.config.Name)
	conn, err := s.connect(ctx, in, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	d := &durable{config: s.config, js: js, log: log, ackPendingFloor: ackPendingFloor(in)}

	said := ""
	for attempt := 0; ctx.Err() == nil; {
		bound, err := d.bind(ctx)
		if err == nil {
			attempt, said = 0, ""
			err = s.session(ctx, in, log, conn, bound)
		}
		in.Ready(false)
		if ctx.Err() != nil {
			break
		}
		var fatal *configError
		if errors.As(err, &fatal) || errors.Is(err, message.ErrLoss) {
			return err
		}
		if errors.Is(err, errRewound) {
			continue
		}
		// It is said once per reason: a stream that is missing may stay so.
		if text := err.Error(); text != said {
			said = text
			log.Warn("not reading the stream; trying again", "stream", s.config.Stream, "error", err)
		}
		attempt++
		sleep(ctx, min(100*time.Millisecond<<min(attempt, 10), 5*time.Second))
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// connect returns at once, connected or not, and the connection never gives up:
// after a long outage nobody should have to restart the worker.
func (s *Source) connect(ctx context.Context, in *consumer.Intake, log *slog.Logger) (*natsgo.Conn, error) {
	options, err := s.options()
	if err != nil {
		return nil, err
	}
	options = append(options,
		natsgo.MaxReconnects(-1),
		natsgo.RetryOnFailedConnect(true),
		// Acknowledgements that wait for a connection may come too late: see rewind.
		natsgo.ReconnectBufSize(-1),
		natsgo.IgnoreAuthErrorAbort(), // credentials are replaced while we run
		natsgo.ReconnectWait(500*time.Millisecond),
		natsgo.ReconnectJitter(500*time.Millisecond, time.Second),
		// A peer that is gone without a word is noticed after three of these.
		natsgo.PingInterval(10*time.Second),
		natsgo.DisconnectErrHandler(func(_ *natsgo.Conn, err error) {
			in.Ready(false)
			if ctx.Err() == nil {
				log.Warn("lost the connection to NATS; connecting again", "error", err)
			}
		}),
		natsgo.ConnectHandler(func(nc *natsgo.Conn) { log.Info("connected to NATS", "server", nc.ConnectedUrlRedacted()) }),
		natsgo.ReconnectHandler(func(nc *natsgo.Conn) { log.Info("connected to NATS again", "server", nc.ConnectedUrlRedacted()) }),
		natsgo.ErrorHandler(func(_ *natsgo.Conn, _ *natsgo.Subscription, err error) {
			log.Warn("NATS reports an error", "error", err)
		}),
	)
	said := "" // only the goroutine that reconnects comes here
	options = append(options, natsgo.ReconnectErrHandler(func(_ *natsgo.Conn, err error) {
		if err != nil && err.Error() != said {
			said = err.Error()
			log.Warn("can't connect to NATS; trying again", "error", err)
		}
	}))
	conn, err := natsgo.Connect(s.config.servers(), options...)
	if err != nil {
		return nil, &configError{"connect: " + err.Error()}
	}
	return conn, nil
}

// options are what every connection needs to get in.
func (s *Source) options() ([]natsgo.Option, error) {
	c := s.config
	options := []natsgo.Option{natsgo.Name("dedupd " + c.Name)}
	if c.TLS != nil {
		options = append(options, natsgo.Secure(c.TLS))
	}
	if c.CredsFile != "" {
		options = append(options, natsgo.UserCredentials(c.CredsFile))
	}
	if c.NkeySeedFile != "" {
		nkey, err := natsgo.NkeyOptionFromSeed(c.NkeySeedFile)
		if err != nil {
			return nil, &configError{"nkey_seed_file: " + err.Error()}
		}
		options = append(options, nkey)
	}
	return options, nil
}
