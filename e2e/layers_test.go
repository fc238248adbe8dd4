package e2e

import (
	"os"
	"path"
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
		`github\.com/rogpeppe/|go\.uber\.org/goleak|github\.com/stretchr/|pgregory\.net/|` + module + `(e2e|internal/pgtest|internal/pgrelay|internal/natstest|internal/kafkatest|internal/child|consumer/consumertest|sinks/sinktest|internal/tools))(/|$)`)
	for _, p := range packages {
		if forbidden.MatchString(p) {
			t.Errorf("the binary contains %s", p)
		}
	}
}

// Docker is given every folder that the binary is built from.
func TestDockerHasAllPackages(t *testing.T) {
	ignore, err := os.ReadFile("../.dockerignore")
	if err != nil {
		t.Fatal(err)
	}
	out, err := goTool(t.Context(), "list", "-deps", "./cmd/dedupd")
	if err != nil {
		t.Fatal(err)
	}
	for p := range strings.FieldsSeq(out) {
		ours, ok := strings.CutPrefix(p, module)
		folder, _, _ := strings.Cut(ours, "/")
		if ok && !strings.Contains(string(ignore), "\n!"+folder+"\n") {
			t.Errorf(".dockerignore leaves out %s, which the binary needs", folder)
		}
	}
}

// helpers are of the standard library alone, and anybody may import them.
const helpers = " internal/human internal/logonce internal/nearest internal/policy internal/wait"

// layers says what each package may import: of ours by folder, of other modules by a
// part of the path. The first row that fits a folder counts. Tests may import anything.
var layers = []struct{ of, ours, others string }{
	// What everybody knows: a message; and a lane, for those who aren't sinks.
	{"message", "", "gjson"},
	{"lane", "message", ""},

	// The half that knows brokers and no Postgres.
	{"consumer", "message lane", "prometheus"},
	{"consumer/kafka", "message lane consumer", "segmentio/kafka-go klauspost/compress"},
	{"consumer/nats", "message lane consumer", "nats-io/nats.go"},

	// The half that knows Postgres and no broker.
	{"dedup", "message lane sinks dedup/claimkey dedup/schema dedup/generations dedup/internal/* internal/sqlstate", "pgx prometheus x/sync"},
	{"dedup/generations", "dedup/claimkey dedup/schema dedup/internal/* internal/sqlstate", "pgx xorfilter xxhash"},
	{"dedup/internal/admin", "dedup/schema dedup/internal/pipeline internal/sqlstate", "pgx"},
	{"dedup/internal/pipeline", "dedup/claimkey", "pgx"},
	{"dedup/schema", "internal/sqlstate", "pgx"},
	{"dedup/claimkey", "message", "xxhash"},
	{"sinks", "message", "pgx"},
	{"sinks/internal/columns", "message sinks", "pgx gjson"},
	{"sinks/internal/mismatch", "sinks", ""},
	{"sinks/sinktest", "message sinks internal/sqlstate", "testing pgx"},
	{"sinks/*", "message sinks sinks/internal/* internal/sqlstate", "pgx"},
	{"retention", "", "prometheus"},

	// Leaves.
	{"internal/human", "", ""},
	{"internal/logonce", "", ""},
	{"internal/nearest", "", ""},
	{"internal/policy", "", ""},
	{"internal/wait", "", ""},
	{"internal/sizing", "", ""},
	{"internal/sqlstate", "", "pgx"},

	// The program.
	{"internal/config", "message sinks sinks/multi", "pgx goccy/go-yaml"},
	{"internal/top", "dedup dedup/generations", "x/term x/text"},
	{"internal/app", "message lane consumer consumer/kafka consumer/nats dedup dedup/claimkey dedup/schema dedup/generations sinks retention internal/config internal/sqlstate", "pgx prometheus"},
	{"cmd/dedupd/cli", "message dedup dedup/schema dedup/generations sinks retention internal/app internal/config internal/sizing internal/sqlstate internal/top", "pgx cobra"},
	{"cmd/dedupd", "cmd/dedupd/cli sinks/statement sinks/table", ""},
	{"examples/claim", "dedup", "pgx"},
	{"examples/*", "cmd/dedupd/cli sinks/* examples/*/*", ""},
	{"examples/*/*", "message sinks", "pgx"},

	// For tests.
	{"consumer/consumertest", "message lane consumer", "testing prometheus goleak"},
	{"internal/child", "", ""},
	{"internal/mutate", "", ""},
	{"internal/pgtest", "internal/child", "testing pgx embedded-postgres"},
	{"internal/pgrelay", "", ""},
	{"internal/natstest", "", "testing nats-io"},
	{"internal/kafkatest", "internal/child", "testing twmb"},
	// The judge of a run knows only what a user of the product does.
	{"e2e/check", "e2e/shape", "pgx nats-io/nats.go twmb"},
	{"e2e/shape", "", ""},
}

// The arrows between the packages (docs/ARCHITECTURE.md).
func TestLayers(t *testing.T) {
	out, err := goTool(t.Context(), "list", "-f", `{{if .GoFiles}}{{.ImportPath}} {{join .Imports " "}}{{end}}`, "./...")
	if err != nil {
		t.Fatal(err)
	}
	used := make([]bool, len(layers))
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		folder := strings.TrimPrefix(words[0], module)
		i := slices.IndexFunc(layers, func(l struct{ of, ours, others string }) bool { return matches(folder, l.of) })
		if i < 0 {
			if !strings.HasPrefix(folder, "e2e") {
				t.Errorf("%s is in no layer: add it to this test", folder)
			}
			continue
		}
		used[i] = true
		for _, imported := range words[1:] {
			ours, isOurs := strings.CutPrefix(imported, module)
			host, _, _ := strings.Cut(imported, "/")
			switch {
			case isOurs:
				if !slices.ContainsFunc(strings.Fields(layers[i].ours+helpers), func(p string) bool { return matches(ours, p) }) {
					t.Errorf("%s imports %s", folder, ours)
				}
			case imported == "testing" || strings.Contains(host, "."):
				if !slices.ContainsFunc(strings.Fields(layers[i].others), func(part string) bool { return strings.Contains(imported, part) }) {
					t.Errorf("%s imports %s", folder, imported)
				}
			}
		}
	}
	for i, l := range layers {
		if !used[i] {
			t.Errorf("no package is %s any more", l.of)
		}
	}
}

func matches(folder, pattern string) bool {
	ok, err := path.Match(pattern, folder)
	return ok && err == nil
}
