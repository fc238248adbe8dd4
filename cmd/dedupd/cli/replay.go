package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/sinks"
)

// selection says which dead letters a command is about.
type selection struct {
	filter       dedup.DeadLetterFilter
	since, until string
	all, dryRun  bool
}

func (s *selection) flags(cmd *cobra.Command, limit int) {
	f, flags := &s.filter, cmd.Flags()
	flags.StringSliceVar(&f.Classes, "class", nil, "only this `CLASS`, "+strings.Join(dedup.Classes(), ", ")+"; may be given several times")
	flags.StringVar(&f.Source, "source", "", "only those that came by this `SOURCE`")
	flags.StringVar(&f.Lane, "lane", "", "only those that came by this `LANE`")
	flags.StringVar(&f.SQLState, "sqlstate", "", "only those whose SQLSTATE is, or begins with, this `CODE`")
	flags.StringVar(&f.Reason, "reason", "", "only those whose reason contains this `TEXT`")
	flags.StringVar(&s.since, "since", "", "only those created since this `TIME`: 2h or 7d ago, or as 2026-01-02T15:04:05Z")
	flags.StringVar(&s.until, "until", "", "only those created before this `TIME`")
	flags.IntVar(&f.Limit, "limit", limit, "at most so many")
	_ = cmd.RegisterFlagCompletionFunc("class", cobra.FixedCompletions(dedup.Classes(), cobra.ShellCompDirectiveNoFileComp))
}

// flagsToAct are the flags of commands that change something.
func (s *selection) flagsToAct(cmd *cobra.Command) {
	s.flags(cmd, 0)
	cmd.Flags().Lookup("limit").Usage = "at most this many, the oldest; 0: all"
	cmd.Flags().BoolVar(&s.all, "all", false, "all dead letters of the scope")
	cmd.Flags().BoolVar(&s.dryRun, "dry-run", false, "only say which it would be")
}

// check reads the flags.
func (s *selection) check() (f dedup.DeadLetterFilter, err error) {
	f = s.filter
	for _, class := range f.Classes {
		if !slices.Contains(dedup.Classes(), class) {
			return f, usageError{fmt.Errorf("--class %q is none of %s", class, strings.Join(dedup.Classes(), ", "))}
		}
	}
	if f.Since, err = parseMoment("--since", s.since); err != nil {
		return f, err
	}
	if f.Until, err = parseMoment("--until", s.until); err != nil {
		return f, err
	}
	return f, nil
}

// parseMoment reads a time, or how long ago it was.
func parseMoment(flag, text string) (dedup.Moment, error) {
	if text == "" {
		return dedup.Moment{}, nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return dedup.Moment{At: at}, nil
	}
	if ago, err := config.ParseDuration(text); err == nil && ago > 0 {
		return dedup.Moment{Ago: time.Duration(ago)}, nil
	}
	return dedup.Moment{}, usageError{fmt.Errorf("%s %q: write how long ago, such as 2h or 7d, or a time, such as 2026-01-02T15:04:05Z", flag, text)}
}

// checkToAct reads the flags and the numbers. It requires one of them, so that nobody
// acts on all dead letters by mistake.
func (s *selection) checkToAct(args []string) (f dedup.DeadLetterFilter, err error) {
	if f, err = s.check(); err != nil {
		return f, err
	}
	for _, arg := range args {
		id, err := parseLetterID(arg)
		if err != nil {
			return f, err
		}
		f.IDs = append(f.IDs, id)
	}
	named := len(f.IDs) > 0 || narrows(f)
	switch {
	case f.Limit < 0:
		return f, usageError{errors.New("--limit must not be below 0")}
	case named && s.all:
		return f, usageError{errors.New("--all goes with neither numbers nor filters")}
	case !named && !s.all:
		return f, usageError{errors.New("say which dead letters: their numbers, a filter such as --class, or --all")}
	}
	return f, nil
}

// narrows reports whether a filter has more than numbers.
func narrows(f dedup.DeadLetterFilter) bool {
	return len(f.Classes) > 0 || f.Source != "" || f.Lane != "" || f.SQLState != "" || f.Reason != "" || f.Since != dedup.Moment{} || f.Until != dedup.Moment{}
}

// choose returns the selected dead letters, the oldest first. If only numbers were
// given, it returns all of them: those that don't exist are then reported.
func choose(ctx context.Context, s *dedup.Store, f dedup.DeadLetterFilter) ([]int64, error) {
	if len(f.IDs) > 0 && !narrows(f) && f.Limit == 0 {
		return slices.Compact(slices.Sorted(slices.Values(f.IDs))), nil
	}
	return s.DeadLetterIDs(ctx, f)
}

