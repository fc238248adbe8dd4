// Command check judges a finished run of dedupd's workers: whether each message
// of the log ended as exactly one committed row. It reads the log, the database
// and records of those who drove the run, and finds what breaks one of the
// invariants I1 to I9.
//
// It shares no code with the product, so that nothing of the product judges
// itself: keys are computed by code of its own, and Kafka is read by another
// client library than the worker's.
//
//	check prepare -database URL
//	check run -database URL -scope orders -kafka localhost:9092 -topic orders \
//	    -intents intents.jsonl -samples samples.jsonl -events events.jsonl -settled
//
// The first makes, in a database that dedupd has migrated, what the second reads:
// the sink's table public.effects, and public.moves, which a trigger fills with
// all that happens to dedupd's lanes. See prepare.sql.
//
// The exit code is 0 for valid, 1 for invalid, 2 if it can't say.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/e2e/shape"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

const usage = `usage:
  check prepare -database URL [-schema dedupd]
  check run     -database URL -scope SCOPE [-kafka BROKERS -topic TOPIC...] [-nats URL -stream STREAM -source NAME...]
                -intents FILE -samples FILE -events FILE [-logs FILE...] [-allow poison,...] [-settled] [-window 1h] [-shape NAME] [-output table|json]
check run -h lists the flags.
`

// command runs a command and gives its exit code.
func command(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	var err error
	code := unknown
	switch name {
	case "prepare":
		if err = prepareCommand(ctx, args[1:], stderr); err == nil {
			code = valid
		}
	case "run":
		code, err = runCommand(ctx, args[1:], stdout, stderr)
	default:
		fmt.Fprint(stderr, usage)
	}
	if errors.Is(err, flag.ErrHelp) {
		return valid
	}
	if err != nil {
		fmt.Fprintln(stderr, "check:", err)
	}
	return code
}

func prepareCommand(ctx context.Context, args []string, stderr io.Writer) error {
	var database, schema string
	flags := flag.NewFlagSet("check prepare", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&database, "database", "", "URL of the database")
	flags.StringVar(&schema, "schema", "dedupd", "dedupd's schema")
	if err := parse(flags, args, map[string]*string{"database": &database}); err != nil {
		return err
	}
	return prepare(ctx, database, schema)
}

