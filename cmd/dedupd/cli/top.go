package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/top"
)

// Top is the JSON of one interval, for `top --output json`.
type Top struct {
	Scope    string    `json:"scope"`
	Time     time.Time `json:"time"` // the database's clock
	Database string    `json:"database"`
	// IntervalSeconds is the time that Rates cover.
	IntervalSeconds float64 `json:"interval_seconds"`
	// Rates are messages per second; Average smooths them over about ten seconds.
	Rates   top.Counts `json:"rates"`
	Average top.Counts `json:"average"`
	// Shares are parts of the interval's fetched, from 0 to 1; null: nothing was fetched.
	Shares *top.Counts `json:"shares"`
	Totals Totals      `json:"totals"`
	Owners int         `json:"owners"`
	// Connections are those of the scope's workers that the role may see.
	Connections int       `json:"connections"`
	Lanes       []TopLane `json:"lanes"`
	// StreamTime is how far every lane has come; null: not known.
	StreamTime  *time.Time               `json:"stream_time"`
	Generations []generations.Generation `json:"generations"`
	// DeadLetters are counted up to 10,001.
	DeadLetters int64           `json:"dead_letters"`
	Window      config.Duration `json:"window"`
	// LatestDuplicateSeconds bounds the age of the oldest duplicate of today and
	// yesterday; null: there was none.
	LatestDuplicateSeconds *int64 `json:"latest_duplicate_seconds"`
}

// TopLane is a lane with its rate and what it does.
type TopLane struct {
	dedup.Books
	FetchedPerSecond float64 `json:"fetched_per_second"`
	// BehindSeconds is how far its clock is behind the database's; null: not known.
	BehindSeconds *float64 `json:"behind_seconds"`
	// State is reads, caught up, stands still, no news, or quarantined: see top's help.
	State string `json:"state"`
}

func newTop(cfg *config.Config, f *top.Frame) Top {
	books := make([]dedup.Books, len(f.Sample.Lanes))
	lanes := make([]TopLane, len(f.Sample.Lanes))
	for i := range f.Sample.Lanes {
		books[i] = f.Sample.Lanes[i].Books
		lanes[i] = TopLane{Books: books[i], FetchedPerSecond: f.LaneRates[i], State: f.State(i)}
		if b := f.Behind(i); b >= 0 {
			lanes[i].BehindSeconds = new(b.Seconds())
		}
	}
	return Top{
		Scope: cfg.Scope, Time: f.Sample.Now, Database: f.Sample.Database, IntervalSeconds: f.Interval.Seconds(),
		Rates: f.Rates, Average: f.Smooth, Shares: f.Rates.Shares(), Totals: newStats("", books, nil, 0).Totals,
		Owners: f.Owners(), Connections: f.Sample.Connections, Lanes: lanes, StreamTime: f.Sample.Stream,
		Generations: append([]generations.Generation{}, f.Sample.Generations...), DeadLetters: f.Sample.DeadLetters,
		Window: cfg.Retention.Window, LatestDuplicateSeconds: f.Sample.LatestDuplicate,
	}
}

func (c *command) top() *cobra.Command {
	var interval time.Duration
	var once bool
	cmd := c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "top",
		Short: "Watches the scope at work: rates, duplicates by cause, lanes, generations",
		Long: `Watches the scope at work, live in a terminal: what all its workers commit a second,
duplicates by cause, each lane's rate, lag and state, generations of claims, dead
letters. It reads only the database, over one connection, with the rights of a worker.
Keys: q quits, s sorts the lanes, space pauses, arrows scroll, ? shows the rest. While
it can't read the database, the last screen stays and says so.

Without a terminal, or with --once, it prints one interval and ends. With --output
json it prints an object a line for each interval until it is ended; what it can't
read then, it reports on stderr and retries. With --once as well it prints one object.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < 100*time.Millisecond || interval > time.Hour {
				return usageError{fmt.Errorf("--interval must be from 100ms to 1h, not %s", interval)}
			}
			return c.watch(cmd.Context(), interval, once)
		},
	}))
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "read again every `DURATION`")
	cmd.Flags().BoolVar(&once, "once", false, "print one interval and end")
	return cmd
}

func (c *command) watch(ctx context.Context, interval time.Duration, once bool) error {
	cfg, _, err := c.loadOne()
	if err != nil {
		return err
	}
	// Nothing may write between the lines of a screen: the screen shows what fails.
	pool, store, err := app.OpenDatabase(ctx, cfg, 1, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := store.Load(ctx); err != nil {
		return err
	}
	view := top.View{Scope: cfg.Scope, Window: time.Duration(cfg.Retention.Window), MaxHold: time.Duration(cfg.Retention.MaxHold), ASCII: !speaksUTF8()}
	out, isFile := c.stdout.(*os.File)
	switch {
	case c.output == outputJSON && !once:
		ctx, stop := untilSignal(ctx, c.stderr)
		defer stop()
		return c.streamTop(ctx, cfg, store, interval)
	case c.output == outputTable && !once && isFile && top.IsTerminal(os.Stdin, out):
		view.Colour = colourful(out)
		return top.Live{In: os.Stdin, Out: out, Sample: store.Sample, Interval: interval}.Run(ctx, view)
	}
	frame, err := top.Once(ctx, store.Sample, interval)
	if err != nil {
		return err
	}
	if c.output == outputJSON {
		return writeJSON(c.stdout, newTop(cfg, frame))
	}
	view.Frame, view.Plain, view.Sort = frame, true, top.SortName
	_, err = fmt.Fprintln(c.stdout, top.Render(view, top.Unlimited, top.Unlimited))
	return err
}

// streamTop writes an object per line until a signal comes or the reader is gone.
func (c *command) streamTop(ctx context.Context, cfg *config.Config, store *dedup.Store, interval time.Duration) error {
	e := json.NewEncoder(c.stdout)
	e.SetEscapeHTML(false)
	var problem logonce.Problem
	err := top.Each(ctx, store.Sample, interval, func(f *top.Frame) error {
		problem.End()
		return e.Encode(newTop(cfg, f))
	}, func(err error) {
		if problem.IsNew(err) {
			fmt.Fprintln(c.stderr, "dedupd: the database can't be read, trying again: "+flat(err))
		}
	})
	if errors.As(err, new(errSignal)) {
		return nil
	}
	return err
}

// speaksUTF8 reports whether the locale has more than ASCII. Without a locale it
// assumes so, as most terminals do.
func speaksUTF8() bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToLower(os.Getenv(name)); v != "" {
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return true
}
