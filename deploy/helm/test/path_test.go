package test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/dedupd/dedupd/deploy/helm/test/path"
)

// The newcomer has no cluster: what Helm's engine renders is what runs.
func TestNewcomersPath(t *testing.T) {
	if testing.Short() {
		t.Skip("builds an image and starts servers")
	}
	path.Run(t, repo, &offline{})
}

const repo = "../../.."

type offline struct{ *release }

func (r *offline) Deploy(t *testing.T, values string) (*appsv1.Deployment, map[string]map[string]string) {
	t.Helper()
	r.release = mustRender(t, values)
	configMaps := map[string]map[string]string{}
	for _, o := range r.kind("ConfigMap") {
		configMaps[o.name] = decode[corev1.ConfigMap](t, o).Data
	}
	return one[appsv1.Deployment](t, r.release, "Deployment"), configMaps
}

func (r *offline) Admit(_ *testing.T, pod corev1.PodTemplateSpec) corev1.PodSpec { return pod.Spec }

func (r *offline) Test(t *testing.T, run func(corev1.PodSpec) int) {
	t.Helper()
	run(one[corev1.Pod](t, r.release, "Pod").Spec)
}
