package test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
)

// What can't work is refused when it is rendered, with its cure.
func TestRefusals(t *testing.T) {
	for _, c := range []struct{ example, values, want string }{
		{"", "", "config is empty: write dedupd's configuration under config"},
		{"kafka", "existingConfigMap: other", "config and existingConfigMap are both set: keep one of the two"},
		{"kafka", "terminationGracePeriodSeconds: 30", "terminationGracePeriodSeconds is 30, but shutdown.drain 15s and 20 s for leaving need 35: raise it"},
		{"kafka", "config: {shutdown: {drain: 1m30s}}", "terminationGracePeriodSeconds is 60, but shutdown.drain 1m30s and 20 s for leaving need 110: raise it"},
		{"kafka", "config: {shutdown: {drain: 40500ms}}", "need 61: raise it"},
		{"kafka", "config: {shutdown: {drain: 1d}}", "need 86420: raise it"},
		{"kafka", "lifecycle: {preStop: {sleep: {seconds: 26}}}", "terminationGracePeriodSeconds is 60, but shutdown.drain 15s, lifecycle.preStop's 26 s and 20 s for leaving need 61: raise it"},
		{"kafka", "config: {shutdown: {drain: \"${DRAIN}\"}}", `config.shutdown.drain is "${DRAIN}", which the chart can't read`},
		{"kafka", "config: {http: {listen: \"0.0.0.0:80\"}}", "config.http.listen is set, but the chart gives the address by DEDUPD_HTTP_LISTEN: set port instead"},
		{"kafka", "config: {database: {url: postgres://db/orders}}", "config.database has a URL, and secrets.database.url is set: keep one of the two"},
		{"kafka", "config: {database: {migrate: false}}", "config.database.migrate is false, but migrations.mode is startup: remove the key, the mode decides"},
		{"migrate-external", "config: {database: {migrate: true}}", "config.database.migrate is true, but migrations.mode is external"},
		{"migrate-job", "config: {database: {url: postgres://db/orders}}\nsecrets: {database: {url: null}}", "migrations.job.database is set, but config.database.url is what dedupd would use"},
		{"kafka", "secrets: {sources: {main: {password: {name: x}}}}", "secrets.sources.main: config has no source of that name, only kafka"},
		{"kafka", "secrets: {sources: {kafka: {creds: {name: x}}}}", "secrets.sources.kafka.creds has no meaning for a source of kind kafka"},
		{"nats", "secrets: {sources: {nats: {password: {name: x}}}}", "secrets.sources.nats.password has no meaning for a source of kind nats"},
		{"pipelines", "secrets: {sources: {kafka: {password: {name: x}}}}", "secrets.sources.kafka: config has no source of that name, only main, bank"},
		{"pipelines", "config: {pipelines: [{scope: a, database: {migrate: true}}]}", "config.pipelines[0].database.migrate is set: remove the key, migrations.mode decides for all"},
		{"hpa", "autoscaling: {keda: {enabled: true}}", "autoscaling.hpa.enabled and autoscaling.keda.enabled are both set"},
		{"hpa", "autoscaling: {external: true}", "autoscaling.hpa.enabled and autoscaling.external are both set"},
		{"podmonitor", "serviceMonitor: {enabled: true}", "podMonitor.enabled and serviceMonitor.enabled are both set: everything would be counted twice; keep one"},
		{"kafka", "extraEnv: [{name: GOMEMLIMIT, value: 1GiB}]", "extraEnv has GOMEMLIMIT, which the chart sets itself: set memoryLimitPercent to 0 to set it yourself"},
		{"kafka", "extraEnv: [{name: DEDUPD_HTTP_LISTEN, value: \":1\"}]", "extraEnv has DEDUPD_HTTP_LISTEN, which the chart sets itself: set port instead"},
		{"kafka-secrets", "extraEnv: [{name: PGSSLROOTCERT, value: x}]", "extraEnv has PGSSLROOTCERT, which the chart sets itself: remove it"},
		{"kafka", "extraEnv: [{name: A, value: one}, {name: A, value: two}]", "extraEnv has A twice: keep one of the two"},
		{"kafka", "resources: {limits: {memory: 512mb}}", `resources.limits.memory is "512mb", which the chart can't read`},
		{"podmonitor", "prometheusRule: {disabled: [NoSuchAlert]}", "prometheusRule.disabled: there is no alert NoSuchAlert, only "},
		{"podmonitor", "prometheusRule: {overrides: {NoSuchAlert: {for: 1m}}}", "prometheusRule.overrides: there is no alert NoSuchAlert, only "},
		{"keda-kafka", "autoscaling: {keda: {mode: nats}}", "autoscaling.keda.mode is nats, but config has no such source"},
		{"keda-nats", "autoscaling: {keda: {nats: {monitoringEndpoint: \"\"}}}", "autoscaling.keda.nats.monitoringEndpoint is empty"},
		{"keda-prometheus", "autoscaling: {keda: {prometheus: {serverAddress: \"\"}}}", "autoscaling.keda.prometheus.serverAddress is empty"},
		{"keda-kafka", "secrets: {sources: {kafka: {username: null}}}\nconfig: {sources: [{kafka: {brokers: [k:9092], topics: [a], sasl: {mechanism: plain, username: u}}}]}", "secrets.sources.kafka.username is missing: KEDA takes user and password from a Secret"},
		{"keda-kafka", "config: {sources: [{kafka: {brokers: \"${BROKERS}\", topics: [a]}}]}", "only the worker knows its environment"},
		{"existing-configmap", "autoscaling: {keda: {enabled: true}}", "but existingConfigMap is set: use mode prometheus"},

		// The schema's.
		{"kafka", "replica: 2", "additional properties 'replica' not allowed"},
		{"kafka", "image: {repo: x}", "additional properties 'repo' not allowed"},
		{"kafka", "config: {scpoe: x}", "additional properties 'scpoe' not allowed"},
		{"kafka", "config: {batch: {max_messages: many}}", "batch/max_messages"},
		{"kafka", "replicas: \"2\"", "want integer"},
		{"kafka", "migrations: {mode: never}", "value must be one of 'startup', 'job', 'external'"},
		{"kafka", "autoscaling: {keda: {minReplicas: 0}}", "minimum: got 0, want 1"},
		{"kafka", "secrets: {database: {password: {name: x}}}", "additional properties 'password' not allowed"},
		{"image", "image: {digest: latest}", "does not match pattern"},
	} {
		text := ""
		if c.example != "" {
			text = example(t, c.example)
		}
		_, err := render(text, c.values)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %s: %v\nwant %s", c.example, c.values, err, c.want)
		}
	}
}

