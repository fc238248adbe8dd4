package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// errSignal is the cause of a context that a signal ended. It is a planned stop.
type errSignal struct{ os.Signal }

func (e errSignal) Error() string { return "signal: " + e.Signal.String() }

// untilSignal returns a context that ends with the first SIGTERM or SIGINT, so that
// the worker drains. A second signal ends the process at once with 128+n: whoever sends
// it doesn't want to wait. stop restores the signals' usual meaning.
func untilSignal(ctx context.Context, stderr io.Writer) (_ context.Context, stop func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		select {
		case s := <-signals:
			cancel(errSignal{s})
		case <-done:
			return
		}
		select {
		case s := <-signals:
			fmt.Fprintf(stderr, "dedupd: a second signal (%s): ending at once; what was not committed comes again\n", s)
			os.Exit(128 + int(s.(syscall.Signal)))
		case <-done:
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		cancel(nil)
	}
}
