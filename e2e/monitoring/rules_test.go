package monitoring

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/goccy/go-yaml"
)

func TestRulesAreClean(t *testing.T) {
	tool := promtool(t)
	if out, err := exec.Command(tool, "check", "rules", "--lint=all", "--lint-fatal", alertsFile).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// The dashboard's expressions, as rules, so that promtool reads them.
func TestDashboardIsPromQL(t *testing.T) {
	tool := promtool(t)
	type rule struct {
		Record string `yaml:"record"`
		Expr   string `yaml:"expr"`
	}
	var rules []rule
	for _, p := range panels(t) {
		for i, target := range p.Targets {
			rules = append(rules, rule{fmt.Sprintf("panel_%d_%d", p.ID, i), fill(target.Expr)})
		}
	}
	file := write(t, map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": rules}}})
	if out, err := exec.Command(tool, "check", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func write(t *testing.T, content any) string {
	t.Helper()
	text, err := yaml.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// moment is when an alert is looked for, in scrapes since the beginning, and
// whether it fires then.
type moment struct {
	alert  string
	scrape int
	fires  bool
}

// firing is a test of alerts on the series of a recording, or on some that are
// written by hand.
type firing struct {
	name string
	// run is the recording. A scrape of it, which was taken a second after the one
	// before, stands for so many seconds.
	run     string
	seconds int
	series  map[string]string // instead
	at      []moment
	quiet   bool // of all alerts, none but those in at may fire at the end
}

const scraped = `namespace="orders",job="dedupd",instance="worker-`

var firings = []firing{
	{name: "a quiet run with a roll-out", run: "quiet", seconds: 30, quiet: true},
	{name: "the same, slowly", run: "quiet", seconds: 60, quiet: true},
	{name: "duplicates", run: "duplicates", seconds: 30, at: []moment{
		{"DedupdDuplicateRateHigh", 20, false},
		{"DedupdDuplicateRateHigh", 85, true},
		{"DedupdDuplicateAgeNearWindow", 20, false},
		{"DedupdDuplicateAgeNearWindow", 85, true},
		{"DedupdDeadLetters", 85, false},
	}},
	{name: "dead letters", run: "deadletters", seconds: 30, at: []moment{
		{"DedupdDeadLetters", 18, false},
		{"DedupdDeadLetters", 30, true},
		{"DedupdLanesHeld", 50, false},
		{"DedupdNoProgress", 50, false},
	}},
	{name: "a held lane", run: "held", seconds: 30, at: []moment{
		{"DedupdLanesHeld", 14, false},
		{"DedupdLanesHeld", 40, true},
		{"DedupdNoProgress", 14, false},
		{"DedupdNoProgress", 70, true},
		{"DedupdAbsentMetrics", 70, false},
	}},
	{name: "claims held by a lane", run: "held", seconds: 360, at: []moment{
		{"DedupdRetentionHeld", 14, false},
		{"DedupdRetentionHeld", 73, true},
	}},
	{name: "an outage of Postgres", run: "outage", seconds: 60, at: []moment{
		{"DedupdNoProgress", 14, false},
		{"DedupdNoProgress", 60, true},
	}},
	{name: "an outage of Postgres for minutes", run: "outage", seconds: 20, at: []moment{
		{"DedupdSinkErrors", 14, false},
		{"DedupdSinkErrors", 70, true},
	}},
	{name: "an outage of Postgres for hours", run: "outage", seconds: 120, at: []moment{
		{"DedupdRetentionStale", 14, false},
		{"DedupdRetentionStale", 40, false},
		{"DedupdRetentionStale", 70, true},
	}},
	{name: "an outage of the broker", run: "broker", seconds: 30, at: []moment{
		{"DedupdSourceNotReady", 14, false},
		{"DedupdSourceNotReady", 50, true},
		{"DedupdLanesHeld", 50, false},
	}},
	{name: "locks on the claims", run: "slow", seconds: 30, at: []moment{
		{"DedupdClaimLatencyHigh", 14, false},
		{"DedupdClaimLatencyHigh", 85, true},
		{"DedupdPoolSaturated", 14, false},
		{"DedupdPoolSaturated", 85, true},
	}},
	{name: "a sink that can't keep up", run: "behind", seconds: 60, at: []moment{
		{"DedupdLagGrowing", 14, false},
		{"DedupdLagGrowing", 73, true},
		{"DedupdNoProgress", 73, false},
	}},
	{name: "a worker that is gone", run: "gone", seconds: 60, at: []moment{
		{"DedupdAbsentMetrics", 14, false},
		{"DedupdAbsentMetrics", 38, true},
	}},
	// By hand: no run of a minute on these servers goes back or loses data, and one
	// job that goes while another stays takes no run to show.
	{name: "the only worker never was", seconds: 60, series: map[string]string{`up{job="other"}`: "1x30"}, at: []moment{
		{"DedupdAbsentMetrics", 5, false},
		{"DedupdAbsentMetrics", 30, true},
	}},
	{name: "one of two jobs is gone", seconds: 60, series: map[string]string{
		`dedupd_build_info{namespace="orders",job="dedupd",instance="worker-0"}`:   "1x10 _x60",
		`dedupd_build_info{namespace="payments",job="dedupd",instance="worker-0"}`: "1x70",
	}, at: []moment{
		{"DedupdAbsentMetrics", 10, false},
		{"DedupdAbsentMetrics", 40, true},
	}},
	{name: "one of two workers is gone", seconds: 60, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`: "1x10 _x60",
		`dedupd_build_info{` + scraped + `1"}`: "1x70",
	}, quiet: true},
	{name: "a running worker rewinds", seconds: 60, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:    "1x90",
		`dedupd_rewinds_total{` + scraped + `0"}`: "0x39 1x50",
	}, quiet: true, at: []moment{
		{"DedupdRewinds", 38, false},
		{"DedupdRewinds", 45, true},
		{"DedupdRewinds", 85, false},
	}},
	{name: "a new worker rewinds before it is scraped", seconds: 60, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:    "1x90",
		`dedupd_rewinds_total{` + scraped + `0"}`: "0x30",
		`dedupd_rewinds_total{` + scraped + `1"}`: "_x40 2x50",
	}, at: []moment{
		{"DedupdRewinds", 38, false},
		{"DedupdRewinds", 45, true},
		{"DedupdRewinds", 85, false},
	}},
	{name: "a transaction that doesn't end", seconds: 60, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                                              "1x90",
		`dedupd_open_transaction_messages{` + scraped + `0",source="shop",lane="orders/0"}`: "0x10 3+1x40 0x40",
		`dedupd_lane_position{` + scraped + `0",source="shop",lane="orders/0"}`:             "100x90",
	}, at: []moment{
		{"DedupdOpenTransaction", 28, false},
		{"DedupdOpenTransaction", 34, true},
		{"DedupdOpenTransaction", 55, false},
	}},
	{name: "transactions that follow each other", seconds: 60, quiet: true, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                                              "1x90",
		`dedupd_open_transaction_messages{` + scraped + `0",source="shop",lane="orders/0"}`: "3x90",
		`dedupd_lane_position{` + scraped + `0",source="shop",lane="orders/0"}`:             "0+100x90",
	}},
	// By hand: what makes messages stale is the sink's configuration, and the recordings have another.
	{name: "versions that don't rise", seconds: 60, quiet: true, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                                           "1x90",
		`dedupd_applied_total{` + scraped + `0",source="shop",outcome="written"}`:        "0+300x90",
		`dedupd_applied_total{` + scraped + `0",source="shop",outcome="stale"}`:          "0+290x90",
		`dedupd_applied_total{` + scraped + `0",source="edge",outcome="written"}`:        "0+1x90",
		`dedupd_applied_total{` + scraped + `0",source="edge",outcome="stale"}`:          "0+3x90",
		`dedupd_applied_total{` + scraped + `0",source="few",outcome="already_present"}`: "0+300x90",
	}},
	{name: "versions that stand still", seconds: 60, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                                     "1x90",
		`dedupd_applied_total{` + scraped + `0",source="shop",outcome="written"}`:  "0+300x30 9000+100x60",
		`dedupd_applied_total{` + scraped + `0",source="shop",outcome="stale"}`:    "0x30 0+150x60",
		`dedupd_applied_total{` + scraped + `0",source="shop",outcome="rejected"}`: "0x30 0+50x60",
	}, at: []moment{
		{"DedupdMostlyNotWritten", 30, false},
		{"DedupdMostlyNotWritten", 85, true},
	}},
	{name: "positions are skipped for the first time", seconds: 60, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                            "1x90",
		`dedupd_positions_skipped_total{` + scraped + `0",source="shop"}`: "_x40 1200x50",
	}, at: []moment{
		{"DedupdPositionsSkipped", 38, false},
		{"DedupdPositionsSkipped", 45, true},
		{"DedupdPositionsSkipped", 85, false},
	}},
	{name: "positions are skipped again", seconds: 60, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                            "1x90",
		`dedupd_positions_skipped_total{` + scraped + `0",source="shop"}`: "7x40 9x50",
	}, at: []moment{
		{"DedupdPositionsSkipped", 39, false},
		{"DedupdPositionsSkipped", 45, true},
	}},
	{name: "the database's clock was ahead", seconds: 60, quiet: true, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                   "1x90",
		`dedupd_build_info{` + scraped + `1"}`:                   "1x90",
		`dedupd_lanes_clock_ahead{` + scraped + `0"}`:            "0x10 3x5 0x75", // mended by the next batches
		`dedupd_lanes_clock_ahead{` + scraped + `1"}`:            "0x10 3x5 0x75",
		`dedupd_generations_clock_ahead{` + scraped + `0"}`:      "0x30 1x20 0x40",
		`dedupd_generations_clock_ahead{` + scraped + `1"}`:      "0x30 1x20 0x40",
		`dedupd_database_clock_ahead_seconds{` + scraped + `0"}`: "0x90",
		`dedupd_database_clock_ahead_seconds{` + scraped + `1"}`: "0x90",
	}, at: []moment{
		{"DedupdClockAhead", 16, false},
		{"DedupdClockAhead", 44, false},
		{"DedupdClockAhead", 49, true},
		{"DedupdClockAhead", 60, false},
	}},
	{name: "two workers, of which one never led", seconds: 60, quiet: true, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                               "1x90",
		`dedupd_retention_last_success_timestamp_seconds{` + scraped + `0"}`: "0+60x90",
		`dedupd_retention_last_success_timestamp_seconds{` + scraped + `1"}`: "0x90",
	}},
	// As a sum these would be more than they are: each worker reports the same.
	{name: "two workers see one queue, one window", seconds: 60, quiet: true, series: map[string]string{
		`dedupd_build_info{` + scraped + `0"}`:                                     "1x90",
		`dedupd_window_used_ratio{` + scraped + `0"}`:                              "0.5x90",
		`dedupd_window_used_ratio{` + scraped + `1"}`:                              "0.5x90",
		`dedupd_retention_held_seconds{` + scraped + `0"}`:                         "9000x90",
		`dedupd_retention_held_seconds{` + scraped + `1"}`:                         "9000x90",
		`dedupd_lag_messages{` + scraped + `0",source="shop",lane="queue"}`:        "0+20x90",
		`dedupd_lag_messages{` + scraped + `1",source="shop",lane="queue"}`:        "0+20x90",
		`dedupd_messages_total{` + scraped + `0",source="shop",outcome="applied"}`: "0+600x90",
	}},
}

