// Command throughput lands a topic in Postgres again and again: with dedupd's
// release binary, with what its users would have instead, and without a broker
// at all, which is as fast as it could be. It starts a Kafka broker and a
// Postgres of its own, prints its tables and writes them to a file. It is a
// benchmark, not a test: every figure that counts is a ratio between runs that
// took turns.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/natstest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	b := new(bench)
	flag.StringVar(&b.dedupd, "dedupd", ".bin/dedupd", "dedupd's binary")
	flag.StringVar(&b.peers, "peers", ".bin/peers", "the binary of the peers written in Go")
	flag.StringVar(&b.connectLibs, "connect", ".cache/connect-4.1.0-libs", "the folder of Kafka Connect's jars")
	flag.StringVar(&b.connectPlugin, "debezium", ".cache/debezium-jdbc-3.6.0", "the folder of Debezium's JDBC sink")
	flag.StringVar(&b.postgres, "postgres", installed(), "the folder of an installed Postgres' programs; empty: download one, which is compiled for size and slower")
	flag.IntVar(&b.roundCount, "rounds", 3, "how often the runs take turns")
	flag.IntVar(&b.messages, "messages", 1_000_000, "messages of the topic; a slow peer gets fewer")
	only := flag.String("only", "", "run only those whose names contain one of these words, separated by commas")
	faults := flag.Bool("faults", false, "instead, run each under the same faults, and report what becomes of the messages")
	growth := flag.Bool("growth", false, "instead, measure what a message costs dedupd when 1, 5 and 20 times as many messages have landed, and by how many lanes")
	flag.StringVar(&b.before, "before", "", "instead, compare with this older dedupd binary")
	strategies := flag.Bool("strategies", false, "instead, compare the ways to apply each message once")
	out := flag.String("out", "", "a file for the report, in Markdown")
	flag.Parse()
	if *only != "" {
		b.only = strings.Split(*only, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	work := b.throughput
	switch {
	case *faults:
		work = b.suffer
	case *growth:
		work = b.grow
	case *strategies:
		work = b.strategies
	case b.before != "":
		work = b.versions
	}
	return b.run(ctx, work, *out)
}

// settings are those of a small production server. fsync and synchronous_commit
// are on.
var settings = map[string]string{
	"shared_buffers": "2GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min", "max_connections": "100",
}

type bench struct {
	dedupd, before, peers      string
	connectLibs, connectPlugin string
	postgres                   string
	roundCount, messages       int
	only                       []string

	folder   string
	server   *pgtest.Server
	broker   *kafkatest.Broker
	nats     *server.Server
	topics   map[topic]bool
	report   measure.Report
	runCount int
	starts   int
}

// throughput is what is measured unless something else is asked for.
func (b *bench) throughput(ctx context.Context) error {
	b.report.Title("Throughput, measured", "make bench")
	b.report.Add("Runs took turns, %d rounds; a figure is the median of the rounds, a ratio the\nmedian of the rounds' ratios. Absolute figures are this machine's and no other's.\n\n", b.roundCount)
	b.report.Setting(b.server.Version(), settings)
	for _, section := range []func(context.Context) error{b.compare, b.vary, b.latency, b.memory} {
		if err := section(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) run(ctx context.Context, work func(context.Context) error, out string) (err error) {
	defer func() {
		if stopErr := b.stop(); err == nil {
			err = stopErr
		}
	}()
	if err := b.start(); err != nil {
		return err
	}
	err = work(ctx)
	fmt.Print(b.report.String()) // as far as it came
	if err != nil {
		return err
	}
	return b.report.Write(out)
}

func (b *bench) start() (err error) {
	if b.folder, err = os.MkdirTemp("", "dedupd-bench-"); err != nil {
		return err
	}
	if b.broker, err = kafkatest.Start(filepath.Join(b.folder, "kafka")); err != nil {
		return err
	}
	if b.nats, err = natstest.Run(filepath.Join(b.folder, "nats")); err != nil {
		return err
	}
	b.topics = make(map[topic]bool)
	b.server, err = pgtest.StartServer(pgtest.Options{Bin: b.postgres, Fsync: true, Settings: settings})
	return err
}

func (b *bench) stop() error {
	var all []error
	if b.server != nil {
		all = append(all, b.server.Stop())
	}
	if b.nats != nil {
		natstest.Stop(b.nats)
	}
	if b.broker != nil {
		all = append(all, b.broker.Stop())
	}
	return errors.Join(append(all, os.RemoveAll(b.folder))...)
}

// installed finds the newest Postgres where Debian puts it.
func installed() (newest string) {
	best := 0
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	for _, program := range found {
		bin := filepath.Dir(program)
		if version, err := strconv.Atoi(filepath.Base(filepath.Dir(bin))); err == nil && version > best {
			best, newest = version, bin
		}
	}
	return newest
}

func (b *bench) wanted(name string) bool {
	for _, word := range b.only {
		if strings.Contains(name, word) {
			return true
		}
	}
	return len(b.only) == 0
}
