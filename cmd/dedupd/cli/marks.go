package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
)

func (c *command) marks() *cobra.Command {
	return group("marks", "Shows and forgets how far producers have come, with dedup.strategy sequence", c.listMarks(), c.whyMark(), c.forgetMark())
}

// withMarks is withScope for commands about marks, which only strategy sequence keeps.
func (c *command) withMarks(ctx context.Context, work func(ctx context.Context, s *dedup.Store) error) error {
	return c.withScope(ctx, func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
		if cfg.Dedup.Strategy != policy.StrategySequence {
			return usageError{fmt.Errorf("dedup.strategy is %s, which keeps no marks of producers", cfg.Dedup.Strategy)}
		}
		return work(ctx, s)
	})
}

// Mark is the JSON of how far a producer has come. Number and epoch are strings, since the
// numbers of many readers of JSON can't have that many digits.
type Mark struct {
	Producer   *Raw      `json:"producer"`
	Key        string    `json:"key"`
	Source     *string   `json:"source"` // null, like lane: the lane was forgotten
	Lane       *string   `json:"lane"`
	LaneNumber int32     `json:"lane_number"`
	Epoch      int64     `json:"epoch,string"`
	Number     int64     `json:"number,string"`
	Position   int64     `json:"position"`
	SeenAt     time.Time `json:"seen_at"`
	AgeSeconds float64   `json:"age_seconds"`
}

func newMark(m *dedup.Mark) *Mark {
	if m == nil {
		return nil
	}
	return &Mark{newRaw(m.Producer), m.Key, m.Source, m.Lane, m.LaneNumber, m.Epoch, m.Number, m.Position, m.SeenAt, m.AgeSeconds}
}

// lane says by which lane the producer's messages come.
func (m *Mark) lane() string {
	if m.Source == nil || m.Lane == nil {
		return fmt.Sprintf("lane number %d, which was forgotten", m.LaneNumber)
	}
	return fmt.Sprintf("source %s, lane %s", *m.Source, *m.Lane)
}

