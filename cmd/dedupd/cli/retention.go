package cli

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/human"
	"github.com/dedupd/dedupd/retention"
)

func (c *command) retention() *cobra.Command {
	return group("retention", "Shows generations of claims, advises which window you need, runs retention",
		c.retentionStatus(), c.adviseRetention(), c.runRetention(), c.setGenerationClock())
}

func (c *command) retentionStatus() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "status",
		Short: "Shows the generations of claims, and when the oldest is dropped",
		Long: `Shows the generations of claims with their sizes, ages and filters, how far the stream
has come, and when the oldest sealed generation is dropped: when the stream clock,
which is that of the lane furthest behind, has passed its end by retention.window; or
when it has been held for retention.max_hold.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.withScope(cmd.Context(), c.showRetention)
		},
	}))
}

func (c *command) adviseRetention() *cobra.Command {
	var since string
	var ask bool
	advise := &cobra.Command{
		Use:   "advise",
		Short: "Compares windows by how late duplicates came, and recommends one",
		Long: `Compares windows by how late duplicates came: how many of them each would have
recognised and what it costs. It recommends one. It asks the brokers how long they
keep messages, and changes nothing.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			period, err := parseSince(since)
			if err != nil {
				return usageError{err}
			}
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
				return c.showAdvice(ctx, s, cfg, period, ask)
			})
		},
	}
	advise.Flags().StringVar(&since, "since", "", "look at duplicates that came in the last `DURATION` (default 30d, or three windows if that is longer)")
	advise.Flags().BoolVar(&ask, "brokers", true, "ask the brokers how long they keep messages")
	return c.withPipeline(c.withOutput(advise))
}

