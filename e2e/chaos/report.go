package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
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

// line is an outcome for a terminal.
func (o *outcome) line() string {
	text := fmt.Sprintf("%-36s %-5s %4d strikes, %7d messages, caught up %.1f s (%.1f s at most): %s (%.0f s, seed %d)%s",
		o.Fault, o.Broker, o.Strikes, o.Messages, o.Caught, o.Slowest, o.Verdict, o.Seconds, o.Seed, notes(o.Notes))
	if o.Complaint != "" {
		text += "\n" + o.Complaint
	}
	return text
}

// report writes the table of what was suffered.
func report(file string, g *rig, seed uint64, outcomes []outcome) error {
	messages, violations := int64(0), 0
	for _, o := range outcomes {
		messages += o.Messages
		violations += o.Violations
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Reliability, measured\n\n`make chaos SEED=%d` wrote this on %s, with Postgres %s and %d processors. %s\n\n",
		seed, time.Now().Format(time.DateOnly), g.postgres.Version(), runtime.NumCPU(), how)
	fmt.Fprintf(&b, "%d runs, %d messages, %d violations.\n\n", len(outcomes), messages, violations)
	b.WriteString("| fault | broker | struck | messages | caught up, median | at most | violations | beside that |\n| --- | --- | --: | --: | --: | --: | --: | --- |\n")
	for _, o := range outcomes {
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %.1f s | %.1f s | %d | %s |\n",
			o.Fault, o.Broker, o.Strikes, o.Messages, o.Caught, o.Slowest, o.Violations, strings.TrimPrefix(notes(o.Notes), "; "))
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
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %.0f s |\n", c.mutant.name, c.mutant.fault, c.mutant.broker, strings.ReplaceAll(cmp.Or(c.by, "**nothing**"), "|", "\\|"), c.seconds)
	}
	return os.WriteFile(file, []byte(b.String()), 0o644)
}

const how = `Workers of the released binary consume what a
producer sends and sends again (a fifth are copies), while the fault strikes. Afterwards a program that shares no code
with the product reads the broker's log again and compares it with the sink, the claims, the dead letters, the lanes and
every move they made.`
