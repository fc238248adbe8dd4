package nats

import (
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// What a durable's filter leaves out is passed over for good. So while a configuration
// with other subjects is rolled out, workers with the old one must not restore their
// filter: beside it, the durable keeps a number that rises with each configuration. A
// process that has just started brings its own, and from then on follows any that
// starts later.

const (
	// filterKey is the key, in the durable's metadata, of the filter that dedupd gave
	// it: if its filter is another one, somebody else changed it.
	filterKey = "dedupd-subjects"
	// filterSetKey is the key of its number.
	filterSetKey = "dedupd-subjects-set"
)

// filter is what a durable shall deliver.
type filter struct {
	subjects []string
	// set is its number; 0: this process has not given it to the durable yet.
	set int64
}

// follow takes over the filter of a worker that has started later.
func (f *filter) follow(c *jetstream.ConsumerConfig, log *slog.Logger) {
	given, ok := c.Metadata[filterKey]
	set := filterSet(c)
	if !ok || f.set == 0 || set <= f.set {
		return
	}
	if given != filterText(f.subjects) {
		log.Warn("a worker that was started later has other subjects: reading by those, as a durable has one filter only. If that one has the older configuration, restart it, or this one, with the newer",
			"durable", c.Durable, "subjects", given, "were", filterText(f.subjects))
		f.subjects = subjectsIn(given)
	}
	f.set = set
}

// displaced reports whether the durable's filter isn't the one that this process has given
// it, but that of a worker that hasn't started later. It has passed over messages.
func (f *filter) displaced(c *jetstream.ConsumerConfig) bool {
	_, ok := c.Metadata[filterKey]
	return f.set > 0 && ok && !sameSubjects(c, f.subjects)
}

// other reports whether a durable's filter is another one, or of another configuration.
func (f *filter) other(c *jetstream.ConsumerConfig) bool {
	return filterSet(c) != f.set || !sameSubjects(c, f.subjects)
}

// take numbers the filter before a durable gets it, whether it had another one or the
// same. Taken from the clock, the number also rises where a durable is created anew and
// keeps none.
func (f *filter) take(was *jetstream.ConsumerConfig) {
	set := filterSet(was)
	if set > 0 && sameSubjects(was, f.subjects) {
		f.set = set
		return
	}
	f.set = max(f.set, set+1, time.Now().Unix())
}

// mark puts the filter into the metadata that a durable will have.
func (f *filter) mark(metadata map[string]string) {
	if f.set == 0 {
		f.set = time.Now().Unix()
	}
	metadata[filterKey], metadata[filterSetKey] = filterText(f.subjects), strconv.FormatInt(f.set, 10)
}

// filterSet is the number of a durable's filter; 0: it keeps none.
func filterSet(c *jetstream.ConsumerConfig) int64 {
	n, _ := strconv.ParseInt(c.Metadata[filterSetKey], 10, 64)
	return n
}

const allSubjects = ">"

func filterText(subjects []string) string {
	if len(subjects) == 0 {
		return allSubjects
	}
	return strings.Join(slices.Sorted(slices.Values(subjects)), " ")
}

// subjectsIn are those of filterText.
func subjectsIn(text string) []string {
	if text == allSubjects {
		return nil
	}
	return strings.Fields(text)
}

func subjectsOf(c *jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return append(slices.Clone(c.FilterSubjects), c.FilterSubject)
	}
	return c.FilterSubjects
}

func sameSubjects(c *jetstream.ConsumerConfig, want []string) bool {
	return filterText(subjectsOf(c)) == filterText(want)
}

// refiltered reports whether a durable's filter isn't the one that dedupd gave it.
func refiltered(c *jetstream.ConsumerConfig) bool {
	given, ok := c.Metadata[filterKey]
	return ok && given != filterText(subjectsOf(c))
}