func (c *command) runRetention() *cobra.Command {
	var rotate, accept bool
	run := &cobra.Command{
		Use:   "run",
		Short: "Runs retention once, now: seals, expires and drops generations, builds filters",
		Long: `Runs retention once, now, as running workers do by retention.schedule. It seals the open
generation if its time has come, builds missing filters, takes generations out of use
that every lane has passed by the window, drops the table of one of them, and deletes
old dead letters. While a worker runs retention, it does nothing; --rotate waits for
the worker for 10 seconds, and fails if that is not enough. If the file has several
pipelines, it does all of them, unless --scope names one; --rotate, --accept-missing and
--output json need that.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !rotate && !accept && c.output == outputTable {
				return c.eachStore(cmd.Context(), true, func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
					if err := s.Load(ctx); err != nil {
						return err
					}
					return c.retain(ctx, s, cfg, false, nil)
				})
			}
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, cfg *config.Config) (err error) {
				given := []int{}
				if accept {
					if given, err = c.acceptMissing(ctx, s); err != nil {
						return err
					}
				}
				return c.retain(ctx, s, cfg, rotate, given)
			})
		},
	}
	run.Flags().BoolVar(&rotate, "rotate", false, "seal the open generation whatever its age and size, if it holds a claim")
	run.Flags().BoolVar(&accept, "accept-missing", false, "give up generations whose tables are gone: ids that they held may be applied again (needs the schema owner's rights)")
	return c.withPipeline(c.withOutput(run))
}

func (c *command) acceptMissing(ctx context.Context, store *dedup.Store) ([]int, error) {
	generations, err := store.Generations().AcceptMissing(ctx, actor())
	if err != nil {
		return nil, err
	}
	for _, g := range generations {
		fmt.Fprintf(c.stderr, "generation %d is given up: ids that it held may be applied again\n", g)
	}
	return append([]int{}, generations...), nil
}

// RetentionReport is the JSON output of `retention run`.
type RetentionReport struct {
	retention.Report
	// GivenUp are the generations that --accept-missing gave up.
	GivenUp []int `json:"given_up"`
}

func (c *command) retain(ctx context.Context, store *dedup.Store, cfg *config.Config, rotate bool, given []int) error {
	report, err := app.Retain(ctx, cfg, store, newLogger(cfg.Log, c.stderr), rotate)
	if c.output == outputJSON {
		return errors.Join(err, writeJSON(c.stdout, RetentionReport{report, given}))
	}
	var b strings.Builder
	line := func(name, value string) { fmt.Fprintf(&b, "%-13s %s\n", name, value) }
	sealed := "none"
	if report.Sealed != 0 {
		sealed = fmt.Sprint("generation ", report.Sealed)
	}
	line("sealed", sealed)
	line("filters for", count(int(report.Filtered), "claim"))
	line("expired", count(report.Expired, "generation"))
	line("dropped", count(len(report.Dropped), "table"))
	line("swept", count(len(report.Swept), "unknown table"))
	line("dead letters", fmt.Sprintf("%d deleted", report.DeadLetters))
	if !report.Led {
		b.WriteString("A worker runs retention just now, and does the rest.\n")
	}
	_, writeErr := fmt.Fprint(c.stdout, b.String())
	return errors.Join(err, writeErr)
}

// RetentionStatus is the JSON output of `retention status`.
type RetentionStatus struct {
	Scope string `json:"scope"`
	// Now is the database's clock. StreamTime is how far every lane has come; null: the
	// clock of some lane isn't known.
	Now        time.Time  `json:"now"`
	StreamTime *time.Time `json:"stream_time"`
	// Lane is the one furthest behind; null: there is none.
	Lane *string `json:"lane"`
	// LaneTime is its clock; null: it isn't known. A clock ahead of Now isn't believed;
	// StreamTime is null then.
	LaneTime *time.Time      `json:"lane_time"`
	Window   config.Duration `json:"window"`
	MaxHold  config.Duration `json:"max_hold"`
	// NextExpiry is that of the oldest sealed generation; null: there is none.
	NextExpiry  *NextExpiry              `json:"next_expiry"`
	Generations []generations.Generation `json:"generations"`
}

// NextExpiry is when a generation is dropped: not before Earliest, when the stream
// clock can have passed it by the window, and by Latest whatever the lanes do.
type NextExpiry struct {
	Generation int       `json:"generation"`
	Earliest   time.Time `json:"earliest"`
	Latest     time.Time `json:"latest"`
	// Due: the next pass takes it out of use.
	Due bool `json:"due"`
}

func newRetentionStatus(cfg *config.Config, s dedup.Status) RetentionStatus {
	r := RetentionStatus{
		Scope: cfg.Scope, Now: s.Now, LaneTime: s.LaneTime, Window: cfg.Retention.Window, MaxHold: cfg.Retention.MaxHold,
		Generations: append([]generations.Generation{}, s.Generations...),
	}
	if !s.Stream.IsZero() {
		r.StreamTime = &s.Stream
	}
	if s.Lane != "" {
		r.Lane = &s.Lane
	}
	for _, g := range s.Generations {
		if g.State == "sealed" && g.SealedAt != nil {
			earliest, latest := g.SealedAt.Add(time.Duration(r.Window)), g.SealedAt.Add(time.Duration(r.MaxHold))
			r.NextExpiry = &NextExpiry{g.Number, earliest, latest, earliest.Before(s.Stream) || latest.Before(s.Now)}
			break
		}
	}
	return r
}

func (c *command) showRetention(ctx context.Context, store *dedup.Store, cfg *config.Config) error {
	status, err := store.Status(ctx)
	if err != nil {
		return err
	}
	r := newRetentionStatus(cfg, status)
	if c.output == outputJSON {
		return writeJSON(c.stdout, r)
	}
	fmt.Fprintf(c.stdout, "scope %s\n\nclock         %s\nstream clock  %s\nnext to go    %s\n\n", r.Scope, timestamp(&r.Now), r.stream(), r.expiry())
	t := table{columns: []column{
		right("GENERATION"), left("STATE"), left("OPENED"), right("AGE"), right("CLAIMS"), right("BYTES"), left("KEYS"), left("FILTER"),
	}}
	for _, g := range r.Generations {
		state, opened := g.State, "-"
		if g.Missing {
			state += ", TABLE MISSING"
		}
		if g.Ahead(r.Now) {
			state += ", CLOCK AHEAD"
		}
		if g.OpenedAt != nil {
			opened = span(r.Now.Sub(*g.OpenedAt))
		}
		t.add(g.Number, state, timestamp(g.OpenedAt), opened, claims(g), human.Bytes(g.Bytes), zone(g), filter(g))
	}
	return t.write(c.stdout)
}

func (r *RetentionStatus) stream() string {
	switch {
	case r.Lane == nil:
		return timestamp(r.StreamTime) + ", the database's: there are no lanes"
	case r.StreamTime == nil && r.LaneTime != nil:
		return "not known: the clock of lane " + oneLine(*r.Lane) + " is at " + timestamp(r.LaneTime) + ", ahead of the database's, and nothing expires before retention.max_hold"
	case r.StreamTime == nil:
		return "not known: lane " + oneLine(*r.Lane) + " has none yet, and nothing expires before retention.max_hold"
	}
	return fmt.Sprintf("%s, %s behind: lane %s", timestamp(r.StreamTime), span(r.Now.Sub(*r.StreamTime)), oneLine(*r.Lane))
}

func (r *RetentionStatus) expiry() string {
	e := r.NextExpiry
	switch {
	case e == nil:
		return "none is sealed"
	case e.Due:
		return fmt.Sprintf("generation %d, with the next pass", e.Generation)
	case e.Earliest.Before(r.Now):
		return fmt.Sprintf("generation %d, when the stream clock has passed %s; at the latest %s", e.Generation, timestamp(&e.Earliest), timestamp(&e.Latest))
	}
	return fmt.Sprintf("generation %d, in %s at the earliest: %s", e.Generation, span(e.Earliest.Sub(r.Now)), timestamp(&e.Earliest))
}

// span formats a time for people; a negative one is 0.
func span(d time.Duration) string { return age(new(max(0, d.Seconds()))) }

// zone is the range of a sealed generation's keys, by their first digits.
func zone(g generations.Generation) string {
	if g.FirstKey == nil || g.LastKey == nil {
		return "-"
	}
	return g.FirstKey.String()[:8] + "…" + g.LastKey.String()[:8]
}

func filter(g generations.Generation) string {
	switch {
	case g.FirstKey == nil: // not sealed, or without claims
		return "-"
	case g.FilterComplete:
		return human.Bytes(g.FilterBytes)
	case g.FilterBytes > 0:
		return human.Bytes(g.FilterBytes) + ", incomplete"
	}
	return "not built"
}

// parseSince reads --since; 0: not given.
func parseSince(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := config.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("--since: %w", err)
	}
	const day = 24 * time.Hour
	if time.Duration(d) < day || time.Duration(d) > 400*day {
		return 0, fmt.Errorf("--since must be from 1d to 400d, not %s: ages are counted by day, and kept for 400", d)
	}
	return time.Duration(d), nil
}

// Advice is the JSON output of `retention advise`.
type Advice struct {
	Scope string `json:"scope"`
	// Ages counts the duplicates of the time Observed, by age.
	Ages       []Age           `json:"ages"`
	Duplicates int64           `json:"duplicates"`
	Observed   config.Duration `json:"observed"`
	// Horizon is the age of the oldest claim.
	Horizon         config.Duration `json:"horizon"`
	ClaimsPerSecond float64         `json:"claims_per_second"`
	Configured      config.Duration `json:"configured"`
	Recommended     config.Duration `json:"recommended"`
	Windows         []Window        `json:"windows"`
	Reasons         []string        `json:"reasons"`
	Warnings        []string        `json:"warnings"`
}

// Age counts the duplicates up to an age and above the previous one.
type Age struct {
	UpToSeconds *int64 `json:"up_to_seconds"` // null: any older
	Duplicates  int64  `json:"duplicates"`
	FirstDay    string `json:"first_day"`
	LastDay     string `json:"last_day"`
}

// Window is a window that advice compares.
type Window struct {
	Window      config.Duration `json:"window"`
	Caught      int64           `json:"caught"`
	Share       float64         `json:"share"`
	Claims      int64           `json:"claims"`
	DiskBytes   int64           `json:"disk_bytes"`
	FilterBytes int64           `json:"filter_bytes"`
	Generations int             `json:"generations"`
}

func (c *command) showAdvice(ctx context.Context, store *dedup.Store, cfg *config.Config, since time.Duration, ask bool) error {
	asked := since
	if since == 0 {
		since = max(30*24*time.Hour, 3*time.Duration(cfg.Retention.Window))
	}
	ages, err := store.DuplicateAges(ctx, since)
	if err != nil {
		return err
	}
	status, err := store.Status(ctx)
	if err != nil {
		return err
	}
	in := adviceInput(cfg, status, ages, since)
	in.Since = asked
	if ask {
		in.Asked = true
		if in.Brokers, in.Unknown, err = app.BrokerRetention(ctx, cfg); err != nil {
			return err
		}
	}
	a := newAdvice(cfg.Scope, in, ages, retention.Advise(in))
	if c.output == outputJSON {
		return writeJSON(c.stdout, a)
	}
	return c.writeAdvice(a)
}

// adviceInput is what the database says about a scope.
func adviceInput(cfg *config.Config, status dedup.Status, ages []dedup.AgeBucket, since time.Duration) retention.AdviceInput {
	r := &cfg.Retention
	in := retention.AdviceInput{
		Window: time.Duration(r.Window), Generation: time.Duration(r.Generation), MaxHold: time.Duration(r.MaxHold),
		GenerationMaxClaims: r.GenerationMaxClaims, FilterMemory: int64(r.FilterMemory),
	}
	for _, b := range ages {
		// Only the first duplicate says since when ages are counted.
		in.Observed = max(in.Observed, min(since, status.Now.Sub(b.FirstDay)))
		upTo := time.Duration(math.MaxInt64)
		if b.UpToSeconds < math.MaxInt64/int64(time.Second) {
			upTo = time.Duration(b.UpToSeconds) * time.Second
		}
		in.Ages = append(in.Ages, retention.AgeBucket{UpTo: upTo, Duplicates: b.Duplicates})
	}
	// Small tables are mostly empty pages.
	const enough = 10_000
	var claims, measured, bytes int64
	for _, g := range status.Generations {
		if g.State != "open" && g.State != "sealed" || g.OpenedAt == nil {
			continue
		}
		in.Horizon = max(in.Horizon, status.Now.Sub(*g.OpenedAt))
		claims += g.Claims
		if g.Claims >= enough && !g.Missing {
			measured, bytes = measured+g.Claims, bytes+g.Bytes
		}
	}
	if in.Horizon >= time.Minute {
		in.ClaimsPerSecond = float64(claims) / in.Horizon.Seconds()
	}
	if measured > 0 {
		in.BytesPerClaim = float64(bytes) / float64(measured)
	}
	return in
}

func newAdvice(scope string, in retention.AdviceInput, ages []dedup.AgeBucket, advice retention.Advice) Advice {
	a := Advice{
		Scope: scope, Ages: []Age{}, Duplicates: advice.Duplicates, Observed: config.Duration(in.Observed.Round(time.Second)),
		Horizon: config.Duration(in.Horizon.Round(time.Second)), ClaimsPerSecond: in.ClaimsPerSecond,
		Configured: config.Duration(advice.Configured), Recommended: config.Duration(advice.Window),
		Reasons: append([]string{}, advice.Reasons...), Warnings: append([]string{}, advice.Warnings...),
	}
	for _, b := range ages {
		bucket := Age{Duplicates: b.Duplicates, FirstDay: b.FirstDay.Format(time.DateOnly), LastDay: b.LastDay.Format(time.DateOnly)}
		if b.UpToSeconds != math.MaxInt64 {
			bucket.UpToSeconds = &b.UpToSeconds
		}
		a.Ages = append(a.Ages, bucket)
	}
	for _, w := range advice.Candidates {
		a.Windows = append(a.Windows, Window{config.Duration(w.Window), w.Caught, w.Share, w.Claims, w.DiskBytes, w.FilterBytes, w.Generations})
	}
	return a
}

func (a *Advice) seen() string {
	if a.Duplicates == 0 {
		return "no duplicates were counted"
	}
	return count(int(a.Duplicates), "duplicate") + " in " + a.Observed.String()
}

func (c *command) writeAdvice(a Advice) error {
	fmt.Fprintf(c.stdout, "scope %s: %s\n\n", a.Scope, a.seen())
	t := table{columns: []column{
		left("WINDOW"), right("CAUGHT"), right("SHARE"), left(""), right("CLAIMS"), right("DISK"), right("FILTERS"), right("GENERATIONS"), left(""),
	}}
	for _, w := range a.Windows {
		caught, share, shareBar := "-", "-", ""
		if a.Duplicates > 0 {
			caught, share, shareBar = fmt.Sprint(w.Caught), percent(downTo(w.Share, 1000)), bar(w.Share)
		}
		kept, disk, filters := "-", "-", "-"
		if w.Claims > 0 {
			kept, disk, filters = fmt.Sprint(w.Claims), human.Bytes(w.DiskBytes), human.Bytes(w.FilterBytes)
		}
		var notes []string
		if w.Window == a.Configured {
			notes = append(notes, "configured")
		}
		if w.Window == a.Recommended {
			notes = append(notes, "recommended")
		}
		t.add(w.Window, caught, share, shareBar, kept, disk, filters, w.Generations, strings.Join(notes, ", "))
	}
	if err := t.write(c.stdout); err != nil {
		return err
	}
	fmt.Fprintf(c.stdout, "\nrecommended: retention.window: %s\n", a.Recommended)
	for _, reason := range a.Reasons {
		fmt.Fprintln(c.stdout, "- "+oneLine(reason))
	}
	fmt.Fprintln(c.stdout, "\nto keep in mind:")
	for _, warning := range a.Warnings {
		fmt.Fprintln(c.stdout, "- "+oneLine(warning))
	}
	return nil
}

// bar draws a share. Only 100 % is a full bar.
func bar(share float64) string {
	const width = 20
	n := int(downTo(share, width) * width)
	return strings.Repeat("#", n) + strings.Repeat(".", width-n)
}

// downTo rounds a share down to steps: 99.99 % isn't all.
func downTo(share float64, steps float64) float64 { return math.Floor(share*steps+1e-9) / steps }