// options are those of check run.
type options struct {
	database, schema, scope  string
	shape                    string
	kafka                    string
	topics                   list
	nats                     string
	streams, sources         list
	intents, samples, events string
	logs                     list
	allow                    string
	settled                  bool
	window                   time.Duration
	seed                     uint64
	output                   string
	timeout                  time.Duration
}

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func runCommand(ctx context.Context, args []string, stdout, stderr io.Writer) (code int, err error) {
	var o options
	flags := flag.NewFlagSet("check run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.database, "database", "", "URL of the database")
	flags.StringVar(&o.schema, "schema", "dedupd", "dedupd's schema")
	flags.StringVar(&o.scope, "scope", "", "the workers' scope")
	flags.StringVar(&o.shape, "shape", shape.Claim.Name, "how the workers were idempotent, which is what their table is judged by: a name of e2e/shape")
	flags.StringVar(&o.kafka, "kafka", "", "Kafka brokers, separated by commas")
	flags.Var(&o.topics, "topic", "a topic that was read; may be given several times")
	flags.StringVar(&o.nats, "nats", "", "URL of the NATS server")
	flags.Var(&o.streams, "stream", "a stream that was read; may be given several times")
	flags.Var(&o.sources, "source", "the name of the source that read the stream; one for each")
	flags.StringVar(&o.intents, "intents", "", "file of what the producer has sent, in JSON lines")
	flags.StringVar(&o.samples, "samples", "", "file of the brokers' and lanes' positions, in JSON lines")
	flags.StringVar(&o.events, "events", "", "file of the fault timeline, in JSON lines")
	flags.Var(&o.logs, "logs", "a log of the workers, or a pattern of such files; may be given several times")
	flags.StringVar(&o.allow, "allow", "", "classes of dead letters that the run causes, separated by commas")
	flags.BoolVar(&o.settled, "settled", false, "the workers had time to read everything")
	flags.DurationVar(&o.window, "window", 0, "how long ids are remembered at least: a copy that comes later may land again; 0: for the whole run")
	flags.Uint64Var(&o.seed, "seed", 0, "the run's seed, which the verdict repeats")
	flags.StringVar(&o.output, "output", "table", "table or json")
	flags.DurationVar(&o.timeout, "timeout", 10*time.Minute, "give up after so long")
	required := map[string]*string{
		"database": &o.database, "scope": &o.scope, "intents": &o.intents, "samples": &o.samples, "events": &o.events,
	}
	if err := parse(flags, args, required); err != nil {
		return unknown, err
	}
	if err := o.check(); err != nil {
		return unknown, err
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	h := &history{scope: o.scope}
	if h.shape, err = shape.Named(o.shape); err != nil {
		return unknown, fmt.Errorf("-shape: %w", err)
	}
	err = h.readAll(ctx, &o)
	r := judge(h, o.terms(), o.seed, began, err)
	if ctx.Err() != nil && r.code == valid {
		r.code, r.Verdict, r.Reason = unknown, verdicts[unknown], "the time was over before the verdict: give more by -timeout"
	}
	if o.output == "json" {
		return r.code, r.writeJSON(stdout)
	}
	return r.code, r.writeTable(stdout)
}

// parse reads flags, all of which must be known, and some of which given.
func parse(flags *flag.FlagSet, args []string, required map[string]*string) error {
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q is no flag", flags.Arg(0))
	}
	var err error
	flags.VisitAll(func(f *flag.Flag) {
		if value := required[f.Name]; value != nil && *value == "" {
			err = errors.Join(err, fmt.Errorf("-%s is missing", f.Name))
		}
	})
	return err
}

func (o *options) check() error {
	switch {
	case o.kafka == "" && o.nats == "":
		return errors.New("give -kafka or -nats: without the log there is nothing to judge by")
	case (o.kafka == "") != (len(o.topics) == 0):
		return errors.New("-kafka and -topic go together")
	case (o.nats == "") != (len(o.streams) == 0):
		return errors.New("-nats and -stream go together")
	case len(o.streams) != len(o.sources):
		return fmt.Errorf("%d streams and %d sources: give one -source for each -stream", len(o.streams), len(o.sources))
	case o.output != "table" && o.output != "json":
		return fmt.Errorf("-output is table or json, not %s", o.output)
	}
	for class := range o.terms().allow {
		switch class {
		case classNoID, classBadID, classPoison, classConflict, classDuplicate, classSequence:
		default:
			return fmt.Errorf("-allow: there is no class %s of dead letters", class)
		}
	}
	return nil
}

func (o *options) terms() terms {
	t := terms{allow: map[string]bool{}, settled: o.settled, window: o.window}
	for class := range strings.SplitSeq(o.allow, ",") {
		if class != "" {
			t.allow[class] = true
		}
	}
	return t
}

// readAll reads a whole history. The database comes first: it knows which source
// has which lane.
func (h *history) readAll(ctx context.Context, o *options) error {
	if err := h.readPostgres(ctx, o.database, o.schema); err != nil {
		return err
	}
	if o.kafka != "" {
		if err := h.readKafka(ctx, o.kafka, o.topics); err != nil {
			return err
		}
	}
	if o.nats != "" {
		if err := h.readNATS(ctx, o.nats, o.streams, o.sources); err != nil {
			return err
		}
	}
	for i := range h.lanes {
		if l := &h.lanes[i]; l.row != nil && !l.read {
			return fmt.Errorf("the workers have read lane %s, whose log was not read again: add its -topic or its -stream", l)
		}
	}
	if err := h.readIntents(o.intents); err != nil {
		return fmt.Errorf("read the intents: %w", err)
	}
	if err := h.readSamples(o.samples); err != nil {
		return fmt.Errorf("read the samples: %w", err)
	}
	if err := h.readEvents(o.events); err != nil {
		return fmt.Errorf("read the events: %w", err)
	}
	for _, pattern := range o.logs {
		if err := h.readLogs(pattern); err != nil {
			return fmt.Errorf("read the logs: %w", err)
		}
	}
	return ctx.Err()
}
