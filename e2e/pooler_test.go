package e2e

import (
	"fmt"
	"testing"

	"github.com/dedupd/dedupd/internal/pgtest"
)

// The whole worker behind a transaction pooler: each transaction meets another
// connection, and nothing may be prepared. The generations rotate meanwhile.
func TestThroughATransactionPooler(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	const messages, duplicates = 100_000, 20_000
	tp := newTopic(t, "e2e-pooler", 4)
	plan, ids := newPlan(dice(t), messages, duplicates, 4)
	if err := tp.produceAll(plan, func() int { return 0 }); err != nil {
		t.Fatal(err)
	}
	config := configFile(t, fmt.Sprintf("scope: e2e-pooler\nsources:\n  - kafka: {brokers: [%q], topics: [%s]}\ndatabase: {url: %q, pooler: pgbouncer_transaction}\n%s%s",
		tp.broker.Addr(), tp.name, pgtest.NewPooler(t, db.url, 3), ordersSink, rotating))
	r := command(t, nil, "run", "-c", config, "--until-idle", "2s")
	if r.code != 0 {
		t.Fatalf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
	log, err := tp.rawLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	db.audit(log, true)
	db.auditClaims("e2e-pooler", ids)
	for _, args := range [][]string{
		{"retention", "run", "--rotate"}, {"retention", "status"}, {"retention", "advise"}, {"stats"}, {"dlq", "list"}, {"lanes", "list"}, {"claims", "why", "nobody"},
	} {
		if r := command(t, nil, append(args, "-c", config)...); r.code != 0 {
			t.Errorf("%q: exit code %d, stderr:\n%s", args, r.code, r.stderr)
		}
	}
}
