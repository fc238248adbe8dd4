package test

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/yannh/kubeconform/pkg/validator"
)

// versions are those of testdata/schemas, which `make chart-schemas` writes.
var versions = []string{"1.29", "1.36"}

// newValidator is kubeconform for one version: strict, and without a network.
func newValidator(t *testing.T, version string) validator.Validator {
	t.Helper()
	dir := t.TempDir()
	for _, file := range []string{version, "customs"} {
		text, err := os.ReadFile(filepath.Join("testdata", "schemas", file+".json"))
		if err != nil {
			t.Fatal(err)
		}
		var set struct {
			Kinds       map[string]string
			Definitions json.RawMessage
		}
		if err := json.Unmarshal(text, &set); err != nil {
			t.Fatal(err)
		}
		for kind, name := range set.Kinds {
			v, k, _ := strings.Cut(kind, " ")
			path := filepath.Join(dir, strings.ToLower(k)+"_"+v[strings.LastIndex(v, "/")+1:]+".json")
			text := fmt.Sprintf(`{"$ref": "#/definitions/%s", "definitions": %s}`, name, set.Definitions)
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	v, err := validator.New([]string{dir + "/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json"},
		validator.Opts{Strict: true, KubernetesVersion: version + ".0"})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// invalid tells what is wrong with an object.
func invalid(v validator.Validator, text string) (problems []string) {
	for _, result := range v.Validate("object", io.NopCloser(strings.NewReader(text))) {
		if result.Status != validator.Valid {
			problems = append(problems, fmt.Sprint(result.Err))
		}
	}
	return problems
}

func TestObjectsFitTheirSchemas(t *testing.T) {
	for _, version := range versions {
		v := newValidator(t, version)
		t.Run(version, func(t *testing.T) {
			examples(t, func(t *testing.T, _ string, r *release) {
				for _, o := range r.objects {
					if problems := invalid(v, o.text); problems != nil {
						t.Errorf("%s: %s", o, strings.Join(problems, "\n"))
					}
				}
			})
		})
	}
}

// The schemas notice what they are there for.
func TestSchemasNoticeMistakes(t *testing.T) {
	v := newValidator(t, versions[0])
	breaks := []struct{ name, example, kind, old, new string }{
		{"a misspelt key", "kafka", "Deployment", "minReadySeconds", "minReadySecond"},
		{"a misspelt key of a container", "kafka", "Deployment", "volumeMounts:", "volumeMount:"},
		{"text for replicas", "kafka", "Deployment", "replicas: 1", `replicas: "1"`},
		{"no selector", "kafka", "Deployment", "  selector:\n    matchLabels:\n      app.kubernetes.io/name: dedupd\n      app.kubernetes.io/instance: orders\n      app.kubernetes.io/component: worker\n", ""},
		{"an unknown field of a custom resource", "keda-kafka", "ScaledObject", "pollingInterval", "pollInterval"},
		{"text for a number of a custom resource", "keda-kafka", "ScaledObject", "minReplicaCount: 1", `minReplicaCount: "1"`},
		{"an unknown field of a monitor", "podmonitor", "PodMonitor", "interval: 30s", "every: 30s"},
		{"an unknown kind", "kafka", "Deployment", "kind: Deployment", "kind: Deploymint"},
	}
	for _, b := range breaks {
		t.Run(b.name, func(t *testing.T) {
			text := mustRender(t, example(t, b.example)).kind(b.kind)[0].text
			broken := strings.Replace(text, b.old, b.new, 1)
			if broken == text {
				t.Fatalf("there is no %q to break in\n%s", b.old, text)
			}
			if invalid(v, text) != nil || invalid(v, broken) == nil {
				t.Errorf("isn't noticed: %v, %v", invalid(v, text), invalid(v, broken))
			}
		})
	}
}
