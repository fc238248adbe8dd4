// Demo shows what dedupd promises, with nothing faked: a real Postgres, a real
// NATS server with JetStream, a producer that repeats itself, and the real
// binary, killed in the middle with SIGKILL. Then it counts.
//
//	make demo
//	go run ./e2e/demo -messages 1000000 -rate 0 -kills 5
//	go run ./e2e/demo -keep
//
// It exits 0 if every id landed exactly once and the books balance, 1 if not or
// if something failed, 2 for wrong usage, 130 after Ctrl-C. All that it starts
// listens on 127.0.0.1 only and ends with it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// options are what the user may choose.
type options struct {
	binary   string  // empty: built first
	messages int     // sent in all, resends included
	resend   float64 // share of them that are resends
	rate     int     // messages a second; 0: as fast as it goes
	kills    int
	seed     uint64
	keep     bool
	postgres string // version; empty: pgtest's default
	timeout  time.Duration
}

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, func() {
		// A terminal that is closed sends this one twice, and nobody meant to
		// hurry; a second Ctrl-C ends the demo at once.
		signal.Ignore(syscall.SIGHUP)
		stop()
	})
	err = run(ctx, o, newScreen(os.Stdout, os.Getenv))
	switch {
	case err == nil:
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "demo: interrupted; everything is stopped and removed")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("demo", flag.ContinueOnError)
	f.SetOutput(io.Discard) // the error says it all
	f.StringVar(&o.binary, "dedupd", "", "the dedupd `binary`; default: build it first")
	f.IntVar(&o.messages, "messages", 100_000, "messages to send, resends included")
	f.Float64Var(&o.resend, "resend", 0.2, "share of the messages that are resends")
	f.IntVar(&o.rate, "rate", 10_000, "messages to send a second; 0: as fast as it goes")
	f.IntVar(&o.kills, "kills", 2, "how often the worker is killed with SIGKILL")
	f.Uint64Var(&o.seed, "seed", 1, "seed of the producer's random choices")
	f.BoolVar(&o.keep, "keep", false, "leave everything running afterwards, until Ctrl-C")
	f.StringVar(&o.postgres, "postgres", "", "`version` of Postgres, such as 17.10")
	f.DurationVar(&o.timeout, "timeout", 5*time.Minute, "give up if the messages haven't landed after this time")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			f.SetOutput(os.Stdout)
			fmt.Println("Usage of the demo:")
			f.PrintDefaults()
		}
		return o, err
	}
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.messages < 1:
		return o, errors.New("-messages must be at least 1")
	case o.resend < 0 || o.resend >= 1:
		return o, errors.New("-resend must be at least 0 and less than 1")
	case o.rate < 0 || o.kills < 0:
		return o, errors.New("-rate and -kills can't be negative")
	case o.timeout <= 0:
		return o, errors.New("-timeout must be more than 0")
	}
	return o, nil
}