// What is just enough isn't refused.
func TestGracePeriod(t *testing.T) {
	for _, values := range []string{
		"terminationGracePeriodSeconds: 35",
		"config: {shutdown: {drain: 40s}}",
		"lifecycle: {preStop: {sleep: {seconds: 25}}}",
		"config: {shutdown: {drain: 1m}}\nterminationGracePeriodSeconds: 80",
	} {
		if _, err := render(example(t, "kafka"), values); err != nil {
			t.Errorf("%s: %v", values, err)
		}
	}
}

func TestReplicas(t *testing.T) {
	for name, want := range map[string]any{"kafka": 1.0, "pass-throughs": 3.0, "hpa": nil, "keda-kafka": nil, "external-scaler": nil} {
		o := mustRender(t, example(t, name)).kind("Deployment")[0]
		if have := at(o.fields, "spec", "replicas"); have != want {
			t.Errorf("%s: replicas %v, want %v", name, have, want)
		}
	}
	if have := at(mustRender(t, example(t, "kafka"), "replicas: 0").kind("Deployment")[0].fields, "spec", "replicas"); have != 0.0 {
		t.Errorf("no worker at all becomes %v", have)
	}
}

// Each join and each leave makes a Kafka group stand still; NATS doesn't mind.
func TestStrategy(t *testing.T) {
	for name, want := range map[string][2]string{
		"kafka": {"1", "0"}, "nats": {"0", "1"}, "two-sources": {"1", "0"}, "existing-configmap": {"1", "0"},
	} {
		d := one[appsv1.Deployment](t, mustRender(t, example(t, name)), "Deployment")
		r := d.Spec.Strategy.RollingUpdate
		if have := [2]string{r.MaxUnavailable.String(), r.MaxSurge.String()}; have != want {
			t.Errorf("%s: maxUnavailable and maxSurge %v, want %v", name, have, want)
		}
		if d.Spec.MinReadySeconds != 10 || *d.Spec.Template.Spec.TerminationGracePeriodSeconds != 60 {
			t.Errorf("%s: %d, %d", name, d.Spec.MinReadySeconds, *d.Spec.Template.Spec.TerminationGracePeriodSeconds)
		}
	}
}

