package test

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/norwoodj/helm-docs/pkg/document"
	"github.com/norwoodj/helm-docs/pkg/helm"
	"github.com/sirupsen/logrus"
	"github.com/spf13/viper"
	"gopkg.in/yaml.v3"

	"github.com/dedupd/dedupd/internal/config"
)

// The README is what helm-docs makes of README.md.gotmpl and values.yaml.
func TestReadme(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"Chart.yaml", "values.yaml", "README.md.gotmpl"} {
		text, err := os.ReadFile(filepath.Join(chartFolder, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	viper.Set("values-file", "values.yaml")
	viper.Set("output-file", "README.md")
	viper.Set("sort-values-order", document.FileSortOrder)
	viper.Set("ignore-non-descriptions", true)
	logrus.SetOutput(io.Discard)
	info, err := helm.ParseChartInformation(dir, helm.ChartValuesDocumentationParsingConfig{})
	if err != nil {
		t.Fatal(err)
	}
	document.PrintDocumentation(info, dir, []string{"README.md.gotmpl"}, false, "", "flat-square", nil, true)
	text, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, filepath.Join(chartFolder, "README.md"), string(bytes.TrimSpace(text))+"\n")
}

// Every value has a line that says what it is, itself or all that is within it.
// (Helm-docs' own strict mode doesn't see comments that don't repeat the key.)
func TestEveryValueIsDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(chartFolder, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	var visit func(path string, n *yaml.Node)
	visit = func(path string, n *yaml.Node) {
		if n.Kind != yaml.MappingNode || len(n.Content) == 0 {
			t.Errorf("values.yaml doesn't say what %s is", strings.TrimPrefix(path, "."))
			return
		}
		for i := 0; i < len(n.Content); i += 2 {
			if key := n.Content[i]; !strings.Contains(key.HeadComment, "# -- ") {
				visit(path+"."+key.Value, n.Content[i+1])
			}
		}
	}
	visit("", root.Content[0])
}

func readSchema(t *testing.T) map[string]any {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(chartFolder, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	return schema
}

// What the schema says about config is dedupd's own schema.
func TestSchemaOfConfigIsDedupds(t *testing.T) {
	schema := readSchema(t)
	var own map[string]any
	if err := json.Unmarshal(config.Schema, &own); err != nil {
		t.Fatal(err)
	}
	delete(own, "$schema")
	if reflect.DeepEqual(at(schema, "$defs", "config"), any(own)) {
		return
	}
	schema["$defs"].(map[string]any)["config"] = own
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(schema); err != nil {
		t.Fatal(err)
	}
	golden(t, filepath.Join(chartFolder, "values.schema.json"), b.String())
}

// The schema names the values that there are, and no others.
func TestSchemaNamesTheValues(t *testing.T) {
	v, err := os.ReadFile(filepath.Join(chartFolder, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	all, err := values(string(v))
	if err != nil {
		t.Fatal(err)
	}
	var visit func(path string, v, schema map[string]any)
	visit = func(path string, v, schema map[string]any) {
		properties, _ := schema["properties"].(map[string]any)
		for key, value := range v {
			p, ok := properties[key].(map[string]any)
			if !ok {
				t.Errorf("the schema doesn't know %s%s", path, key)
				continue
			}
			// What has names of its own is a part of ours, the rest is free-form.
			if m, ok := value.(map[string]any); ok && p["properties"] != nil && len(m) > 0 {
				visit(path+key+".", m, p)
			}
		}
		if path == "resources." || strings.HasSuffix(path, "Probe.") {
			return // Kubernetes' own
		}
		for key := range properties {
			if _, ok := v[key]; !ok {
				t.Errorf("values.yaml doesn't have %s%s, which the schema knows", path, key)
			}
		}
		if schema["additionalProperties"] != false && path != "global." {
			t.Errorf("the schema takes unknown keys of %s", path)
		}
	}
	visit("", all, readSchema(t))
}
