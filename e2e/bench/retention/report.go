package main

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// report is what was measured, in Markdown.
type report struct{ text strings.Builder }

func (r *report) add(format string, args ...any) { fmt.Fprintf(&r.text, format, args...) }

func (r *report) setting(b *bench) {
	r.add("# Retention, measured\n\n")
	r.add("`make bench-retention` wrote this on %s. Runs took turns, %d rounds; a figure is the median of the rounds, a ratio\n", time.Now().UTC().Format(time.DateOnly), b.rounds)
	r.add("the median of the rounds' ratios. Absolute figures are this machine's and no other's.\n\n")
	var set []string
	for name, value := range settings {
		set = append(set, fmt.Sprintf("%s %s", name, value))
	}
	slices.Sort(set)
	r.add("Setting: %s, %d cores shared by Postgres and the workers, %s of memory; Postgres %s with fsync, %s.\n",
		processor(), runtime.NumCPU(), memory(), pgVersion, strings.Join(set, ", "))
	if b.scale != 1 {
		r.add("\n**A first look only: with %g of the claims.**\n", b.scale)
	}
}

// table adds a table; the first row holds the titles.
func (r *report) table(rows [][]string) {
	r.add("\n")
	for i, row := range rows {
		r.add("| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			r.add("|%s\n", strings.Repeat(" --- |", len(row)))
		}
	}
	r.add("\n")
}

func processor() string { return firstLine("/proc/cpuinfo", "model name") }

func memory() string { return firstLine("/proc/meminfo", "MemTotal") }

func firstLine(file, name string) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(data)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func thousands(rate float64) string { return fmt.Sprintf("%.1f k", rate/1000) }

func ms(d time.Duration) string { return fmt.Sprintf("%.0f ms", float64(d.Microseconds())/1000) }