func TestMemoryLimit(t *testing.T) {
	for values, want := range map[string]string{
		"":                                              "483183820", // 0.9 × 512 × 2²⁰
		"resources: {limits: {memory: 1Gi}}":            "966367641",
		"resources: {limits: {memory: 1.5Gi}}":          "1449551462",
		"resources: {limits: {memory: 500M}}":           "450000000",
		"resources: {limits: {memory: 2G}}":             "1800000000",
		"resources: {limits: {memory: 1000000000}}":     "900000000",
		"resources: {limits: {memory: \"1000000000\"}}": "900000000",
		"memoryLimitPercent: 50":                        "268435456",
		"memoryLimitPercent: 0":                         "",
		"resources: {limits: null}":                     "",
	} {
		c := pods(t, mustRender(t, example(t, "kafka"), values))[0].Spec.Containers[0]
		if have := env(c); have["GOMEMLIMIT"] != want || (have["GOGC"] != "") != (want != "") {
			t.Errorf("%s: GOMEMLIMIT %q, GOGC %q; want %q", values, have["GOMEMLIMIT"], have["GOGC"], want)
		}
	}
}

// One-shot pods are no workers: nothing that counts workers may count them.
func TestOnlyWorkersAreSelected(t *testing.T) {
	r := mustRender(t, example(t, "migrate-job"), "serviceMonitor: {enabled: true}\nretention: {cronJob: {enabled: true}}")
	selectors := map[string]map[string]string{
		"deployment": one[appsv1.Deployment](t, r, "Deployment").Spec.Selector.MatchLabels,
		"budget":     one[policyv1.PodDisruptionBudget](t, r, "PodDisruptionBudget").Spec.Selector.MatchLabels,
		"service":    one[corev1.Service](t, r, "Service").Spec.Selector,
		"spread":     one[appsv1.Deployment](t, r, "Deployment").Spec.Template.Spec.TopologySpreadConstraints[0].LabelSelector.MatchLabels,
	}
	for _, p := range pods(t, r) {
		for name, selector := range selectors {
			matches := true
			for key, value := range selector {
				matches = matches && p.Labels[key] == value
			}
			if matches != (p.of.kind == "Deployment") {
				t.Errorf("%s: the selector of the %s says %v", p.of, name, matches)
			}
		}
	}
}

func TestDisruptionAndSpread(t *testing.T) {
	r := mustRender(t, example(t, "kafka"))
	b := one[policyv1.PodDisruptionBudget](t, r, "PodDisruptionBudget").Spec
	if b.MaxUnavailable.String() != "1" || b.MinAvailable != nil || *b.UnhealthyPodEvictionPolicy != policyv1.AlwaysAllow {
		t.Errorf("budget %v", b)
	}
	var keys []string
	for _, c := range one[appsv1.Deployment](t, r, "Deployment").Spec.Template.Spec.TopologySpreadConstraints {
		keys = append(keys, c.TopologyKey)
		if c.WhenUnsatisfiable != corev1.ScheduleAnyway || len(c.MatchLabelKeys) != 1 || c.MatchLabelKeys[0] != "pod-template-hash" {
			t.Errorf("spread %v", c)
		}
	}
	if strings.Join(keys, " ") != "topology.kubernetes.io/zone kubernetes.io/hostname" {
		t.Errorf("spread over %v", keys)
	}
}

func TestNetworkPolicy(t *testing.T) {
	if all := mustRender(t, example(t, "kafka")).kind("NetworkPolicy"); len(all) > 0 {
		t.Error("there is a NetworkPolicy that nobody asked for")
	}
	p := one[networkingv1.NetworkPolicy](t, mustRender(t, example(t, "networkpolicy")), "NetworkPolicy").Spec
	if len(p.PolicyTypes) != 2 || len(p.Ingress) != 1 || len(p.Ingress[0].From) != 1 || p.Ingress[0].Ports[0].Port.String() != "9464" {
		t.Errorf("in comes %v", p.Ingress)
	}
	if len(p.Egress) != 3 || p.Egress[0].Ports[0].Port.String() != "53" || p.Egress[1].Ports[0].Port.String() != "5432" {
		t.Errorf("out goes %v", p.Egress)
	}
}

