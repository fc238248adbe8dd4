package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

// servers are the servers and the programs that runs share.
type servers struct {
	folder  string
	keep    bool // of all runs, not only of those that went wrong
	discard bool // the folder, with the servers: nothing went wrong
	version string

	dedupd, check, natsBinary string

	postgres *pgtest.Server
	runs     atomic.Int64

	mu    sync.Mutex // for the brokers, which are started when they are first asked for
	kafka *kafkatest.Broker
	nats  []*natsServer
}

// build makes a program of this module from source.
func build(ctx context.Context, binary, pkg string, more ...string) error {
	cmd := exec.CommandContext(ctx, "go", append(append([]string{"build", "-o", binary}, more...), pkg)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return nil
}

// start builds the programs and starts the servers. It must run in the
// repository.
func (g *servers) start(ctx context.Context) (err error) {
	if g.folder == "" {
		if g.folder, err = os.MkdirTemp("", "dedupd-chaos-"); err != nil {
			return err
		}
	}
	programs := filepath.Join(g.folder, "bin")
	if g.dedupd == "" {
		g.dedupd = filepath.Join(programs, "dedupd")
		if err := build(ctx, g.dedupd, "./cmd/dedupd"); err != nil {
			return err
		}
	}
	g.check = filepath.Join(programs, "check")
	if err := build(ctx, g.check, "./e2e/check"); err != nil {
		return err
	}
	g.natsBinary = filepath.Join(programs, "nats-server")
	if err := build(ctx, g.natsBinary, "github.com/nats-io/nats-server/v2"); err != nil {
		return err
	}
	g.postgres, err = pgtest.StartServer(g.settings())
	return err
}

func (g *servers) settings() pgtest.Options {
	return pgtest.Options{Version: g.version, Fsync: true, Settings: map[string]string{"max_connections": "300"}}
}

func (g *servers) stop() error {
	var all []error
	if g.kafka != nil {
		all = append(all, g.kafka.Stop())
	}
	for _, s := range g.nats {
		all = append(all, s.Stop())
	}
	if g.postgres != nil {
		all = append(all, g.postgres.Stop())
	}
	if g.discard { // not before: a server that stops still writes there
		all = append(all, os.RemoveAll(g.folder))
	}
	return errors.Join(all...)
}

// newBroker is a topic or a stream of its own for a run.
func (g *servers) newBroker(ctx context.Context, kind, name string, partitions int) (broker, error) {
	if err := g.startBroker(kind); err != nil {
		return nil, err
	}
	if kind == "kafka" {
		return newKafkaTopic(ctx, []*kafkatest.Broker{g.kafka}, name, partitions)
	}
	return newNATSStream(ctx, g.nats, name, partitions)
}

func (g *servers) startBroker(kind string) (err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case kind == "kafka" && g.kafka == nil:
		g.kafka, err = kafkatest.Start(filepath.Join(g.folder, "kafka"))
	case kind == "nats" && g.nats == nil:
		g.nats, err = startNATS(g.natsBinary, filepath.Join(g.folder, "nats"), 1, nil)
	}
	return err
}

func execute(ctx context.Context, url, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}

func isState(err error, state string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == state
}

func median(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

func longest(all []time.Duration) (most time.Duration) {
	for _, d := range all {
		most = max(most, d)
	}
	return most
}
