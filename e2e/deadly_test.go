package e2e

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/twmb/franz-go/pkg/kgo"
)

const deadlySink = `
id: {from: header:message-id}
sink: {deadly: {}}
`

// deadlyAt is the message that ends the process.
const deadlyAt = 137

func deadlyBody(n int, do string) []byte { return fmt.Appendf(nil, `{"n":%d,"do":%q}`, n, do) }

// supervise starts the worker again whenever it ends, until nothing is left to
// be done, and returns how often it did.
func supervise(t *testing.T, w *worker, code int, between func(), done func() error) (restarts int) {
	t.Helper()
	const most = 6
	end := time.Now().Add(4 * time.Minute)
	for w.start(); ; {
		time.Sleep(50 * time.Millisecond)
		err := done()
		switch {
		case err == nil:
			return restarts
		case time.Now().After(end):
			t.Fatalf("not done in time, after %d restarts: %v", restarts, err)
		case !w.Ended():
			continue
		case w.Code() != code:
			t.Fatalf("the worker has ended with code %d, want %d", w.Code(), code)
		case restarts == most:
			t.Fatalf("the worker has ended %d times: %v", most+1, err)
		}
		restarts++
		between()
		w.start()
	}
}

// judgeDeadly demands that all but one of the messages have landed, once each,
// and that this one is a dead letter.
func (db *database) judgeDeadly(messages int64, id string) {
	db.t.Helper()
	if n, ids := one[int64](db, "SELECT count(*) FROM public.orders"), one[int64](db, "SELECT count(DISTINCT id) FROM public.orders"); n != messages-1 || ids != n {
		db.t.Errorf("%d rows of %d ids, want %d", n, ids, messages-1)
	}
	letters := column[string](db, "SELECT class || ' ' || convert_from(message_id, 'UTF8') || ': ' || reason FROM dedupd.dead_letters")
	if len(letters) != 1 || !strings.HasPrefix(letters[0], "poison "+id+": the worker ended 3 times while it applied this message") {
		db.t.Errorf("the dead letters are %q, want one, of %s", letters, id)
	}
	if n := one[int64](db, "SELECT count(*) FROM dedupd.attempts"); n != 0 {
		db.t.Errorf("%d attempts stay noted", n)
	}
}

func (db *database) landed(messages int64) func() error {
	return func() error {
		// Before the worker's first start there are no tables of its own.
		if n := one[int64](db, "SELECT count(*) FROM public.orders"); n < messages-1 {
			return fmt.Errorf("%d rows", n)
		}
		if n := one[int64](db, "SELECT count(*) FROM dedupd.dead_letters"); n == 0 {
			return fmt.Errorf("no dead letter")
		}
		return nil
	}
}

// A message that ends the process becomes a dead letter after a few restarts, and
// it alone.
func TestKafkaMessageEndsTheProcess(t *testing.T) {
	needServices(t)
	t.Parallel()
	const scope, messages = "e2e-deadly", 300
	db := newDatabase(t)
	db.exec(ordersTable)
	tp := newTopic(t, scope, 2)
	var records []*kgo.Record
	for i := range messages {
		do := ""
		if i == deadlyAt {
			do = "exit"
		}
		records = append(records, &kgo.Record{
			Partition: int32(i % 2), Value: deadlyBody(i, do),
			Headers: []kgo.RecordHeader{{Key: idHeader, Value: []byte(send{n: int32(i)}.id())}},
		})
	}
	if err := tp.produce(records...); err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, "worker", configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - kafka: {brokers: [%q], topics: [%s]}\ndatabase:\n  url: %q\n%s",
		scope, tp.broker.Addr(), tp.name, db.url, deadlySink)))
	w.binary = build(t, "./e2e/deadly")
	began := time.Now()
	restarts := supervise(t, w, 2, func() {}, db.landed(messages))
	t.Logf("done after %d restarts, in %.0f s", restarts, time.Since(began).Seconds())
	w.drain(drainLimit)
	db.judgeDeadly(messages, send{n: deadlyAt}.id())
	if _, sum := db.settledBooks(scope); sum.Fetched != messages || sum.Applied != messages-1 || sum.Dead != 1 {
		t.Errorf("the books say %+v", sum)
	}
}