func TestMonitors(t *testing.T) {
	r := mustRender(t, example(t, "servicemonitor"))
	s := one[corev1.Service](t, r, "Service")
	if s.Spec.ClusterIP != "" || s.Spec.Ports[0].Name != "http" {
		t.Errorf("service %v", s.Spec)
	}
	// The monitor selects the Service by its labels.
	selector, _ := at(r.kind("ServiceMonitor")[0].fields, "spec", "selector", "matchLabels").(map[string]any)
	for key, value := range selector {
		if s.Labels[key] != value {
			t.Errorf("the ServiceMonitor wants %s: %v, the Service has %q", key, value, s.Labels[key])
		}
	}
	if s := one[corev1.Service](t, mustRender(t, example(t, "kafka"), "service: {enabled: true}"), "Service"); s.Spec.ClusterIP != corev1.ClusterIPNone {
		t.Errorf("a headless service has the address %q", s.Spec.ClusterIP)
	}
	r = mustRender(t, example(t, "podmonitor"))
	selector, _ = at(r.kind("PodMonitor")[0].fields, "spec", "selector", "matchLabels").(map[string]any)
	for key, value := range selector {
		if pods(t, r)[0].Labels[key] != value {
			t.Errorf("the PodMonitor wants %s: %v", key, value)
		}
	}
}

// Whoever goes, goes slowly, and never to nothing.
func TestScalers(t *testing.T) {
	h := one[autoscalingv2.HorizontalPodAutoscaler](t, mustRender(t, example(t, "hpa")), "HorizontalPodAutoscaler").Spec
	down := h.Behavior.ScaleDown
	if h.ScaleTargetRef.Name != "orders-dedupd" || *h.MinReplicas != 2 || h.MaxReplicas != 6 || *down.StabilizationWindowSeconds != 300 ||
		down.Policies[0].Value != 1 || down.Policies[0].PeriodSeconds != 120 {
		t.Errorf("HPA %v", h)
	}

	spec := mustRender(t, example(t, "keda-kafka")).kind("ScaledObject")[0].fields
	if at(spec, "spec", "minReplicaCount") != 1.0 || at(spec, "spec", "maxReplicaCount") != 12.0 ||
		at(spec, "spec", "advanced", "horizontalPodAutoscalerConfig", "behavior", "scaleDown", "stabilizationWindowSeconds") != 300.0 {
		t.Errorf("ScaledObject %v", spec["spec"])
	}
}

