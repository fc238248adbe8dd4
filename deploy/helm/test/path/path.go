// Package path is a newcomer's way from a clone to rows: image, chart, workers
// under a container runtime, an outage, an upgrade under load, and the books.
package path

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/dedupd/dedupd/deploy/helm/test/node"
	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

// Cluster is where the chart is installed. The pods run on this machine, by package
// node.
type Cluster interface {
	// Deploy installs the chart as the release orders, or upgrades it, and tells what
	// Deployment and which ConfigMaps there are then.
	Deploy(t *testing.T, values string) (*appsv1.Deployment, map[string]map[string]string)
	// Admit creates one of a Deployment's pods, and tells what the cluster has made
	// of its spec.
	Admit(t *testing.T, pod corev1.PodTemplateSpec) corev1.PodSpec
	// Test runs what `helm test` runs: run comes back with the exit code.
	Test(t *testing.T, run func(corev1.PodSpec) (code int))
}

// Run goes from a clone to rows: it builds the image, installs the chart, runs what
// the chart says under a container runtime against a real Kafka and a real
// Postgres, stops the database for a while, rolls both workers under load, and
// reads the books. It asks throughout whether the probes tell the truth. repo is
// the repository's root.
func Run(t *testing.T, repo string, cluster Cluster) {
	if err := node.Tools(); err != nil {
		t.Fatal(err)
	}
	p := newPath(t, repo, cluster)
	workers := p.deployment("v1")
	p.start(workers, 0)
	p.start(workers, 1)
	p.isRestricted(0)

	stop := p.produce()
	p.rows(1000)

	// An outage of the database: nobody is ready, nobody is restarted.
	if err := p.postgres.Kill(); err != nil {
		t.Fatal(err)
	}
	p.within(30*time.Second, "both workers say that they aren't ready", func() bool { return !p.pods[0].Ready() && !p.pods[1].Ready() })
	if err := p.postgres.Restart(); err != nil {
		t.Fatal(err)
	}
	p.within(60*time.Second, "both workers are ready again", func() bool { return p.pods[0].Ready() && p.pods[1].Ready() })

	// A new version, as the Deployment's strategy has it: one goes, its successor
	// comes, and only then the next.
	next := p.deployment("v2")
	if s := next.Spec.Strategy.RollingUpdate; s.MaxUnavailable.IntVal != 1 || s.MaxSurge.IntVal != 0 {
		t.Fatalf("the strategy is %+v, and not the one that is played here", s)
	}
	if next.Spec.Template.Annotations["checksum/config"] == workers.Spec.Template.Annotations["checksum/config"] {
		t.Error("the configuration has changed, and the pod template hasn't: nothing would be rolled")
	}
	for i := range p.pods {
		before := p.count()
		p.stop(i)
		p.start(next, i)
		p.rows(before + 500)
	}

	sent, ids := stop()
	p.rows(ids)
	p.doctor()
	p.stop(0)
	p.stop(1)
	p.balance(sent, ids)
}

type path struct {
	t          *testing.T
	cluster    Cluster
	image      string
	broker     *kafkatest.Broker
	postgres   *pgtest.Server
	pool       *pgxpool.Pool
	configMaps map[string]map[string]string
	pods       [2]*node.Pod
	started    int
}

