// Command mutate asks what tests are worth: it makes small changes to a package, one
// at a time, and lists those that the package's tests don't notice.
//
// All changes are compiled into one test binary, each behind a number, and an
// environment variable switches one of them on. So a package is built once, and a
// change costs a run of its tests.
//
//	go run ./internal/mutate [-run REGEXP] [-short] [-only FILE,...] PACKAGE...
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"time"
)

// options of a run.
type options struct {
	run   string        // of the tests; empty: all
	short bool          // the tests that need no servers
	only  []string      // names of files to change; none: all
	jobs  int           // test processes at a time
	limit time.Duration // of one; 0: five times what the tests take, and ten seconds
}

func main() {
	var o options
	var only string
	flag.StringVar(&o.run, "run", "", "run only the tests that match `REGEXP`")
	flag.BoolVar(&o.short, "short", false, "run the tests that need no servers")
	flag.StringVar(&only, "only", "", "change only these `FILES`, separated by commas")
	flag.IntVar(&o.jobs, "jobs", runtime.NumCPU(), "this many test processes at a time")
	flag.DurationVar(&o.limit, "limit", 0, "end tests that take longer; their change then counts as noticed")
	flag.Parse()
	if only != "" {
		o.only = strings.Split(only, ",")
	}
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "mutate: name at least one package")
		os.Exit(2)
	}
	if err := mutateAll(flag.Args(), o); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func mutateAll(patterns []string, o options) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	for _, pattern := range patterns {
		if err := mutate(ctx, pattern, o, os.Stdout); err != nil {
			return err
		}
	}
	return nil
}

// mutate does it for all packages of a pattern that have tests.
func mutate(ctx context.Context, pattern string, o options, out io.Writer) error {
	packages, err := load(ctx, pattern)
	if err != nil {
		return err
	}
	for _, p := range packages {
		if err := examine(ctx, p, o, out); err != nil {
			return fmt.Errorf("%s: %w", p.ImportPath, err)
		}
	}
	return nil
}

// examine lists the changes of one package that its tests don't notice.
func examine(ctx context.Context, p *pkg, o options, out io.Writer) error {
	folder, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	mutants, err := p.mutants(o.only)
	if err != nil {
		return err
	}
	b, err := p.build(ctx, folder, mutants)
	if err != nil {
		return err
	}
	missed, err := b.try(ctx, o)
	if err != nil {
		return err
	}
	for _, m := range missed {
		fmt.Fprintf(out, "%s: %s\n", m.where, m.what)
	}
	fmt.Fprintf(out, "%s: %d changes, %d not noticed\n", p.ImportPath, len(b.mutants), len(missed))
	return nil
}
