package config

import (
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/sinks"
)

// Options are what a configuration is made of beside its file.
type Options struct {
	// Environ is the environment as os.Environ gives it.
	Environ []string
	// Sinks, if set, are the kinds that check the sink's part.
	Sinks *sinks.Registry
}

// Load reads the file at path, applies the environment and validates the result.
// Warnings are for the log. The error is Problems: don't use the configuration then,
// which is nil only if the file isn't YAML.
func Load(path string, o Options) (c *Config, warnings []Problem, err error) {
	text, err := read(path, maxFile)
	if err != nil {
		return nil, nil, Problems{{File: path, Message: err.Error()}}
	}
	return Parse(path, text, o)
}

// Parse is Load for a file's text. Problems call the file name.
func Parse(name string, text []byte, o Options) (c *Config, warnings []Problem, err error) {
	environment := make(map[string]string, len(o.Environ))
	for _, kv := range o.Environ {
		key, value, _ := strings.Cut(kv, "=")
		environment[key] = value
	}
	b := &builder{file: name, lookup: func(key string) (string, bool) {
		value, ok := environment[key]
		return value, ok
	}}
	root := b.parse(text)
	if root == nil {
		return nil, nil, b.problems.withExcerpts(text)
	}

	l := &loader{file: name, environment: environment, sinks: o.Sinks, problems: b.problems}
	if root.entry(pipelinesKey) != nil {
		c = l.several(root)
	} else {
		c = l.read(root, nil, "")
		l.check(c)
	}
	return c, unknownVariables(environment), l.problems.once().withExcerpts(text)
}

// loader reads a file's configurations, and collects their problems.
type loader struct {
	file        string
	environment map[string]string
	sinks       *sinks.Registry
	problems    Problems
}

// read reads a configuration. Own, if there is one, is the part of a pipeline at that path:
// what it doesn't set is as above.
func (l *loader) read(above, own *node, path string) *Config {
	d := &decoder{file: l.file, places: make(map[string]place)}
	c := Default()
	c.file, c.places = l.file, d.places
	d.note("", above.line, above.column, above)
	d.decode(above, "", reflect.ValueOf(c).Elem())
	l.problems = append(l.problems, d.problems...)
	if own != nil {
		d := &decoder{file: l.file, places: d.places, pipeline: path}
		d.note("", own.line, own.column, own)
		d.decode(own, "", reflect.ValueOf(c).Elem())
		l.problems = append(l.problems, d.problems.in(path)...)
	}
	c.override(l.environment)
	c.setDerived()
	return c
}

// check finds what is wrong with a configuration that could be read.
func (l *loader) check(c *Config) {
	l.problems = slices.Concat(l.problems, c.readSecrets(), c.validate())
	if l.sinks != nil {
		_, wrong := c.parts(l.sinks)
		l.problems = append(l.problems, wrong...)
	}
}

func read(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(text)) > limit {
		return nil, fmt.Errorf("larger than %s: is this the right file?", Size(limit))
	}
	return text, nil
}

// once keeps the first problem of each key: it causes the others.
func (ps Problems) once() Problems {
	var kept Problems
	for _, p := range ps {
		if p.Key == "" || !slices.ContainsFunc(kept, func(k Problem) bool { return k.Key == p.Key && k.Line == p.Line }) {
			kept = append(kept, p)
		}
	}
	return kept
}

func (ps Problems) withExcerpts(text []byte) error {
	lines := strings.Split(string(text), "\n")
	for i, p := range ps {
		if p.Line >= 1 && p.Line <= len(lines) {
			ps[i].Excerpt = lines[p.Line-1] + "\n" + strings.Repeat(" ", max(p.Column-1, 0)) + "^"
		}
	}
	return ps.err()
}

// The environment variables that override the file: those that containers set.
const (
	envURL    = "DEDUPD_DATABASE_URL"
	envListen = "DEDUPD_HTTP_LISTEN"
	envLevel  = "DEDUPD_LOG_LEVEL"
)

func (c *Config) override(environment map[string]string) {
	set := func(name, path string) (string, bool) {
		value, ok := environment[name]
		if ok {
			c.places[path] = place{env: name, origin: "environment, $" + name}
		}
		return value, ok
	}
	if v, ok := set(envURL, "database.url"); ok {
		c.Database.URL, c.Database.URLFile = Secret(v), ""
	}
	if v, ok := set(envListen, "http.listen"); ok {
		c.HTTP.Listen = v
	}
	if v, ok := set(envLevel, "log.level"); ok {
		c.Log.Level = LogLevel(v)
	}
}

// foreign matches DEDUPD_ variables that aren't ours: those that Kubernetes sets for
// services whose names begin with dedupd, and those of tests.
var foreign = regexp.MustCompile(`^DEDUPD_(SERVICE_.*|PORT.*|TEST_.*|KAFKA_LIBS|.*_SERVICE_(HOST|PORT).*|.*_PORT(_[0-9]+_.*)?)$`)

func unknownVariables(environment map[string]string) []Problem {
	var warnings []Problem
	for name := range environment {
		switch {
		case !strings.HasPrefix(name, "DEDUPD_"), foreign.MatchString(name):
		case name == envURL, name == envListen, name == envLevel:
		default:
			warnings = append(warnings, Problem{Warning: true, Message: fmt.Sprintf(
				"the environment variable %s has no meaning; %s", name, suggest(name, []string{envURL, envListen, envLevel}))})
		}
	}
	return Problems(warnings).sorted()
}
