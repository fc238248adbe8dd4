package e2e

import (
	"bufio"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dedupd/dedupd/internal/pgtest"
)

// metrics are a worker's, by name and labels as the text format has them, and
// summed by name.
func (w *worker) metrics() (series, sums map[string]float64) {
	w.t.Helper()
	status, body := w.get("/metrics")
	if status != 200 {
		w.t.Fatalf("%s: /metrics answers %d: %s", w.name, status, body)
	}
	series, sums = map[string]float64{}, map[string]float64{}
	lines := bufio.NewScanner(strings.NewReader(body))
	for lines.Scan() {
		line := lines.Text()
		at := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || at < 0 {
			continue
		}
		value, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			w.t.Fatalf("%s: %q: %v", w.name, line, err)
		}
		name, _, _ := strings.Cut(line[:at], "{")
		series[line[:at]] = value
		sums[name] += value
	}
	return series, sums
}

// checkMetrics compares the counters of the only worker a scope ever had with
// the books.
func (db *database) checkMetrics(w *worker, scope, source string) {
	db.t.Helper()
	lanes, sum := db.settledBooks(scope)
	series, sums := w.metrics()
	for outcome, want := range map[string]int64{"applied": sum.Applied, "duplicate": sum.Duplicates, "conflict": sum.Conflicts, "dead": sum.Dead, "filtered": sum.Filtered} {
		name := fmt.Sprintf(`dedupd_messages_total{outcome=%q,source=%q}`, outcome, source)
		if got := series[name]; got != float64(want) {
			db.t.Errorf("%s is %g, the books say %d", name, got, want)
		}
	}
	for cause, want := range map[string]int64{"redelivery": sum.Redelivered, "resend": sum.Resent, "cross_source": sum.CrossSource} {
		name := fmt.Sprintf(`dedupd_duplicates_total{cause=%q,source=%q}`, cause, source)
		if got := series[name]; got != float64(want) {
			db.t.Errorf("%s is %g, the books say %d", name, got, want)
		}
	}
	// Fetched is what came from the broker, so what was left to somebody else, or
	// read again, is in it.
	fetched := sums["dedupd_messages_fetched_total"] - sums["dedupd_messages_abandoned_total"]
	if fetched != float64(sum.Fetched) {
		db.t.Errorf("the metrics have %g messages fetched and not abandoned, the books %d fetched", fetched, sum.Fetched)
	}
	for lane, p := range lanes {
		name := fmt.Sprintf(`dedupd_lane_position{lane=%q,source=%q}`, lane, source)
		if got, ok := series[name]; !ok || got != float64(p.NextPosition) {
			db.t.Errorf("%s is %g, the books say %d", name, got, p.NextPosition)
		}
	}
	if n, ok := sums["dedupd_build_info"]; !ok || n != 1 {
		db.t.Errorf("dedupd_build_info is %g", n)
	}
}

// The probes of a running worker, before, while and after Postgres is away: an
// outage must not have the worker restarted, and it goes on by itself.
func TestProbes(t *testing.T) {
	needServices(t)
	server, err := pgtest.StartServer(pgtest.Options{Fsync: true})
	if err != nil {
		t.Fatal("Postgres: ", err, postgresAdvice)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	const scope = "e2e-probes"
	db := createDatabase(t, server, "probes")
	db.exec(ordersTable)
	tp := newTopic(t, "e2e-probes", 2)
	w := newWorker(t, "worker", kafkaConfig(t, scope, tp, db.url))
	w.start()
	t.Logf("started after %.2f s", w.probe("/startupz", 200, 20*time.Second).Seconds())
	t.Logf("ready after another %.2f s", w.probe("/readyz", 200, 20*time.Second).Seconds())
	w.probe("/livez", 200, 0)
	if status, _ := w.get("/nothing"); status != 404 {
		t.Errorf("a path that isn't there: %d", status)
	}

	rng := dice(t)
	plan, ids := newPlan(rng, 5000, 1000, 2)
	if err := tp.produceAll(plan, atOnce); err != nil {
		t.Fatal(err)
	}
	db.awaitRows("public.orders", int64(ids), 30*time.Second)
	awaitBooks(db, scope, 5000)
	db.checkMetrics(w, scope, "kafka")

	pid := w.Pid()
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	t.Logf("not ready %.2f s after Postgres has crashed", w.probe("/readyz", 503, 10*time.Second).Seconds())
	later := plain(ids, 1000)
	if err := tp.produceAll(later, atOnce); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		w.probe("/livez", 200, 0)
		w.probe("/startupz", 200, 0)
		if status, body := w.get("/readyz"); status != 503 {
			t.Fatalf("/readyz answers %d while Postgres is away: %s", status, body)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	t.Logf("ready again %.2f s after Postgres is up", w.probe("/readyz", 200, 20*time.Second).Seconds())
	db.pool.Reset()
	t.Logf("goes on within another %.2f s", db.awaitRows("public.orders", int64(ids+len(later)), 30*time.Second).Seconds())
	awaitBooks(db, scope, 6000)
	if w.Ended() || w.Pid() != pid {
		t.Fatal("it isn't the same process any more")
	}
	db.checkMetrics(w, scope, "kafka")
	w.drain(drainLimit)
	log, err := tp.rawLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	db.audit(log, true)
	db.auditClaims(scope, ids+len(later))
	if _, sum := db.settledBooks(scope); sum.Fetched != 6000 || sum.Duplicates != 1000 {
		t.Errorf("the books say %+v; want 6000 fetched, 1000 duplicates", sum)
	}
}

// awaitBooks waits until so many messages, or more, are booked: the last ones may
// be duplicates, of which the sink shows nothing.
func awaitBooks(db *database, scope string, fetched int64) {
	db.t.Helper()
	await(db.t, fmt.Sprintf("%d messages in the books", fetched), 30*time.Second, func() error {
		if _, sum := db.settledBooks(scope); sum.Fetched < fetched {
			return fmt.Errorf("%d are", sum.Fetched)
		}
		return nil
	})
}
