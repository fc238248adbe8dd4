package cli

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/message"
)

func (c *command) setLaneClock() *cobra.Command {
	var earlier bool
	set := &cobra.Command{
		Use:   "set-clock SOURCE LANE TIME",
		Short: "Corrects a lane's clock, by which claims expire",
		Long: `Corrects a lane's clock, the stream time, by which claims expire. TIME is a time such
as 2026-01-02T15:04:05Z; "now", the database's time; or "unknown". The lane's next
batch, or its heartbeat when it is caught up, moves the clock on from there. The command
asks no question; the audit records the change.

Set back, or to unknown, the clock keeps claims for longer: until the lane has passed
them again, or for retention.max_hold.

Set forward, it may make claims expire earlier, and COPIES THAT COME LATER ARE APPLIED
AGAIN. So may any time if the clock is unknown, or ahead of the database's and
therefore ignored. All this needs --expire-earlier. No clock can be set ahead of the
database's.

Set the database's own clock right first. This needs the rights of the schema's owner.`,
		Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			to, err := parseClock(args[2], true)
			if err != nil {
				return usageError{err}
			}
			to.Earlier = earlier
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, _ *config.Config) error {
				clock, err := s.SetLaneClock(ctx, actor(), message.Lane{Source: args[0], Name: args[1]}, to)
				if err != nil {
					return err
				}
				if c.output == outputJSON {
					return writeJSON(c.stdout, clock)
				}
				fmt.Fprintf(c.stdout, "the clock of lane %s of source %s was set from %s to %s\n", oneLine(clock.Lane), oneLine(clock.Source), orUnknown(clock.From), orUnknown(clock.To))
				return nil
			})
		},
	}
	expireEarlier(set, &earlier)
	return c.withPipeline(c.withOutput(set))
}

func (c *command) setGenerationClock() *cobra.Command {
	var earlier bool
	set := &cobra.Command{
		Use:   "set-clock GENERATION TIME",
		Short: "Corrects when a generation was sealed, or the open one opened",
		Long: `Corrects when a generation was sealed, or when the open one was opened, if the
database's clock was wrong then. TIME is a time such as 2026-01-02T15:04:05Z, or "now",
the database's time. A generation's claims are kept for retention.window from its
sealing. The command asks no question; the audit records the change.

Set a generation whose time is ahead to now: all its claims exist by now, and are kept
for a window from now on.

An earlier time may make claims expire earlier than a window after they were made, and
COPIES THAT COME LATER ARE APPLIED AGAIN. It needs --expire-earlier.

Set the database's own clock right first. This needs the rights of the schema's owner.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			generation, err := strconv.ParseInt(args[0], 10, 32)
			if err != nil || generation < 0 {
				return usageError{fmt.Errorf("%q is no generation: it must be a whole number, as retention status shows it", args[0])}
			}
			to, err := parseClock(args[1], false)
			if err != nil {
				return usageError{err}
			}
			to.Earlier = earlier
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
				clock, err := s.Generations().SetClock(ctx, actor(), int(generation), to)
				if err != nil {
					return err
				}
				if c.output == outputJSON {
					return writeJSON(c.stdout, clock)
				}
				was := "opened"
				if clock.State == "sealed" {
					was = "sealed"
				}
				fmt.Fprintf(c.stdout, "generation %d was %s at %s, not at %s\n", clock.Number, was, timestamp(&clock.To), timestamp(&clock.From))
				if clock.State == "sealed" {
					goes := clock.To.Add(time.Duration(cfg.Retention.Window))
					fmt.Fprintf(c.stdout, "Its claims expire when every lane has passed %s.\n", timestamp(&goes))
				}
				return nil
			})
		},
	}
	expireEarlier(set, &earlier)
	return c.withPipeline(c.withOutput(set))
}

func expireEarlier(cmd *cobra.Command, earlier *bool) {
	cmd.Flags().BoolVar(earlier, "expire-earlier", false, "allow it even if claims may expire earlier")
}

// parseClock reads what a clock is to be set to.
func parseClock(text string, mayBeUnknown bool) (generations.ClockSetting, error) {
	switch {
	case text == "now":
		return generations.ClockSetting{Now: true}, nil
	case text == "unknown" && mayBeUnknown:
		return generations.ClockSetting{}, nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil || at.IsZero() {
		unknown := ""
		if mayBeUnknown {
			unknown = `, or "unknown"`
		}
		return generations.ClockSetting{}, fmt.Errorf(`%q is no time: write it as 2026-01-02T15:04:05Z, or "now"%s`, text, unknown)
	}
	return generations.ClockSetting{To: at}, nil
}

func orUnknown(t *time.Time) string {
	if t == nil {
		return "unknown"
	}
	return timestamp(t)
}
