// Command retention measures what remembering costs: claims with few and many
// remembered ids, rotations and expiry under load, filters, and duplicates. It
// starts a Postgres of its own, prints its tables and writes them to a file. It
// is a benchmark, not a test: every figure that counts is a ratio between runs
// that took turns.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
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
	phases := flag.String("phases", "throughput,filters,rotation,boundary,expiry,duplicates", "what to measure")
	flag.Float64Var(&b.scale, "scale", 1, "a share of the claims to remember, for a first look")
	flag.IntVar(&b.rounds, "rounds", 9, "how often the runs take turns")
	flag.IntVar(&b.messages, "messages", 240_000, "messages of one run")
	out := flag.String("out", "", "a file for the report, in Markdown")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return b.run(ctx, strings.Split(*phases, ","), *out)
}

// settings are those of a small production server. Checkpoints are kept out of
// the runs: with one in each, a table that is written all over would pay for a
// whole page with each row.
var settings = map[string]string{
	"shared_buffers": "4GB", "max_wal_size": "32GB", "checkpoint_timeout": "1h", "maintenance_work_mem": "1GB",
	"max_connections": "100", "autovacuum_naptime": "1min",
}

type bench struct {
	scale    float64
	rounds   int
	messages int
	server   *pgtest.Server
	report   measure.Report
}

func (b *bench) run(ctx context.Context, phases []string, out string) (err error) {
	b.server, err = pgtest.StartServer(pgtest.Options{Fsync: true, Settings: settings})
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := b.server.Stop(); err == nil {
			err = stopErr
		}
	}()
	known := map[string]func(context.Context) error{
		"throughput": b.throughput, "filters": b.filters, "rotation": b.rotation, "boundary": b.boundary, "expiry": b.expiry, "duplicates": b.duplicates,
	}
	b.report.Title("Retention, measured", "make bench-retention")
	b.report.Add("Runs took turns, %d rounds; a figure is the median of the rounds, a ratio\nthe median of the rounds' ratios. Absolute figures are this machine's and no other's.\n\n", b.rounds)
	b.report.Setting(pgVersion, settings)
	if b.scale != 1 {
		b.report.Add("\n**A first look only: with %g of the claims.**\n", b.scale)
	}
	for _, name := range phases {
		phase := known[name]
		if phase == nil {
			return fmt.Errorf("there is no phase %q", name)
		}
		start := time.Now()
		if err := phase(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		measure.Progress("%s took %s", name, time.Since(start).Round(time.Second))
		if err := b.report.Write(out); err != nil {
			return err
		}
	}
	fmt.Print(b.report.String())
	return nil
}

func (b *bench) scaled(claims int) int { return int(float64(claims) * b.scale) }
