package test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

// pod is a pod that the chart makes, by whichever object.
type pod struct {
	of object
	corev1.PodTemplateSpec
}

func pods(t *testing.T, r *release) (all []pod) {
	t.Helper()
	for _, o := range r.objects {
		switch o.kind {
		case "Deployment":
			all = append(all, pod{o, decode[appsv1.Deployment](t, o).Spec.Template})
		case "Job":
			all = append(all, pod{o, decode[batchv1.Job](t, o).Spec.Template})
		case "CronJob":
			all = append(all, pod{o, decode[batchv1.CronJob](t, o).Spec.JobTemplate.Spec.Template})
		case "Pod":
			p := decode[corev1.Pod](t, o)
			all = append(all, pod{o, corev1.PodTemplateSpec{ObjectMeta: p.ObjectMeta, Spec: p.Spec}})
		}
	}
	return all
}

// restricted judges pods as a namespace that enforces the profile does.
func restricted(t *testing.T) func(p pod) []string {
	t.Helper()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	level := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	return func(p pod) (refusals []string) {
		for _, result := range evaluator.EvaluatePod(level, &p.ObjectMeta, &p.Spec) {
			if !result.Allowed {
				refusals = append(refusals, result.ForbiddenReason+": "+result.ForbiddenDetail)
			}
		}
		return refusals
	}
}

func TestPodsAreRestricted(t *testing.T) {
	judge := restricted(t)
	seen := map[string]bool{}
	examples(t, func(t *testing.T, _ string, r *release) {
		for _, p := range pods(t, r) {
			seen[p.of.kind] = true
			for _, refusal := range judge(p) {
				t.Errorf("%s: %s", p.of, refusal)
			}
			// What the profile doesn't ask for.
			s := p.Spec
			if s.AutomountServiceAccountToken == nil || *s.AutomountServiceAccountToken || s.EnableServiceLinks == nil || *s.EnableServiceLinks {
				t.Errorf("%s has a token or service links", p.of)
			}
			if c := s.SecurityContext; *c.RunAsUser != 65532 || *c.RunAsGroup != 65532 || *c.FSGroup != 65532 || *c.FSGroupChangePolicy != corev1.FSGroupChangeOnRootMismatch {
				t.Errorf("%s: %v", p.of, c)
			}
			for _, c := range append(s.Containers, s.InitContainers...) {
				if c.SecurityContext.ReadOnlyRootFilesystem == nil || !*c.SecurityContext.ReadOnlyRootFilesystem {
					t.Errorf("%s, %s: the root can be written", p.of, c.Name)
				}
			}
		}
	})
	for _, kind := range []string{"Deployment", "Job", "CronJob", "Pod"} {
		if !seen[kind] {
			t.Errorf("no example makes a %s", kind)
		}
	}
}

// The evaluator refuses what it must.
func TestRestrictedNoticesMistakes(t *testing.T) {
	judge := restricted(t)
	for _, change := range []string{
		"podSecurityContext: {runAsNonRoot: null}",
		"podSecurityContext: {seccompProfile: null}",
		"securityContext: {allowPrivilegeEscalation: true}",
		"securityContext: {capabilities: {drop: [NET_RAW]}}",
		"podSecurityContext: {runAsUser: 0}",
		"extraVolumes: [{name: host, hostPath: {path: /}}]",
		"extraContainers: [{name: other, image: other}]",
	} {
		if p := pods(t, mustRender(t, example(t, "kafka"), change))[0]; judge(p) == nil {
			t.Errorf("%s is allowed", change)
		}
	}
}

func TestContainers(t *testing.T) {
	examples(t, func(t *testing.T, _ string, r *release) {
		for _, p := range pods(t, r) {
			c := p.Spec.Containers[0]
			// Memory is granted whole; a CPU limit would take threads away from Go.
			if !c.Resources.Limits.Cpu().IsZero() || c.Resources.Requests.Cpu().IsZero() || c.Resources.Limits.Memory().IsZero() ||
				c.Resources.Limits.Memory().Cmp(*c.Resources.Requests.Memory()) != 0 {
				t.Errorf("%s: resources %v", p.of, c.Resources)
			}
			// A folder is exchanged as a whole when its Secret changes; a subPath isn't.
			for _, m := range c.VolumeMounts {
				if m.SubPath != "" {
					t.Errorf("%s: %s is mounted by a subPath", p.of, m.Name)
				}
				if !slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
					t.Errorf("%s: there is no volume %s", p.of, m.Name)
				}
			}
			if i := slices.Index(c.Args, "-c"); i < 0 || c.Args[i+1] != "/etc/dedupd/config/dedupd.yaml" {
				t.Errorf("%s: arguments %q", p.of, c.Args)
			}
		}
	})
}

