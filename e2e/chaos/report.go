package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

func notes(all map[string]int) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&b, "; %s: %d", name, all[name])
	}
	return b.String()
}

// name is the fault's, with the shape that it was met in.
func (o *outcome) name() string {
	if o.Shape == "" {
		return o.Fault
	}
	return o.Fault + ", shape " + o.Shape
}

// line is an outcome for a terminal.
func (o *outcome) line() string {
	text := fmt.Sprintf("%-48s %-5s %4d strikes, %7d messages, caught up %.1f s (%.1f s at most): %s (%.0f s, seed %d)%s",
		o.name(), o.Broker, o.Strikes, o.Messages, o.Caught, o.Slowest, o.Verdict, o.Seconds, o.Seed, notes(o.Notes))
	if o.Complaint != "" {
		text += "\n" + o.Complaint
	}
	return text
}

// outcomesFile is where the outcomes of a report stand, for programs, and for the
// next time.
func outcomesFile(report string) string { return strings.TrimSuffix(report, ".md") + ".json" }

// readOutcomes reads those of an earlier time, if there are any.
func readOutcomes(report string) (all []outcome, err error) {
	text, err := os.ReadFile(outcomesFile(report))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	err = json.Unmarshal(text, &all)
	return all, err
}

// replace puts an outcome in the place of an earlier one of the same fault, shape and
// broker, or at the end.
func replace(all []outcome, o outcome) []outcome {
	at := slices.IndexFunc(all, func(other outcome) bool { return other.name() == o.name() && other.Broker == o.Broker })
	if at < 0 {
		return append(all, o)
	}
	all[at] = o
	return all
}

// report writes the table of what was suffered, and its outcomes beside it, in the
// order of the faults.
func report(file string, g *servers, outcomes []outcome) error {
	place := func(o outcome) int {
		return slices.IndexFunc(faults, func(f *fault) bool { return f.name == o.Fault })
	}
	slices.SortFunc(outcomes, func(a, b outcome) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(a.Shape, b.Shape), cmp.Compare(a.Broker, b.Broker))
	})
	text, err := json.MarshalIndent(outcomes, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(outcomesFile(file), append(text, '\n'), 0o644); err != nil {
		return err
	}
	messages, violations, bad, last := int64(0), 0, 0, ""
	for _, o := range outcomes {
		messages += o.Messages
		violations += o.Violations
		last = max(last, o.Date)
		if o.Verdict != "valid" {
			bad++
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Reliability, measured\n\n`make chaos` wrote this, last on %s, with Postgres %s and %d processors; seeds and dates of the runs are in [%s](%[4]s). %[5]s\n\n",
		last, g.postgres.Version(), runtime.NumCPU(), filepath.Base(outcomesFile(file)), how)
	fmt.Fprintf(&b, "%d runs, %d messages, %d violations", len(outcomes), messages, violations)
	if bad > 0 {
		fmt.Fprintf(&b, "; **%d runs are not valid**", bad)
	}
	b.WriteString(".\n\n")
	b.WriteString("| fault | broker | struck | messages | caught up, median | at most | violations | beside that |\n| --- | --- | --: | --: | --: | --: | --: | --- |\n")
	for _, o := range outcomes {
		beside := strings.TrimPrefix(notes(o.Notes), "; ")
		if o.Verdict != "valid" {
			beside = "**" + o.Verdict + "**: " + strings.ReplaceAll(strings.ReplaceAll(o.Complaint, "\n", " "), "|", "\\|") + " " + beside
		}
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %.1f s | %.1f s | %d | %s |\n",
			o.name(), o.Broker, o.Strikes, o.Messages, o.Caught, o.Slowest, o.Violations, beside)
	}
	return os.WriteFile(file, []byte(b.String()), 0o644)
}

// caught is what became of a mutant.
type caught struct {
	mutant  *mutant
	by      string // empty: it came through
	seconds float64
}

// reportMutants writes the table of those that were hunted.
func reportMutants(file string, seed uint64, all []caught) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Mutants, caught\n\n`make mutants SEED=%d` wrote this on %s. Each line is a bug that was built into the product, and by what\n"+
		"the rig noticed it: an invariant of the judge, or what the run complained of. A rig that lets one pass proves nothing by\nbeing silent about the product.\n\n",
		seed, time.Now().Format(time.DateOnly))
	b.WriteString("| bug | fault | broker | caught by | after |\n| --- | --- | --- | --- | --: |\n")
	for _, c := range all {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %.0f s |\n", c.mutant.name, c.mutant.meets(), c.mutant.broker, strings.ReplaceAll(cmp.Or(c.by, "**nothing**"), "|", "\\|"), c.seconds)
	}
	return os.WriteFile(file, []byte(b.String()), 0o644)
}

const how = `Workers of the released binary consume what a
producer sends and sends again (a fifth are copies), while the fault strikes. Afterwards a program that shares no code
with the product reads the broker's log again and compares it with the sink, the claims, the dead letters, the lanes and
every move they made.`
