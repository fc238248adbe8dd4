package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/human"
)

// Stats is the JSON output of `stats`.
type Stats struct {
	Scope  string        `json:"scope"`
	Lanes  []dedup.Books `json:"lanes"`
	Totals Totals        `json:"totals"`
	// Rates are shares of what was fetched, from 0 to 1.
	Rates       Rates                    `json:"rates"`
	Generations []generations.Generation `json:"generations"`
	// DeadLetters counts those kept now; Totals.Dead also counts those that expired.
	DeadLetters int64 `json:"dead_letters"`
}

// Totals are the sums of all lanes' books.
type Totals struct {
	Fetched        int64 `json:"fetched"`
	Applied        int64 `json:"applied"`
	Written        int64 `json:"written"`
	AlreadyPresent int64 `json:"already_present"`
	Stale          int64 `json:"stale"`
	Rejected       int64 `json:"rejected"`
	Duplicates     int64 `json:"duplicates"`
	Redelivered    int64 `json:"redelivered"`
	Resent         int64 `json:"resent"`
	CrossSource    int64 `json:"cross_source"`
	Conflicts      int64 `json:"conflicts"`
	Dead           int64 `json:"dead"`
	Filtered       int64 `json:"filtered"`
	// Lag sums up the lanes whose lag is known; null: it is known of none.
	Lag *int64 `json:"lag"`
}

// Rates are shares of the fetched messages.
type Rates struct {
	Duplicates  float64 `json:"duplicates"`
	Redelivered float64 `json:"redelivered"`
	Resent      float64 `json:"resent"`
	CrossSource float64 `json:"cross_source"`
	Conflicts   float64 `json:"conflicts"`
	Dead        float64 `json:"dead"`
	Filtered    float64 `json:"filtered"`
}

func newStats(scope string, books []dedup.Books, l []generations.Generation, deadLetters int64) Stats {
	s := Stats{Scope: scope, Lanes: append([]dedup.Books{}, books...), Generations: append([]generations.Generation{}, l...), DeadLetters: deadLetters}
	t := &s.Totals
	for _, b := range books {
		t.Fetched += b.Fetched
		t.Applied += b.Applied
		t.Written += b.Written
		t.AlreadyPresent += b.AlreadyPresent
		t.Stale += b.Stale
		t.Rejected += b.Rejected
		t.Duplicates += b.Duplicates
		t.Redelivered += b.Redelivered
		t.Resent += b.Resent
		t.CrossSource += b.CrossSource
		t.Conflicts += b.Conflicts
		t.Dead += b.Dead
		t.Filtered += b.Filtered
		if b.Lag != nil {
			if t.Lag == nil {
				t.Lag = new(int64)
			}
			*t.Lag += *b.Lag
		}
	}
	if n := float64(t.Fetched); n > 0 {
		s.Rates = Rates{
			Duplicates: float64(t.Duplicates) / n, Redelivered: float64(t.Redelivered) / n, Resent: float64(t.Resent) / n,
			CrossSource: float64(t.CrossSource) / n, Conflicts: float64(t.Conflicts) / n, Dead: float64(t.Dead) / n, Filtered: float64(t.Filtered) / n,
		}
	}
	return s
}

func (c *command) stats() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "stats",
		Short: "Shows the books of each lane, duplicates by cause, generations and lag",
		Long: `Shows the books of each lane, as the database has them. Every fetched message is
applied, a duplicate (delivered again, sent again, or from another source), a
conflict (a known id with another payload), dead, or filtered (no sink wants it). It
also shows the generations of
claims, and how many messages the brokers held behind the last batch.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.withScope(cmd.Context(), c.showStats)
		},
	}))
}

func (c *command) showStats(ctx context.Context, store *dedup.Store, cfg *config.Config) error {
	books, err := store.Books(ctx)
	if err != nil {
		return err
	}
	generations, err := store.Generations().List(ctx)
	if err != nil {
		return err
	}
	dead, err := store.CountDeadLetters(ctx)
	if err != nil {
		return err
	}
	s := newStats(cfg.Scope, books, generations, dead)
	if c.output == outputJSON {
		return writeJSON(c.stdout, s)
	}
	return c.writeStats(s)
}

func (c *command) writeStats(s Stats) error {
	lanes := table{columns: []column{
		left("SOURCE"), left("LANE"), right("FETCHED"), right("APPLIED"), right("DUPLICATES"), right("CONFLICTS"), right("DEAD"), right("FILTERED"),
		right("LAG"), right("NEXT"), left("STREAM TIME"), left("OWNER"),
	}}
	for i := range s.Lanes {
		b := &s.Lanes[i]
		lanes.add(b.Source, b.Lane, b.Fetched, b.Applied, b.Duplicates, b.Conflicts, b.Dead, b.Filtered, known(b.Lag), b.NextPosition, timestamp(b.StreamTime), b.Owner)
	}
	t := s.Totals
	if len(s.Lanes) > 1 {
		lanes.add("total", "", t.Fetched, t.Applied, t.Duplicates, t.Conflicts, t.Dead, t.Filtered, known(t.Lag), "", "", "")
	}
	fmt.Fprintf(c.stdout, "scope %s\n\n", s.Scope)
	if err := lanes.write(c.stdout); err != nil {
		return err
	}
	fmt.Fprintf(c.stdout, "\napplied     %d written, %d already present, %d stale, %d rejected\n", t.Written, t.AlreadyPresent, t.Stale, t.Rejected)
	fmt.Fprintf(c.stdout, "duplicates  %s of the fetched: delivered again %s, sent again %s, by another source %s\n",
		percent(s.Rates.Duplicates), percent(s.Rates.Redelivered), percent(s.Rates.Resent), percent(s.Rates.CrossSource))
	fmt.Fprintf(c.stdout, "dead        %s of the fetched; %s kept\n\n", percent(s.Rates.Dead), count(int(s.DeadLetters), "dead letter"))

	generations := table{columns: []column{right("GENERATION"), left("STATE"), left("OPENED"), right("CLAIMS"), right("BYTES")}}
	for _, g := range s.Generations {
		generations.add(g.Number, g.State, timestamp(g.OpenedAt), claims(g), human.Bytes(g.Bytes))
	}
	return generations.write(c.stdout)
}

// claims is how many claims a generation holds; "~" marks an estimate.
func claims(g generations.Generation) string {
	if g.Exact {
		return fmt.Sprint(g.Claims)
	}
	return fmt.Sprintf("~%d", g.Claims)
}

// known is a number, or "-" if it isn't known.
func known[T any](value *T) string {
	if value == nil {
		return "-"
	}
	return fmt.Sprint(*value)
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }
