package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/dedupd/dedupd/deploy/helm/test/path"
)

// What runs is what the server has admitted, completed and stored.
func TestNewcomersPath(t *testing.T) {
	i := &installed{namespace: ownNamespace(t)}
	path.Run(t, repo, i)
	must(t, "uninstall", "orders", "-n", i.namespace)
	for _, o := range left(t, i.namespace) {
		if !strings.HasPrefix(o, "pods/") { // whose Deployment's controller nobody runs
			t.Errorf("uninstalled, and there is still %s", o)
		}
	}
}

// installed is a release in the API server.
type installed struct{ namespace string }

func (i *installed) Deploy(t *testing.T, text string) (*appsv1.Deployment, map[string]map[string]string) {
	t.Helper()
	must(t, "upgrade", "--install", "orders", chart, "-n", i.namespace, "-f", values(t, text))
	configMaps := map[string]map[string]string{}
	for _, c := range get[corev1.ConfigMapList](t, "/api/v1/namespaces/"+i.namespace+"/configmaps").Items {
		configMaps[c.Name] = c.Data
	}
	return deployment(t, i.namespace), configMaps
}

func (i *installed) Admit(t *testing.T, pod corev1.PodTemplateSpec) corev1.PodSpec {
	t.Helper()
	a := create(t, i.namespace, pod, false)
	var made corev1.Pod
	if err := json.Unmarshal(a.Body, &made); err != nil || a.Code != http.StatusCreated || len(a.Warnings) > 0 {
		t.Fatalf("the pod: %v %d %q %s", err, a.Code, a.Warnings, a.Body)
	}
	return made.Spec
}

func (i *installed) Test(t *testing.T, run func(corev1.PodSpec) int) {
	t.Helper()
	test := start(t, "test", "orders", "-n", i.namespace)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		for _, pod := range get[corev1.PodList](t, "/api/v1/namespaces/"+i.namespace+"/pods").Items {
			if pod.Annotations["helm.sh/hook"] != "test" {
				continue
			}
			phase := "Succeeded"
			if run(pod.Spec) != 0 {
				phase = "Failed"
			}
			patchStatus(t, "/api/v1/namespaces/"+i.namespace+"/pods/"+pod.Name, map[string]any{"phase": phase})
			if text, err := test(); err != nil {
				t.Errorf("helm test: %v\n%s", err, text)
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal("helm test makes no pod")
		}
	}
}
