package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/examples/claim"
	"github.com/dedupd/dedupd/internal/child"
)

const createPayments = `CREATE TABLE public.payments (number bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL, cents bigint NOT NULL)`

// payments is a process of the example service.
type payments struct {
	*child.Process
	t    *testing.T
	args []string

	mu      sync.Mutex
	address string
}

func startPayments(t *testing.T, db *database, wait time.Duration) *payments {
	t.Helper()
	p := &payments{t: t, args: []string{db.url, wait.String()}}
	p.start()
	t.Cleanup(func() { p.Kill() })
	return p
}

func (p *payments) start() {
	p.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		p.t.Fatal(err)
	}
	defer r.Close()
	process, err := startProcess("payments", exec.Command(build(p.t, "./e2e/payments"), p.args...), w, os.Stderr)
	if err != nil {
		p.t.Fatal(err)
	}
	_ = w.Close()
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		p.t.Fatalf("the service doesn't tell its address: %v", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Process, p.address = process, strings.TrimSpace(line)
}

// restart kills the process as kill -9 does.
func (p *payments) restart() {
	p.t.Helper()
	p.Kill()
	<-p.Done()
	p.start()
}

// client asks for payments. It keeps no connections: the other end may be new.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}

// pay asks for a payment. An error means that nobody knows whether it was booked.
func (p *payments) pay(key string, cents int) (status int, body string, err error) {
	p.mu.Lock()
	address := p.address
	p.mu.Unlock()
	r, err := http.NewRequestWithContext(p.t.Context(), http.MethodPost, "http://"+address, strings.NewReader(fmt.Sprintf(`{"cents": %d}`, cents)))
	if err != nil {
		return 0, "", err
	}
	r.Header.Set("Idempotency-Key", key)
	answer, err := client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text), err
}

// payer is a client that asks again until it has its receipts.
type payer struct {
	services           []*payments
	rng                *rand.Rand
	receipts           map[string]string
	unknown, inFlight  int
	different, refused []string
}

func (c *payer) pay(key string, cents int) {
	for {
		status, body, err := c.services[c.rng.IntN(len(c.services))].pay(key, cents)
		switch {
		case err != nil || status == http.StatusServiceUnavailable:
			c.unknown++
			time.Sleep(5 * time.Millisecond)
			continue
		case status == http.StatusConflict:
			c.inFlight++
			continue
		case status != http.StatusOK:
			c.refused = append(c.refused, fmt.Sprintf("%s: %d %s", key, status, body))
			return
		}
		if before, ok := c.receipts[key]; ok && before != body {
			c.different = append(c.different, fmt.Sprintf("%s: first %s, then %s", key, before, body))
		}
		c.receipts[key] = body
		return
	}
}

// The stored result is returned for a duplicate: clients ask several processes of a service
// for the same payments while these are killed and generations rotate. Each payment is booked
// once, and all who ask get the receipt of it.
func TestStoredResultForADuplicate(t *testing.T) {
	const keys, clients = 400, 6
	db := newDatabase(t)
	db.exec(createPayments)
	db.exec(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.03 * random()); RETURN NEW; END'`)
	db.exec(`CREATE TRIGGER slow BEFORE INSERT ON public.payments FOR EACH ROW EXECUTE FUNCTION slow()`)
	rng := dice(t)
	services := []*payments{startPayments(t, db, 0), startPayments(t, db, 50*time.Millisecond), startPayments(t, db, 2*time.Second)}

	all := make([]*payer, clients)
	var asking sync.WaitGroup
	for i := range all {
		c := &payer{services: services, rng: rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64())), receipts: map[string]string{}}
		all[i] = c
		asking.Go(func() {
			for range 2 { // the second time all are duplicates
				for k := range keys {
					c.pay(fmt.Sprint("key-", k), 100+k)
				}
			}
		})
	}
	for range strategyKills {
		time.Sleep(time.Duration(50+rng.IntN(200)) * time.Millisecond)
		services[rng.IntN(len(services))].restart()
		for _, sql := range []string{`SELECT dedupd.prepare_generation('payments')`, `SELECT dedupd.rotate('payments', (SELECT identity FROM dedupd.generations WHERE scope = 'payments' AND state = 'open'), '1s')`} {
			if _, err := db.pool.Exec(t.Context(), sql); err != nil {
				t.Logf("a rotation failed: %v", err)
			}
		}
	}
	asking.Wait()

	unknown, inFlight := 0, 0
	for _, c := range all {
		unknown, inFlight = unknown+c.unknown, inFlight+c.inFlight
		if len(c.different) > 0 || len(c.refused) > 0 || !maps.Equal(c.receipts, all[0].receipts) {
			t.Errorf("other receipts: %q, other answers: %q", c.different, c.refused)
		}
	}
	t.Logf("%d requests without an answer, %d while another was at work", unknown, inFlight)
	if unknown == 0 || inFlight == 0 {
		t.Error("no kill hit a request, or no two met: this was no test")
	}
	if n := one[int](db, `SELECT count(*) FROM public.payments`); n != keys {
		t.Errorf("%d payments of %d keys", n, keys)
	}
	for key, text := range all[0].receipts {
		var r claim.Receipt
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatal(err)
		}
		if n := one[int64](db, `SELECT number FROM public.payments WHERE key = $1 AND cents = $2`, key, r.Cents); n != r.Number {
			t.Errorf("%s has the receipt %s and the payment %d", key, text, n)
		}
	}
	if n := one[int](db, `SELECT count(*) FROM dedupd.generations`); n < strategyKills/2 {
		t.Errorf("%d generations", n)
	}
}

