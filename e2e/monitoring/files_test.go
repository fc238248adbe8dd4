package monitoring

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/retention"
)

const (
	root       = "../.."
	alertsFile = root + "/deploy/helm/dedupd/files/alerts.yaml"
	dashboard  = root + "/deploy/helm/dedupd/files/dashboard.json"
	runbooks   = root + "/docs/runbooks"
)

type alert struct {
	Name        string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func alerts(t *testing.T) []alert {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string  `yaml:"name"`
			Rules []alert `yaml:"rules"`
		} `yaml:"groups"`
	}
	if err := yaml.UnmarshalWithOptions([]byte(read(t, alertsFile)), &file, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	if len(file.Groups) != 1 || file.Groups[0].Name != "dedupd" {
		t.Fatalf("groups are %v, want the one dedupd", file.Groups)
	}
	return file.Groups[0].Rules
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

type panel struct {
	ID          int    `json:"id"`
	Type        string `json:"type"`
	Title       string `json:"title"`
	Description string `json:"description"`
	Grid        struct {
		H, W, X, Y int
	} `json:"gridPos"`
	Targets []struct {
		Expr   string `json:"expr"`
		Legend string `json:"legendFormat"`
	} `json:"targets"`
	Field struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
	Datasource struct {
		UID string `json:"uid"`
	} `json:"datasource"`
}

func panels(t *testing.T) []panel {
	t.Helper()
	var d struct {
		UID    string  `json:"uid"`
		Schema int     `json:"schemaVersion"`
		Panels []panel `json:"panels"`
	}
	if err := json.Unmarshal([]byte(read(t, dashboard)), &d); err != nil {
		t.Fatal(err)
	}
	if d.UID != "dedupd" || d.Schema < 39 {
		t.Errorf("uid %q, schemaVersion %d", d.UID, d.Schema)
	}
	return d.Panels
}

// fill puts values in the place of the dashboard's variables.
func fill(expression string) string {
	return strings.NewReplacer("$__rate_interval", "5m", "$namespace", ".*", "$job", ".*").Replace(expression)
}

// collected takes what is registered, and tells of it.
type collected struct {
	prometheus.Registerer
	labels map[string][]string
}

var description = regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)

func (c collected) MustRegister(all ...prometheus.Collector) {
	for _, one := range all {
		described := make(chan *prometheus.Desc, 100)
		one.Describe(described)
		close(described)
		for d := range described {
			m := description.FindStringSubmatch(d.String())
			c.labels[m[1]] = strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' })
		}
	}
}

// registered are the metrics of the product with their labels. Those of
// internal/app aren't to be had without servers: TestExposition sees them in a
// run.
func registered() map[string][]string {
	c := collected{labels: map[string][]string{
		"dedupd_build_info":                             {"version", "revision", "go"},
		"dedupd_filter_bytes":                           nil,
		"dedupd_database_connections":                   nil,
		"dedupd_database_connections_busy":              nil,
		"dedupd_database_connection_wait_seconds_total": nil,
	}}
	consumer.NewMetrics(c, consumer.NewBudget(1))
	dedup.NewMetrics(c)
	retention.NewMetrics(c)
	return c.labels
}

// Of the Go runtime and the process, the dashboard needs only these.
var others = []string{"go_memstats_heap_inuse_bytes", "process_cpu_seconds_total", "process_resident_memory_bytes"}

