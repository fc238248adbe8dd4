package cli

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/human"
	"github.com/dedupd/dedupd/internal/sizing"
)

// Size is the JSON output of `size`.
type Size struct {
	Input struct {
		sizing.Input
		Window     config.Duration `json:"window"`
		Generation config.Duration `json:"generation"`
		MaxHold    config.Duration `json:"max_hold"`
		Checkpoint config.Duration `json:"checkpoint"`
	} `json:"input"`
	sizing.Estimate
	// Config has the keys to set, in YAML. Setting is where the figures come from.
	Config   string   `json:"config"`
	Warnings []string `json:"warnings"`
	Setting  string   `json:"setting"`
}

// sizeFlags are the command line's; an empty text: not given.
type sizeFlags struct {
	rate, window, generation, maxHold, checkpoint string
	messageBytes, filterMemory                    string
	duplicates, id, broker                        string
	workers, columns, connections                 int
	maxClaims                                     int64
	sinkIndex, explain                            bool
}

func (c *command) size() *cobra.Command {
	var f sizeFlags
	cmd := c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "size --rate RATE",
		Short: "Estimates what a rate takes: workers, Postgres, disk, WAL, memory",
		Long: `Estimates what a rate of messages takes: workers and Postgres' cores, connections,
disk for claims, WAL, filters and memory, and the settings that fit. It uses figures
that were measured on one machine, and connects to nothing. --explain says where each
line comes from. With -c, settings come from the file if no flag gives them.`,
		Example: `  dedupd size --rate 5k/s --window 7d --duplicates 5%
  dedupd size --rate 300M/d --message-bytes 4KiB --id uuidv7 --explain`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return c.estimate(&f) },
	}))
	text := func(p *string, name, value, usage string) { cmd.Flags().StringVar(p, name, value, usage) }
	text(&f.rate, "rate", "", "messages, copies included, on average: `RATE` such as 5k/s, 300k/m, 40M/d")
	text(&f.window, "window", "", "keep claims for this `DURATION` (default 7d)")
	text(&f.generation, "generation", "", "keep a generation open for this `DURATION` (default 6h, or a sixth of a shorter window)")
	text(&f.maxHold, "max-hold", "", "a lane that stands still keeps claims for this `DURATION` at most (default 28d, or four windows if that is longer)")
	text(&f.messageBytes, "message-bytes", "1KiB", "the `SIZE` of a value, on average")
	text(&f.duplicates, "duplicates", "5%", "the `SHARE` of copies among the messages")
	text(&f.id, "id", sizing.IDUUID, "the kind of ids, `"+strings.Join(sizing.IDs, "|")+"`")
	text(&f.broker, "broker", "", "where messages come from, `kafka|nats` (default kafka)")
	text(&f.filterMemory, "filter-memory", "", "the `SIZE` of retention.filter_memory (default 256MiB)")
	text(&f.checkpoint, "checkpoint", "5m", "Postgres makes a checkpoint each `DURATION`")
	cmd.Flags().IntVar(&f.workers, "workers", 0, "run `N` processes (default: as needed, and two)")
	cmd.Flags().IntVar(&f.columns, "columns", 0, "the sink takes `N` typed columns from a document (default: it keeps the document)")
	cmd.Flags().IntVar(&f.connections, "connections", 0, "database.max_connections, `N` (default 4)")
	cmd.Flags().Int64Var(&f.maxClaims, "generation-max-claims", 0, "retention.generation_max_claims, `N` (default 20000000)")
	cmd.Flags().BoolVar(&f.sinkIndex, "sink-index", false, "the sink's table has an index of random values, such as a primary key of UUIDv4")
	cmd.Flags().BoolVar(&f.explain, "explain", false, "say where each line comes from")
	_ = cmd.RegisterFlagCompletionFunc("id", cobra.FixedCompletions(sizing.IDs, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (c *command) estimate(f *sizeFlags) error {
	cfg := config.Default()
	if c.file != "" {
		var err error
		if cfg, _, err = c.load(); err != nil {
			return err
		}
		if cfg, err = cfg.Pick(c.scope); err != nil {
			return usageError{err}
		}
	}
	in, err := f.input(cfg, c.file != "")
	if err != nil {
		return usageError{err}
	}
	e := sizing.Make(in)
	s := Size{Estimate: e, Setting: sizing.Setting}
	s.Input.Input = in
	s.Input.Window, s.Input.Generation = config.Duration(in.Window), config.Duration(in.Generation)
	s.Input.MaxHold, s.Input.Checkpoint = config.Duration(in.MaxHold), config.Duration(in.Checkpoint)
	s.Config, s.Warnings = suggest(in, e)
	if c.output == outputJSON {
		return writeJSON(c.stdout, s)
	}
	return c.writeSize(in, &s, f.explain)
}

// flagProblems collects what is wrong with flags.
type flagProblems []string

func (p *flagProblems) check(flag string, err error) {
	if err != nil {
		*p = append(*p, fmt.Sprintf("--%s: %v", flag, err))
	}
}

func (p *flagProblems) duration(flag, text string, otherwise config.Duration) time.Duration {
	if text == "" {
		return time.Duration(otherwise)
	}
	d, err := config.ParseDuration(text)
	if err == nil && d <= 0 {
		err = errors.New("must be longer than 0")
	}
	p.check(flag, err)
	return time.Duration(d)
}

func (p *flagProblems) size(flag, text string, otherwise config.Size) int64 {
	if text == "" {
		return int64(otherwise)
	}
	n, err := config.ParseSize(text)
	p.check(flag, err)
	return int64(n)
}

// input reads the flags, which override the configuration, and checks the result.
func (f *sizeFlags) input(cfg *config.Config, fromFile bool) (sizing.Input, error) {
	var problems flagProblems
	r := &cfg.Retention
	in := sizing.Input{
		ID: f.id, Broker: cmp.Or(f.broker, brokerOf(cfg)), Columns: f.columns, SinkIndex: f.sinkIndex, Workers: f.workers,
		GenerationMaxClaims: cmp.Or(f.maxClaims, r.GenerationMaxClaims),
		MaxConnections:      cmp.Or(f.connections, cfg.Database.MaxConnections),
		InflightBytes:       int64(cfg.Batch.InflightBytes),
	}
	var err error
	in.Rate, err = parseRate(f.rate)
	problems.check("rate", err)
	in.Duplicates, err = parseShare(f.duplicates)
	problems.check("duplicates", err)
	in.Window = problems.duration("window", f.window, r.Window)
	in.Generation = problems.duration("generation", f.generation, r.Generation)
	if f.generation == "" && !fromFile && in.Generation > in.Window {
		in.Generation = max(time.Second, in.Window/6)
	}
	in.MaxHold = problems.duration("max-hold", f.maxHold, r.MaxHold)
	if f.maxHold == "" && in.MaxHold < in.Window {
		in.MaxHold = 4 * in.Window
	}
	in.Checkpoint = problems.duration("checkpoint", f.checkpoint, 0)
	in.MessageBytes = problems.size("message-bytes", f.messageBytes, 0)
	in.FilterMemory = problems.size("filter-memory", f.filterMemory, r.FilterMemory)
	problems.ranges(&in)
	if len(problems) > 0 {
		return in, errors.New(strings.Join(problems, "; "))
	}
	return in, nil
}

// brokerOf is the dearer broker of a configuration.
func brokerOf(cfg *config.Config) string {
	for i := range cfg.Sources {
		if cfg.Sources[i].NATS != nil {
			return sizing.BrokerNATS
		}
	}
	return sizing.BrokerKafka
}

// ranges checks what the flags and the configuration make together.
func (p *flagProblems) ranges(in *sizing.Input) {
	read := len(*p) == 0 // else the lengths mean nothing
	for _, r := range []struct {
		bad  bool
		flag string
		text string
	}{
		{!slices.Contains(sizing.IDs, in.ID), "id", fmt.Sprintf("%q is none of %s", in.ID, strings.Join(sizing.IDs, ", "))},
		{in.Broker != sizing.BrokerKafka && in.Broker != sizing.BrokerNATS, "broker", fmt.Sprintf("%q is neither kafka nor nats", in.Broker)},
		{in.Workers < 0 || in.Workers > 10_000, "workers", "must be from 1 to 10000, or left out"},
		{in.Columns < 0 || in.Columns > 1600, "columns", "must be from 1 to 1600, or left out"},
		{in.MaxConnections < 2 || in.MaxConnections > 10_000, "connections", "must be from 2 to 10000: one serves lanes and retention, the others write"},
		{in.GenerationMaxClaims < 1000, "generation-max-claims", "must be at least 1000"},
		{in.MessageBytes > 1<<30, "message-bytes", "Postgres has no values of more than 1GiB"},
		{read && in.Generation > in.Window, "generation", fmt.Sprintf("%s is longer than the window of %s", config.Duration(in.Generation), config.Duration(in.Window))},
		{read && in.MaxHold < in.Window, "max-hold", fmt.Sprintf("%s is shorter than the window of %s", config.Duration(in.MaxHold), config.Duration(in.Window))},
	} {
		if r.bad {
			p.check(r.flag, errors.New(r.text))
		}
	}
}

// parseRate reads 5k/s, 300k/m, 2M/h, 40M/d, or a plain number a second.
func parseRate(text string) (float64, error) {
	if text == "" {
		return 0, errors.New("how many messages come? give it such as 5k/s, 300k/m or 40M/d")
	}
	bad := fmt.Errorf("%q is no rate; write it like 800/s, 5k/s, 300k/m, 2M/h or 40M/d", text)
	amount, unit, found := strings.Cut(text, "/")
	seconds := map[string]float64{"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[unit]
	if !found {
		seconds = 1
	}
	n, err := parseAmount(amount)
	if err != nil || seconds == 0 {
		return 0, bad
	}
	if n /= seconds; n < 0.001 || n > 1e8 {
		return 0, fmt.Errorf("%q is out of range: from 0.001/s to 100M/s", text)
	}
	return n, nil
}

func parseAmount(text string) (float64, error) {
	factor := 1.0
	for suffix, f := range map[string]float64{"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9} {
		if t, ok := strings.CutSuffix(text, suffix); ok {
			text, factor = t, f
			break
		}
	}
	if text == "" || strings.Trim(text, "0123456789.") != "" {
		return 0, errors.New("no number")
	}
	n, err := strconv.ParseFloat(text, 64)
	return n * factor, err
}

// parseShare reads 5% or 0.05.
func parseShare(text string) (float64, error) {
	number, isPercent := strings.CutSuffix(text, "%")
	n, err := parseAmount(strings.TrimSpace(number))
	if isPercent {
		n /= 100
	}
	if err != nil || n > 0.999 {
		return 0, fmt.Errorf("%q is no share; write it like 5%% or 0.05, up to 99.9%%", text)
	}
	return n, nil
}

// suggest returns the settings that fit, and warnings about them.
func suggest(in sizing.Input, e sizing.Estimate) (yaml string, warnings []string) {
	warnings = []string{}
	warn := func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	generation, maxClaims, memory := in.Generation, in.GenerationMaxClaims, in.FilterMemory
	const most = 1000
	if e.TooMany {
		// Long enough for 500 generations, with the claims of that time.
		generation = max(generation, (in.Window/500 + time.Hour - 1).Truncate(time.Hour))
		maxClaims = max(maxClaims, int64(math.Ceil(e.ClaimsPerSecond*in.Window.Seconds()/500/1e6))*1e6)
		warn("%d generations are more than the %d that a window may have: longer ones are suggested.", e.Generations, most)
	}
	if !e.FiltersFit && !in.Ordered() {
		const step = 64 << 20
		memory = (e.FilterBytes + step - 1) / step * step
		warn("The filters take %s, and retention.filter_memory is %s: the %.1f oldest generations are looked up in their tables, %.0f look-ups a second, each a read of the disk where Postgres hasn't the page in memory. Give it %s, and each process as much more memory; or shorten the window; or have ids in the order of time.",
			human.Bytes(e.FilterBytes), human.Bytes(in.FilterMemory), e.Unfiltered, e.Probes, config.Size(memory))
	}
	if in.Workers > 0 && in.Workers < e.WorkersNeeded {
		warn("%s: %d are needed, at one core each half busy.", count(in.Workers, "worker"), e.WorkersNeeded)
	}
	if e.PostgresCores > 8 {
		warn("Postgres would be kept busy on %.0f cores. Nothing of that size was measured: split the topic over several databases, or measure.", math.Ceil(e.PostgresCores))
	}
	yaml = fmt.Sprintf("database:\n  max_connections: %d\nretention:\n  window: %s\n  generation: %s\n  generation_max_claims: %d\n  filter_memory: %s\n  max_hold: %s\n",
		in.MaxConnections, config.Duration(in.Window), config.Duration(generation), maxClaims, config.Size(memory), config.Duration(in.MaxHold))
	return yaml, warnings
}

func (c *command) writeSize(in sizing.Input, s *Size, explain bool) error {
	e := &s.Estimate
	var b strings.Builder
	fmt.Fprintf(&b, "%s messages a second of %s by %s, %s copies, ids %s\nwindow %s, generations of %s\n\n",
		short(in.Rate), human.Bytes(in.MessageBytes), in.Broker, percent(in.Duplicates), in.ID, config.Duration(in.Window), config.Duration(in.Generation))
	line := func(name, value, why string) {
		fmt.Fprintf(&b, "%-22s %s\n", name, value)
		if explain {
			for _, l := range wrap(why, 72) {
				b.WriteString("                         " + l + "\n")
			}
		}
	}
	line("workers", fmt.Sprintf("%d of %.1f cores", e.Workers, max(0.1, e.CoresPerWorker)),
		fmt.Sprintf("A message takes a worker %.1f µs, so %.2f cores are busy; half of a core is planned for peaks and for catching up. %d would do; two are the least that survive the end of one. Ordered sources need as many partitions as workers.", e.WorkerMicros, e.WorkerCores, e.WorkersNeeded))
	line("Postgres", fmt.Sprintf("%s, %.2f busy", count(e.PostgresCoresPlan, "core"), e.PostgresCores),
		fmt.Sprintf("A message takes Postgres %.1f µs: claim, row and commit of one that is new, next to nothing for a copy; %.1f of it look up ids that no filter covers. Half of each core is left. What else the database does comes on top.", e.PostgresMicros, e.ProbeMicros))
	line("connections", fmt.Sprint(e.Connections), fmt.Sprintf("%d workers, %d each (database.max_connections). Commands such as doctor take two more for a moment.", e.Workers, in.MaxConnections))
	line("claims kept", fmt.Sprintf("%s, %s a second", short(float64(e.Claims)), short(e.ClaimsPerSecond)),
		"One for each message that is new, for the window and a generation: the oldest goes as a whole, when its last claim is old enough.")
	cut := ""
	if e.CutByMaxClaims {
		cut = ", full before its time"
	}
	line("generations", fmt.Sprintf("%d of %s claims, each open for %s%s", e.Generations, short(float64(e.ClaimsPerGeneration)), span(time.Duration(e.GenerationSeconds*float64(time.Second))), cut),
		"One open, the others sealed. A generation ends after retention.generation, or with retention.generation_max_claims, whichever comes first.")
	line("disk for claims", human.Bytes(e.ClaimsBytes), fmt.Sprintf("%.0f bytes a claim with its index, and no bloat: nothing is deleted row by row. The sink's own rows come on top.", e.BytesPerClaim))
	line("  grows by", human.Bytes(e.ClaimsBytesPerDay)+" a day", "Until the first generation goes, a window after its end.")
	line("  at most", fmt.Sprintf("%s, while a lane stands still", human.Bytes(e.HeldBytes)), fmt.Sprintf("Claims are kept until every lane has passed them, for retention.max_hold, %s, at most.", config.Duration(in.MaxHold)))
	line("  for filters", human.Bytes(e.FilterTableBytes), "Filters are kept in the database, too.")
	line("log (WAL)", fmt.Sprintf("%s a day, %.0f B a message", human.Bytes(e.WALBytesPerDay), e.WALBytesPerMessage),
		fmt.Sprintf("Claim, row and positions; %s of it are whole pages of the index after checkpoints, one each %s. Replicas and archives get as much. Values that compress take less.", human.Bytes(e.WALPagesPerDay), config.Duration(in.Checkpoint)))
	fit := "they fit"
	switch {
	case in.Ordered():
		fit = "ordered ids do without"
	case !e.FiltersFit:
		fit = fmt.Sprintf("of which %s fit", human.Bytes(in.FilterMemory))
	}
	line("filters in memory", fmt.Sprintf("%s, %s", human.Bytes(e.FilterBytes), fit),
		"2.28 bytes a claim in each process, up to retention.filter_memory, newest first. Ids that no filter covers are looked up in their tables. Ids in the order of time are recognised by the smallest and largest of a table.")
	line("memory of a worker", human.Bytes(e.MemoryBytes), "batch.inflight_bytes, 64 MiB, and the filters that fit. Use it as the process's limit.")
	line("Postgres' memory", human.Bytes(e.OpenIndexBytes)+" at least for claims", "The index of the open generation: new random ids reach all of it, so it should stay in shared_buffers or the system's cache.")
	b.WriteString("\n")
	for _, w := range s.Warnings {
		for _, l := range wrap(w, 86) {
			b.WriteString(l + "\n")
		}
		b.WriteString("\n")
	}
	b.WriteString(s.Config + "\n")
	for _, l := range wrap("An estimate: these are figures of "+s.Setting+". dedupd retention advise uses those of your scope.", 86) {
		b.WriteString(l + "\n")
	}
	_, err := fmt.Fprint(c.stdout, b.String())
	return err
}

// short formats a number for people, in powers of 1000.
func short(n float64) string {
	for _, unit := range []string{"", " k", " M", " G"} {
		if n < 999.95 {
			return strings.TrimSuffix(strconv.FormatFloat(n, 'f', 1, 64), ".0") + unit
		}
		n /= 1000
	}
	return strings.TrimSuffix(strconv.FormatFloat(n, 'f', 1, 64), ".0") + " T"
}

// wrap breaks a text into lines of at most n characters.
func wrap(text string, n int) (lines []string) {
	l := ""
	for _, word := range strings.Fields(text) {
		if l != "" && len([]rune(l))+1+len([]rune(word)) > n {
			lines, l = append(lines, l), ""
		}
		l = strings.TrimSpace(l + " " + word)
	}
	return append(lines, l)
}
