package test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// unasked are what kube-score asks for and dedupd has another answer to.
var unasked = map[string]string{
	"container-ephemeral-storage-request-and-limit": "nothing is written but the log, which the kubelet bounds",
	"container-image-pull-policy":                   "versions don't change; Always would make the registry a part of every restart",
	"deployment-has-host-podantiaffinity":           "topology spread constraints do it",
	"pod-networkpolicy":                             "off by default: only the user knows the brokers' addresses",
}

func TestKubeScore(t *testing.T) {
	if testing.Short() {
		t.Skip("runs a program that make chart-test builds")
	}
	args := []string{
		"score", "-", "--kubernetes-version", "v1.36", "--exit-one-on-warning", "--output-format", "ci",
		"--ignore-container-cpu-limit",
	} // it would take threads away from Go; the request is what counts
	for check := range unasked {
		args = append(args, "--ignore-test", check)
	}
	score := func(r *release) (string, error) {
		var all []string
		for _, o := range r.objects {
			all = append(all, o.text)
		}
		c := exec.Command(filepath.Join(repo, ".bin", "kube-score"), args...) // make chart-test builds it
		c.Stdin = strings.NewReader(strings.Join(all, "---\n"))
		text, err := c.CombinedOutput()
		return string(text), err
	}
	examples(t, func(t *testing.T, _ string, r *release) {
		text, err := score(r)
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, "[OK]") && !strings.HasPrefix(line, "[SKIPPED]") {
				t.Error(strings.TrimSpace(line))
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	text, err := score(mustRender(t, example(t, "kafka"), "securityContext: {readOnlyRootFilesystem: false}"))
	if err == nil || !strings.Contains(text, "[CRITICAL]") {
		t.Errorf("it has nothing against a root that can be written: %v\n%s", err, text)
	}
}