// unit is a test file of promtool: which alerts fire, and when.
func (f firing) unit(t *testing.T, rules string, all []alert) (file string) {
	t.Helper()
	series, scrapes := f.series, 90
	if f.run != "" {
		recording, err := Read(read(t, filepath.Join("testdata", f.run+".txt")))
		if err != nil {
			t.Fatal(err)
		}
		if series, err = recording.Stretch(f.seconds); err != nil {
			t.Fatal(err)
		}
		scrapes = recording.Scrapes
	}
	type input struct {
		Series string `yaml:"series"`
		Values string `yaml:"values"`
	}
	var inputs []input
	for _, s := range slices.Sorted(maps.Keys(series)) {
		inputs = append(inputs, input{s, series[s]})
	}
	// An expression counts the alerts that fire, so that a test need not repeat
	// their texts. That an alert is absent is a count of no sample.
	type expected struct {
		Labels string  `yaml:"labels"`
		Value  float64 `yaml:"value"`
	}
	type query struct {
		Expr    string     `yaml:"expr"`
		Time    string     `yaml:"eval_time"`
		Samples []expected `yaml:"exp_samples"`
	}
	var queries []query
	ask := func(name string, scrape int, fires bool) {
		q := query{Expr: fmt.Sprintf(`group(ALERTS{alertname=%q,alertstate="firing"})`, name), Time: fmt.Sprintf("%ds", scrape*f.seconds), Samples: []expected{}}
		if fires {
			q.Samples = []expected{{"{}", 1}}
		}
		queries = append(queries, q)
	}
	for _, m := range f.at {
		ask(m.alert, m.scrape, m.fires)
	}
	if f.quiet {
		for _, a := range all {
			for scrape := 5; scrape < scrapes; scrape += 5 {
				if !slices.ContainsFunc(f.at, func(m moment) bool { return m.alert == a.Name }) {
					ask(a.Name, scrape, false)
				}
			}
		}
	}
	path, err := filepath.Abs(rules)
	if err != nil {
		t.Fatal(err)
	}
	return write(t, map[string]any{
		"rule_files":          []string{path},
		"evaluation_interval": fmt.Sprintf("%ds", min(60, f.seconds)),
		"tests": []any{map[string]any{
			"interval":         fmt.Sprintf("%ds", f.seconds),
			"input_series":     inputs,
			"promql_expr_test": queries,
		}},
	})
}

