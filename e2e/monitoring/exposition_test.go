package monitoring

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/dedupd/dedupd/e2e/rig"
	"github.com/dedupd/dedupd/internal/natstest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

// What the real binary shows on /metrics is what the other tests believe it does,
// and promtool has nothing to say against it.
func TestExposition(t *testing.T) {
	url, js := natstest.Start(t)
	produceOrders(t, js)
	text := metricsOfAWorker(t, url, ordersDatabase(t))
	compareWithRegistered(t, text)
	lint := exec.Command(promtool(t), "check", "metrics")
	lint.Stdin = strings.NewReader(text)
	if out, err := lint.CombinedOutput(); err != nil {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}

func ordersDatabase(t *testing.T) (url string) {
	t.Helper()
	postgres, err := pgtest.StartServer(pgtest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = postgres.Stop() })
	pool, err := pgxpool.New(t.Context(), postgres.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(t.Context(), "CREATE TABLE public.orders (id text, payload jsonb)"); err != nil {
		t.Fatal(err)
	}
	return postgres.URL("postgres")
}

func produceOrders(t *testing.T, js jetstream.JetStream) {
	t.Helper()
	for i := range 20 { // ten orders, each twice, and one that has no id
		header := nats.Header{"message-id": {fmt.Sprint(i % 10)}}
		if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "orders", Header: header, Data: []byte("{}")}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := js.Publish(t.Context(), "orders", []byte("{}")); err != nil {
		t.Fatal(err)
	}
}

// metricsOfAWorker is what a worker shows once all has landed.
func metricsOfAWorker(t *testing.T, url, database string) (text string) {
	t.Helper()
	address, err := rig.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	config, log := filepath.Join(folder, "dedupd.yaml"), filepath.Join(folder, "log")
	if err := os.WriteFile(config, fmt.Appendf(nil, `
scope: orders
sources: [{name: shop, nats: {servers: [%q], stream: ORDERS}}]
database: {url: %q}
dead_letters: {max_share: 1}
sink: {table: {name: public.orders, columns: {id: id, payload: value}}}
http: {listen: %q}
`, url, database, address), 0o600); err != nil {
		t.Fatal(err)
	}
	worker, err := rig.Start(exec.Command(dedupd(t), "run", "-c", config), log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		worker.Kill()
		if t.Failed() {
			t.Log(rig.Tail(log))
		}
	})

	dead := regexp.MustCompile(`(?m)^dedupd_dead_letters_total\{class="no_id"\} 1$`)
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if text, err = scrape("http://" + address + "/metrics"); err == nil && dead.MatchString(text) {
			return text
		}
		if worker.Ended() || time.Now().After(end) {
			t.Fatalf("the messages don't land: %v", err)
		}
	}
}

// compareWithRegistered wants the binary to show what the other tests know, no less and
// no more.
func compareWithRegistered(t *testing.T, text string) {
	t.Helper()
	known := registered()
	found := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (dedupd_\w+)`).FindAllStringSubmatch(text, -1) {
		if _, ok := known[m[1]]; !ok {
			t.Errorf("the binary shows %s, which nothing here knows", m[1])
		}
		found[m[1]] = true
	}
	for name, labels := range known {
		// One with labels is there when something has happened.
		if !found[name] && len(labels) == 0 {
			t.Errorf("the binary doesn't show %s", name)
		}
	}
	for series := range ParseExposition(text, "worker-0", nil) {
		name, set, _ := strings.Cut(series, "{")
		labels, ok := known[name]
		if !ok {
			continue // a part of a histogram, or the runtime's
		}
		for _, m := range matcher.FindAllStringSubmatch(quoted.ReplaceAllString(set, `""`), -1) {
			if !slices.Contains(append([]string{"namespace", "job", "instance"}, labels...), m[1]) {
				t.Errorf("%s has the label %s, which nothing here knows", name, m[1])
			}
		}
	}
	for _, name := range others {
		if !strings.Contains(text, "\n"+name+" ") {
			t.Errorf("the binary doesn't show %s", name)
		}
	}
}

func scrape(url string) (string, error) {
	answer, err := http.Get(url) // #nosec: our own
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = errors.New(answer.Status)
	}
	return string(text), err
}
