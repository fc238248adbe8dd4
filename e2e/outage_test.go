package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/dedupd/dedupd/internal/kafkatest"
)

// A broker that goes away and comes back: the worker isn't ready meanwhile, but
// alive, and goes on by itself with what is there afterwards.

func TestKafkaOutage(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	broker := kafkatest.Own(t)
	tp := createTopic(t, broker, "e2e-outage", 2)
	outage{
		db: db, worker: newWorker(t, "worker", kafkaConfig(t, "e2e-outage", tp, db.url)),
		produce: func(plan []send) error { return tp.produceAll(plan, atOnce) },
		stop:    broker.Kill, start: broker.Restart,
	}.run(t, 2)
	log, err := tp.rawLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	db.audit(log, true)
}

func TestNATSOutage(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	st := newStream(t, "OUTAGE")
	config := configFile(t, fmt.Sprintf("scope: e2e-outage\nsources:\n  - nats: {servers: [%q], stream: %s}\ndatabase:\n  url: %q\n%s",
		st.url, st.name, db.url, ordersSink))
	outage{
		db: db, worker: newWorker(t, "worker", config),
		produce: func(plan []send) error { return st.publishAll(plan, atOnce) },
		stop:    func() error { st.stopServer(); return nil },
		start:   func() error { st.startServer(); return nil },
	}.run(t, 1)
	log, err := st.rawLog(t.Context(), "queue")
	if err != nil {
		t.Fatal(err)
	}
	db.audit(log, false)
}

type outage struct {
	db      *database
	worker  *worker
	produce func([]send) error
	stop    func() error
	start   func() error
}

func (o outage) run(t *testing.T, partitions int32) {
	t.Helper()
	w := o.worker
	w.start()
	plan, ids := newPlan(dice(t), 2000, 400, partitions)
	if err := o.produce(plan); err != nil {
		t.Fatal(err)
	}
	o.db.awaitRows("public.orders", int64(ids), 30*time.Second)
	w.probe("/readyz", 200, 5*time.Second)

	if err := o.stop(); err != nil {
		t.Fatal(err)
	}
	t.Logf("not ready %.1f s after the broker is gone", w.probe("/readyz", 503, 30*time.Second).Seconds())
	w.probe("/livez", 200, 0)
	if err := o.start(); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	if err := o.produce(plain(ids, 1000)); err != nil {
		t.Fatal(err)
	}
	o.db.awaitRows("public.orders", int64(ids+1000), 60*time.Second)
	t.Logf("landed %.1f s after the broker is back", time.Since(back).Seconds())
	w.probe("/readyz", 200, 20*time.Second)
	awaitBooks(o.db, "e2e-outage", 3000)
	w.drain(drainLimit)
}
