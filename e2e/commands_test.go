package e2e

import (
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/e2e/rig"
)

// kafkaConfig is a small configuration for the table of orders.
func kafkaConfig(t *testing.T, scope string, tp *topic, url string) string {
	t.Helper()
	return configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - kafka: {brokers: [%q], topics: [%s]}\ndatabase:\n  url: %q\n%s",
		scope, tp.broker.Addr(), tp.name, url, ordersSink))
}

// A job: it lands what is there, tells how fast, and ends.
func TestRunUntilIdle(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	const messages, duplicates = 100_000, 20_000
	tp := newTopic(t, "e2e-idle", 4)
	plan, ids := newPlan(dice(t), messages, duplicates, 4)
	if err := tp.produceAll(plan, func() int { return 0 }); err != nil {
		t.Fatal(err)
	}
	config := kafkaConfig(t, "e2e-idle", tp, db.url)
	r := command(t, nil, "run", "-c", config, "--until-idle", "1s")
	if r.code != 0 || !regexp.MustCompile(`^100000 messages in \S+, \d+ msg/s\n$`).MatchString(r.stdout) {
		t.Fatalf("exit code %d, stdout %q, stderr:\n%s", r.code, r.stdout, r.stderr)
	}
	t.Logf("one worker: %s", r.stdout)
	log, err := tp.rawLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	db.audit(log, true)
	db.auditClaims("e2e-idle", ids)

	// The second time there is nothing to do, and that is no failure either.
	r = command(t, nil, "run", "-c", config, "--until-idle", "500ms")
	if r.code != 0 || !strings.HasPrefix(r.stdout, "0 messages") {
		t.Errorf("again: exit code %d, stdout %q, stderr:\n%s", r.code, r.stdout, r.stderr)
	}
	if _, sum := db.settledBooks("e2e-idle"); sum.Fetched != messages {
		t.Errorf("the books say %d fetched, want %d", sum.Fetched, messages)
	}
}

// A short run has all in one batch, and none that would carry what the broker has
// confirmed of it. An operator's reset of the group is followed all the same.
func TestResetAfterAShortRun(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	const messages = 100
	tp := newTopic(t, "e2e-reset", 1)
	plan, _ := newPlan(dice(t), messages, 0, 1)
	if err := tp.produceAll(plan, func() int { return 0 }); err != nil {
		t.Fatal(err)
	}
	config := kafkaConfig(t, "e2e-reset", tp, db.url)
	for run, want := range []string{"100 messages", "100 messages", "0 messages"} {
		r := command(t, nil, "run", "-c", config, "--until-idle", "500ms")
		if r.code != 0 || !strings.HasPrefix(r.stdout, want) {
			t.Fatalf("run %d: exit code %d, stdout %q, want %s; stderr:\n%s", run, r.code, r.stdout, want, r.stderr)
		}
		if run == 0 {
			if err := tp.broker.SetCommitted(t.Context(), "e2e-reset", tp.name, 0, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, sum := db.settledBooks("e2e-reset"); sum.Applied != messages || sum.Duplicates != messages {
		t.Errorf("the books say %+v, want %d applied and %d duplicates", sum, messages, messages)
	}
}

// What scripts rely on: which mistake gives which exit code, and that the message
// names it.
func TestExitCodes(t *testing.T) {
	db := newDatabase(t)
	tp := newTopic(t, "e2e-codes", 1)
	good := kafkaConfig(t, "e2e-codes", tp, db.url)
	address, err := url.Parse(db.url)
	if err != nil {
		t.Fatal(err)
	}
	password, _ := address.User.Password()
	run := func(config string) result {
		return command(t, nil, "run", "-c", config, "--until-idle", "1s")
	}
	check := func(what string, r result, code int, says string) {
		t.Helper()
		if r.code != code || !strings.Contains(r.stderr, says) {
			t.Errorf("%s: exit code %d, want %d; stderr, which should say %q:\n%s", what, r.code, code, says, r.stderr)
		}
		if strings.Contains(r.stderr, password) {
			t.Errorf("%s: it tells the password:\n%s", what, r.stderr)
		}
	}

	check("an unknown key", run(configFile(t, "scope: orders\nsauces: []\n")), 2, "sauces")
	check("no file", run("nowhere.yaml"), 2, "nowhere.yaml")
	check("an unknown flag", command(t, nil, "run", "--until-lunch"), 2, "until-lunch")
	check("no such command", command(t, nil, "walk"), 2, "walk")

	check("no server", run(kafkaConfig(t, "e2e-codes", tp, "postgres://nobody@"+closedPort(t)+"/none")), 3, "connect")
	check("no such database", run(kafkaConfig(t, "e2e-codes", tp, strings.Replace(db.url, address.Path, "/nosuch", 1))), 3, "nosuch")
	check("no table for the sink", run(good), 3, "public.orders")

	db.exec(ordersTable)
	if err := tp.produce(&kgo.Record{Value: []byte(`{"n":1}`), Headers: []kgo.RecordHeader{{Key: idHeader, Value: []byte("order-0000001")}}}); err != nil {
		t.Fatal(err)
	}
	if r := run(good); r.code != 0 {
		t.Fatalf("with its table: exit code %d: %s", r.code, r.stderr)
	}
	db.awaitRows("public.orders", 1, 0)
	db.exec("INSERT INTO dedupd.migrations (version, name) VALUES (99, 'tomorrow')")
	check("a schema of a later version", run(good), 3, "99")
}

// closedPort is an address where nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	address, err := rig.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	return address
}
