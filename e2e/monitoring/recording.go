// Package monitoring tests the alerts, their runbooks and the dashboard of
// deploy/helm/dedupd/files against what the binary really exports. The program
// record makes the recordings in testdata, from real runs.
package monitoring

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Missing is the value of a series in a scrape that didn't have it.
const Missing = "_"

// Recording is what a run exported, scraped once a second. Its lines are
//
//	# a comment
//	name{label="value"} 1 2 _ 4
type Recording struct {
	// About tells what happened in the run.
	About []string
	// Scrapes is how many there are.
	Scrapes int
	// Series have one value for each scrape.
	Series map[string][]string
}

// Add adds a scrape: the value of each series.
func (r *Recording) Add(scrape map[string]string) {
	if r.Series == nil {
		r.Series = map[string][]string{}
	}
	for series := range scrape {
		if r.Series[series] == nil {
			r.Series[series] = slices.Repeat([]string{Missing}, r.Scrapes)
		}
	}
	r.Scrapes++
	for series, values := range r.Series {
		value, ok := scrape[series]
		if !ok {
			value = Missing
		}
		r.Series[series] = append(values, value)
	}
}

// Write writes the recording.
func (r *Recording) Write(w io.Writer) error {
	b := bufio.NewWriter(w)
	for _, line := range r.About {
		fmt.Fprintln(b, strings.TrimSpace("# "+line))
	}
	for _, series := range slices.Sorted(maps.Keys(r.Series)) {
		fmt.Fprintf(b, "%s %s\n", series, strings.Join(r.Series[series], " "))
	}
	return b.Flush()
}

// Read reads a recording.
func Read(text string) (*Recording, error) {
	r := &Recording{Series: map[string][]string{}}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if about, ok := strings.CutPrefix(line, "#"); ok {
			r.About = append(r.About, strings.TrimSpace(about))
			continue
		}
		end := strings.LastIndex(line, "} ")
		if end < 0 {
			return nil, fmt.Errorf("no series with labels in the line %q: record it again", line)
		}
		values := strings.Fields(line[end+1:])
		if r.Scrapes != 0 && len(values) != r.Scrapes {
			return nil, fmt.Errorf("%s has %d values, others have %d: record it again", line[:end+1], len(values), r.Scrapes)
		}
		r.Scrapes = len(values)
		r.Series[line[:end+1]] = values
	}
	return r, nil
}

var sample = regexp.MustCompile(`^([a-z_]+)(?:\{(.*)\})? (\S+)$`)

// ParseExposition reads what /metrics shows as text. Every series gets the labels
// namespace, job and instance, as a scrape would give it. Metrics that wanted
// doesn't want are left out; nil wants all.
func ParseExposition(text, instance string, wanted func(metric string) bool) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		m := sample.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil || wanted != nil && !wanted(m[1]) {
			continue
		}
		labels := fmt.Sprintf(`namespace="orders",job="dedupd",instance=%q`, instance)
		if m[2] != "" {
			labels += "," + m[2]
		}
		all[m[1]+"{"+labels+"}"] = m[3]
	}
	return all
}

// stretched are the metrics whose value is a time. When a second of the run
// becomes a minute of the test, a second that was counted becomes one as well,
// and so does the distance from the beginning. Histograms are left: their
// quantiles don't depend on how fast they grow.
var stretched = map[string]bool{
	"dedupd_database_connection_wait_seconds_total":   true,
	"dedupd_retention_held_seconds":                   true,
	"dedupd_retention_last_success_timestamp_seconds": true, // recorded as the distance
}

// Stretch is the recording as input series of promtool, at so many seconds
// between two scrapes.
func (r *Recording) Stretch(seconds int) (map[string]string, error) {
	all := map[string]string{}
	for series, values := range r.Series {
		name, _, _ := strings.Cut(series, "{")
		if stretched[name] {
			values = slices.Clone(values)
			for i, v := range values {
				if v == Missing {
					continue
				}
				f, err := strconv.ParseFloat(v, 64)
				if err != nil {
					return nil, err
				}
				values[i] = strconv.FormatFloat(f*float64(seconds), 'f', -1, 64)
			}
		}
		all[series] = strings.Join(values, " ")
	}
	return all, nil
}

var (
	quoted     = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	metricName = regexp.MustCompile(`\b(?:dedupd|go|process)_[a-z0-9_]+`)
)

// Metrics are the metrics that an expression of PromQL names.
func Metrics(expression string) []string {
	found := metricName.FindAllString(quoted.ReplaceAllString(expression, `""`), -1)
	slices.Sort(found)
	return slices.Compact(found)
}