func TestAlertsFire(t *testing.T) {
	tool := promtool(t)
	all := alerts(t)
	fired := map[string]bool{}
	for _, f := range firings {
		for _, m := range f.at {
			fired[m.alert] = fired[m.alert] || m.fires
		}
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			if out, err := exec.Command(tool, "test", "rules", f.unit(t, alertsFile, all)).CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	for _, a := range all {
		if !fired[a.Name] {
			t.Errorf("no test shows that %s fires", a.Name)
		}
	}
}

// The tests above are worth something: an alert that never fires, and one that
// always does, are each noticed.
func TestBrokenAlertsAreNoticed(t *testing.T) {
	tool := promtool(t)
	all := alerts(t)
	for _, a := range all {
		for kind, expression := range map[string]string{"never": "(" + a.Expr + ") unless vector(1) == 1 unless on () vector(1)", "always": "vector(1)"} {
			t.Run(a.Name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				rule := map[string]any{"alert": a.Name, "expr": expression, "labels": a.Labels}
				rules := write(t, map[string]any{"groups": []any{map[string]any{"name": "dedupd", "rules": []any{rule}}}})
				for _, f := range firings {
					if !slices.ContainsFunc(f.at, func(m moment) bool { return m.alert == a.Name && (m.fires || kind == "always") }) {
						continue
					}
					one := f
					one.quiet, one.at = false, slices.DeleteFunc(slices.Clone(f.at), func(m moment) bool { return m.alert != a.Name })
					if exec.Command(tool, "test", "rules", one.unit(t, rules, all)).Run() != nil {
						return // noticed
					}
				}
				t.Errorf("no test notices that %s fires %s", a.Name, kind)
			})
		}
	}
}

// dedupd is the binary, built as the tests' own; DEDUPD_TEST_BINARY names one
// that is there.
func dedupd(t *testing.T) string {
	t.Helper()
	if named := os.Getenv("DEDUPD_TEST_BINARY"); named != "" {
		return named
	}
	binary := filepath.Join(t.TempDir(), "dedupd")
	build := exec.Command("go", "build", "-o", binary, "./cmd/dedupd")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build dedupd: %v\n%s", err, out)
	}
	return binary
}
