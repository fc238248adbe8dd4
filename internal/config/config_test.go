package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

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

// TestFiles reads every file of testdata. A file's first line is a comment: "ok",
// or "want: LINE:COLUMN: KEY: " and a part of the message; several such lines
// where several problems are wanted, and then no others may be found.
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

func TestSecretFiles(t *testing.T) {
	dir := t.TempDir()
	dsn, password := filepath.Join(dir, "dsn"), filepath.Join(dir, "password")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(dsn, "postgres://h/one\n")
	write(password, " pass \r\n")
	c := parse(t, fmt.Sprintf(`
scope: orders
sources: [{kafka: {brokers: "b:1", topics: orders, sasl: {mechanism: plain, username: u, password_file: %q}}}]
database: {url_file: %q}
sink: {probe: {name: x}}
`, password, dsn))
	if got := c.Database.URL.Reveal(); got != "postgres://h/one" {
		t.Errorf("url %q", got)
	}
	if got, err := c.Sources[0].Kafka.SASL.CurrentPassword(); got != " pass " || err != nil {
		t.Errorf("password %q, %v", got, err)
	}
	write(dsn, "postgres://h/two")
	if got, err := c.Database.Connection(); got != "postgres://h/two" || err != nil {
		t.Errorf("after a change: %q, %v", got, err)
	}
	var out strings.Builder
	if err := c.Print(&out); err != nil || strings.Contains(out.String(), "pass ") || strings.Contains(out.String(), "//h/") {
		t.Errorf("print shows a secret: %v\n%s", err, out.String())
	}
}

// TestNoTextOfASecret tries every way in which a value usually becomes text.
func TestNoTextOfASecret(t *testing.T) {
	type holder struct {
		S Secret
		P *Secret
	}
	s := Secret("hunter2")
	h := holder{s, &s}
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	logger.Info("x", "secret", s, "holder", h, "pointer", &s)
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "secret", s, "holder", h)
	asJSON, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	asYAML, err := yaml.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	c := parse(t, small, "DEDUPD_DATABASE_URL=postgres://u:hunter2@h/db")
	var printed strings.Builder
	if err := c.Print(&printed); err != nil {
		t.Fatal(err)
	}
	texts := []string{s.String(), s.GoString(), log.String(), string(asJSON), string(asYAML), printed.String(), fmt.Sprint(c.Database), fmt.Errorf("x: %w, %v", errors.New("y"), s).Error()}
	for _, verb := range []string{"%s", "%v", "%+v", "%#v", "%q", "%x", "%X", "%d", "%10s", "%t"} {
		texts = append(texts, fmt.Sprintf(verb, s), fmt.Sprintf(verb, h), fmt.Sprintf(verb, []Secret{s}))
	}
	for _, text := range texts {
		if strings.Contains(text, "hunter2") || strings.Contains(strings.ToLower(text), fmt.Sprintf("%x", "hunter2")) {
			t.Errorf("shown: %s", text)
		}
	}
	// Wrong ones are not shown either.
	_, _, err = Parse("f.yaml", []byte(small), Options{Environ: []string{"DEDUPD_DATABASE_URL=postgres://u:hunter2@h:port/db"}})
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the error of a bad URL: %v", err)
	}
}

