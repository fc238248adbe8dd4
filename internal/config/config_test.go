package config

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

var update = flag.Bool("update", false, "write schema.json anew")

// registry has a sink that decodes as real ones do.
func registry() *sinks.Registry {
	r := new(sinks.Registry)
	r.Register("probe", func(decode func(any) error) (sinks.Sink, error) {
		var c struct {
			Name    string            `yaml:"name"`
			Columns map[string]string `yaml:"columns"`
			Rows    int               `yaml:"rows"`
			SQL     string            `yaml:"sql"`
		}
		if err := decode(&c); err != nil {
			return nil, err
		}
		var problems []error
		if c.Name == "" {
			problems = append(problems, errors.New("name: is required"))
		}
		for column, from := range c.Columns {
			if _, err := message.ParseField(from); err != nil {
				problems = append(problems, fmt.Errorf("columns.%s: %w", column, err))
			}
		}
		return nil, errors.Join(problems...)
	})
	return r
}

var environ = []string{
	"HOST=broker:9092", "BROKERS=a:1,b:2", "PASSWORD=p@ss: #word", "EMPTY=", "FOUR=4", "LIST=[a, b]",
}

// TestFiles reads every file of testdata. A file's first line is a comment: "ok", or
// "want: LINE:COLUMN: KEY: " and the beginning of the message, with one such line for
// each problem. There must be no other problems.
func TestFiles(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 20 {
		t.Fatalf("testdata has %d files: %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			for line := range strings.Lines(string(text)) {
				if w, ok := strings.CutPrefix(line, "# want: "); ok {
					want = append(want, strings.TrimSpace(w))
				}
			}
			if len(want) == 0 && !bytes.HasPrefix(text, []byte("# ok")) {
				t.Fatal("the first line must be # ok or # want: …")
			}
			_, _, err = Load(file, Options{Environ: environ, Sinks: registry()})
			var got Problems
			if err != nil && !errors.As(err, &got) {
				t.Fatalf("the error is a %T", err)
			}
			if len(got) != len(want) {
				t.Fatalf("%d problems, want %d:\n%v", len(got), len(want), err)
			}
			for i, p := range got {
				text := strings.TrimPrefix(p.String(), file+":")
				if !strings.HasPrefix(text, want[i]) {
					t.Errorf("problem %d:\n got %s\nwant %s", i, text, want[i])
				}
			}
		})
	}
}