// act does work with the selected dead letters; with --dry-run it only shows what would
// be done.
func (c *command) act(ctx context.Context, chosen *selection, args []string, done string, work func(context.Context, *dedup.Store, *config.Config, []int64) error) error {
	f, err := chosen.checkToAct(args)
	if err != nil {
		return err
	}
	return c.withScope(ctx, func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
		if chosen.dryRun {
			return c.showSelected(ctx, s, f, done)
		}
		ids, err := choose(ctx, s, f)
		if err != nil {
			return err
		}
		return work(ctx, s, cfg, ids)
	})
}

// Selected is the JSON output of --dry-run.
type Selected struct {
	Selected int     `json:"selected"`
	IDs      []int64 `json:"ids"`
}

// rowsShown is how many dead letters of a selection are shown to people.
const rowsShown = 50

func (c *command) showSelected(ctx context.Context, s *dedup.Store, f dedup.DeadLetterFilter, done string) error {
	ids, err := s.DeadLetterIDs(ctx, f)
	if err != nil {
		return err
	}
	if c.output == outputJSON {
		return writeJSON(c.stdout, Selected{len(ids), append([]int64{}, ids...)})
	}
	if len(ids) > 0 {
		letters, err := s.DeadLetters(ctx, dedup.DeadLetterFilter{IDs: ids[:min(len(ids), rowsShown)]})
		if err != nil {
			return err
		}
		slices.Reverse(letters)
		if err := c.writeDeadLetters(letters); err != nil {
			return err
		}
		if len(ids) > rowsShown {
			fmt.Fprintf(c.stdout, "… and %d more\n", len(ids)-rowsShown)
		}
	}
	fmt.Fprintf(c.stdout, "%s would be %s\n", count(len(ids), "dead letter"), done)
	return nil
}

func (c *command) replay() *cobra.Command {
	var chosen selection
	var overwrite bool
	cmd := &cobra.Command{
		Use:   "replay [ID…]",
		Short: "Applies dead letters again, each in a transaction like any message's",
		Long: `Applies dead letters again, the oldest first, once you have fixed the cause: the sink's
table, the configuration. Each gets a transaction of its own, which claims its id and
lets the sink write it, as for any message. So it has one effect, also while workers
run, and when two people replay it at once. The outcome is one of these:

  applied    the sink has written it; the dead letter is gone
  duplicate  another message has its id, with the same payload; the dead letter is gone
  conflict   another message has its id, with another payload; it stays.
             dedupd claims forget ID lets it in
  filtered   no sink wants it any more: it passes no filter; it stays
  dead       it still has no usable id, or the sink refuses it; it stays
  gone       it was replayed or discarded by somebody else, or has expired

Lanes don't move. The books count the outcome, and the audit records who did it. An
error that isn't the message's ends the command, and the rest stays as it is.

A dead letter is older than what was applied since. Where it would undo that, as in a table
with mode upsert, it is replayed only with --overwrite. So is one of class sequence, which
may also be a copy. Look at the row first.`,
		Example: `  dedupd dlq replay -c orders.yaml 7 8
  dedupd dlq replay -c orders.yaml --class poison --sqlstate 23514 --since 2h --dry-run`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.act(cmd.Context(), &chosen, args, "replayed", func(ctx context.Context, s *dedup.Store, cfg *config.Config, ids []int64) error {
				p, err := app.OpenProcessor(ctx, cfg, &sinks.Default, s)
				if err != nil {
					return err
				}
				p.Overwrite = overwrite
				return c.replayAll(ctx, p, ids)
			})
		},
	}
	chosen.flagsToAct(cmd)
	cmd.Flags().BoolVar(&overwrite, "overwrite", false, "also where an old state may go over a newer one, as in an upsert, and those of class sequence")
	return c.withPipeline(c.withOutput(cmd))
}

// ReplayResult is the JSON output of `dlq replay`.
type ReplayResult struct {
	Applied     int        `json:"applied"`
	Duplicates  int        `json:"duplicates"`
	Conflicts   int        `json:"conflicts"`
	Dead        int        `json:"dead"`
	Filtered    int        `json:"filtered"`
	Gone        int        `json:"gone"`
	DeadLetters []Replayed `json:"dead_letters"`
}

// Replayed is the JSON of what happened to one dead letter.
type Replayed struct {
	ID          int64  `json:"id"`
	Outcome     string `json:"outcome"`
	SinkOutcome string `json:"sink_outcome,omitempty"` // of what was applied
	MessageID   *Raw   `json:"message_id"`
	Reason      string `json:"reason,omitempty"`
	SQLState    string `json:"sqlstate,omitempty"`
}

