// Command schemas writes what the chart's tests hold its objects to: the strict
// schemas of the kinds that it makes, for each version of Kubernetes, and of the
// custom resources. They come from the modules of Kubernetes, KEDA and the
// Prometheus operator, which are too large to be fetched by every test run.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/dedupd/dedupd/deploy/helm/test/crds"
)

// kubernetes are the oldest version that the chart supports, and a new one.
var kubernetes = []string{"v1.29.15", "v1.36.3"}

// kinds of Kubernetes that the chart makes, by their definition's name.
var kinds = map[string]string{
	"io.k8s.api.core.v1.ConfigMap":                      "v1 ConfigMap",
	"io.k8s.api.core.v1.Pod":                            "v1 Pod",
	"io.k8s.api.core.v1.Service":                        "v1 Service",
	"io.k8s.api.core.v1.ServiceAccount":                 "v1 ServiceAccount",
	"io.k8s.api.apps.v1.Deployment":                     "apps/v1 Deployment",
	"io.k8s.api.batch.v1.Job":                           "batch/v1 Job",
	"io.k8s.api.batch.v1.CronJob":                       "batch/v1 CronJob",
	"io.k8s.api.policy.v1.PodDisruptionBudget":          "policy/v1 PodDisruptionBudget",
	"io.k8s.api.networking.v1.NetworkPolicy":            "networking.k8s.io/v1 NetworkPolicy",
	"io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler": "autoscaling/v2 HorizontalPodAutoscaler",
}

type schema = map[string]any

// set is a file: definitions that refer to each other, and which of them is
// which kind ("apps/v1 Deployment").
type set struct {
	Kinds       map[string]string `json:"kinds"`
	Definitions map[string]schema `json:"definitions"`
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: schemas FOLDER")
	}
	for _, version := range kubernetes {
		s, err := ofKubernetes(version)
		if err != nil {
			log.Fatal(err)
		}
		minor := strings.Join(strings.Split(strings.TrimPrefix(version, "v"), ".")[:2], ".")
		if err := s.write(filepath.Join(os.Args[1], minor+".json")); err != nil {
			log.Fatal(err)
		}
	}
	s, err := ofCustoms()
	if err != nil {
		log.Fatal(err)
	}
	if err := s.write(filepath.Join(os.Args[1], "customs.json")); err != nil {
		log.Fatal(err)
	}
}

func ofKubernetes(version string) (*set, error) {
	dir, err := crds.Module("k8s.io/kubernetes@" + version)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "api", "openapi-spec", "swagger.json"))
	if err != nil {
		return nil, err
	}
	var api struct{ Definitions map[string]schema }
	if err := json.Unmarshal(text, &api); err != nil {
		return nil, err
	}
	s := &set{Kinds: map[string]string{}, Definitions: map[string]schema{}}
	for name, kind := range kinds {
		if api.Definitions[name] == nil {
			return nil, fmt.Errorf("%s has no %s", version, name)
		}
		s.Kinds[kind] = name
		s.reach(name, api.Definitions)
		fixKind(s.Definitions[name], kind)
	}
	return s, nil
}

// reach takes a definition over, and all that it refers to.
func (s *set) reach(name string, all map[string]schema) {
	if s.Definitions[name] != nil {
		return
	}
	switch name {
	case "io.k8s.apimachinery.pkg.util.intstr.IntOrString":
		s.Definitions[name] = schema{"type": []string{"integer", "string"}}
		return
	case "io.k8s.apimachinery.pkg.api.resource.Quantity":
		s.Definitions[name] = schema{"type": []string{"number", "string"}}
		return
	}
	d := strict(all[name]).(schema)
	s.Definitions[name] = d
	walk(d, func(node schema) {
		if ref, ok := node["$ref"].(string); ok {
			s.reach(strings.TrimPrefix(ref, "#/definitions/"), all)
		}
	})
}

func ofCustoms() (*set, error) {
	s := &set{Kinds: map[string]string{}, Definitions: map[string]schema{}}
	files, err := crds.Read()
	if err != nil {
		return nil, err
	}
	for file, text := range files {
		var crd struct {
			Spec struct {
				Group    string
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Schema struct{ OpenAPIV3Schema schema }
				}
			}
		}
		if err := yaml.Unmarshal(text, &crd); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, v := range crd.Spec.Versions {
			kind := crd.Spec.Group + "/" + v.Name + " " + crd.Spec.Names.Kind
			name := crd.Spec.Names.Kind + "." + v.Name
			s.Kinds[kind] = name
			s.Definitions[name] = strict(v.Schema.OpenAPIV3Schema).(schema)
			fixKind(s.Definitions[name], kind)
		}
	}
	return s, nil
}

// strict copies a schema without its prose, and forbids what it doesn't name.
func strict(node any) any {
	switch n := node.(type) {
	case []any:
		out := make([]any, len(n))
		for i := range n {
			out[i] = strict(n[i])
		}
		return out
	case schema:
		out := schema{}
		for key, value := range n {
			switch {
			case key == "properties":
				properties := schema{}
				for name, p := range value.(schema) {
					properties[name] = strict(p)
				}
				out[key] = properties
			case key == "description", key == "example", key == "default", strings.HasPrefix(key, "x-"):
			default:
				out[key] = strict(value)
			}
		}
		if n["x-kubernetes-int-or-string"] == true {
			delete(out, "type")
		}
		_, named := n["properties"].(schema)
		if _, open := n["additionalProperties"]; named && !open && n["x-kubernetes-preserve-unknown-fields"] != true {
			out["additionalProperties"] = false
		}
		return out
	}
	return node
}

func walk(node any, visit func(schema)) {
	switch n := node.(type) {
	case []any:
		for _, item := range n {
			walk(item, visit)
		}
	case schema:
		visit(n)
		for _, item := range n {
			walk(item, visit)
		}
	}
}

// fixKind makes apiVersion and kind required, and what they are.
func fixKind(d schema, kind string) {
	version, name, _ := strings.Cut(kind, " ")
	properties := d["properties"].(schema)
	properties["apiVersion"] = schema{"const": version}
	properties["kind"] = schema{"const": name}
	required, _ := d["required"].([]any)
	d["required"] = append(required, "apiVersion", "kind", "metadata")
}

// write has a line for each definition, so that a new version is a diff to read.
func (s *set) write(path string) error {
	kinds, err := json.Marshal(s.Kinds)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\"kinds\": %s,\n\"definitions\": {", kinds)
	separator := "\n"
	for _, name := range slices.Sorted(maps.Keys(s.Definitions)) {
		line, err := json.Marshal(s.Definitions[name])
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s%q: %s", separator, name, line)
		separator = ",\n"
	}
	b.WriteString("\n}}\n")
	return os.WriteFile(path, b.Bytes(), 0o644)
}