// A duplicate is told from what is in flight: while the first request is at work, the second
// is told to ask again, or waits. If the first one's process is killed, the second does the
// work; if it lives, the second gets its receipt.
func TestDuplicateToldFromInFlight(t *testing.T) {
	db := newDatabase(t)
	db.exec(createPayments)
	db.exec(`CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END'`)
	db.exec(`CREATE TRIGGER hold BEFORE INSERT ON public.payments FOR EACH ROW EXECUTE FUNCTION hold()`)
	first, impatient, patient := startPayments(t, db, 0), startPayments(t, db, 0), startPayments(t, db, 10*time.Second)
	brake, err := db.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer brake.Release()

	type answer struct {
		status int
		body   string
		err    error
	}
	ask := func(p *payments, key string) chan answer {
		got := make(chan answer, 1)
		go func() {
			status, body, err := p.pay(key, 100)
			got <- answer{status, body, err}
		}()
		return got
	}
	await := func(locks string) {
		t.Helper()
		for began := time.Now(); one[int](db, `SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = $1`, locks) == 0; time.Sleep(2 * time.Millisecond) {
			if time.Since(began) > 8*time.Second {
				t.Fatalf("nobody waits for a lock of type %s", locks)
			}
		}
	}
	for round := range strategyKills {
		key, dies := fmt.Sprint("key-", round), round%2 == 0
		if _, err := brake.Exec(t.Context(), `SELECT pg_advisory_lock(7)`); err != nil {
			t.Fatal(err)
		}
		working := ask(first, key)
		await("advisory")
		if a := <-ask(impatient, key); a.status != http.StatusConflict {
			t.Errorf("%s is in flight, and a second request gets %+v", key, a)
		}
		waiting := ask(patient, key)
		await("transactionid")
		if dies {
			first.restart()
		}
		if _, err := brake.Exec(t.Context(), `SELECT pg_advisory_unlock(7)`); err != nil {
			t.Fatal(err)
		}
		earlier, second := <-working, <-waiting
		if dies != (earlier.err != nil) || second.status != http.StatusOK || !dies && earlier.body != second.body {
			t.Errorf("%s, dies %v: the first request gets %+v, the second %+v", key, dies, earlier, second)
		}
		if a := <-ask(impatient, key); a.status != http.StatusOK || a.body != second.body {
			t.Errorf("%s: a duplicate gets %+v, want %s", key, a, second.body)
		}
		if n := one[int](db, `SELECT count(*) FROM public.payments WHERE key = $1`, key); n != 1 {
			t.Errorf("%s was booked %d times", key, n)
		}
	}
}

