package test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

type rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

type rules struct {
	Groups []struct {
		Name  string `json:"name"`
		Rules []rule `json:"rules"`
	} `json:"groups"`
}

func (r rules) alerts() map[string]rule {
	all := map[string]rule{}
	for _, g := range r.Groups {
		for _, rule := range g.Rules {
			if rule.Alert != "" { // others record
				all[rule.Alert] = rule
			}
		}
	}
	return all
}

func rendered(t *testing.T, layers ...string) rules {
	t.Helper()
	var spec struct{ Spec rules }
	if err := yaml.Unmarshal([]byte(mustRender(t, layers...).kind("PrometheusRule")[0].text), &spec); err != nil {
		t.Fatal(err)
	}
	return spec.Spec
}

// The alerts are those of the file, and the values change what they say they do.
func TestAlerts(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(chartFolder, "files", "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file rules
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	want := file.alerts()
	have := rendered(t, example(t, "podmonitor")).alerts()
	if len(have) != len(want) || len(want) == 0 {
		t.Fatalf("of %d alerts %d arrive", len(want), len(have))
	}
	var some string
	for name, w := range want {
		h := have[name]
		if h.Expr != w.Expr || h.For != w.For || len(h.Annotations) != len(w.Annotations) {
			t.Errorf("%s: %v, want %v", name, h, w)
		}
		for key, value := range w.Annotations {
			if h.Annotations[key] != value {
				t.Errorf("%s: annotation %s is %q, want %q", name, key, h.Annotations[key], value)
			}
		}
		if h.Labels["team"] != "orders" {
			t.Errorf("%s has no label of alertLabels: %v", name, h.Labels)
		}
		some = name
	}

	changed := rendered(t, example(t, "podmonitor"),
		"prometheusRule: {overrides: {"+some+": {expr: vector(1), for: 3m, labels: {severity: page}, annotations: {note: ours}}}}").alerts()[some]
	if changed.Expr != "vector(1)" || changed.For != "3m" || changed.Labels["severity"] != "page" || changed.Labels["team"] != "orders" ||
		changed.Annotations["note"] != "ours" || len(changed.Annotations) < len(want[some].Annotations) {
		t.Errorf("%s with overrides: %v", some, changed)
	}

	left := rendered(t, example(t, "podmonitor"), `
prometheusRule:
  disabled: [`+some+`]
  additionalGroups: [{name: ours, rules: [{alert: Ours, expr: vector(1)}]}]`).alerts()
	if _, there := left[some]; there || left["Ours"].Expr != "vector(1)" || len(left) != len(want) {
		t.Errorf("without %s, with one more: %v", some, left)
	}
}

func TestDashboard(t *testing.T) {
	file, err := os.ReadFile(filepath.Join(chartFolder, "files", "dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range mustRender(t, example(t, "podmonitor")).kind("ConfigMap") {
		if o.name != "orders-dedupd-dashboard" {
			continue
		}
		text, _ := at(o.fields, "data", "orders-dedupd.json").(string)
		if strings.TrimSpace(text) != strings.TrimSpace(string(file)) || !json.Valid([]byte(text)) {
			t.Errorf("the dashboard isn't the file's:\n%s", firstDifference(text, string(file)))
		}
		if at(o.fields, "metadata", "namespace") != "monitoring" || at(o.fields, "metadata", "labels", "grafana_dashboard") != "1" || o.annotation("grafana_folder") != "Messaging" {
			t.Errorf("the dashboard's metadata: %v", o.fields["metadata"])
		}
		return
	}
	t.Error("there is no dashboard")
}
