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
)

func main() {
	if err := begin(); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
}

func begin() error {
	g := new(servers)
	flag.StringVar(&g.dedupd, "dedupd", "", "the binary to test (default: built from this checkout)")
	flag.StringVar(&g.version, "postgres", "", "the version of Postgres, such as 16.10")
	flag.BoolVar(&g.keep, "keep", false, "keep the files of all runs, not only of those that failed")
	only := flag.String("run", "", "run only the faults whose names match this regular expression")
	brokers := flag.String("brokers", "kafka,nats", "the brokers to run them with")
	short := flag.Bool("short", false, "the slice that every change must pass: minutes")
	times := flag.Int("times", 0, "let each fault strike this many times")
	atOnce := flag.Int("at-once", 3, "runs at a time")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano())>>20, "where the dice begin; the same seed and faults throw the same dice")
	hunting := flag.Bool("mutants", false, "instead, build one bug at a time into the product: each must be noticed")
	soak := flag.Duration("soak", 0, "instead, draw faults at random for this long")
	out := flag.String("out", "", "a file for the report, in Markdown; with -run, only the lines of those faults change")
	flag.Parse()
	pattern, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	howOften := func(f *fault, kind string) int {
		switch {
		case *times > 0:
			return *times
		case *short:
			return slice(f, kind)
		}
		return f.long
	}
	jobs := plan(*seed, strings.Split(*brokers, ","), func(f *fault) bool { return pattern.MatchString(f.name) }, howOften)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	defer func() {
		if err := g.stop(); err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
		}
	}()
	if *hunting {
		say("seed %d, %d mutants at most", *seed, len(mutants))
	} else {
		say("seed %d, %d runs", *seed, len(jobs))
	}
	if err := g.start(ctx); err != nil {
		return err
	}
	if *hunting {
		all, err := g.hunt(ctx, pattern.MatchString, *seed, *atOnce)
		if err == nil && *out != "" {
			err = reportMutants(*out, *seed, all)
		}
		if err != nil {
			return err
		}
		for _, c := range all {
			if c.by == "" {
				return fmt.Errorf("not caught: %s", c.mutant.name)
			}
		}
		return os.RemoveAll(g.folder)
	}
	if *soak > 0 {
		jobs = draw(*seed, *soak)
	}
	var outcomes []outcome
	if *only != "" && *out != "" { // the others' lines stay
		if outcomes, err = readOutcomes(*out); err != nil {
			return err
		}
	}
	done, bad := 0, 0
	err = g.doAll(ctx, jobs, *atOnce, func(o outcome) error {
		o.Date = time.Now().Format(time.DateOnly)
		if *soak > 0 { // a fault comes many times
			outcomes = append(outcomes, o)
		} else {
			outcomes = replace(outcomes, o)
		}
		done++
		say("%s", o.line())
		if o.Verdict != "valid" {
			bad++
		}
		if *out == "" {
			return nil
		}
		return report(*out, g, outcomes) // what is cut short has its report, too
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
	return os.RemoveAll(g.folder)
}

func say(format string, args ...any) {
	fmt.Printf(time.Now().Format("15:04:05")+"  "+format+"\n", args...)
}
