package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/sinks"
)

func (c *command) run() *cobra.Command {
	var untilIdle time.Duration
	var acceptLoss bool
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Runs the worker until SIGTERM or SIGINT",
		Long: `Runs the worker until SIGTERM or SIGINT. It then stops fetching, finishes the
transactions in hand, tells the brokers, and exits 0. A second signal ends it at
once; what was not committed comes again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("until-idle") && untilIdle <= 0 {
				return usageError{errors.New("--until-idle must be longer than 0")}
			}
			return c.work(cmd.Context(), untilIdle, acceptLoss)
		},
	}
	cmd.Flags().DurationVar(&untilIdle, "until-idle", 0, "end once every lane has been caught up for this `DURATION`")
	cmd.Flags().BoolVar(&acceptLoss, "accept-loss-on-failover", false, "read streams that delete what is acknowledged, though a failover of the database may lose it")
	return c.withFile(cmd)
}

func (c *command) work(ctx context.Context, untilIdle time.Duration, acceptLoss bool) error {
	// From here on a signal means a drain, even while the worker still starts.
	ctx, stop := untilSignal(ctx, c.stderr)
	defer stop()
	cfg, logger, err := c.loadAndWarn()
	if err != nil {
		return err
	}
	worker := &app.App{Config: cfg, Sinks: &sinks.Default, Logger: logger, UntilIdle: untilIdle, AcceptLoss: acceptLoss}
	done, err := worker.Run(ctx)
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil // the signal came before there was anything to drain
	}
	if err != nil {
		return err
	}
	if untilIdle > 0 {
		fmt.Fprintln(c.stdout, rate(done))
	}
	return nil
}

// rate says what a run has done. Its time excludes the wait for idleness.
func rate(s app.Summary) string {
	text := fmt.Sprintf("%s in %s", count(int(s.Messages), "message"), s.Duration.Round(time.Millisecond))
	if seconds := s.Duration.Seconds(); seconds > 0 {
		text += fmt.Sprintf(", %.0f msg/s", float64(s.Messages)/seconds)
	}
	return text
}
