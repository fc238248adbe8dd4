package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/pgtest"
)

// postgres is the database the orders land in.
type postgres struct {
	server  *pgtest.Server
	pool    *pgxpool.Pool
	url     string
	version string
}

// table is what a user would have: an ordinary table. It has no unique index,
// so that nothing but dedupd keeps doubles out.
const table = `
CREATE TABLE public.orders (
    id       text NOT NULL,
    customer text NOT NULL,
    cents    bigint NOT NULL,
    came_by  text NOT NULL,
    sent_at  timestamptz NOT NULL
)`

func startPostgres(ctx context.Context, version string, s *screen) (*postgres, error) {
	type started struct {
		server *pgtest.Server
		err    error
	}
	done := make(chan started, 1)
	download := s.download("Postgres")
	go func() {
		server, err := pgtest.StartServer(pgtest.Options{
			Version: version,
			Fsync:   true, // as in production
			Progress: func(done, total int64) error {
				download(done, total)
				return ctx.Err()
			},
		})
		done <- started{server, err}
	}()
	var r started
	select {
	case r = <-done:
	case <-ctx.Done():
		// A start takes a moment, unpacking some seconds, and a download ends at
		// its next bytes. A second Ctrl-C doesn't wait for any of it.
		select {
		case r = <-done:
		case <-time.After(10 * time.Second):
			return nil, ctx.Err()
		}
	}
	if r.err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("Postgres (its binaries are downloaded once, which needs the network): %w", r.err)
	}
	p := &postgres{server: r.server}
	if err := p.prepare(ctx); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	return p, nil
}

func (p *postgres) prepare(ctx context.Context) error {
	admin, err := pgxpool.New(ctx, p.server.URL("postgres"))
	if err != nil {
		return err
	}
	defer admin.Close()
	if _, err := admin.Exec(ctx, "CREATE DATABASE demo"); err != nil {
		return err
	}
	p.url = p.server.URL("demo")
	if p.pool, err = pgxpool.New(ctx, p.url); err != nil {
		return err
	}
	if err := p.pool.QueryRow(ctx, "SELECT current_setting('server_version')").Scan(&p.version); err != nil {
		return err
	}
	_, err = p.pool.Exec(ctx, table)
	return err
}

func (p *postgres) stop() error {
	if p.pool != nil {
		p.pool.Close()
	}
	return p.server.Stop()
}

// broker is a NATS server in this process, with the two streams.
type broker struct {
	server *server.Server
	conn   *natsgo.Conn
	js     jetstream.JetStream
	url    string
}

func startBroker(ctx context.Context, folder string) (*broker, error) {
	s, err := server.NewServer(&server.Options{
		ServerName: "dedupd-demo",
		Host:       "127.0.0.1",
		Port:       server.RANDOM_PORT,
		JetStream:  true,
		StoreDir:   filepath.Join(folder, "nats"),
		NoLog:      true,
		NoSigs:     true, // Ctrl-C is ours: the worker drains first
	})
	if err != nil {
		return nil, fmt.Errorf("NATS: %w", err)
	}
	b := &broker{server: s}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		b.stop()
		return nil, errors.New("NATS: the server doesn't take connections")
	}
	b.url = s.ClientURL()
	if err := b.prepare(ctx); err != nil {
		b.stop()
		return nil, fmt.Errorf("NATS: %w", err)
	}
	return b, nil
}

func (b *broker) prepare(ctx context.Context) error {
	var err error
	if b.conn, err = natsgo.Connect("", natsgo.InProcessServer(b.server)); err != nil {
		return err
	}
	if b.js, err = jetstream.New(b.conn, jetstream.WithPublishAsyncMaxPending(2*burst)); err != nil {
		return err
	}
	for stream, subject := range map[string]string{shopStream: shopSubject, edgeStream: edgeSubject} {
		if _, err := b.js.CreateStream(ctx, jetstream.StreamConfig{
			Name:     stream,
			Subjects: []string{subject},
			Storage:  jetstream.FileStorage,
		}); err != nil {
			return err
		}
	}
	return nil
}

func (b *broker) stop() {
	if b.conn != nil {
		b.conn.Close()
	}
	b.server.Shutdown()
	b.server.WaitForShutdown()
}

// held is what the broker has not seen acknowledged: what it has yet to
// deliver, and what a worker has in hand, or had when it was killed.
func (b *broker) held(ctx context.Context) (int, error) {
	held := 0
	for _, stream := range []string{shopStream, edgeStream} {
		c, err := b.js.Consumer(ctx, stream, scope)
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			info, err := b.js.Stream(ctx, stream)
			if err != nil {
				return 0, err
			}
			held += int(info.CachedInfo().State.Msgs) // #nosec: a count of messages
			continue
		}
		if err != nil {
			return 0, err
		}
		info := c.CachedInfo()
		held += int(info.NumPending) + info.NumAckPending // #nosec: a count of messages
	}
	return held, nil
}

// impatience is the ack wait that hurry sets; the server looks at most 100 ms
// after.
const impatience = 100 * time.Millisecond

// hurry has the broker deliver again at once what a killed worker had in hand.
// By itself it waits for ten seconds, which is right in production and dull in a
// demo. The next worker sets the ack wait back.
func (b *broker) hurry(ctx context.Context) error {
	for _, stream := range []string{shopStream, edgeStream} {
		c, err := b.js.Consumer(ctx, stream, scope)
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			continue // killed before it came so far
		}
		if err != nil {
			return err
		}
		config := c.CachedInfo().Config
		config.AckWait = impatience
		if _, err := b.js.UpdateConsumer(ctx, stream, config); err != nil {
			return err
		}
	}
	sleep(ctx, 4*impatience)
	return ctx.Err()
}

// version of the embedded NATS server.
func (b *broker) version() string { return strings.TrimPrefix(server.VERSION, "v") }
