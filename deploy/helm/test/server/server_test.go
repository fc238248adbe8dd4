// Package server installs the chart into Kubernetes' own API server, as `make
// chart-server-test` builds it, with the helm that users have, in namespaces that
// enforce the profile restricted.
package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/dedupd/dedupd/deploy/helm/test/cluster"
	"github.com/dedupd/dedupd/deploy/helm/test/crds"
)

const (
	repo  = "../../../.."
	chart = "../../dedupd"
)

var (
	api  *cluster.Cluster
	helm = os.Getenv("DEDUPD_TEST_HELM")
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	apiserver := os.Getenv("DEDUPD_TEST_APISERVER")
	if helm == "" || apiserver == "" {
		fmt.Fprintln(os.Stderr, "these tests need the binaries of helm and kube-apiserver: make chart-server-test builds them")
		return 1
	}
	dir, err := os.MkdirTemp("", "dedupd-cluster-")
	if err == nil {
		defer os.RemoveAll(dir)
		api, err = cluster.Start(context.Background(), dir, apiserver)
	}
	if err == nil {
		defer api.Stop()
		for _, name := range []string{"HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"} {
			_ = os.Setenv(name, filepath.Join(dir, "helm"))
		}
		_ = os.Setenv("KUBECONFIG", api.Kubeconfig)
		err = prepare()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// prepare creates what the examples take for granted.
func prepare() error {
	definitions, err := crds.Read()
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(definitions)) {
		if err := apply("", string(definitions[name])); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for _, text := range []string{
		"apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: gvisor}\nhandler: runsc",
		"apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: high}\nvalue: 1000",
	} {
		if err := apply("", text); err != nil {
			return err
		}
	}
	// The server serves a new kind a moment after it has learnt of it.
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		served := true
		for _, path := range []string{"keda.sh/v1alpha1/scaledobjects", "keda.sh/v1alpha1/triggerauthentications", "monitoring.coreos.com/v1/podmonitors", "monitoring.coreos.com/v1/servicemonitors", "monitoring.coreos.com/v1/prometheusrules"} {
			a, err := api.Ask(context.Background(), http.MethodGet, "/apis/"+path, "", nil)
			served = served && err == nil && a.Code == http.StatusOK
		}
		if served {
			return errors.Join(namespace("orders"), namespace("monitoring")) // which examples name
		}
		if time.Now().After(end) {
			return fmt.Errorf("the custom resources are not served")
		}
	}
}

func apply(namespace, text string) error {
	a, err := api.Apply(context.Background(), namespace, text, false)
	if err == nil && a.Code >= 300 {
		err = fmt.Errorf("%d %s", a.Code, a.Body)
	}
	return err
}

// namespace makes one that refuses pods which aren't restricted, and warns of
// objects that would make such.
func namespace(name string) error {
	return apply("", fmt.Sprintf(`
apiVersion: v1
kind: Namespace
metadata:
  name: %s
  labels: {pod-security.kubernetes.io/enforce: restricted, pod-security.kubernetes.io/warn: restricted}`, name))
}

// ownNamespace is one for this test.
func ownNamespace(t *testing.T) string {
	t.Helper()
	name := strings.ToLower(t.Name())
	if err := namespace(name); err != nil {
		t.Fatal(err)
	}
	return name
}

// start runs helm; the result waits for it.
func start(t *testing.T, args ...string) (wait func() (string, error)) {
	t.Helper()
	c := exec.CommandContext(t.Context(), helm, args...)
	var text bytes.Buffer
	c.Stdout, c.Stderr = &text, &text
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return func() (string, error) {
		err := c.Wait()
		return text.String(), err
	}
}

func must(t *testing.T, args ...string) string {
	t.Helper()
	text, err := start(t, args...)()
	if err != nil {
		t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, text)
	}
	return text
}