func newPath(t *testing.T, repo string, cluster Cluster) *path {
	p := &path{t: t, cluster: cluster}
	build := exec.Command("make", "-s", "image", "VERSION=newcomer")
	build.Dir = repo
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("make image: %v\n%s", err, text)
	}
	root, err := filepath.Abs(repo)
	if err != nil {
		t.Fatal(err)
	}
	p.image = filepath.Join(root, ".bin", "image") + ":newcomer"

	t.Setenv(kafkatest.LibsEnv, filepath.Join(root, ".cache", "kafka-4.1.0-libs"))
	p.broker = kafkatest.Own(t)
	if err := p.broker.CreateTopic(t.Context(), "orders", 4, nil); err != nil {
		t.Fatal(err)
	}
	if p.postgres, err = pgtest.StartServer(pgtest.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.postgres.Stop(); err != nil {
			t.Error(err)
		}
	})
	if p.pool, err = pgxpool.New(t.Context(), p.postgres.URL("postgres")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.pool.Close)
	if _, err := p.pool.Exec(t.Context(), `CREATE TABLE orders (id text NOT NULL, body jsonb NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return p
}

// deployment deploys the chart; a version is another log level.
func (p *path) deployment(version string) (d *appsv1.Deployment) {
	level := map[string]string{"v1": "info", "v2": "debug"}[version]
	d, p.configMaps = p.cluster.Deploy(p.t, fmt.Sprintf(`
image: {tag: newcomer}
replicas: 2
minReadySeconds: 2
config:
  scope: orders
  log: {level: %s}
  sources:
    - kafka: {brokers: [%q], topics: [orders]}
  sink:
    table:
      name: public.orders
      columns: {id: id, body: value}
secrets:
  database:
    url: {name: orders-database}
`, level, p.broker.Addr()))
	return d
}

// pod runs a pod's spec on this machine.
func (p *path) pod(spec corev1.PodSpec) *node.Pod {
	p.started++
	name := fmt.Sprintf("dedupd-%d-%d", os.Getpid(), p.started)
	log, err := os.Create(filepath.Join(p.t.TempDir(), "log"))
	if err != nil {
		p.t.Fatal(err)
	}
	pod, err := node.Start(p.t.Context(), node.Options{
		Image: p.image, Dir: p.t.TempDir(), Name: name, Address: fmt.Sprintf("127.0.7.%d", p.started), Spec: spec, ConfigMaps: p.configMaps,
		Secrets: map[string]map[string]string{"orders-database": {"url": p.postgres.URL("postgres")}},
		Log:     log,
	})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		pod.Kill()
		text, err := os.ReadFile(log.Name())
		if err == nil && p.t.Failed() {
			p.t.Logf("log of %s:\n%s", name, text)
		}
		_ = log.Close()
	})
	return pod
}

// start runs one of a Deployment's pods and waits until it counts as available.
func (p *path) start(d *appsv1.Deployment, i int) {
	p.t.Helper()
	pod := p.pod(p.cluster.Admit(p.t, d.Spec.Template))
	p.pods[i] = pod
	p.within(60*time.Second, "a worker is ready", func() bool {
		select {
		case <-pod.Done():
			p.t.Fatalf("the worker has ended with %d", pod.Code())
		default:
		}
		return pod.Ready()
	})
	time.Sleep(time.Duration(d.Spec.MinReadySeconds) * time.Second)
	if !pod.Ready() {
		p.t.Fatalf("a worker was ready only for a moment: %+v", pod.Answers())
	}
}

// stop ends a pod, and asks whether its probes have told the truth.
func (p *path) stop(i int) {
	p.t.Helper()
	pod := p.pods[i]
	asked := time.Now()
	code, killed := pod.Stop()
	if code != 0 || killed {
		p.t.Errorf("a worker that was told to end did so with %d, killed: %v", code, killed)
	}
	started := false
	for _, a := range pod.Answers() {
		switch {
		case a.Probe == "startup":
			started = started || a.OK
		case a.At.After(asked):
		case a.Probe == "liveness" && !a.OK:
			p.t.Errorf("the liveness probe failed in a worker that lived: %s", a.Text)
		}
	}
	if !started {
		p.t.Error("the startup probe never succeeded")
	}
}

// isRestricted looks from outside at what the container may do.
func (p *path) isRestricted(i int) {
	p.t.Helper()
	pid, err := p.pods[i].Pid()
	if err != nil {
		p.t.Fatal(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, want := range []string{
		`Uid:\s65532\s65532\s65532\s65532`, `Gid:\s65532\s65532\s65532\s65532`, `NoNewPrivs:\s1`, `Seccomp:\s2`,
		`CapInh:\s0+`, `CapPrm:\s0+`, `CapEff:\s0+`, `CapBnd:\s0+`, `CapAmb:\s0+`,
	} {
		if !regexp.MustCompile(`(?m)^` + want + `$`).Match(status) {
			p.t.Errorf("want %s in\n%s", want, status)
		}
	}
	mounts, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		p.t.Fatal(err)
	}
	defer mounts.Close()
	found := 0
	for s := bufio.NewScanner(mounts); s.Scan(); {
		f := strings.Fields(s.Text())
		if f[4] == "/" || strings.HasPrefix(f[4], "/etc/dedupd") {
			found++
			if options := "," + f[5] + ","; !strings.Contains(options, ",ro,") {
				p.t.Errorf("%s can be written to: %s", f[4], f[5])
			}
		}
	}
	if found < 3 {
		p.t.Errorf("root, configuration and secrets make three mounts, not %d", found)
	}
	response, err := http.Get(p.pods[i].URL("/metrics"))
	if err != nil {
		p.t.Fatal(err)
	}
	defer response.Body.Close()
	if text, _ := io.ReadAll(response.Body); !strings.Contains(string(text), `dedupd_build_info{`) {
		p.t.Error("/metrics has no dedupd_build_info")
	}
}

// produce sends until it is told to stop; every fifth message is a resend of an
// earlier one. stop tells how many were sent and how many ids they had.
func (p *path) produce() (stop func() (sent, ids int64)) {
	client, err := kgo.NewClient(kgo.SeedBrokers(p.broker.Addr()), kgo.DefaultProduceTopic("orders"))
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(p.t.Context())
	var sent, ids atomic.Int64
	var producing sync.WaitGroup
	producing.Go(func() {
		for ctx.Err() == nil {
			n := ids.Load()
			if rand.IntN(5) == 0 && n > 0 {
				n = rand.Int64N(n)
			} else {
				ids.Add(1)
			}
			body, _ := json.Marshal(map[string]int64{"order": n})
			client.Produce(context.WithoutCancel(ctx), &kgo.Record{
				Value: body, Headers: []kgo.RecordHeader{{Key: "message-id", Value: fmt.Append(nil, "order-", n)}},
			}, func(_ *kgo.Record, err error) {
				if err != nil {
					p.t.Errorf("produce: %v", err)
				}
			})
			sent.Add(1)
			time.Sleep(time.Millisecond)
		}
	})
	return func() (int64, int64) {
		cancel()
		producing.Wait()
		if err := client.Flush(context.WithoutCancel(p.t.Context())); err != nil {
			p.t.Fatal(err)
		}
		client.Close()
		return sent.Load(), ids.Load()
	}
}

func (p *path) count() (n int64) {
	_ = p.pool.QueryRow(p.t.Context(), `SELECT count(*) FROM orders`).Scan(&n) // 0 while the database is away
	return n
}

// rows waits until the table has so many.
func (p *path) rows(n int64) {
	p.t.Helper()
	p.within(60*time.Second, fmt.Sprintf("the table has %d rows", n), func() bool { return p.count() >= n })
}

func (p *path) within(d time.Duration, what string, done func() bool) {
	p.t.Helper()
	for end := time.Now().Add(d); !done(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			for _, pod := range p.pods {
				if pod != nil {
					a := pod.Answers()
					p.t.Logf("probes: %+v", a[max(0, len(a)-6):])
				}
			}
			p.t.Fatalf("it took more than %s until %s", d, what)
		}
	}
}

// doctor runs what `helm test` runs.
func (p *path) doctor() {
	p.t.Helper()
	p.cluster.Test(p.t, func(spec corev1.PodSpec) int {
		pod := p.pod(spec)
		select {
		case <-pod.Done():
		case <-time.After(60 * time.Second):
			p.t.Fatal("helm test's pod doesn't come to its end")
		}
		if pod.Code() != 0 {
			p.t.Errorf("helm test's pod ended with %d", pod.Code())
		}
		return pod.Code()
	})
}

// balance compares the books with what was sent, and the table with its ids.
func (p *path) balance(sent, ids int64) {
	p.t.Helper()
	var fetched, applied, duplicates, others, rows, distinct int64
	if err := p.pool.QueryRow(p.t.Context(), `
		SELECT b.*, o.* FROM
			(SELECT sum(fetched), sum(applied), sum(duplicates), sum(conflicts + dead) FROM dedupd.books WHERE scope = 'orders') b,
			(SELECT count(*), count(DISTINCT id) FROM orders) o`).
		Scan(&fetched, &applied, &duplicates, &others, &rows, &distinct); err != nil {
		p.t.Fatal(err)
	}
	if fetched != sent || applied != ids || duplicates != sent-ids || others != 0 || rows != ids || distinct != ids {
		p.t.Errorf("%d messages of %d ids were sent; the books have %d fetched, %d applied, %d duplicates, %d others; the table has %d rows of %d ids",
			sent, ids, fetched, applied, duplicates, others, rows, distinct)
	}
	p.t.Logf("%d messages, %d ids: %d applied, %d duplicates", sent, ids, applied, duplicates)
}
