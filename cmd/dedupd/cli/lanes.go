package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
)

func (c *command) lanes() *cobra.Command {
	list := &cobra.Command{
		Use:   "list",
		Short: "Lists lanes: their positions, their owners, and which one holds up expiry",
		Long: `Lists the scope's lanes: the position of each, who acquired it last and under which
epoch, and how far its clock, the stream time, is behind the database's. Claims expire
by the clock of the lane furthest behind. A lane whose clock is unknown holds up all
of them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.withScope(cmd.Context(), c.showLanes)
		},
	}
	return group("lanes", "Shows lanes and their positions, and moves them",
		c.withPipeline(c.withOutput(list)), c.setPosition(), c.setLaneClock(), c.forgetLane())
}

func (c *command) setPosition() *cobra.Command {
	var reapply bool
	set := &cobra.Command{
		Use:   "set-position SOURCE LANE POSITION",
		Short: "Moves a lane to another position, forward or back",
		Long: `Moves a Kafka partition's lane to another position, forward or back. A worker that
owns it is fenced at its next batch, and begins there; if the topic is quiet, within
half a minute. The command asks no question; the audit records the change.

Going back, messages are read again. Those whose ids are still claimed are
duplicates. Those that were claimed longer ago than claims are kept ARE APPLIED
AGAIN. Claims then don't expire until the lane has moved. With dedup.strategy position
there are no claims: all that is read again IS APPLIED AGAIN, which --reapply confirms.

Going forward, the messages in between ARE NOT APPLIED, now or later.

A NATS queue has no position. If it is held because its stream discarded messages
before they were read, set it to a position behind them: it goes on with what is
left. If the stream goes on discarding, set it to the stream's end: what is there is
read all the same.

This needs the rights of the schema's owner.`,
		Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			position, err := strconv.ParseInt(args[2], 10, 64)
			if err != nil || position < 0 {
				return usageError{fmt.Errorf("%q is no position: it must be a whole number from 0 on", args[2])}
			}
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
				m, err := s.SetPosition(ctx, actor(), args[0], args[1], position, reapply || cfg.Dedup.Strategy != policy.StrategyPosition)
				if err != nil {
					return err
				}
				return c.showMove(m)
			})
		},
	}
	set.Flags().BoolVar(&reapply, "reapply", false, "with dedup.strategy position: go back, and apply again what is read again")
	return c.withPipeline(c.withOutput(set))
}

