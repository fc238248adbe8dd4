package e2e

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/dedupd/dedupd/"

// The binary that people run has no servers, no test libraries and no second
// Kafka client in it.
func TestBinaryHasNoTestCode(t *testing.T) {
	out, err := goTool(t.Context(), "list", "-deps", "./cmd/dedupd")
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(out)
	if len(packages) < 100 || !slices.Contains(packages, module+"consumer/kafka") {
		t.Fatalf("go list tells only %d packages, or not ours", len(packages))
	}
	forbidden := regexp.MustCompile(`^(testing|github\.com/nats-io/nats-server|github\.com/fergusstrange/|github\.com/twmb/|github\.com/Shopify/|github\.com/google/go-cmp|` +
		`github\.com/rogpeppe/|go\.uber\.org/goleak|github\.com/stretchr/|pgregory\.net/|` + module + `(e2e|internal/pgtest|internal/natstest|internal/child|consumer/consumertest|sinks/sinktest|internal/tools))(/|$)`)
	for _, p := range packages {
		if forbidden.MatchString(p) {
			t.Errorf("the binary contains %s", p)
		}
	}
}

// layer says what a package of ours may import: of ours by its folder, of others
// by a pattern of those it must not. Tests are not looked at.
var layers = []struct {
	of     string // a pattern of folders
	ours   string // a pattern of folders that may be imported
	others string // a pattern of import paths that may not
}{
	{`message`, `^$`, `pgx|kafka|nats|prometheus|cobra`},
	{`consumer`, `^(message|lane|internal/(logonce|wait))$`, `pgx|kafka|nats|cobra`},
	{`consumer/kafka`, `^(message|lane|consumer|internal/(logonce|wait))$`, `pgx|nats|prometheus|cobra`},
	{`consumer/nats`, `^(message|lane|consumer|internal/(logonce|wait))$`, `pgx|kafka|prometheus|cobra`},
	{`dedup`, `^(message|sinks)$`, `kafka|nats|cobra`},
	{`sinks`, `^message$`, `kafka|nats|prometheus|cobra`},
	{`sinks/[^/]+`, `^(message|sinks(/internal/.+)?|internal/nearest)$`, `kafka|nats|cobra`},
	{`sinks/internal/.+`, `^(message|sinks)$`, `kafka|nats|prometheus|cobra`},
	{`retention`, `^internal/(logonce|wait)$`, `pgx|kafka|nats|cobra`},
	{`internal/config`, `^(message|sinks|internal/nearest)$`, `kafka|nats|prometheus|cobra`},
	// A leaf, so that both halves of "did you mean" may stand on it.
	{`internal/nearest`, `^$`, `.*\..*`},
	// Figures and arithmetic: a leaf.
	{`internal/sizing`, `^$`, `.*\..*`},
	{`internal/top`, `^(dedup|internal/wait)$`, `pgx|kafka|nats|prometheus|cobra`},
	{`internal/(logonce|wait)`, `^$`, `.*\..*`},
	// For test support and the demo; no layer above names it.
	{`internal/child`, `^$`, `.*\..*`},
	// A program about our packages, of the standard library alone.
	{`internal/mutate`, `^$`, `.*\..*`},
	{`internal/app`, `^(message|consumer|consumer/kafka|consumer/nats|dedup|sinks|retention|internal/config)$`, `cobra`},
	{`cmd/dedupd/cli`, `^(message|dedup|sinks|retention|internal/app|internal/config|internal/logonce|internal/nearest|internal/sizing|internal/top)$`, `kafka|nats`},
	{`cmd/dedupd`, `^(cmd/dedupd/cli|sinks/[^/]+)$`, `.*\..*`},
	{`consumer/consumertest`, `^(message|consumer)$`, `pgx`},
	{`sinks/sinktest`, `^(message|sinks)$`, `kafka|nats`},
	{`examples/.+`, `^(message|sinks(/[^/]+)?|dedup|cmd/dedupd/cli|examples/.+)$`, `kafka|nats|cobra`},
}

// The import arrows, a second time: the linter holds them too, where it runs.
func TestLayers(t *testing.T) {
	out, err := goTool(t.Context(), "list", "-f", `{{if .GoFiles}}{{.ImportPath}} {{join .Imports " "}}{{end}}`, "./...")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		folder := strings.TrimPrefix(words[0], module)
		if strings.HasPrefix(folder, "e2e") || strings.HasPrefix(folder, "internal/pgtest") || strings.HasPrefix(folder, "internal/natstest") || strings.HasPrefix(folder, "internal/tools") {
			continue
		}
		rule := -1
		for i, l := range layers {
			// The first that fits; more special ones of the same folder stand below.
			if regexp.MustCompile("^(" + l.of + ")$").MatchString(folder) {
				rule = i
				if l.of == folder {
					break
				}
			}
		}
		if rule < 0 {
			t.Errorf("%s is in no layer: add it to this test", folder)
			continue
		}
		seen[layers[rule].of] = true
		for _, path := range words[1:] {
			ours, isOurs := strings.CutPrefix(path, module)
			switch {
			case isOurs && !regexp.MustCompile(layers[rule].ours).MatchString(ours):
				t.Errorf("%s imports %s", folder, ours)
			case !isOurs && strings.Contains(path, ".") && regexp.MustCompile(layers[rule].others).MatchString(path):
				t.Errorf("%s imports %s", folder, path)
			}
		}
	}
	for _, l := range layers {
		if !seen[l.of] {
			t.Errorf("no package is %s any more", l.of)
		}
	}
}