// The stored result of a worker's sink, for a duplicate that comes to a service: it asks for
// ids at any time, while workers are killed and generations rotate.
func TestStoredResultOfAWorkersSink(t *testing.T) {
	needServices(t)
	const scope, partitions, messages = "e2e-answers", 4, 6000
	db := newDatabase(t)
	db.exec(ordersTable)
	tp := newTopic(t, scope, partitions)
	rng := dice(t)
	var records []*kgo.Record
	for i := range messages {
		r := &kgo.Record{Partition: int32(i % partitions), Value: deadlyBody(i, ""), Headers: []kgo.RecordHeader{{Key: idHeader, Value: []byte(send{n: int32(i)}.id())}}}
		records = append(records, r)
		if rng.IntN(5) == 0 { // sent again, by another partition
			again := *r
			again.Partition = int32((i + 1) % partitions)
			records = append(records, &again)
		}
	}
	config := configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - kafka: {brokers: [%q], topics: [%s]}\ndatabase:\n  url: %q\n%s", scope, tp.broker.Addr(), tp.name, db.url, deadlySink))
	f := &fleet{t: t, rng: rng}
	for i := range 2 {
		w := newWorker(t, fmt.Sprintf("worker %d", i+1), config)
		w.binary = build(t, "./e2e/deadly")
		w.start()
		f.workers = append(f.workers, w)
	}
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: db.pool, Scope: scope})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(n int, wait time.Duration) (c dedup.Claimed, err error) {
		tx, err := db.pool.Begin(t.Context())
		if err != nil {
			return c, err
		}
		defer func() { err = errors.Join(err, tx.Rollback(t.Context())) }()
		claims, err := store.Claim(t.Context(), tx, []string{send{n: int32(n)}.id()}, dedup.ClaimOptions{Wait: wait})
		if err != nil {
			return c, err
		}
		if c = claims[0]; !c.IsNew && string(c.Result) != strconv.Itoa(n) {
			err = fmt.Errorf("a duplicate of message %d is told %q", n, c.Result)
		}
		return c, err
	}
	done, asked := make(chan struct{}), make(chan string, 1)
	own := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
	produce := func(n int) {
		t.Helper()
		n = min(n, len(records))
		if err := tp.produce(records[:n]...); n > 0 && err != nil {
			t.Fatal(err)
		}
		records = records[n:]
	}
	produce(1)
	for began := time.Now(); one[int](db, `SELECT count(*) FROM public.orders`) == 0; time.Sleep(50 * time.Millisecond) { // then the schema is there
		if time.Since(began) > time.Minute {
			t.Fatal("nothing has landed")
		}
	}
	go func() {
		fresh, told, inFlight := 0, 0, 0
		for {
			select {
			case <-done:
				asked <- fmt.Sprintf("%d were new, %d told, %d in flight", fresh, told, inFlight)
				return
			default:
			}
			c, err := ask(own.IntN(messages), time.Duration(own.IntN(20))*time.Millisecond)
			switch {
			case errors.Is(err, dedup.ErrInFlight):
				inFlight++
			case err != nil:
				t.Error(err)
			case c.IsNew:
				fresh++
			default:
				told++
			}
			time.Sleep(time.Millisecond)
		}
	}()
	for n := range strategyKills {
		produce(messages / strategyKills)
		f.pause(100*time.Millisecond, 400*time.Millisecond)
		f.killOne(n + 1)
		for _, sql := range []string{`SELECT dedupd.prepare_generation($1)`, `SELECT dedupd.rotate($1, (SELECT identity FROM dedupd.generations WHERE scope = $1 AND state = 'open'), '1s')`} {
			if _, err := db.pool.Exec(t.Context(), sql, scope); err != nil {
				t.Logf("a rotation failed: %v", err)
			}
		}
	}
	produce(len(records))
	db.awaitRows("public.orders", messages, time.Minute)
	close(done)
	t.Log(<-asked)
	f.end()
	for n := range messages {
		if c, err := ask(n, time.Second); err != nil || c.IsNew {
			t.Fatalf("message %d: new %v, %v", n, c.IsNew, err)
		}
	}
	if n := one[int](db, `SELECT count(*) FROM dedupd.results_root r JOIN dedupd.claims_root c USING (key) WHERE replace(r.tableoid::regclass::text, 'results', 'claims') = c.tableoid::regclass::text`); n != messages {
		t.Errorf("%d results stand beside their claims", n)
	}
	if n := one[int](db, `SELECT count(*) FROM dedupd.results_root`); n != messages {
		t.Errorf("%d results of %d messages", n, messages)
	}
}