var (
	selector = regexp.MustCompile(`\b((?:dedupd|go|process)_[a-z0-9_]+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
	grouping = regexp.MustCompile(`\b(?:by|on|ignoring) \(([^)]*)\)`)
)

// check checks names and labels of an expression; that it is PromQL at all is
// promtool's to tell.
func check(t *testing.T, where, expression string, known map[string][]string) {
	t.Helper()
	every := []string{"namespace", "job", "instance", "scope"} // of the scrape, and of a process with several pipelines
	var sum []string
	for _, m := range selector.FindAllStringSubmatch(expression, -1) {
		name := m[1]
		labels, ok := known[name]
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if base, is := strings.CutSuffix(name, suffix); is && !ok {
				if labels, ok = known[base]; ok && suffix == "_bucket" {
					labels = append(slices.Clone(labels), "le")
				}
			}
		}
		if !ok && !slices.Contains(others, name) {
			t.Errorf("%s: there is no metric %s", where, name)
		}
		all := append(slices.Clone(every), labels...)
		sum = append(sum, all...)
		for _, l := range matcher.FindAllStringSubmatch(quoted.ReplaceAllString(m[2], `""`), -1) {
			if !slices.Contains(all, l[1]) {
				t.Errorf("%s: %s has no label %s", where, name, l[1])
			}
		}
	}
	if len(sum) == 0 {
		t.Errorf("%s: no metric in %q", where, expression)
	}
	for _, m := range grouping.FindAllStringSubmatch(expression, -1) {
		for l := range strings.SplitSeq(m[1], ",") {
			if l = strings.TrimSpace(l); l != "" && !slices.Contains(sum, l) {
				t.Errorf("%s: no metric in it has the label %s", where, l)
			}
		}
	}
}

func TestAlertsNameWhatThereIs(t *testing.T) {
	known := registered()
	for _, a := range alerts(t) {
		check(t, a.Name, a.Expr, known)
		if s := a.Labels["severity"]; s != "critical" && s != "warning" {
			t.Errorf("%s: severity %q", a.Name, s)
		}
		if a.Annotations["summary"] == "" || a.Annotations["description"] == "" {
			t.Errorf("%s: summary and description must tell what is wrong", a.Name)
		}
	}
}

func TestRunbooks(t *testing.T) {
	var want []string
	index := read(t, filepath.Join(runbooks, "README.md"))
	for _, a := range alerts(t) {
		want = append(want, a.Name+".md")
		if url := "https://github.com/dedupd/dedupd/blob/main/docs/runbooks/" + a.Name + ".md"; a.Annotations["runbook_url"] != url {
			t.Errorf("%s: runbook_url is %q, want %s", a.Name, a.Annotations["runbook_url"], url)
		}
		if !strings.Contains(index, fmt.Sprintf("[%s](%[1]s.md) | %s |", a.Name, a.Labels["severity"])) {
			t.Errorf("docs/runbooks/README.md doesn't list %s with its severity %s", a.Name, a.Labels["severity"])
		}
		text := read(t, filepath.Join(runbooks, a.Name+".md"))
		if !strings.HasPrefix(text, "# "+a.Name+"\n") {
			t.Errorf("the runbook of %s has another title", a.Name)
		}
		at := 0
		for _, section := range []string{"What it means", "What is at risk", "How to look", "What to do", "When it is a false alarm"} {
			i := strings.Index(text, "\n## "+section+"\n")
			if i < at {
				t.Errorf("the runbook of %s has no section %q in its place", a.Name, section)
			}
			at = max(at, i)
		}
	}
	files, err := filepath.Glob(filepath.Join(runbooks, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if name := filepath.Base(f); name != "README.md" && !slices.Contains(want, name) {
			t.Errorf("docs/runbooks/%s belongs to no alert", name)
		}
	}
}

// Commands that a runbook tells to run are commands of the binary, with flags
// that it has.
func TestCommandsInRunbooks(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the binary, and -short asks for seconds")
	}
	binary := dedupd(t)
	command := regexp.MustCompile("(?m)(?:^|[`(])dedupd ([a-z][^`#\n]*)")
	word := regexp.MustCompile(`^[a-z-]+$`)
	files, err := filepath.Glob(filepath.Join(runbooks, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	helps := map[string]string{}
	seen := 0
	for _, f := range files {
		for _, m := range command.FindAllStringSubmatch(read(t, f), -1) {
			seen++
			var names, flags []string
			for _, w := range strings.Fields(m[1]) {
				switch {
				case strings.HasPrefix(w, "-"):
					name, _, _ := strings.Cut(w, "=")
					flags = append(flags, name)
				case word.MatchString(w) && len(flags) == 0 && len(names) < 2:
					names = append(names, w)
				}
			}
			if len(names) == 2 && !slices.Contains([]string{"claims", "config", "dlq", "lanes", "marks", "migrate", "retention"}, names[0]) {
				names = names[:1]
			}
			key := strings.Join(names, " ")
			if helps[key] == "" {
				out, err := exec.Command(binary, append([]string{"help"}, names...)...).CombinedOutput()
				if err != nil || !strings.Contains(string(out), "dedupd "+key) {
					t.Errorf("%s: there is no command `dedupd %s`", f, key)
					continue
				}
				helps[key] = string(out)
			}
			for _, flag := range flags {
				if !regexp.MustCompile(`(?m)[ ,]` + regexp.QuoteMeta(flag) + `[ ,\n]`).MatchString(helps[key]) {
					t.Errorf("%s: `dedupd %s` has no flag %s", f, key, flag)
				}
			}
		}
	}
	if seen < 20 {
		t.Errorf("only %d commands in the runbooks", seen)
	}
}

// unshown are metrics without a panel, with the reason.
var unshown = map[string]string{
	"dedupd_results_total": "only sinks of one's own give results",
}

func TestDashboard(t *testing.T) {
	known := registered()
	ids := map[int]string{}
	shown := map[string]bool{}
	for _, p := range panels(t) {
		if ids[p.ID] != "" {
			t.Errorf("%q and %q have the id %d", ids[p.ID], p.Title, p.ID)
		}
		ids[p.ID] = p.Title
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || p.Field.Defaults.Unit == "" || p.Datasource.UID != "${datasource}" {
			t.Errorf("%q needs a description, a unit and the datasource of the variable", p.Title)
		}
		if len(p.Targets) == 0 {
			t.Errorf("%q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			expression := fill(target.Expr)
			check(t, p.Title, expression, known)
			for _, m := range Metrics(expression) {
				for _, suffix := range []string{"_bucket", "_sum", "_count"} {
					if base := strings.TrimSuffix(m, suffix); known[base] != nil || slices.Contains(keys(known), base) {
						m = base
					}
				}
				shown[m] = true
			}
			if p.Type == "timeseries" && target.Legend == "" {
				t.Errorf("%q has a curve without a legend", p.Title)
			}
			if !strings.Contains(target.Expr, `namespace=~"$namespace", job=~"$job"`) {
				t.Errorf("%q doesn't heed the variables", p.Title)
			}
		}
	}
	for name := range known {
		if !shown[name] && unshown[name] == "" {
			t.Errorf("the dashboard doesn't show %s, and no reason is given", name)
		}
	}
}

func keys(m map[string][]string) (all []string) {
	for k := range m {
		all = append(all, k)
	}
	return all
}

func TestPanelsDoNotOverlap(t *testing.T) {
	all := panels(t)
	for i, a := range all {
		if a.Grid.X < 0 || a.Grid.W < 1 || a.Grid.X+a.Grid.W > 24 {
			t.Errorf("%q leaves the grid", a.Title)
		}
		for _, b := range all[:i] {
			if a.Grid.X < b.Grid.X+b.Grid.W && b.Grid.X < a.Grid.X+a.Grid.W && a.Grid.Y < b.Grid.Y+b.Grid.H && b.Grid.Y < a.Grid.Y+a.Grid.H {
				t.Errorf("%q lies over %q", a.Title, b.Title)
			}
		}
	}
}

// promtool finds the program; make alerts-test gets it and names it.
func promtool(t *testing.T) string {
	t.Helper()
	if named := os.Getenv("DEDUPD_TEST_PROMTOOL"); named != "" {
		return named
	}
	path, err := exec.LookPath("promtool")
	if errors.Is(err, exec.ErrNotFound) {
		if testing.Short() {
			t.Skip("there is no promtool")
		}
		t.Fatal("there is no promtool: `make alerts-test` gets it")
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}