// values is a file with them.
func values(t *testing.T, text string) string {
	t.Helper()
	file, err := os.CreateTemp(t.TempDir(), "*.yaml")
	if err == nil {
		_, err = file.WriteString(text)
		_ = file.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return file.Name()
}

func example(name string) string { return filepath.Join(chart, "ci", name+".yaml") }

// template gives the objects that helm renders, hooks included.
func template(t *testing.T, namespace string, files ...string) (all []string) {
	t.Helper()
	args := []string{"template", "orders", chart, "-n", namespace}
	for _, f := range files {
		args = append(args, "-f", f)
	}
	for _, text := range strings.Split("\n"+must(t, args...), "\n---\n") {
		if strings.TrimSpace(text) != "" {
			all = append(all, text)
		}
	}
	return all
}

func get[T any](t *testing.T, path string) *T {
	t.Helper()
	v, err := cluster.Get[T](t.Context(), api, path)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// podOf is the pod that an object makes; nil: it makes none.
func podOf(t *testing.T, text string) *corev1.PodTemplateSpec {
	t.Helper()
	var o cluster.Object
	into := func(v any) {
		if err := yaml.UnmarshalStrict([]byte(text), v); err != nil {
			t.Fatal(err)
		}
	}
	if err := yaml.Unmarshal([]byte(text), &o); err != nil {
		t.Fatal(err)
	}
	switch o.Kind {
	case "Deployment":
		var d appsv1.Deployment
		into(&d)
		return &d.Spec.Template
	case "Job":
		var j batchv1.Job
		into(&j)
		return &j.Spec.Template
	case "CronJob":
		var j batchv1.CronJob
		into(&j)
		return &j.Spec.JobTemplate.Spec.Template
	}
	return nil
}

// create asks for a pod; dry keeps none.
func create(t *testing.T, namespace string, pod corev1.PodTemplateSpec, dry bool) *cluster.Answer {
	t.Helper()
	full := corev1.Pod{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec}
	full.APIVersion, full.Kind, full.GenerateName = "v1", "Pod", "orders-"
	text, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	query := "?fieldValidation=Strict"
	if dry {
		query += "&dryRun=All"
	}
	a, err := api.Ask(t.Context(), http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods"+query, "application/json", text)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// The server accepts all that the examples make, and has nothing to remark.
func TestExamples(t *testing.T) {
	own := ownNamespace(t)
	files, err := filepath.Glob(example("*"))
	if err != nil || len(files) < 20 {
		t.Fatalf("only %d examples: %v", len(files), err)
	}
	kinds := map[string]bool{}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			for _, text := range template(t, own, file) {
				var o cluster.Object
				if err := yaml.Unmarshal([]byte(text), &o); err != nil {
					t.Fatal(err)
				}
				kinds[o.Kind] = true
				a, err := api.Apply(t.Context(), own, text, true)
				if err != nil {
					t.Fatal(err)
				}
				if a.Code >= 300 || len(a.Warnings) > 0 {
					t.Errorf("%s %s: %d %q %s", o.Kind, o.Metadata.Name, a.Code, a.Warnings, a.Body)
				}
				if pod := podOf(t, text); pod != nil {
					if a := create(t, own, *pod, true); a.Code != http.StatusCreated || len(a.Warnings) > 0 {
						t.Errorf("a pod of the %s: %d %q %s", o.Kind, a.Code, a.Warnings, a.Body)
					}
				}
			}
		})
	}
	for _, kind := range []string{
		"ConfigMap", "CronJob", "Deployment", "HorizontalPodAutoscaler", "Job", "NetworkPolicy", "Pod", "PodDisruptionBudget",
		"PodMonitor", "PrometheusRule", "ScaledObject", "Service", "ServiceAccount", "ServiceMonitor", "TriggerAuthentication",
	} {
		if !kinds[kind] {
			t.Errorf("no example makes a %s", kind)
		}
	}
}

// The server isn't one that accepts everything.
func TestRefusals(t *testing.T) {
	own := ownNamespace(t)
	for change, want := range map[string]string{
		"extraContainers: [{name: other, image: other}]":              "violates PodSecurity",
		"extraVolumes: [{name: host, hostPath: {path: /}}]":           "violates PodSecurity",
		"resources: {requests: {memory: 2Gi}, limits: {memory: 1Gi}}": "must be less than or equal to memory limit",
		"lifecycle: {preStop: {slep: {seconds: 5}}}":                  "field not declared in schema",
		"priorityClassName: higher":                                   "no PriorityClass with name higher",
	} {
		refused := false
		for _, text := range template(t, own, example("kafka"), values(t, change)) {
			a, err := api.Apply(t.Context(), own, text, true)
			if err != nil {
				t.Fatal(err)
			}
			answers := []*cluster.Answer{a}
			if d := (appsv1.Deployment{}); strings.Contains(text, "kind: Deployment") && yaml.Unmarshal([]byte(text), &d) == nil {
				answers = append(answers, create(t, own, d.Spec.Template, true))
			}
			for _, a := range answers {
				refused = refused || a.Code >= 400 && strings.Contains(string(a.Body), want)
			}
		}
		if !refused {
			t.Errorf("%s is accepted, or not for %q", change, want)
		}
	}
}

// deployment is the one of a namespace.
func deployment(t *testing.T, namespace string) *appsv1.Deployment {
	t.Helper()
	all := get[appsv1.DeploymentList](t, "/apis/apps/v1/namespaces/"+namespace+"/deployments")
	if len(all.Items) != 1 {
		t.Fatalf("there are %d Deployments", len(all.Items))
	}
	return &all.Items[0]
}

// left are the objects that a namespace holds, of the kinds that the chart makes,
// and releases.
func left(t *testing.T, namespace string) (all []string) {
	t.Helper()
	for _, kind := range []string{
		"/api/v1 configmaps", "/api/v1 pods", "/api/v1 secrets", "/api/v1 services", "/api/v1 serviceaccounts",
		"/apis/apps/v1 deployments", "/apis/autoscaling/v2 horizontalpodautoscalers", "/apis/batch/v1 cronjobs", "/apis/batch/v1 jobs",
		"/apis/keda.sh/v1alpha1 scaledobjects", "/apis/keda.sh/v1alpha1 triggerauthentications",
		"/apis/monitoring.coreos.com/v1 podmonitors", "/apis/monitoring.coreos.com/v1 prometheusrules", "/apis/monitoring.coreos.com/v1 servicemonitors",
		"/apis/networking.k8s.io/v1 networkpolicies", "/apis/policy/v1 poddisruptionbudgets",
	} {
		group, plural, _ := strings.Cut(kind, " ")
		list := get[struct{ Items []cluster.Object }](t, group+"/namespaces/"+namespace+"/"+plural)
		for _, o := range list.Items {
			all = append(all, plural+"/"+o.Metadata.Name)
		}
	}
	return all
}

// A release is installed, scaled by its autoscaler, upgraded, rolled back, and
// removed without a trace.
func TestLifecycle(t *testing.T) {
	own := ownNamespace(t)
	all := values(t, `
podMonitor: {enabled: true}
prometheusRule: {enabled: true}
dashboard: {enabled: true}
networkPolicy: {enabled: true}
retention: {cronJob: {enabled: true}}
`)
	must(t, "install", "orders", chart, "-n", own, "-f", example("hpa"), "-f", all)
	first := deployment(t, own)
	const checksum = "checksum/config"
	if first.Spec.Template.Annotations[checksum] == "" || len(left(t, own)) < 10 {
		t.Fatalf("installed: %v, %v", left(t, own), first.Spec.Template.Annotations)
	}

	// What an autoscaler does.
	a, err := api.Ask(t.Context(), http.MethodPatch, "/apis/apps/v1/namespaces/"+own+"/deployments/"+first.Name+"/scale", "application/merge-patch+json", []byte(`{"spec": {"replicas": 5}}`))
	if err != nil || a.Code != http.StatusOK {
		t.Fatal(err, a)
	}
	must(t, "upgrade", "orders", chart, "-n", own, "-f", example("hpa"), "-f", all, "--set", "config.log.level=debug")
	second := deployment(t, own)
	if *second.Spec.Replicas != 5 {
		t.Errorf("an upgrade sets the autoscaler's 5 replicas to %d", *second.Spec.Replicas)
	}
	if second.Spec.Template.Annotations[checksum] == first.Spec.Template.Annotations[checksum] {
		t.Error("another configuration, and the pods wouldn't be replaced")
	}
	must(t, "upgrade", "orders", chart, "-n", own, "-f", example("hpa"), "-f", all, "--set", "config.log.level=debug")
	if again := deployment(t, own); again.Generation != second.Generation {
		t.Error("an upgrade without a change replaces the pods")
	}

	must(t, "rollback", "orders", "1", "-n", own)
	back := deployment(t, own)
	if *back.Spec.Replicas != 5 || back.Spec.Template.Annotations[checksum] != first.Spec.Template.Annotations[checksum] {
		t.Errorf("rolled back to %d replicas, %v", *back.Spec.Replicas, back.Spec.Template.Annotations)
	}

	must(t, "uninstall", "orders", "-n", own)
	if rest := left(t, own); len(rest) > 0 {
		t.Errorf("uninstalled, and there is still %v", rest)
	}
}

// The hook that migrates finds all that it needs when it runs, before anything
// else of the release is there; and where it fails, nothing is upgraded.
func TestMigrateJob(t *testing.T) {
	own := ownNamespace(t)
	for _, secret := range []string{"orders-database", "orders-database-owner"} {
		if err := apply(own, "apiVersion: v1\nkind: Secret\nmetadata: {name: "+secret+"}\nstringData: {url: postgres://db/orders}"); err != nil {
			t.Fatal(err)
		}
	}
	install := start(t, "install", "orders", chart, "-n", own, "-f", example("migrate-job"))
	job := awaitJob(t, own)
	if rest := get[appsv1.DeploymentList](t, "/apis/apps/v1/namespaces/"+own+"/deployments"); len(rest.Items) > 0 {
		t.Error("the workers are there before the schema")
	}
	spec := job.Spec.Template.Spec
	if spec.ServiceAccountName != "" && spec.ServiceAccountName != "default" {
		t.Errorf("the Job has the account %s, which nobody has made yet", spec.ServiceAccountName)
	}
	for _, v := range spec.Volumes {
		switch {
		case v.ConfigMap != nil:
			get[corev1.ConfigMap](t, "/api/v1/namespaces/"+own+"/configmaps/"+v.ConfigMap.Name)
		case v.Projected != nil:
			for _, s := range v.Projected.Sources {
				get[corev1.Secret](t, "/api/v1/namespaces/"+own+"/secrets/"+s.Secret.Name)
			}
		}
	}
	end(t, job, "Complete")
	if text, err := install(); err != nil {
		t.Fatalf("helm install: %v\n%s", err, text)
	}
	before := deployment(t, own)

	upgrade := start(t, "upgrade", "orders", chart, "-n", own, "-f", example("migrate-job"), "--set", "image.tag=next")
	end(t, awaitJob(t, own), "Failed")
	if text, err := upgrade(); err == nil {
		t.Errorf("helm upgrade with a migration that failed:\n%s", text)
	}
	if after := deployment(t, own); after.Generation != before.Generation {
		t.Error("the migration failed, and the workers are upgraded")
	}
}

// awaitJob waits for a Job that has not ended.
func awaitJob(t *testing.T, namespace string) *batchv1.Job {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		for _, j := range get[batchv1.JobList](t, "/apis/batch/v1/namespaces/"+namespace+"/jobs").Items {
			if len(j.Status.Conditions) == 0 {
				return &j
			}
		}
	}
	t.Fatal("there is no Job")
	return nil
}

// end has a Job end as its controller does: Complete or Failed.
func end(t *testing.T, job *batchv1.Job, how string) {
	t.Helper()
	now := time.Now().UTC().Format(time.RFC3339)
	criterion := map[string]string{"Complete": "SuccessCriteriaMet", "Failed": "FailureTarget"}[how]
	condition := func(kind string) map[string]any {
		return map[string]any{"type": kind, "status": "True", "lastTransitionTime": now, "lastProbeTime": now}
	}
	status := map[string]any{"startTime": now, "conditions": []any{condition(criterion), condition(how)}}
	if how == "Complete" {
		status["completionTime"], status["succeeded"] = now, 1
	} else {
		status["failed"] = 1
	}
	patchStatus(t, "/apis/batch/v1/namespaces/"+job.Namespace+"/jobs/"+job.Name, status)
}

func patchStatus(t *testing.T, path string, status map[string]any) {
	t.Helper()
	text, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		t.Fatal(err)
	}
	a, err := api.Ask(t.Context(), http.MethodPatch, path+"/status", "application/merge-patch+json", text)
	if err != nil || a.Code != http.StatusOK {
		t.Fatalf("%v %+v", err, a)
	}
}