func (r *ReplayResult) add(d dedup.Replayed) {
	switch d.Outcome {
	case dedup.ReplayApplied:
		r.Applied++
	case dedup.ReplayDuplicate:
		r.Duplicates++
	case dedup.ReplayConflict:
		r.Conflicts++
	case dedup.ReplayDead:
		r.Dead++
	case dedup.ReplayFiltered:
		r.Filtered++
	case dedup.ReplayGone:
		r.Gone++
	}
	r.DeadLetters = append(r.DeadLetters, Replayed{d.ID, d.Outcome, d.SinkOutcome, newRaw(d.MessageID), d.Reason, d.SQLState})
}

func (c *command) replayAll(ctx context.Context, p *dedup.Processor, ids []int64) error {
	result := ReplayResult{DeadLetters: []Replayed{}}
	show := newProgress(c.stderr, "dead letters")
	show.expect(int64(len(ids)))
	var failed error
	for _, id := range ids {
		r, err := p.Replay(ctx, actor(), id)
		if err != nil {
			failed = fmt.Errorf("%w; %d of %d were handled before it, the others are unchanged", err, len(result.DeadLetters), len(ids))
			break
		}
		result.add(r)
		show.update(int64(len(result.DeadLetters)))
	}
	show.end()
	return errors.Join(c.showReplay(result), failed)
}

func (c *command) showReplay(r ReplayResult) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, r)
	}
	t := table{columns: []column{right("ID"), left("OUTCOME"), left("MESSAGE ID"), left("REASON")}}
	others := 0
	for _, l := range r.DeadLetters {
		if l.SinkOutcome == "written" {
			continue
		}
		if others++; others <= rowsShown {
			t.add(l.ID, strings.TrimSpace(l.Outcome+" "+l.SinkOutcome), shorten(l.MessageID.inLine(), 40), shorten(l.Reason, 100))
		}
	}
	if others > 0 {
		if err := t.write(c.stdout); err != nil {
			return err
		}
		if others > rowsShown {
			fmt.Fprintf(c.stdout, "… and %d more\n", others-rowsShown)
		}
		fmt.Fprintln(c.stdout)
	}
	fmt.Fprintf(c.stdout, "applied %d, duplicates %d, conflicts %d, dead %d, filtered %d, gone %d\n", r.Applied, r.Duplicates, r.Conflicts, r.Dead, r.Filtered, r.Gone)
	if r.Conflicts > 0 {
		fmt.Fprintln(c.stdout, "A conflict's id is claimed by another message; dedupd claims why ID says which. dedupd claims forget ID lets the dead letter in.")
	}
	if r.Gone > 0 {
		fmt.Fprintln(c.stdout, "Those that are gone have been replayed or discarded by somebody else, or have expired.")
	}
	return nil
}

func (c *command) discard() *cobra.Command {
	var chosen selection
	cmd := &cobra.Command{
		Use:   "discard [ID…]",
		Short: "Deletes dead letters that nobody wants any more",
		Long: `Deletes dead letters: THEIR MESSAGES ARE NOT APPLIED. The audit records who did it, and
the dead letters without their payload. Their claims stay, so copies of such a message
are duplicates; dedupd claims forget ID lets the next copy in.`,
		Example: `  dedupd dlq discard -c orders.yaml 7 8
  dedupd dlq discard -c orders.yaml --class duplicate --until 7d`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.act(cmd.Context(), &chosen, args, "discarded", c.discardAll)
		},
	}
	chosen.flagsToAct(cmd)
	return c.withPipeline(c.withOutput(cmd))
}

// DiscardResult is the JSON output of `dlq discard`.
type DiscardResult struct {
	Discarded int     `json:"discarded"`
	Gone      int     `json:"gone"`
	IDs       []int64 `json:"ids"` // of those discarded
}

func (c *command) discardAll(ctx context.Context, s *dedup.Store, _ *config.Config, ids []int64) error {
	show := newProgress(c.stderr, "dead letters")
	show.expect(int64(len(ids)))
	done := 0
	discarded, failed := s.DiscardDeadLetters(ctx, actor(), ids, func(n int) {
		done = n
		show.update(int64(n))
	})
	show.end()
	if failed != nil {
		failed = fmt.Errorf("%w; %d of %d were handled before it", failed, done, len(ids))
	}
	slices.Sort(discarded)
	result := DiscardResult{len(discarded), done - len(discarded), append([]int64{}, discarded...)}
	if c.output == outputJSON {
		return errors.Join(writeJSON(c.stdout, result), failed)
	}
	fmt.Fprintf(c.stdout, "discarded %d, gone %d\n", result.Discarded, result.Gone)
	return failed
}
