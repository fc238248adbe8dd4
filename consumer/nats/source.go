// Package nats reads NATS JetStream: one durable pull consumer shared by any
// number of workers, whose messages are acknowledged one by one after their
// commit. It is the only package that knows the NATS client.
package nats

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
)

var _ consumer.Source = (*Source)(nil)

// Source reads one stream.
type Source struct {
	config   Config
	floorAge time.Duration // zero: the constant, but for tests
}

// New makes a source. It connects to nothing.
func New(c Config) *Source { return &Source{config: c} }

// Name is the source's name in the configuration.
func (s *Source) Name() string { return s.config.Name }

// Run reads until ctx ends. A missing server, stream or consumer is waited for; the
// error is one that only another configuration can fix.
func (s *Source) Run(ctx context.Context, in *consumer.Session) error {
	log := in.Logger().With("source", s.config.Name)
	conn, err := s.connect(ctx, in, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer s.tellRefusals(conn, log)()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	d := &durable{config: s.config, js: js, log: log, ackPendingFloor: ackPendingFloor(in), floorAge: s.floorAge, filter: filter{subjects: s.config.Subjects}}

	var tries retries
	for ctx.Err() == nil {
		read := time.Duration(0)
		bound, err := d.bind(ctx)
		if err == nil {
			err = s.session(ctx, in, log, conn, bound)
			read = bound.read
		}
		in.NotReady(err)
		if ctx.Err() != nil {
			break
		}
		var fatal *configError
		if errors.As(err, &fatal) || errors.Is(err, lane.ErrLoss) {
			return err
		}
		if isHold(err) {
			in.Hold(s.lane(), err)
		}
		pause := tries.failed(read)
		if errors.Is(err, errRewound) {
			if tries.attempt == 1 {
				pause = 0
			}
		} else if tries.problem.IsNew(err) {
			log.Warn("not reading the stream; trying again", "stream", s.config.Stream, "error", err)
		}
		wait.For(ctx, pause)
	}
	return nil
}

func isHold(err error) bool {
	var hold *lane.HoldError
	return errors.As(err, &hold)
}

// connect returns at once, connected or not, and the connection never gives up:
// after a long outage nobody should have to restart the worker.
func (s *Source) connect(ctx context.Context, in *consumer.Session, log *slog.Logger) (*natsgo.Conn, error) {
	options, err := s.options()
	if err != nil {
		return nil, err
	}
	// The library calls the handlers one after the other.
	var problem logonce.Problem
	warn := func(what string, err error) {
		if problem.IsNew(err) {
			log.Warn(what, "error", err)
		}
	}
	connected := func(nc *natsgo.Conn) {
		problem.End()
		log.Info("connected to NATS", "server", nc.ConnectedUrlRedacted())
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
				warn("lost the connection to NATS; connecting again", cmp.Or(err, errDisconnected))
			}
		}),
		natsgo.ConnectHandler(connected),
		natsgo.ReconnectHandler(connected),
		natsgo.ErrorHandler(func(_ *natsgo.Conn, _ *natsgo.Subscription, err error) { warn("NATS reports an error", err) }),
		natsgo.ReconnectErrHandler(func(_ *natsgo.Conn, err error) {
			if err != nil {
				warn("can't connect to NATS; trying again", s.config.explain(err))
			}
		}),
	)
	conn, err := natsgo.Connect(s.config.servers(), options...)
	if err != nil {
		return nil, &configError{s.config.explain(err).Error()}
	}
	return conn, nil
}

// errDisconnected is the reason where the library gives none.
var errDisconnected = errors.New("the server closed the connection")

// options are what every connection needs to get in.
func (s *Source) options() ([]natsgo.Option, error) {
	c := s.config
	options := []natsgo.Option{natsgo.Name("dedupd " + c.Name)}
	if c.TLS != nil {
		options = append(options, natsgo.Secure(c.TLS), func(o *natsgo.Options) error {
			o.RootCAsCB = natsgo.RootCAsHandler(c.Authorities)
			return nil
		})
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
