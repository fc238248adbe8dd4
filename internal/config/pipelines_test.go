package config

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func pipelines(t *testing.T, env ...string) *Config {
	t.Helper()
	text, err := os.ReadFile("testdata/ok-pipelines.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, string(text), env...)
}

// A pipeline is what stands above it, and what it says itself. What it lists replaces what
// is listed above.
func TestPipelines(t *testing.T) {
	c := pipelines(t, "DEDUPD_DATABASE_URL=postgres://h/db")
	if len(c.All()) != 2 || c.HTTP.Listen != ":1" {
		t.Fatalf("%+v", c)
	}
	a, b := c.All()[0], c.All()[1]
	if a.Scope != "a" || a.Database.Schema != "s" || a.Database.MaxConnections != 8 || a.Database.URL.Reveal() != "postgres://h/db" || a.HTTP.Listen != ":1" {
		t.Errorf("%+v", a)
	}
	if len(a.Sources) != 2 || a.Sources[0].NATS.Durable != "a" || a.Sources[1].Kafka.Group != "a" || len(a.Filter.conditions) != 1 || a.Filter.conditions[0].Place != "key" || a.Sink.Kinds() != "probe" {
		t.Errorf("%+v", a)
	}
	if b.Scope != "b" || b.Database.Schema != "s" || b.Database.MaxConnections != 2 || len(b.Sources) != 1 || b.Sources[0].Kafka.Group != "own" || b.Filter.conditions[0].Place != "header:x" || b.Sink.Kinds() != "probe, probe" {
		t.Errorf("%+v", b)
	}
}

func TestPickAPipeline(t *testing.T) {
	several, one := pipelines(t), parse(t, small)
	for name, c := range map[string]struct {
		of          *Config
		scope, want string // the scope, or the error
	}{
		"one of several":  {several, "b", "b"},
		"none of several": {several, "", "test.yaml has several pipelines: say which with --scope a, --scope b"},
		"another":         {several, "x", `test.yaml has no scope "x"; known here: a, b`},
		"the only one":    {one, "", "orders"},
		"by its name":     {one, "orders", "orders"},
		"by another":      {one, "order", `test.yaml has no scope "order"; did you mean orders?`},
	} {
		picked, err := c.of.Pick(c.scope)
		got := fmt.Sprint(err)
		if err == nil {
			got = picked.Scope
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// What a pipeline prints alone is a file of its own.
func TestPrintOfAPipeline(t *testing.T) {
	c := pipelines(t)
	var all, one strings.Builder
	if err := c.Print(&all); err != nil {
		t.Fatal(err)
	}
	if strings.Count(all.String(), "http:") != 1 || strings.Count(all.String(), "inflight_bytes: ") != 1 || strings.Count(all.String(), "scope: ") != 2 {
		t.Errorf("the file prints as\n%s", all.String())
	}
	roundTrip(t, c)
	if err := c.All()[1].Print(&one); err != nil {
		t.Fatal(err)
	}
	again := parse(t, one.String())
	if again.Scope != "b" || again.HTTP.Listen != ":1" || again.Sources[0].Kafka.Group != "own" {
		t.Errorf("the pipeline prints as\n%s", one.String())
	}
	// The place of what it took from above is above.
	if !strings.Contains(one.String(), "# line 3") || !strings.Contains(one.String(), "# line 14") {
		t.Errorf("origins:\n%s", one.String())
	}
}

// What a pipeline replaces has no places any more: a default that depends on whether a key
// is set goes by its own.
func TestAPipelineReplacesASource(t *testing.T) {
	c := parse(t, `
sources: [{kafka: {brokers: "b:1", topics: orders, on_group_reset: honour}}]
dedup: {strategy: position}
sink: {probe: {name: x}}
pipelines:
  - {scope: a, sources: [{kafka: {brokers: "b:1", topics: others}}]}
  - {scope: b}
`)
	if a, b := c.All()[0].Sources[0].Kafka, c.All()[1].Sources[0].Kafka; a.OnGroupReset != "ignore" || b.OnGroupReset != "honour" {
		t.Errorf("on_group_reset is %s and %s, want ignore and honour", a.OnGroupReset, b.OnGroupReset)
	}
}

// Each pipeline has a part of the memory, which holds a batch.
func TestPipelinesShareMemory(t *testing.T) {
	const file = `
batch: {inflight_bytes: 3MiB, max_bytes: 1MiB}
sources: [{kafka: {brokers: "b:1", topics: orders}}]
sink: {probe: {name: x}}
pipelines:
  - {scope: a}
  - {scope: b, batch: {max_bytes: %s}}
  - {scope: c}
`
	parse(t, fmt.Sprintf(file, "1MiB"))
	want := "test.yaml:2:9: batch.inflight_bytes: 3MiB are 1MiB for each of 3 pipelines, less than batch.max_bytes (1025KiB) of pipelines[1]: one batch would not fit; raise it"
	if _, _, err := Parse("test.yaml", []byte(fmt.Sprintf(file, "1025KiB")), Options{Sinks: registry()}); err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}