func (c *command) forgetLane() *cobra.Command {
	var force, reapply bool
	forget := &cobra.Command{
		Use:   "forget SOURCE LANE",
		Short: "Deletes a lane whose topic is gone, so that it no longer holds up expiry",
		Long: `Deletes a lane with its books, for a topic or partition that is gone: its clock
stands still, and would keep claims from expiring. The audit records the whole row.
Claims that came by the lane stay, but no longer say which lane that was.

Without --force, a lane that was in use within the last 5 minutes is not deleted. A
worker that still reads it is fenced, and acquires it as a new lane, which begins at
the group's offset or where "start" says.

This needs the rights of the schema's owner.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
				if cfg.Dedup.Strategy == policy.StrategyPosition && !reapply {
					return dedup.ErrReapplies
				}
				row, err := s.ForgetLane(ctx, actor(), args[0], args[1], force)
				if err != nil {
					return err
				}
				return c.showForgottenLane(args[0], args[1], row)
			})
		},
	}
	forget.Flags().BoolVar(&reapply, "reapply", false, "with dedup.strategy position: apply again what is read again if the lane comes back")
	forget.Flags().BoolVar(&force, "force", false, "delete it even if it seems to be in use")
	return c.withPipeline(c.withOutput(forget))
}

// actor is who runs the command; the audit records it.
func actor() string {
	name := fmt.Sprintf("uid %d", os.Getuid()) // a container's user may have no name
	if u, err := user.Current(); err == nil && u.Username != "" {
		name = u.Username
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return name + "@" + host
}

func (c *command) showLanes(ctx context.Context, s *dedup.Store, _ *config.Config) error {
	lanes, err := s.LaneStates(ctx)
	if err != nil {
		return err
	}
	if c.output == outputJSON {
		return writeJSON(c.stdout, lanes)
	}
	if len(lanes) == 0 {
		fmt.Fprintln(c.stdout, "no lanes yet")
		return nil
	}
	t := table{columns: []column{
		left("SOURCE"), left("LANE"), left("ORDERED"), right("NEXT"), right("BROKER"), right("LAG"), left("STREAM TIME"), right("AGE"),
		left("UPDATED"), right("EPOCH"), left("OWNER"),
	}}
	behind := ""
	for i := range lanes {
		l := &lanes[i]
		ordered := "yes"
		if !l.Ordered {
			ordered = "no"
		}
		t.add(l.Source, l.Lane, ordered, l.NextPosition, known(l.BrokerPosition), known(l.Lag), timestamp(l.StreamTime), age(l.StreamAge),
			timestamp(&l.UpdatedAt), l.Epoch, l.Owner)
		if l.HoldsUpExpiry {
			behind = fmt.Sprintf("%s %s, whose clock isn't known: nothing expires before retention.max_hold", l.Source, l.Lane)
			if l.ClockAhead {
				behind = fmt.Sprintf("%s %s, whose clock is ahead of the database's and isn't believed: nothing expires before retention.max_hold", l.Source, l.Lane)
			} else if l.StreamTime != nil {
				behind = fmt.Sprintf("%s %s, which is furthest behind: %s", l.Source, l.Lane, age(l.StreamAge))
			}
		}
	}
	if err := t.write(c.stdout); err != nil {
		return err
	}
	fmt.Fprintf(c.stdout, "\nclaims expire by the clock of %s\n", oneLine(behind))
	for i := range lanes {
		if l := &lanes[i]; l.GapNext != nil {
			fmt.Fprintf(c.stdout, "%s %s is held, or skips: its stream has discarded positions %d to %d before all were read\n", oneLine(l.Source), oneLine(l.Lane), *l.GapFrom, *l.GapNext-1)
		}
	}
	return nil
}

// age formats seconds for people, in the two largest units; "-": not known.
func age(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	n := int64(*seconds)
	units := []struct {
		name    string
		seconds int64
	}{{"d", 86400}, {"h", 3600}, {"m", 60}, {"s", 1}}
	for i, u := range units[:3] {
		if n >= u.seconds {
			next := units[i+1]
			return fmt.Sprintf("%d%s%02d%s", n/u.seconds, u.name, n%u.seconds/next.seconds, next.name)
		}
	}
	return fmt.Sprintf("%ds", n)
}

func (c *command) showMove(m dedup.LaneMove) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, m)
	}
	if m.Queue {
		fmt.Fprintf(c.stdout, "lane %s of source %s goes on within seconds, with what is left; what its stream discards below %d is not missed\n", oneLine(m.Lane), oneLine(m.Source), m.To)
		return nil
	}
	fmt.Fprintf(c.stdout, "lane %s of source %s was moved from %d to %d, under epoch %d\n", oneLine(m.Lane), oneLine(m.Source), m.From, m.To, m.Epoch)
	switch {
	case m.To < m.From:
		fmt.Fprintf(c.stdout, "With dedup.strategy claim, ids claimed since %s are known, and their messages duplicates; older ones that are read again are applied again. "+
			"With sequence, the producers' marks tell; with position, all is applied again.\n", m.ClaimsSince.UTC().Format(time.RFC3339))
	case m.To > m.From:
		fmt.Fprintln(c.stdout, "The messages in between are not applied.")
	}
	fmt.Fprintf(c.stdout, "The owner, %s, is fenced at its next batch and begins there; where the topic is quiet, within half a minute.\n", oneLine(m.Owner))
	return nil
}

func (c *command) showForgottenLane(source, lane string, row json.RawMessage) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, row)
	}
	fmt.Fprintf(c.stdout, "lane %s of source %s is forgotten; the audit keeps its row:\n%s\n", oneLine(lane), oneLine(source), harmless(string(row)))
	return nil
}