func TestNATSMessageEndsTheProcess(t *testing.T) {
	needServices(t)
	t.Parallel()
	const scope, messages = "e2e-deadly", 300
	db := newDatabase(t)
	db.exec(ordersTable)
	st := newStream(t, "DEADLY")
	for i := range messages {
		do := ""
		if i == deadlyAt {
			do = "kill"
		}
		st.publish(send{n: int32(i)}.id(), deadlyBody(i, do))
	}
	w := newWorker(t, "worker", configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - nats: {servers: [%q], stream: %s}\ndatabase:\n  url: %q\n%s",
		scope, st.url, st.name, db.url, deadlySink)))
	w.binary = build(t, "./e2e/deadly")
	began := time.Now()
	restarts := supervise(t, w, -1, func() { st.deliverAgain(scope) }, db.landed(messages))
	t.Logf("done after %d restarts, in %.0f s", restarts, time.Since(began).Seconds())
	w.drain(drainLimit)
	db.judgeDeadly(messages, send{n: deadlyAt}.id())
	if _, sum := db.settledBooks(scope); sum.Applied != messages-1 || sum.Dead != 1 || sum.Resent != 0 {
		t.Errorf("the books say %+v", sum)
	}
}

// Kills from outside, in the middle of whatever there is, are nobody's fault.
func TestKillsMakeNoDeadLetters(t *testing.T) {
	needServices(t)
	t.Parallel()
	const scope, messages, kills = "e2e-kills-alone", 60_000, 20
	rng := dice(t)
	db := newDatabase(t)
	db.exec(ordersTable)
	st := newStream(t, "KILLS")
	var pace atomic.Int64
	pace.Store(800) // there is work at every moment
	produced := make(chan error, 1)
	go func() { produced <- st.publishAll(plain(0, messages), func() int { return int(pace.Load()) }) }()
	f := newFleet(t, rng, 1, configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - nats: {servers: [%q], stream: %s}\ndatabase:\n  url: %q\nbatch: {max_messages: 300}\n%s",
		scope, st.url, st.name, db.url, ordersSink)))
	w := f.workers[0]
	for range kills {
		w.address() // it has begun
		f.pause(10*time.Millisecond, 600*time.Millisecond)
		f.mustLive()
		w.Kill()
		st.deliverAgain(scope)
		w.start()
	}
	t.Logf("%d of %d have landed by the last kill", one[int64](db, "SELECT count(*) FROM public.orders"), messages)
	pace.Store(0)
	if err := <-produced; err != nil {
		t.Fatal("publish: ", err)
	}
	db.awaitRows("public.orders", messages, 2*time.Minute)
	f.end()
	if n := one[int64](db, "SELECT count(*) FROM dedupd.dead_letters"); n != 0 {
		t.Errorf("%d dead letters", n)
	}
	if _, sum := db.settledBooks(scope); sum.Applied != messages || sum.Dead != 0 {
		t.Errorf("the books say %+v", sum)
	}
}

// publish sends one message.
func (st *stream) publish(id string, body []byte) {
	st.t.Helper()
	msg := st.message(0, id, body)
	if _, err := st.js.PublishMsg(st.t.Context(), msg); err != nil {
		st.t.Fatal("NATS: ", err)
	}
}

// deliverAgain has the server deliver again at once what a dead worker had in
// hand, and not after the durable's ack wait. The next worker sets that right.
func (st *stream) deliverAgain(durable string) {
	st.t.Helper()
	c, err := st.js.Consumer(st.t.Context(), st.name, durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return // killed before it came so far
	}
	if err != nil {
		st.t.Fatal("NATS: ", err)
	}
	config := c.CachedInfo().Config
	config.AckWait = 200 * time.Millisecond
	if _, err := st.js.UpdateConsumer(st.t.Context(), st.name, config); err != nil {
		st.t.Fatal("NATS: ", err)
	}
	time.Sleep(time.Second)
}