func TestRedactURL(t *testing.T) {
	for in, want := range map[string]string{
		"nats://h:4222": "nats://h:4222", "nats://u:p@h:4222": "nats://[redacted]@h:4222", "nats://token@h": "nats://[redacted]@h",
		"nats://u:p@ss@h": "nats://[redacted]@h", "u:p@h": "[redacted]@h", "nats://u:%zz@h": "nats://[redacted]@h",
	} {
		if got := redactURL(in); got != want {
			t.Errorf("%s is shown as %s", in, got)
		}
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

func TestDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1h30m": 90 * time.Minute, "7d": 168 * time.Hour, "4w": 28 * 24 * time.Hour, "1w2d3h": (9*24 + 3) * time.Hour,
		"90s": 90 * time.Second, "1.5h": 90 * time.Minute, "0": 0, "250ms": 250 * time.Millisecond,
	} {
		d, err := ParseDuration(text)
		if err != nil || time.Duration(d) != want {
			t.Errorf("%s is %s, %v", text, d, err)
		}
		if again, err := ParseDuration(d.String()); again != d || err != nil {
			t.Errorf("%s prints as %s, which reads as %s, %v", text, d, again, err)
		}
	}
	for _, text := range []string{"", "7", "-1h", "+1h", "1x", "d", "1d2w", "1 d", "99999w", "1e3s", "9999999d"} {
		if d, err := ParseDuration(text); err == nil {
			t.Errorf("%q is taken for %s", text, d)
		}
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{"8MiB": 8 << 20, "64KiB": 64 << 10, "1GB": 1e9, "1.5KiB": 1536, "17": 17, "0": 0, "2 GiB": 2 << 30, "1kB": 1000} {
		s, err := ParseSize(text)
		if err != nil || s != want {
			t.Errorf("%s is %d, %v", text, s, err)
		}
		if again, err := ParseSize(s.String()); again != s || err != nil {
			t.Errorf("%s prints as %s", text, s)
		}
	}
	for _, text := range []string{"", "-1", "1.5", "1mib", "8M", "1e3", "MiB", "99999999TiB"} {
		if s, err := ParseSize(text); err == nil {
			t.Errorf("%q is taken for %s", text, s)
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

func TestDecodeForSinks(t *testing.T) {
	type Inner struct {
		A int `yaml:"a"`
	}
	var got struct {
		Inner   `yaml:",inline"`
		Any     any
		List    []Inner       `yaml:"list"`
		Ordered yaml.MapSlice `yaml:"ordered"`
		Wait    *Duration     `yaml:"wait"`
		Keep    string        `yaml:"keep"`
		Share   float32       `yaml:"share"`
	}
	got.Keep = "kept"
	c, _, _ := Parse("f.yaml", []byte(`
sink:
  x: {a: 1, any: [1, "1", true, 1.5, {b: null}], list: [{a: 2}], ordered: {z: 1, a: [header:x]}, wait: 2d, keep: , share: 0.5}
`), Options{})
	if err := c.Sink.Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.A != 1 || got.List[0].A != 2 || *got.Wait != 2*day || got.Keep != "kept" || got.Share != 0.5 {
		t.Errorf("%+v", got)
	}
	if want := []any{int64(1), "1", true, 1.5, map[string]any{"b": nil}}; !reflect.DeepEqual(got.Any, want) {
		t.Errorf("any: %#v", got.Any)
	}
	if want := (yaml.MapSlice{{Key: "z", Value: int64(1)}, {Key: "a", Value: []any{"header:x"}}}); !reflect.DeepEqual(got.Ordered, want) {
		t.Errorf("ordered: %#v", got.Ordered)
	}
	var wrong struct {
		Z int `yaml:"z"`
	}
	var problems Problems
	if err := c.Sink.Decode(&wrong); !errors.As(err, &problems) || len(problems) != 7 || problems[0].Key != "sink.x.a" || problems[0].Line != 3 {
		t.Errorf("unknown keys: %v", err)
	}
}

// FuzzParse reads anything without a panic, and what is printed reads back as
// the same.
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
	p := &printer{c: c, comments: true, reveal: true}
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
	copied := *c
	copied.places, copied.file, copied.Sink = nil, "", Sink{}
	for i := range copied.Sources {
		// An empty list is no list.
		if n := copied.Sources[i].NATS; n != nil && len(n.Subjects) == 0 {
			n.Subjects = nil
		}
	}
	var sink any
	if c.Sink.node != nil {
		sink = plain(c.Sink.node)
	}
	return []any{copied, c.Sink.Kind, sink}
}
