// Command chaos lets things go wrong for the real binary: workers are killed,
// stopped and restarted, at any moment and at chosen points of their
// transactions; answers are lost, servers crash, generations rotate. Meanwhile a
// producer sends, and sends again. Afterwards an independent program, e2e/check,
// reads the raw log again and judges what came of it.
//
// It drives the binary through the names that users rely on, and through a relay
// in front of Postgres (e2e/tap); the binary has no switch for faults.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"
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
	g := new(rig)
	flag.StringVar(&g.dedupd, "dedupd", "", "the binary to try (default: built from this checkout)")
	flag.StringVar(&g.version, "postgres", "", "the version of Postgres, such as 16.10")
	flag.BoolVar(&g.keep, "keep", false, "keep what all runs have written down, not only of those that went wrong")
	only := flag.String("run", "", "run only the faults whose names fit this regular expression")
	brokers := flag.String("brokers", "kafka,nats", "the brokers to run them with")
	short := flag.Bool("short", false, "the slice that every change must pass: minutes")
	times := flag.Int("times", 0, "let each fault strike so many times")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "where the dice begin; a run is replayed by its own seed, its name and its broker")
	out := flag.String("out", "", "a file for the report, in Markdown")
	flag.Parse()
	pattern, err := regexp.Compile(*only)
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
	say("seed %d", *seed)
	if err := g.start(ctx); err != nil {
		return err
	}
	var outcomes []outcome
	for i, f := range faults {
		if !pattern.MatchString(f.name) {
			continue
		}
		for j, kind := range strings.Split(*brokers, ",") {
			if f.brokers != nil && !slices.Contains(f.brokers, kind) {
				continue
			}
			n := f.long
			if *short {
				n = f.short
			}
			if *times > 0 {
				n = *times
			}
			if n == 0 {
				continue
			}
			own := *seed
			if pattern.String() != "^"+regexp.QuoteMeta(f.name)+"$" {
				own += uint64(1000*i + j)
			}
			o, err := g.do(ctx, f, kind, n, own)
			if err != nil {
				return err
			}
			outcomes = append(outcomes, o)
			say("%-34s %-5s %3d strikes, %7d messages, caught up %.1f s (%.1f s at most): %s (%.0f s, seed %d)%s",
				o.Fault, o.Broker, o.Strikes, o.Messages, o.Caught, o.Slowest, o.Verdict, o.Seconds, o.Seed, notes(o.Notes))
			if o.Complaint != "" {
				say("%s", o.Complaint)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
	}
	if *out != "" {
		if err := report(*out, g, outcomes); err != nil {
			return err
		}
	}
	bad := 0
	for _, o := range outcomes {
		if o.Verdict != "valid" {
			bad++
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d runs are not valid; what they wrote down is in %s", bad, len(outcomes), g.folder)
	}
	return os.RemoveAll(g.folder)
}

func say(format string, args ...any) {
	fmt.Printf(time.Now().Format("15:04:05")+"  "+format+"\n", args...)
}
