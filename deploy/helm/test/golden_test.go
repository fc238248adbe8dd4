package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
)

// What Helm's own linter says, with warnings as errors. An icon is asked for by
// an information only.
func TestLint(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(chartFolder, "ci", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, layers := range append([]string{""}, files...) {
		text := ""
		if layers != "" {
			text = example(t, strings.TrimSuffix(filepath.Base(layers), ".yaml"))
		}
		v, err := values(text)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range lint.RunAll(chartFolder, v, "default").Messages {
			if m.Severity >= support.WarningSev {
				t.Errorf("%s: %s", filepath.Base(layers), m)
			}
		}
	}
}

// Each example is made as it was made last time: whoever changes a template
// sees, and shows, what becomes of it.
func TestGolden(t *testing.T) {
	examples(t, func(t *testing.T, name string, r *release) {
		var b strings.Builder
		for _, o := range r.objects {
			b.WriteString("---\n")
			text := o.text
			// Alerts and the dashboard have tests of their own.
			switch {
			case o.kind == "PrometheusRule":
				text = text[:strings.Index(text, "\nspec:")] + "\n"
			case strings.HasSuffix(o.name, "-dashboard"):
				text = text[:strings.Index(text, "\ndata:")] + "\n"
			}
			b.WriteString(text)
		}
		b.WriteString("--- # NOTES\n" + r.notes)
		golden(t, filepath.Join("testdata", "golden", name+".yaml"), b.String())
	})
}

// golden compares a generated file with what it must be.
func golden(t *testing.T, path, want string) {
	t.Helper()
	have, err := os.ReadFile(path)
	if *update && string(have) != want {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err != nil || string(have) != want {
		t.Errorf("%s isn't what is generated (%v); go test . -update writes it. First difference: %s", path, err, firstDifference(string(have), want))
	}
}

func firstDifference(have, want string) string {
	haves, wants := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range max(len(haves), len(wants)) {
		var h, w string
		if i < len(haves) {
			h = haves[i]
		}
		if i < len(wants) {
			w = wants[i]
		}
		if h != w {
			return "\n- " + h + "\n+ " + w
		}
	}
	return "none"
}
