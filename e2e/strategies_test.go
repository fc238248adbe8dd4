package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/e2e/shape"
)

// strategyKills is how many workers each of these tests kills while messages arrive.
const strategyKills = 20

// landUnderKills lands records by two workers, one of which is killed again and again,
// until the table has the rows. The groups are the workers' consumer groups.
func landUnderKills(t *testing.T, tp *topic, db *database, config string, records []*kgo.Record, table string, rows int64, groups ...string) {
	t.Helper()
	f := newFleet(t, dice(t), 2, config)
	f.killThrough(db, strategyKills, func(part int) error {
		all := records[part*len(records)/strategyKills : (part+1)*len(records)/strategyKills]
		for len(all) > 0 {
			n := min(100, len(all))
			if err := tp.produce(all[:n]...); err != nil {
				return err
			}
			all = all[n:]
			time.Sleep(10 * time.Millisecond)
		}
		return nil
	}, func() {
		for _, group := range groups {
			tp.evict(group)
		}
	})
	db.awaitRows(table, rows, time.Minute)
	f.end()
	if r := command(t, nil, "run", "-c", config, "--until-idle", "500ms"); r.code != 0 { // what is behind the last row
		t.Fatalf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
}

// A high-water mark per producer: whatever producers send again, brokers deliver again and
// workers die of, each number of a producer lands once, in its order.
func TestHighWaterMarkPerProducer(t *testing.T) { underKills(t, shape.Sequence) }

// A change stream, by position: each record lands once, in its order, and nothing else is
// kept. What the producer sends twice lands twice.
func TestChangeStreamByPosition(t *testing.T) { underKills(t, shape.Position) }

// Natural idempotency: rows that were there before a message came stay as they are, and are
// counted.
func TestInsertBesideExistingRows(t *testing.T) { underKills(t, shape.Insert) }

// State or version check: versions of aggregates come in any order, by several partitions
// and from an application beside the workers. Each row ends with its highest version.
func TestStateVersionCheck(t *testing.T) { underKills(t, shape.Versioned) }

// State check: each step of an order expects the state before it. Whatever order steps come
// in, and whatever an application does to the rows meanwhile, each row takes the steps that
// fit, each once, and no others.
func TestStateCheck(t *testing.T) { underKills(t, shape.Update) }

// Raise instead of ignoring: a step that comes before the one that it builds on is a dead
// letter that says both states. Its replay is checked again.
func TestAStepThatComesTooEarly(t *testing.T) {
	const scope = "e2e-early"
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.orders (id text PRIMARY KEY, status text NOT NULL)`)
	db.exec(`INSERT INTO public.orders VALUES ('a', 'new'), ('b', 'new')`)
	tp := newTopic(t, scope, 1)
	step := func(order, from, to string) *kgo.Record {
		return &kgo.Record{Value: fmt.Appendf(nil, `{"id": %q, "from": %q, "to": %q}`, order, from, to), Headers: []kgo.RecordHeader{{Key: idHeader, Value: []byte(order + to)}}}
	}
	if err := tp.produce(step("a", "paid", "sent"), step("b", "new", "paid"), step("a", "new", "paid"), step("b", "new", "void"), step("c", "new", "paid")); err != nil {
		t.Fatal(err)
	}
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database: {url: %q}
id: {from: header:message-id}
sink:
  table: {name: public.orders, mode: update, key: [id], expect: {status: json:from}, columns: {id: json:id, status: json:to}}
dead_letters: {max_share: 1}
`, scope, tp.broker.Addr(), tp.name, db.url))
	if r := command(t, nil, "run", "-c", config, "--until-idle", "500ms"); r.code != 0 {
		t.Fatalf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
	reasons := func() string {
		return one[string](db, `SELECT coalesce(string_agg(position || ': ' || reason, E'\n' ORDER BY position), '') FROM dedupd.dead_letters`)
	}
	const tail = "; sink.table.on_mismatch is dead_letter"
	tooLate := "\n3: it expects status = \"new\"; its row has status = \"paid\"" + tail + "\n4: it expects status = \"new\"; there is no row with its key" + tail
	if got, want := reasons(), "0: it expects status = \"paid\"; its row has status = \"new\""+tail+tooLate; got != want {
		t.Errorf("the dead letters are\n%s\nwant\n%s", got, want)
	}
	if r := command(t, nil, "dlq", "replay", "--all", "-c", config); !strings.Contains(r.stdout, "applied 1, ") {
		t.Errorf("dlq replay: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	if got := reasons(); got != tooLate[1:] {
		t.Errorf("after a replay the dead letters are\n%s", got)
	}
	if got := one[string](db, `SELECT string_agg(id || ' ' || status, ', ' ORDER BY id) FROM public.orders`); got != "a sent, b paid" {
		t.Errorf("the orders are %s", got)
	}
}

// steps is a configuration of orders' steps, each of which holds its lane until its order is
// in the state before it.
func steps(t *testing.T, db *database, source string) string {
	t.Helper()
	db.exec(`CREATE TABLE public.orders (id text PRIMARY KEY, status text NOT NULL)`)
	return configFile(t, fmt.Sprintf(`scope: steps
sources:
  - %s
database: {url: %q}
id: {from: header:message-id}
sink:
  table: {name: public.orders, mode: update, key: [id], expect: {status: json:from}, on_mismatch: stop, columns: {id: json:id, status: json:to}}
`, source, db.url))
}

// An application answers each order that is paid by making the next one ready, which the next
// message of the same batch waits for.
func TestAHoldThatAnApplicationEnds(t *testing.T) {
	const orders = 20
	db, tp := newDatabase(t), newTopic(t, "e2e-hold", 1)
	config := steps(t, db, fmt.Sprintf("kafka: {brokers: [%q], topics: [%s]}", tp.broker.Addr(), tp.name))
	records := make([]*kgo.Record, orders)
	for i := range records {
		records[i] = &kgo.Record{Value: fmt.Appendf(nil, `{"id": "%d", "from": "ready", "to": "paid"}`, i), Headers: []kgo.RecordHeader{{Key: idHeader, Value: fmt.Append(nil, i)}}}
	}
	if err := tp.produce(records...); err != nil {
		t.Fatal(err)
	}
	db.exec(`INSERT INTO public.orders SELECT i, CASE i WHEN 0 THEN 'ready' ELSE 'new' END FROM generate_series(0, $1::int - 1) i`, orders)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := db.pool.Exec(ctx, `UPDATE public.orders o SET status = 'ready' FROM public.orders p
				WHERE o.status = 'new' AND p.status = 'paid' AND p.id::int = o.id::int - 1`); err != nil && ctx.Err() == nil {
				done <- err
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		done <- nil
	}()
	r := command(t, nil, "run", "-c", config, "--until-idle", "2s")
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if r.code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
	if n := one[int](db, `SELECT count(*) FROM public.orders WHERE status = 'paid'`); n != orders {
		t.Errorf("%d of %d orders are paid", n, orders)
	}
	if _, sum := db.settledBooks("steps"); sum.Applied != orders || sum.Duplicates != 0 {
		t.Errorf("the books say %+v of %d messages", sum, orders)
	}
}

// Steps come by a queue in the wrong order: each waits for the one that it builds on, which may
// be behind it.
func TestHoldsInAQueue(t *testing.T) {
	const orders = 10
	st, db := newStream(t, "HOLDS"), newDatabase(t)
	config := steps(t, db, fmt.Sprintf("nats: {servers: [%q], stream: %s}", st.url, st.name))
	db.exec(`INSERT INTO public.orders SELECT i, 'new' FROM generate_series(0, $1::int - 1) i`, orders)
	for _, step := range [][2]string{{"sent", "done"}, {"paid", "sent"}, {"new", "paid"}} {
		for i := range orders {
			if _, err := st.js.PublishMsg(t.Context(), st.message(0, fmt.Sprint(i, step[1]), fmt.Appendf(nil, `{"id": "%d", "from": %q, "to": %q}`, i, step[0], step[1]))); err != nil {
				t.Fatal(err)
			}
		}
	}
	if r := command(t, nil, "run", "-c", config, "--until-idle", "2s"); r.code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
	if n := one[int](db, `SELECT count(*) FROM public.orders WHERE status = 'done'`); n != orders {
		t.Errorf("%d of %d orders are done", n, orders)
	}
	if _, sum := db.settledBooks("steps"); sum.Applied != 3*orders {
		t.Errorf("the books say %+v of %d messages", sum, 3*orders)
	}
}

// The latest state of each key: the last message of a key's lane wins, and copies that come
// late change nothing.
func TestLatestState(t *testing.T) { underKills(t, shape.Upsert) }

// Messages that say only a part of a row: each column has its last value in the order of the
// key's lane, a new row its defaults, and what an application writes beside that stays.
func TestPartsOfRows(t *testing.T) { underKills(t, shape.Parts) }

// Parts of rows from a queue: whatever order they come in, each row has all of them in the
// end, if no two of them say the same.
func TestPartsOfRowsFromAQueue(t *testing.T) {
	const rows = 2500
	st, db, rng := newStream(t, "PARTS"), newDatabase(t), dice(t)
	db.exec(`CREATE TABLE public.parts (id text PRIMARY KEY, a text, b text NOT NULL DEFAULT 'b', c text DEFAULT 'c', d text)`)
	config := configFile(t, fmt.Sprintf(`scope: parts
sources:
  - nats: {servers: [%q], stream: %s}
database:
  url: %q
id: {from: header:message-id}
sink:
  table:
    name: public.parts
    mode: upsert
    key: [id]
    accept_reordering: true
    columns: {id: json:id, a: json:a, b: json:b, c: json:c, d: json:d}
`, st.url, st.name, db.url))
	parts := make([]string, 0, 4*rows)
	for row := range rows {
		for _, column := range []string{"a", "b", "c", "d"} {
			parts = append(parts, fmt.Sprintf(`{"id": "%d", %q: "%[1]d"}`, row, column))
		}
	}
	rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })

	f := newFleet(t, rng, 2, config)
	for _, w := range f.workers {
		w.mayRetry = true // two may add a row at the same moment
	}
	published := make(chan error, 1)
	go func() {
		for i, part := range parts {
			if _, err := st.js.PublishMsgAsync(st.message(0, fmt.Sprint("part-", i), []byte(part))); err != nil {
				published <- err
				return
			}
			if i%100 == 99 {
				<-st.js.PublishAsyncComplete()
				time.Sleep(50 * time.Millisecond)
			}
		}
		published <- nil
	}()
	for n := range strategyKills {
		f.pause(100*time.Millisecond, 400*time.Millisecond)
		what, _, _ := f.killOne(n + 1)
		t.Log(what)
	}
	if err := <-published; err != nil {
		t.Fatal(err)
	}
	f.end()
	if r := command(t, nil, "run", "-c", config, "--until-idle", "500ms"); r.code != 0 {
		t.Fatalf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
	if n := one[int](db, `SELECT count(*) FROM public.parts WHERE (a, b, c, d) = (id, id, id, id)`); n != rows {
		t.Errorf("%d of %d rows have all of their parts", n, rows)
	}
	if _, sum := db.settledBooks("parts"); sum.Applied != int64(len(parts)) || sum.Dead != 0 {
		t.Errorf("the books say %+v of %d messages", sum, len(parts))
	}
}

// Only if the target is as expected: a statement says which withdrawals it has made, and the
// others leave the account as it is.
func TestStatementSaysWhatItApplied(t *testing.T) { underKills(t, shape.Statement) }

// One operation, several targets: each message lands once in every table whose filter it
// passes, in one transaction, and what no table wants is counted and claims nothing.
func TestOneOperationSeveralTargets(t *testing.T) { underKills(t, shape.List) }