func TestProbes(t *testing.T) {
	d := one[appsv1.Deployment](t, mustRender(t, example(t, "kafka")), "Deployment")
	c := d.Spec.Template.Spec.Containers[0]
	for path, probe := range map[string]*corev1.Probe{"/startupz": c.StartupProbe, "/livez": c.LivenessProbe, "/readyz": c.ReadinessProbe} {
		if probe.HTTPGet == nil || probe.HTTPGet.Path != path || probe.HTTPGet.Port.String() != "http" || probe.TimeoutSeconds < 2 {
			t.Errorf("%s: %v", path, probe)
		}
	}
	if p := c.StartupProbe; p.PeriodSeconds != 5 || p.FailureThreshold != 60 {
		t.Errorf("the startup probe gives a migration %d × %d s", p.PeriodSeconds, p.FailureThreshold)
	}
	if len(c.Ports) != 1 || c.Ports[0].Name != "http" || c.Ports[0].ContainerPort != 9464 {
		t.Errorf("ports %v", c.Ports)
	}

	d = one[appsv1.Deployment](t, mustRender(t, example(t, "kafka"), "port: 8080\nreadinessProbe: {failureThreshold: 9}\nlivenessProbe: {exec: {command: [dedupd, version]}}\nstartupProbe: {enabled: false}"), "Deployment")
	c = d.Spec.Template.Spec.Containers[0]
	if c.ReadinessProbe.FailureThreshold != 9 || c.ReadinessProbe.HTTPGet == nil || c.LivenessProbe.HTTPGet != nil || c.LivenessProbe.Exec == nil || c.StartupProbe != nil {
		t.Errorf("probes %v %v %v", c.StartupProbe, c.LivenessProbe, c.ReadinessProbe)
	}
	if env(c)["DEDUPD_HTTP_LISTEN"] != ":8080" || c.Ports[0].ContainerPort != 8080 {
		t.Errorf("port 8080 becomes %v, %v", c.Ports, env(c))
	}
}

func env(c corev1.Container) map[string]string {
	all := map[string]string{}
	for _, e := range c.Env {
		all[e.Name] = e.Value
	}
	return all
}

// What is left to the chart's user reaches the pod as it is.
func TestPassThroughs(t *testing.T) {
	r := mustRender(t, example(t, "pass-throughs"))
	d := one[appsv1.Deployment](t, r, "Deployment")
	s := d.Spec.Template.Spec
	for name, ok := range map[string]bool{
		"name":                  d.Name == "orders-landing" && d.Namespace == "orders",
		"labels":                d.Labels["team"] == "orders" && d.Spec.Template.Labels["team"] == "orders",
		"selector":              d.Spec.Selector.MatchLabels["team"] == "", // it can't be changed later
		"annotations":           d.Annotations["example.com/owner"] == "orders",
		"deploymentAnnotations": d.Annotations["secret.reloader.stakater.com/reload"] == "orders-database",
		"podLabels":             d.Spec.Template.Labels["sidecar"] == "yes",
		"podAnnotations":        d.Spec.Template.Annotations["example.com/scrape"] == "no",
		"extraArgs":             slices.Contains(s.Containers[0].Args, "--accept-loss-on-failover"),
		"extraEnv":              env(s.Containers[0])["DEDUPD_LOG_LEVEL"] == "debug",
		"extraEnvFrom":          s.Containers[0].EnvFrom[0].ConfigMapRef.Name == "proxy",
		"extraVolumes":          slices.ContainsFunc(s.Volumes, func(v corev1.Volume) bool { return v.Name == "scratch" && v.EmptyDir != nil }),
		"extraVolumeMounts":     slices.ContainsFunc(s.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/tmp" }),
		"extraContainers":       len(s.Containers) == 2 && s.Containers[1].Name == "proxy",
		"initContainers":        s.InitContainers[0].Name == "wait",
		"priorityClassName":     s.PriorityClassName == "high",
		"runtimeClassName":      *s.RuntimeClassName == "gvisor",
		"dnsPolicy":             s.DNSPolicy == corev1.DNSNone,
		"dnsConfig":             s.DNSConfig.Nameservers[0] == "10.0.0.10",
		"hostAliases":           s.HostAliases[0].Hostnames[0] == "kafka",
		"nodeSelector":          s.NodeSelector["kubernetes.io/os"] == "linux",
		"tolerations":           s.Tolerations[0].Key == "dedicated",
		"affinity":              s.Affinity.NodeAffinity != nil,
		"topologySpread":        len(s.TopologySpreadConstraints) == 1 && s.TopologySpreadConstraints[0].TopologyKey == "rack",
		"lifecycle":             s.Containers[0].Lifecycle.PreStop.Sleep.Seconds == 5,
		"terminationGrace":      *s.TerminationGracePeriodSeconds == 90,
		"strategy":              d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType && d.Spec.Strategy.RollingUpdate == nil,
		"extraObjects":          len(r.kind("ConfigMap")) == 3,
	} {
		if !ok {
			t.Errorf("%s doesn't arrive", name)
		}
	}
	for _, o := range r.objects {
		if !strings.HasPrefix(o.name, "orders-landing") && o.name != "orders-text" {
			t.Errorf("%s has another name", o)
		}
	}
}

func TestImage(t *testing.T) {
	for values, want := range map[string]string{
		"":                         "dedupd:0.1.0",
		"image: {tag: \"2\"}":      "dedupd:2",
		"image: {registry: a.io/}": "a.io/dedupd:0.1.0",
		"image: {registry: a.io}\nglobal: {imageRegistry: b.io}": "b.io/dedupd:0.1.0",
	} {
		p := pods(t, mustRender(t, example(t, "kafka"), values))[0]
		if have := p.Spec.Containers[0].Image; have != want {
			t.Errorf("%s: %s, want %s", values, have, want)
		}
	}
	p := pods(t, mustRender(t, example(t, "image")))[0]
	if have := p.Spec.Containers[0].Image; !strings.HasPrefix(have, "registry.example.com/team/dedupd@sha256:") {
		t.Errorf("a digest becomes %s", have)
	}
	if s := p.Spec.ImagePullSecrets; len(s) != 2 || s[0].Name != "registry" || s[1].Name != "mirror" {
		t.Errorf("pull secrets %v", s)
	}
}
