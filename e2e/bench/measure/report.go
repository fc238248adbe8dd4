package measure

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Report is what was measured, in Markdown.
type Report struct{ text strings.Builder }

// Title begins a report, with the command that made it.
func (r *Report) Title(title, command string) {
	r.Add("# %s\n\n`%s` wrote this on %s. ", title, command, time.Now().UTC().Format(time.DateOnly))
}

// Setting tells of the machine and of the server's settings.
func (r *Report) Setting(postgres string, settings map[string]string) {
	var set []string
	for name, value := range settings {
		set = append(set, fmt.Sprintf("%s %s", name, value))
	}
	slices.Sort(set)
	r.Add("Setting: %s, %d cores shared by all of it, %s of memory; Postgres %s with fsync, %s.\n",
		firstLine("/proc/cpuinfo", "model name"), runtime.NumCPU(), firstLine("/proc/meminfo", "MemTotal"), postgres, strings.Join(set, ", "))
}

// Add adds text.
func (r *Report) Add(format string, args ...any) { fmt.Fprintf(&r.text, format, args...) }

// Table adds a table; the first row holds the titles.
func (r *Report) Table(rows [][]string) {
	r.Add("\n")
	for i, row := range rows {
		r.Add("| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			r.Add("|%s\n", strings.Repeat(" --- |", len(row)))
		}
	}
	r.Add("\n")
}

func (r *Report) String() string { return r.text.String() }

// Write writes the report to a file; without a name it does nothing.
func (r *Report) Write(file string) error {
	if file == "" {
		return nil
	}
	return os.WriteFile(file, []byte(r.String()), 0o644) // #nosec: it is to be read
}

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

// Progress tells a person what goes on.
func Progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s  %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// Median is the upper one of an even number.
func Median[T int | float64 | time.Duration](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// Thousands is a rate for people.
func Thousands(rate float64) string { return fmt.Sprintf("%.1f k", rate/1000) }

// Millis is a duration in milliseconds.
func Millis(d time.Duration) string { return fmt.Sprintf("%.0f ms", float64(d.Microseconds())/1000) }

// Micros is what each of n took, in microseconds.
func Micros(d time.Duration, n int) string {
	return fmt.Sprintf("%.1f µs", float64(d.Nanoseconds())/1000/float64(max(n, 1)))
}
