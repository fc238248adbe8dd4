package main

import (
	"fmt"
	"maps"
	"os"
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
func report(file string, g *rig, outcomes []outcome) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Reliability, measured\n\n`make chaos` wrote this on %s, with Postgres %s. %s\n\n", time.Now().Format(time.DateOnly), g.postgres.Version(), how)
	b.WriteString("| fault | broker | struck | messages | caught up, median | at most | violations | beside that |\n| --- | --- | --: | --: | --: | --: | --: | --- |\n")
	for _, o := range outcomes {
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %.1f s | %.1f s | %d | %s |\n",
			o.Fault, o.Broker, o.Strikes, o.Messages, o.Caught, o.Slowest, o.Violations, strings.TrimPrefix(notes(o.Notes), "; "))
	}
	return os.WriteFile(file, []byte(b.String()), 0o644)
}

const how = `Workers of the released binary consume what a
producer sends and sends again (a fifth are copies), while the fault strikes. Afterwards a program that shares no code
with the product reads the broker's log again and compares it with the sink, the claims, the dead letters, the lanes and
every move they made.`
