package e2e

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/twmb/franz-go/pkg/kgo"
)

// The same events come by Kafka and by NATS, as while a producer moves from one
// to the other: what came by one is a duplicate when it comes by the other. It
// runs by the sample configuration as it is.
func TestTwoSources(t *testing.T) {
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.events (id text PRIMARY KEY, payload jsonb NOT NULL, arrived_by text NOT NULL, at timestamptz NOT NULL)`)
	tp := newTopic(t, "events", 2)
	st := newStream(t, "EVENTS")
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, "worker", filepath.Join(root, "configs", "kafka-and-nats.yaml"),
		"KAFKA_BROKERS="+tp.broker.Addr(), "NATS_SERVERS="+st.url, "DATABASE_URL="+db.url)
	w.start()

	// Three thousand events: a third by each way alone, a third by both at once;
	// by Kafka in the binary mode of CloudEvents, by NATS in the structured one.
	const events = 3000
	var records []*kgo.Record
	sent := make(chan error, 1)
	for n := range events {
		if n%3 != 1 {
			records = append(records, &kgo.Record{Partition: int32(n % 2), Value: fmt.Appendf(nil, `{"n":%d}`, n), Headers: []kgo.RecordHeader{
				{Key: "ce_specversion", Value: []byte("1.0")},
				{Key: "ce_type", Value: []byte("test")},
				{Key: "ce_source", Value: []byte("/e2e")},
				{Key: "ce_id", Value: fmt.Append(nil, n)},
			}})
		}
	}
	go func() { sent <- tp.produce(records...) }()
	for n := range events {
		if n%3 == 0 {
			continue
		}
		msg := natsgo.NewMsg("EVENTS.test")
		msg.Header.Set("ce-source", "/e2e")
		msg.Header.Set("ce-id", fmt.Sprint(n))
		msg.Data = fmt.Appendf(nil, `{"n":%d}`, n)
		if _, err := st.js.PublishMsg(t.Context(), msg); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	awaitBooks(db, "events", events*4/3)
	lanes, sum := db.settledBooks("events")
	if sum.Applied != events || sum.CrossSource != events/3 || sum.Duplicates != sum.CrossSource || sum.Conflicts != 0 || sum.Dead != 0 || len(lanes) != 3 {
		t.Errorf("the books say %+v in %d lanes; want %d applied and %d duplicates by the other source", sum, len(lanes), events, events/3)
	}
	if n := one[int64](db, "SELECT count(DISTINCT payload) FROM public.events"); n != events {
		t.Errorf("%d payloads landed, want %d", n, events)
	}
	ways := one[int64](db, "SELECT count(DISTINCT arrived_by) FROM public.events")
	if ways != 3 {
		t.Errorf("events arrived by %d lanes, want 2 of Kafka's and the queue", ways)
	}
	w.probe("/readyz", 200, 5*time.Second)
	w.drain(drainLimit)
}