func parse(t *testing.T, text string, env ...string) *Config {
	t.Helper()
	c, _, err := Parse("test.yaml", []byte(text), Options{Environ: env, Sinks: registry()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const small = `
scope: orders
sources: [{kafka: {brokers: "b:1", topics: orders}}]
sink: {probe: {name: x}}
`

func TestDefaults(t *testing.T) {
	c := parse(t, small)
	if s := c.Sources[0]; s.Name != "kafka" || s.Kafka.Group != "orders" || s.Kafka.Start != "earliest" {
		t.Errorf("source %+v %+v", s, s.Kafka)
	}
	c = parse(t, "scope: o\nsources: [{nats: {servers: 'nats://h:1', stream: S}}]\nsink: {probe: {name: x}}")
	if s := c.Sources[0]; s.Name != "nats" || s.NATS.Durable != "o" || s.NATS.Mode != "queue" {
		t.Errorf("source %+v %+v", s, s.NATS)
	}
}

func TestEnvironmentOverridesFile(t *testing.T) {
	c := parse(t, small+"database: {url_file: /does/not/exist}\nhttp: {listen: ':1'}\nlog: {level: error}",
		"DEDUPD_DATABASE_URL=postgres://h/db", "DEDUPD_HTTP_LISTEN=0.0.0.0:80", "DEDUPD_LOG_LEVEL=debug")
	url, err := c.Database.Connection()
	if url != "postgres://h/db" || err != nil || c.HTTP.Listen != "0.0.0.0:80" || c.Log.Level != "debug" {
		t.Errorf("%q, %v, %+v, %+v", url, err, c.HTTP, c.Log)
	}
	_, _, err = Parse("f.yaml", []byte(small), Options{Environ: []string{"DEDUPD_LOG_LEVEL=loud"}})
	if err == nil || !strings.HasPrefix(err.Error(), "log.level: ") || !strings.Contains(err.Error(), "DEDUPD_LOG_LEVEL") {
		t.Errorf("a wrong variable: %v", err)
	}
}

func TestUnknownVariablesWarn(t *testing.T) {
	_, warnings, err := Parse("f.yaml", []byte(small), Options{Environ: []string{
		"DEDUPD_LOGLEVEL=debug", "DEDUPD_SERVICE_HOST=x", "DEDUPD_PORT_9464_TCP=x", "DEDUPD_PORT=x", "DEDUPD_TEST_DSN=x",
		"DEDUPD_KAFKA_LIBS=x", "DEDUPD_METRICS_SERVICE_PORT_HTTP=x", "DEDUPD_METRICS_PORT_1_TCP_ADDR=x", "OTHER=x",
	}})
	if err != nil {
		t.Fatal(err)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0].Message, "DEDUPD_LOGLEVEL has no meaning; did you mean DEDUPD_LOG_LEVEL?") {
		t.Errorf("warnings %v", warnings)
	}
}

func TestPrintTellsOrigins(t *testing.T) {
	c := parse(t, small+"database: {schema: '${S}'}", "S=s", "DEDUPD_LOG_LEVEL=warn")
	var out strings.Builder
	if err := c.Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"scope: orders # line 2", "group: orders # default: the scope", "schema: s # line 5, $S", "level: warn # environment, $DEDUPD_LOG_LEVEL", "window: 7d # default"} {
		if !strings.Contains(strings.Join(strings.Fields(out.String()), " "), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

func TestLoadMissingFile(t *testing.T) {
	_, _, err := Load("does-not-exist.yaml", Options{})
	var problems Problems
	if !errors.As(err, &problems) || len(problems) != 1 || problems[0].File != "does-not-exist.yaml" {
		t.Errorf("%v", err)
	}
}

// FuzzParse reads anything without a panic. What is printed reads back as the same.
func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	more, _ := filepath.Glob("../../configs/*.yaml")
	for _, file := range append(files, more...) {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, _, err := Parse("f.yaml", text, Options{Environ: environ})
		if c == nil || err != nil {
			if err == nil {
				t.Fatal("neither a configuration nor an error")
			}
			return
		}
		roundTrip(t, c)
	})
}

func roundTrip(t *testing.T, c *Config) {
	t.Helper()
	p := &printer{c: c, reveal: true}
	var out bytes.Buffer
	if err := p.print(&out); err != nil {
		t.Fatal(err)
	}
	again, _, err := Parse("f.yaml", out.Bytes(), Options{})
	if err != nil {
		t.Fatalf("what was printed is wrong: %v\n%s", err, out.String())
	}
	a, b := bare(c), bare(again)
	if !reflect.DeepEqual(a, b) {
		t.Fatalf("printed and read again:\n%+v\nwas\n%+v\n%s", b, a, out.String())
	}
}

// bare is a configuration without the places its values came from.
func bare(c *Config) any {
	if len(c.Pipelines) > 0 {
		all := []any{c.HTTP, c.Log, c.Shutdown, c.Batch.InflightBytes}
		for _, one := range c.Pipelines {
			all = append(all, bare(one))
		}
		return all
	}
	copied := *c
	copied.places, copied.file, copied.Sink, copied.Filter = nil, "", nil, Filter{}
	for i := range copied.Sources {
		// An empty list is no list.
		if n := copied.Sources[i].NATS; n != nil && len(n.Subjects) == 0 {
			n.Subjects = nil
		}
	}
	var sinks []any
	for _, s := range c.Sink {
		sinks = append(sinks, s.at, s.Kind, plainOrNil(s.node), s.Filter.conditions)
	}
	return []any{copied, c.Filter.conditions, sinks}
}

func plainOrNil(n *node) any {
	if n == nil {
		return nil
	}
	return plain(n)
}