func (c *command) listMarks() *cobra.Command {
	var f dedup.MarkFilter
	list := &cobra.Command{
		Use:   "list",
		Short: "Lists producers' marks, those seen last first",
		Long: `Lists how far producers have come: the lane that their messages come by, and the epoch
and number of the last one. A producer that isn't seen for retention.window is
forgotten.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.Limit < 1 || f.Limit > 10_000 {
				return usageError{errors.New("--limit must be from 1 to 10000")}
			}
			return c.withMarks(cmd.Context(), func(ctx context.Context, s *dedup.Store) error {
				marks, err := s.Marks(ctx, f)
				if err != nil {
					return err
				}
				return c.showMarks(marks, f.Limit)
			})
		},
	}
	list.Flags().StringVar(&f.Source, "source", "", "only those whose messages come by this `SOURCE`")
	list.Flags().StringVar(&f.Lane, "lane", "", "only those whose messages come by this `LANE`")
	list.Flags().IntVar(&f.Limit, "limit", 50, "at most so many")
	return c.withPipeline(c.withOutput(list))
}

func (c *command) showMarks(marks []dedup.Mark, limit int) error {
	all := make([]Mark, len(marks))
	for i := range marks {
		all[i] = *newMark(&marks[i])
	}
	if c.output == outputJSON {
		return writeJSON(c.stdout, all)
	}
	if len(all) == 0 {
		fmt.Fprintln(c.stdout, "no marks")
		return nil
	}
	t := table{columns: []column{
		left("PRODUCER"), left("SOURCE"), left("LANE"), right("EPOCH"), right("NUMBER"), right("POSITION"), left("SEEN"), right("AGE"),
	}}
	for _, m := range all {
		t.add(shorten(m.Producer.inLine(), 60), known(m.Source), known(m.Lane), m.Epoch, m.Number, m.Position, timestamp(&m.SeenAt), age(&m.AgeSeconds))
	}
	if err := t.write(c.stdout); err != nil {
		return err
	}
	if len(all) == limit {
		fmt.Fprintln(c.stderr, "there may be more: raise --limit")
	}
	return nil
}

const howToNameAProducer = `Give the producer as dedup.sequence.producer finds it, byte by byte. If that joins
several places, give the joined text ("3:abc,2:de,"), as marks list shows it. A mark's
key, as in dlq show, works as well.`

// WhyMark is the JSON output of `marks why`.
type WhyMark struct {
	Producer    string                `json:"producer"`
	Key         string                `json:"key"`
	Found       bool                  `json:"found"`
	Mark        *Mark                 `json:"mark"`
	DeadLetters []dedup.DeadLetterRef `json:"dead_letters"`
}

func (c *command) whyMark() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "why PRODUCER",
		Short: "Tells how far a producer has come, and so why its messages are duplicates",
		Long: `Tells how far a producer has come, and what that means for its next messages. "No
mark" is an answer, too, with exit code 0.

` + howToNameAProducer,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkProducer(args[0]); err != nil {
				return err
			}
			return c.withMarks(cmd.Context(), func(ctx context.Context, s *dedup.Store) error {
				a, err := s.FindMark(ctx, args[0])
				if err != nil {
					return err
				}
				return c.showWhyMark(WhyMark{args[0], a.Key, a.Mark != nil, newMark(a.Mark), a.DeadLetters})
			})
		},
	}))
}

// checkProducer refuses what no message can have as its producer.
func checkProducer(name string) error {
	if name == "" {
		return usageError{errors.New("a producer's name is at least 1 byte long")}
	}
	return nil
}

func (c *command) showWhyMark(w WhyMark) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, w)
	}
	var b strings.Builder
	line := func(name, value string) { fmt.Fprintf(&b, "%-12s  %s\n", name, oneLine(value)) }
	line("producer", w.Producer)
	line("key", w.Key)
	if m := w.Mark; m != nil {
		line("found", "yes")
		if name := m.Producer.inLine(); name != w.Producer {
			line("name", name)
		}
		line("lane", m.lane())
		line("epoch", fmt.Sprint(m.Epoch))
		line("number", fmt.Sprintf("%d, at position %d", m.Number, m.Position))
		line("seen", fmt.Sprintf("%s, %s ago", timestamp(&m.SeenAt), age(&m.AgeSeconds)))
		line("next", m.next())
	} else {
		line("found", "no; its next message is taken whatever its number")
	}
	for _, d := range w.DeadLetters {
		line("dead letter", fmt.Sprintf("%d, %s", d.ID, d.Class))
	}
	_, err := io.WriteString(c.stdout, b.String())
	return err
}

// next is what becomes of the producer's next messages.
func (m *Mark) next() string {
	if m.Source == nil || m.Lane == nil {
		return fmt.Sprintf("by the lane that takes over, which is the one of its next message, numbers up to %d are duplicates", m.Number)
	}
	return fmt.Sprintf("by this lane, numbers up to %d are duplicates; by another lane its messages are dead letters, but for a higher epoch", m.Number)
}

// ForgottenMark is the JSON output of `marks forget`.
type ForgottenMark struct {
	Producer string `json:"producer"`
	Found    bool   `json:"found"`
	Mark     *Mark  `json:"mark"`
}

func (c *command) forgetMark() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "forget PRODUCER",
		Short: "Deletes a producer's mark, so that it begins anew",
		Long: `Deletes a producer's mark. Its next message IS TAKEN WHATEVER ITS NUMBER, by whatever
lane it comes, and becomes its mark. If that is a copy of an earlier one, it and the
copies after it ARE APPLIED AGAIN; so they are if the lane is moved back.

Use it for a producer without an epoch that began its numbers anew, so that all that
it sends is a duplicate, or one that moved to another partition, so that all of it is
a dead letter. First let the producer stop, and its lanes catch up.

The audit records the mark. A producer without one is no error. Dead letters stay; a
replay passes marks by.

` + howToNameAProducer + ` This needs the rights of the schema's owner.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkProducer(args[0]); err != nil {
				return err
			}
			return c.withMarks(cmd.Context(), func(ctx context.Context, s *dedup.Store) error {
				m, err := s.ForgetMark(ctx, actor(), args[0])
				if err != nil {
					return err
				}
				return c.showForgottenMark(ForgottenMark{args[0], m != nil, newMark(m)})
			})
		},
	}))
}

func (c *command) showForgottenMark(f ForgottenMark) error {
	switch {
	case c.output == outputJSON:
		return writeJSON(c.stdout, f)
	case !f.Found:
		fmt.Fprintln(c.stdout, "there was nothing to forget: the producer has no mark")
	default:
		fmt.Fprintf(c.stdout, "forgotten: epoch %d, number %d, by %s, seen %s\nThe producer's next message is taken whatever its number, by whatever lane it comes.\n",
			f.Mark.Epoch, f.Mark.Number, oneLine(f.Mark.lane()), timestamp(&f.Mark.SeenAt))
	}
	return nil
}
