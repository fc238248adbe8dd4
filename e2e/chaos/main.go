// Command chaos lets things go wrong for the real binary: workers are killed,
// stopped and restarted, at any moment and at chosen points of their
// transactions; answers are lost, servers crash, generations rotate. Meanwhile a
// producer sends, and sends again. Afterwards an independent program, e2e/check,
// reads the raw log again and judges what came of it.
//
// It drives the binary through the names that users rely on, and through a relay
// in front of Postgres (internal/pgrelay); the binary has no switch for faults.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/e2e/shape"
)

func main() {
	if err := begin(); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
}

// choice is what the command line asks for.
type choice struct {
	pattern  *regexp.Regexp
	only     bool // some faults
	brokers  []string
	shape    *shape.Shape // nil: any
	short    bool
	times    int
	atOnce   int
	seed     uint64
	hunting  bool
	soak     time.Duration
	out      string
	outcomes []outcome
}

func parse(g *servers) (c *choice, err error) {
	c = new(choice)
	flag.StringVar(&g.dedupd, "dedupd", "", "the binary to test (default: built from this checkout)")
	flag.StringVar(&g.version, "postgres", "", "the version of Postgres, such as 16.10")
	flag.BoolVar(&g.keep, "keep", false, "keep the files of all runs, not only of those that failed")
	only := flag.String("run", "", "run only the faults whose names match this regular expression")
	brokers := flag.String("brokers", "kafka,nats", "the brokers to run them with")
	form := flag.String("shape", "", "run only in this shape: how the workers are idempotent, a name of e2e/shape (default: each fault in shape claim, and the other shapes by the dice)")
	flag.BoolVar(&c.short, "short", false, "the slice that every change must pass: minutes")
	flag.IntVar(&c.times, "times", 0, "let each fault strike this many times")
	flag.IntVar(&c.atOnce, "at-once", 3, "runs at a time")
	flag.Uint64Var(&c.seed, "seed", uint64(time.Now().UnixNano())>>20, "where the dice begin; the same seed and faults throw the same dice")
	flag.BoolVar(&c.hunting, "mutants", false, "instead, build one bug at a time into the product: each must be noticed")
	flag.DurationVar(&c.soak, "soak", 0, "instead, draw faults at random for this long")
	flag.StringVar(&c.out, "out", "", "a file for the report, in Markdown; with -run, only the lines of those faults change")
	flag.Parse()
	c.only, c.brokers = *only != "", strings.Split(*brokers, ",")
	if *form != "" {
		if c.shape, err = shape.Named(*form); err != nil {
			return nil, fmt.Errorf("-shape: %w", err)
		}
	}
	c.pattern, err = regexp.Compile(*only)
	return c, err
}

// howOften is how many times a fault strikes.
func (c *choice) howOften(f *fault, kind string) int {
	switch {
	case c.times > 0:
		return c.times
	case c.short:
		return slice(f, kind)
	}
	return f.long
}

func begin() error {
	g := new(servers)
	c, err := parse(g)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	defer func() {
		if err := g.stop(); err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
		}
	}()
	if c.hunting {
		return c.hunt(ctx, g)
	}
	return c.doFaults(ctx, g)
}

func (c *choice) hunt(ctx context.Context, g *servers) error {
	say("seed %d, %d mutants at most", c.seed, len(mutants))
	if err := g.start(ctx); err != nil {
		return err
	}
	all, err := g.hunt(ctx, c.pattern.MatchString, c.seed, c.atOnce)
	if err == nil && c.out != "" {
		err = reportMutants(c.out, c.seed, all)
	}
	if err != nil {
		return err
	}
	for _, h := range all {
		if h.by == "" {
			return fmt.Errorf("not caught: %s", h.mutant.name)
		}
	}
	g.discard = true
	return nil
}

func (c *choice) doFaults(ctx context.Context, g *servers) error {
	jobs := c.plan()
	say("seed %d, %d runs", c.seed, len(jobs))
	if err := g.start(ctx); err != nil {
		return err
	}
	if c.soak > 0 {
		jobs = draw(c.seed, c.soak, c.shape)
	}
	if c.only && c.out != "" { // the others' lines stay
		var err error
		if c.outcomes, err = readOutcomes(c.out); err != nil {
			return err
		}
	}
	done, bad := 0, 0
	err := g.doAll(ctx, jobs, c.atOnce, func(o outcome) error {
		done++
		if o.Verdict != "valid" {
			bad++
		}
		return c.note(g, o)
	})
	if err != nil {
		return err
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d runs are not valid; what they wrote down is in %s", bad, done, g.folder)
	}
	if g.keep {
		say("everything is in %s", g.folder)
		return nil
	}
	g.discard = true
	return nil
}

// note writes the report anew after each run, so that what is cut short has one, too.
func (c *choice) note(g *servers, o outcome) error {
	o.Date = time.Now().Format(time.DateOnly)
	if c.soak > 0 { // a fault comes many times
		c.outcomes = append(c.outcomes, o)
	} else {
		c.outcomes = replace(c.outcomes, o)
	}
	say("%s", o.line())
	if c.out == "" {
		return nil
	}
	return report(c.out, g, c.outcomes)
}

func say(format string, args ...any) {
	fmt.Printf(time.Now().Format("15:04:05")+"  "+format+"\n", args...)
}
