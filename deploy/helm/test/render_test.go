package test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write what is generated")

const chartFolder = "../dedupd"

var loadChart = sync.OnceValues(func() (*chart.Chart, error) { return loader.LoadDir(chartFolder) })

// object is one of the objects that the chart makes.
type object struct {
	kind, name string
	text       string
	fields     map[string]any
}

func (o object) String() string { return o.kind + "/" + o.name }

func (o object) annotation(name string) string {
	metadata, _ := o.fields["metadata"].(map[string]any)
	annotations, _ := metadata["annotations"].(map[string]any)
	text, _ := annotations[name].(string)
	return text
}

// release is what the chart makes of some values.
type release struct {
	objects []object
	notes   string
}

// kind gives the objects of one kind.
func (r *release) kind(kind string) (all []object) {
	for _, o := range r.objects {
		if o.kind == kind {
			all = append(all, o)
		}
	}
	return all
}

// values reads YAML the way Helm reads a file of values, the later on top.
func values(layers ...string) (map[string]any, error) {
	all := map[string]any{}
	for _, text := range layers {
		v, err := loader.LoadValues(strings.NewReader(text))
		if err != nil {
			return nil, err
		}
		all = loader.MergeMaps(all, v)
	}
	return all, nil
}

// render makes the objects of a release orders in the namespace default.
func render(layers ...string) (*release, error) {
	c, err := loadChart()
	if err != nil {
		return nil, err
	}
	v, err := values(layers...)
	if err != nil {
		return nil, err
	}
	options := common.ReleaseOptions{Name: "orders", Namespace: "default", Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(c, v, options, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{}.RenderWithContext(context.Background(), c, all)
	if err != nil {
		return nil, err
	}
	r := &release{}
	for _, path := range slices.Sorted(maps.Keys(files)) {
		switch {
		case strings.HasSuffix(path, "NOTES.txt"):
			r.notes = strings.TrimSpace(files[path]) + "\n"
			continue
		case strings.HasPrefix(filepath.Base(path), "_"):
			continue
		}
		for _, text := range strings.Split("\n"+files[path], "\n---") {
			if strings.TrimSpace(text) == "" {
				continue
			}
			o := object{text: strings.TrimSpace(text) + "\n"}
			// Strictly: a key that appears twice is an error of a server-side apply.
			if err := yaml.UnmarshalStrict([]byte(text), &o.fields); err != nil {
				return nil, fmt.Errorf("%s: %w\n%s", path, err, text)
			}
			metadata, _ := o.fields["metadata"].(map[string]any)
			o.kind, _ = o.fields["kind"].(string)
			o.name, _ = metadata["name"].(string)
			r.objects = append(r.objects, o)
		}
	}
	return r, nil
}

func mustRender(t *testing.T, layers ...string) *release {
	t.Helper()
	r, err := render(layers...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// example is a file of the chart's ci folder.
func example(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(chartFolder, "ci", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// examples runs a test for each file of the chart's ci folder.
func examples(t *testing.T, test func(t *testing.T, name string, r *release)) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(chartFolder, "ci", "*.yaml"))
	if err != nil || len(files) < 20 {
		t.Fatalf("only %d examples: %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) { test(t, name, mustRender(t, example(t, name))) })
	}
}

// one decodes the one object of a kind into Kubernetes' own type, strictly.
func one[T any](t *testing.T, r *release, kind string) *T {
	t.Helper()
	all := r.kind(kind)
	if len(all) != 1 {
		t.Fatalf("there are %d objects of kind %s: %v", len(all), kind, all)
	}
	return decode[T](t, all[0])
}

func decode[T any](t *testing.T, o object) *T {
	t.Helper()
	into := new(T)
	if err := yaml.UnmarshalStrict([]byte(o.text), into); err != nil {
		t.Fatalf("%s: %v\n%s", o, err, o.text)
	}
	return into
}

// at is a field of an object: at(o, "spec", "replicas").
func at(fields map[string]any, path ...string) any {
	var v any = fields
	for _, name := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[name]
	}
	return v
}
