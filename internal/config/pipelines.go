package config

import (
	"fmt"
	"slices"
	"strings"
)

const pipelinesKey = "pipelines"

// sharedKeys are those that a process has once, however many pipelines it runs.
var sharedKeys = []string{"http", "log", "shutdown", "batch.inflight_bytes"}

// All are the configurations of the scopes: the pipelines, or the file itself.
func (c *Config) All() []*Config {
	if len(c.Pipelines) > 0 {
		return c.Pipelines
	}
	return []*Config{c}
}

// Pick returns the configuration of one scope. It may be empty if the file has only one.
func (c *Config) Pick(scope string) (*Config, error) {
	all := c.All()
	scopes := make([]string, len(all))
	for i, one := range all {
		if scopes[i] = one.Scope; one.Scope == scope {
			return one, nil
		}
	}
	switch {
	case scope == "" && len(c.Pipelines) == 0:
		return c, nil
	case scope == "" && len(all) == 1:
		return all[0], nil
	case scope == "":
		return nil, fmt.Errorf("%s has several pipelines: say which with --scope %s", c.file, strings.Join(scopes, ", --scope "))
	}
	return nil, fmt.Errorf("%s has no scope %q; %s", c.file, scope, suggest(scope, scopes))
}

// several reads a file with pipelines.
func (l *loader) several(root *node) *Config {
	list := root.entry(pipelinesKey)
	above := *root
	above.entries = slices.DeleteFunc(slices.Clone(root.entries), func(e entry) bool { return e.key == pipelinesKey || e.key == "scope" })
	if scope := root.entry("scope"); scope != nil {
		l.add("scope", scope.line, scope.column, "stands above pipelines; each of them has its own")
	}
	if list.value.kind != listNode || len(list.value.items) == 0 {
		l.add(pipelinesKey, list.line, list.column, "must be a list of pipelines, each with its scope, sources and sink")
		return l.read(&above, nil, "")
	}
	all := make([]*Config, 0, len(list.value.items))
	for i, item := range list.value.items {
		at := index(pipelinesKey, i)
		if item.kind != mapNode {
			l.add(at, item.line, item.column, "must be %s, not %s", mapNode, item.kind)
			continue
		}
		c := l.read(&above, l.own(item, at), at)
		l.check(c)
		all = append(all, c)
	}
	l.across(all)
	c := l.read(&above, nil, "")
	c.Pipelines = all
	return c
}

func (l *loader) add(path string, line, column int, format string, args ...any) {
	l.problems = append(l.problems, Problem{Key: path, File: l.file, Line: line, Column: column, Message: fmt.Sprintf(format, args...)})
}

// own is a pipeline without the keys that it can't have.
func (l *loader) own(item *node, path string) *node {
	own := *item
	own.entries = nil
	for _, e := range item.entries {
		switch {
		case e.key == pipelinesKey:
			l.add(join(path, e.key), e.line, e.column, "a pipeline has no pipelines of its own")
		case slices.Contains(sharedKeys, e.key):
			l.add(join(path, e.key), e.line, e.column, "a process has one for all pipelines; write it above them")
		default:
			if inflight := e.value.entry("inflight_bytes"); e.key == "batch" && inflight != nil {
				l.add(join(path, "batch.inflight_bytes"), inflight.line, inflight.column, "a process has one for all pipelines; write it above them")
			}
			own.entries = append(own.entries, e)
		}
	}
	return &own
}

// across finds what pipelines can't share.
func (l *loader) across(all []*Config) {
	l.shareMemory(all)
	scopes, readers := make(map[string]int), make(map[string]int)
	for i, c := range all {
		if first, ok := scopes[c.Scope]; ok && c.Scope != "" {
			l.problems = append(l.problems, c.problem("scope", "%q is also that of %s; each pipeline needs its own", c.Scope, index(pipelinesKey, first)))
			continue // its groups are the same by default
		}
		scopes[c.Scope] = i
		for j := range c.Sources {
			s, at := &c.Sources[j], index("sources", j)
			what, key, keys := "", "", []string(nil)
			switch {
			case s.Kafka != nil:
				what, key = fmt.Sprintf("group %q", s.Kafka.Group), at+".kafka.group"
				for _, b := range s.Kafka.Brokers {
					keys = append(keys, "kafka "+strings.ToLower(b)+" "+s.Kafka.Group)
				}
			case s.NATS != nil:
				what, key, keys = fmt.Sprintf("durable %q", s.NATS.Durable), at+".nats.durable", s.NATS.readers()
			}
			for _, k := range keys {
				if first, ok := readers[k]; ok && first != i {
					l.problems = append(l.problems, c.problem(key, "%s is also that of %s, so each would get a part of the messages; leave it out, or give each its own", what, index(pipelinesKey, first)))
					break
				}
				readers[k] = i
			}
		}
	}
}

// shareMemory finds a pipeline whose part of the memory holds no batch.
func (l *loader) shareMemory(all []*Config) {
	for i, c := range all {
		b := &c.Batch
		if part := b.InflightBytes / Size(len(all)); part < b.MaxBytes && b.InflightBytes >= b.MaxBytes {
			l.problems = append(l.problems, c.problem("batch.inflight_bytes", "%s are %s for each of %d pipelines, less than batch.max_bytes (%s) of %s: one batch would not fit; raise it",
				b.InflightBytes, part, len(all), b.MaxBytes, index(pipelinesKey, i)))
			return
		}
	}
}