// What KEDA must know about brokers is what dedupd knows.
func TestKEDATriggers(t *testing.T) {
	triggers := func(layers ...string) (all []map[string]any) {
		list, _ := at(mustRender(t, layers...).kind("ScaledObject")[0].fields, "spec", "triggers").([]any)
		for _, item := range list {
			all = append(all, item.(map[string]any))
		}
		return all
	}
	same := func(have map[string]any, want map[string]string) {
		t.Helper()
		for key, value := range want {
			if at(have, "metadata", key) != value {
				t.Errorf("%s is %v, want %s", key, at(have, "metadata", key), value)
			}
		}
	}
	kafka := triggers(example(t, "keda-kafka"))
	if len(kafka) != 2 || kafka[0]["type"] != "kafka" {
		t.Fatalf("triggers %v", kafka)
	}
	same(kafka[1], map[string]string{
		"bootstrapServers": "kafka-0.kafka:9093,kafka-1.kafka:9093", "consumerGroup": "orders", "topic": "refunds", "lagThreshold": "10000",
		"offsetResetPolicy": "earliest", "excludePersistentLag": "true", "tls": "enable", "sasl": "scram_sha256",
	})
	same(triggers(example(t, "two-sources"), "autoscaling: {keda: {enabled: true}}")[0], map[string]string{
		"bootstrapServers": "kafka:9092", "offsetResetPolicy": "latest",
	})
	same(triggers(example(t, "keda-nats"))[0], map[string]string{
		"natsServerMonitoringEndpoint": "nats.nats.svc.cluster.local:8222", "account": "$G", "stream": "ORDERS", "consumer": "orders", "useHttps": "false",
	})
	same(triggers(example(t, "two-sources"), "autoscaling: {keda: {enabled: true, mode: nats, nats: {monitoringEndpoint: n:8222}}}")[0], map[string]string{
		"stream": "ORDERS", "consumer": "landing",
	})
	same(triggers(example(t, "keda-prometheus"))[0], map[string]string{
		"serverAddress": "http://prometheus.monitoring:9090", "threshold": "10000",
		"query": `sum(max by (scope, source, lane) (dedupd_lag_messages{namespace="default",pod=~"orders-dedupd-[a-z0-9]+-[a-z0-9]+"}))`,
	})

	several, auths := triggers(example(t, "pipelines")), mustRender(t, example(t, "pipelines")).kind("TriggerAuthentication")
	if len(several) != 4 || len(auths) != 2 {
		t.Fatalf("pipelines have the triggers %v and the authentications %v", several, auths)
	}
	for i, want := range []map[string]string{
		{"topic": "orders", "consumerGroup": "orders", "bootstrapServers": "kafka:9093"},
		{"topic": "orders", "consumerGroup": "order_search", "bootstrapServers": "kafka:9093"},
		{"topic": "payments", "consumerGroup": "landing", "bootstrapServers": "bank:9093"},
		{"topic": "refunds", "consumerGroup": "landing", "bootstrapServers": "bank:9093"},
	} {
		same(several[i], want)
		if have := at(several[i], "authenticationRef", "name"); have != auths[i/2].name {
			t.Errorf("trigger %d authenticates by %v, want %s", i, have, auths[i/2].name)
		}
	}

	auth := mustRender(t, example(t, "keda-kafka")).kind("TriggerAuthentication")
	refs, _ := at(auth[0].fields, "spec", "secretTargetRef").([]any)
	if len(auth) != 1 || len(refs) != 3 || at(kafka[0], "authenticationRef", "name") != auth[0].name {
		t.Errorf("authentication %v, %v", auth, refs)
	}
	own := "autoscaling: {keda: {triggerAuthentication: mine}}"
	if all := mustRender(t, example(t, "keda-kafka"), own).kind("TriggerAuthentication"); len(all) != 0 {
		t.Errorf("beside a TriggerAuthentication that exists there is %v", all)
	}
	if have := at(triggers(example(t, "keda-kafka"), own)[0], "authenticationRef", "name"); have != "mine" {
		t.Errorf("authentication %v", have)
	}
}

// A hook runs before anything of the chart is there.
func TestMigrationJobNeedsNothingOfTheChart(t *testing.T) {
	for _, values := range []string{
		example(t, "migrate-job"),
		example(t, "migrate-job") + "\nserviceAccount: {name: mine}",
		example(t, "existing-configmap") + "\nmigrations: {mode: job, job: {database: {name: orders-database-owner}}}",
	} {
		r := mustRender(t, values)
		j := one[batchv1.Job](t, r, "Job")
		if j.Annotations["helm.sh/hook"] != "pre-install,pre-upgrade" {
			t.Errorf("the job is no hook: %v", j.Annotations)
		}
		hooks := map[string]bool{}
		ours := map[string]bool{}
		for _, o := range r.objects {
			if o.annotation("helm.sh/hook") != "" {
				hooks[o.String()] = true
			} else {
				ours[o.String()] = true
			}
		}
		s := j.Spec.Template.Spec
		needs := []string{"ServiceAccount/" + s.ServiceAccountName}
		for _, v := range s.Volumes {
			if v.ConfigMap != nil {
				needs = append(needs, "ConfigMap/"+v.ConfigMap.Name)
			}
			if v.Projected != nil {
				for _, source := range v.Projected.Sources {
					needs = append(needs, "Secret/"+source.Secret.Name)
				}
			}
		}
		for _, need := range needs {
			if ours[need] && !hooks[need] {
				t.Errorf("%s: the hook needs %s, which isn't there yet", values, need)
			}
		}
		if !strings.Contains(strings.Join(needs, " "), "Secret/orders-database-owner") || strings.Contains(strings.Join(needs, " "), "Secret/orders-database ") {
			t.Errorf("%s: the hook needs %v", values, needs)
		}
		if got := strings.Join(s.Containers[0].Args, " "); !strings.HasPrefix(got, "migrate up -c ") {
			t.Errorf("the job runs %s", got)
		}
	}
}

func TestRetentionCronJob(t *testing.T) {
	c := one[batchv1.CronJob](t, mustRender(t, example(t, "retention-cronjob")), "CronJob").Spec
	if c.ConcurrencyPolicy != batchv1.ForbidConcurrent || *c.StartingDeadlineSeconds != 300 ||
		!strings.HasPrefix(strings.Join(c.JobTemplate.Spec.Template.Spec.Containers[0].Args, " "), "retention run -c ") {
		t.Errorf("CronJob %v", c)
	}
	var scopes []string
	for _, o := range mustRender(t, example(t, "pipelines")).kind("CronJob") {
		args := decode[batchv1.CronJob](t, o).Spec.JobTemplate.Spec.Template.Spec.Containers[0].Args
		scopes = append(scopes, strings.Join(args[len(args)-2:], " "))
	}
	if want := []string{"--scope orders", "--scope order_search", "--scope payments"}; !slices.Equal(scopes, want) {
		t.Errorf("CronJobs for %q, want %q", scopes, want)
	}
}

func TestHelmTest(t *testing.T) {
	o := mustRender(t, example(t, "kafka")).kind("Pod")[0]
	p := decode[corev1.Pod](t, o)
	if o.annotation("helm.sh/hook") != "test" || p.Spec.RestartPolicy != corev1.RestartPolicyNever ||
		!strings.HasPrefix(strings.Join(p.Spec.Containers[0].Args, " "), "doctor -c ") {
		t.Errorf("the test is %v", p)
	}
}

// A change of the configuration starts the pods anew, and nothing else does.
func TestChecksum(t *testing.T) {
	sum := func(layers ...string) string {
		return pods(t, mustRender(t, layers...))[0].Annotations["checksum/config"]
	}
	first := sum(example(t, "kafka"))
	if first == "" || first != sum(example(t, "kafka"), "replicas: 5") || first == sum(example(t, "kafka"), "config: {retention: {window: 8d}}") {
		t.Errorf("checksum %q, %q with another window", first, sum(example(t, "kafka"), "config: {retention: {window: 8d}}"))
	}
	if s := sum(example(t, "existing-configmap")); s != "" {
		t.Errorf("a ConfigMap that the chart can't read has the checksum %s", s)
	}
}

func TestNotes(t *testing.T) {
	for _, c := range []struct{ example, values, want string }{
		{"kafka", "", "kafka: Kafka, topics orders, group orders"},
		{"nats", "", "nats: NATS, stream ORDERS, durable orders"},
		{"kafka", "", "http://localhost:9464/metrics"},
		{"kafka", "replicas: 3\nconfig: {database: {max_connections: 8}}", "Up to 3 workers with 8 connections to the database each: 24 in all"},
		{"hpa", "", "Up to 6 workers with 4 connections to the database each: 24 in all"},
		{"kafka", "config: {retention: {window: 3d}}", "Claims are kept for 3d"},
		{"hpa", "", "beyond the number of partitions stand by"},
		{"kafka", "secrets: {database: {url: null}}", "WARNING: nothing says where the database is"},
		{"kafka", "secrets: {database: {url: null}}\nconfig: {database: {url: \"postgres://me:secret@db/orders\"}}", "WARNING: config.database.url holds a password"},
		{"kafka", "config: {sources: [{kafka: {brokers: [k:1], topics: [a], sasl: {mechanism: plain, username: u, password: p}}}]}", "sasl.password is in a ConfigMap"},
		{"kafka", "config: {batch: {inflight_bytes: 1GiB}}", "WARNING: resources.limits.memory is 512Mi, but batch.inflight_bytes, retention.filter_memory and 64 MiB come to 1344Mi"},
		{"pipelines", "config: {database: {max_connections: 8}}", "Up to 4 workers with 24 connections to the database each: 96 in all"},
		{"pipelines", "config: {retention: {filter_memory: 1GiB}}", "16 MiB and for each pipeline retention.filter_memory and 48 MiB come to 3296Mi"},
		{"kafka", "networkPolicy: {enabled: true}", "WARNING: networkPolicy.egress is empty"},
	} {
		if notes := mustRender(t, example(t, c.example), c.values).notes; !strings.Contains(notes, c.want) {
			t.Errorf("%s: %s: the notes are\n%s\nwant %s", c.example, c.values, notes, c.want)
		}
	}
	examples(t, func(t *testing.T, _ string, r *release) {
		if strings.Contains(r.notes, "WARNING") || strings.Contains(r.notes, "<no value>") {
			t.Error(r.notes)
		}
	})
}
