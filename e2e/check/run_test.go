package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/natstest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	pgtest.Shutdown()
	kafkatest.Stop()
	if built.path != "" {
		_ = os.Remove(built.path)
	}
	os.Exit(code)
}

// The checker's own code is all of this project that it contains.
func TestSharesNoCodeWithTheProduct(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	const module = "github.com/dedupd/dedupd"
	own := 0
	for _, p := range strings.Fields(string(out)) {
		switch {
		case p == module+"/e2e/check", p == module+"/e2e/shape":
			own++
		case p == module || strings.HasPrefix(p, module+"/") || strings.Contains(p, "segmentio/kafka-go"):
			t.Errorf("check contains %s", p)
		}
	}
	if own != 2 {
		t.Errorf("go list doesn't name the checker itself:\n%s", out)
	}
}

// rig is a run that is to be judged: the worker's configuration, and the notes
// that whoever drives a run keeps.
type rig struct {
	t      *testing.T
	scope  string
	folder string
	config string
	conn   *pgx.Conn
	mu     sync.Mutex
	noted  map[string]*os.File
}

func newRig(t *testing.T, folder, scope, database string) *rig {
	r := &rig{t: t, scope: scope, folder: folder, config: filepath.Join(folder, "dedupd.yaml"), noted: map[string]*os.File{}}
	var err error
	if r.conn, err = pgx.Connect(t.Context(), database); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"intents", "samples", "events"} {
		if r.noted[name], err = os.Create(filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func (r *rig) close() {
	_ = r.conn.Close(context.Background())
	for _, f := range r.noted {
		_ = f.Close()
	}
}

func (r *rig) configure(format string, args ...any) {
	if err := os.WriteFile(r.config, fmt.Appendf(nil, format, args...), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) note(name string, line map[string]any) {
	text, err := json.Marshal(line)
	if err != nil {
		panic(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.noted[name].Write(append(text, '\n')); err != nil {
		panic(err)
	}
}

func (r *rig) intent(id string, number int, value []byte) {
	sum := sha256.Sum256(value)
	r.note("intents", map[string]any{"id": id, "copy": number, "sum": hex.EncodeToString(sum[:]), "state": "acked"})
}

var built struct {
	sync.Once
	path string
	err  error
}

// dedupd is a command of the real binary, which ends with the test.
func (r *rig) dedupd(log string, args ...string) *exec.Cmd {
	r.t.Helper()
	built.Do(func() {
		built.path = filepath.Join(os.TempDir(), fmt.Sprintf("dedupd-check-%d", os.Getpid()))
		var out []byte
		if out, built.err = exec.Command("go", "build", "-o", built.path, "../../cmd/dedupd").CombinedOutput(); built.err != nil {
			built.err = fmt.Errorf("%w: %s", built.err, out)
		}
	})
	if built.err != nil {
		r.t.Fatal("build dedupd: ", built.err)
	}
	cmd := exec.CommandContext(r.t.Context(), built.path, append(args, "-c", r.config)...)
	cmd.Env = append(os.Environ(), "DEDUPD_HTTP_LISTEN=127.0.0.1:0")
	file, err := os.Create(filepath.Join(r.folder, log+".log"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = file.Close() })
	cmd.Stdout, cmd.Stderr = file, file
	return cmd
}

func (r *rig) worker(name string) *exec.Cmd {
	r.t.Helper()
	cmd := r.dedupd(name, "run")
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	return cmd
}

// drain ends a worker as a deployment does.
func (r *rig) drain(cmd *exec.Cmd) {
	r.t.Helper()
	_ = cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		r.t.Fatal("the worker didn't drain: ", err)
	}
}

// await asks the database until it agrees.
func (r *rig) await(what, sql string, args ...any) {
	r.t.Helper()
	for until := time.Now().Add(90 * time.Second); ; {
		var yes bool
		if err := r.conn.QueryRow(r.t.Context(), sql, args...).Scan(&yes); err != nil {
			r.t.Fatalf("%s: %v", what, err)
		}
		if yes {
			return
		}
		if time.Now().After(until) {
			r.t.Fatalf("%s: not within 90 s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// check runs the checker's command.
func check(t *testing.T, args ...string) (code int, r report, stdout string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = command(t.Context(), args, &out, &errs)
	if errs.Len() > 0 {
		t.Log(errs.String())
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil && args[0] == "run" {
		t.Fatalf("%v: %s", err, out.String())
	}
	return code, r, out.String()
}

// broken are the invariants that a report finds broken.
func broken(r report) string {
	var all []string
	for _, p := range r.Invariants {
		if p.Violations > 0 {
			all = append(all, p.Invariant)
		}
	}
	return strings.Join(all, " ")
}

const (
	scope      = "check"
	topic      = "check-orders"
	partitions = 3
)

// kafkaRun is a short run over Kafka: two workers, one of which is killed; the
// role that they work as can't read or write the audit's moves.
func kafkaRun(t *testing.T, folder, database string) (broker *kafkatest.Broker) {
	ctx := t.Context()
	r := newRig(t, folder, scope, database)
	defer r.close()
	broker = kafkatest.Run(t)
	if err := broker.CreateTopic(ctx, topic, partitions, nil); err != nil {
		t.Fatal(err)
	}
	role := r.prepareKafka(broker, database)
	client, err := kgo.NewClient(kgo.SeedBrokers(broker.Addr()), kgo.DefaultProduceTopic(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	first := r.worker("worker-1")
	second := r.worker("worker-2")
	sampling, stop := context.WithCancel(ctx)
	var sampled sync.WaitGroup
	sampled.Go(func() { r.sample(sampling, client, database) })

	p := &producer{rig: r, client: client}
	p.sendAll(func() {
		// Both are at work, or there would be nothing to recover from.
		r.await("both workers have lanes", `SELECT count(DISTINCT owner) > 1 FROM dedupd.lanes WHERE fetched > 0`)
		r.note("events", map[string]any{"at": time.Now(), "what": "kill worker 1"})
		_ = first.Process.Kill()
		_ = first.Wait()
		first = r.worker("worker-3")
	})
	for partition, end := range p.ends {
		r.await("the end of the log", `SELECT coalesce((SELECT next_position = $2 FROM dedupd.lanes WHERE lane = $1), false)`, fmt.Sprintf("%s/%d", topic, partition), end)
	}
	r.drain(first)
	r.drain(second)
	stop()
	sampled.Wait()
	r.exec("DROP OWNED BY " + role)
	r.exec("DROP ROLE " + role)
	return broker
}

// prepareKafka makes the schema and the audit, and a role for the workers.
func (r *rig) prepareKafka(broker *kafkatest.Broker, database string) (role string) {
	r.t.Helper()
	role = "worker_" + strings.ReplaceAll(r.conn.Config().Database, "-", "_")
	u, err := url.Parse(database)
	if err != nil {
		r.t.Fatal(err)
	}
	u.User = url.UserPassword(role, "worker")
	r.configure(`
scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database: {url: %q, migrate: false}
id: {from: "header:message-id"}
sink:
  table:
    name: public.effects
    columns: {id: id, lane: lane, position: position, sum: json:sum}
retention: {generation: 2s, schedule: 1s, window: 30m}
`, scope, broker.Addr(), topic, u.String())
	var schema bytes.Buffer
	cmd := r.dedupd("migrate", "migrate", "sql", "--grants", role)
	cmd.Stdout = &schema
	if err := cmd.Run(); err != nil {
		r.t.Fatal(err)
	}
	r.exec("CREATE ROLE " + role + " LOGIN PASSWORD 'worker'")
	r.exec(schema.String())
	for range 2 { // the second changes nothing
		if code, _, _ := check(r.t, "prepare", "-database", database); code != 0 {
			r.t.Fatal("check prepare failed")
		}
	}
	r.exec("GRANT INSERT, SELECT ON public.effects TO " + role)
	return role
}

func (r *rig) exec(sql string) {
	r.t.Helper()
	if _, err := r.conn.Exec(r.t.Context(), sql); err != nil {
		r.t.Fatalf("%.200s: %v", sql, err)
	}
}

// producer sends orders, and notes what it intends to send.
type producer struct {
	*rig
	client *kgo.Client
	ends   [partitions]int64
}

func (p *producer) send(id string, number, partition int, value []byte, headers ...kgo.RecordHeader) {
	p.t.Helper()
	if id != "" {
		headers = append(headers, kgo.RecordHeader{Key: "message-id", Value: []byte(id)})
	}
	record := &kgo.Record{Partition: int32(partition), Value: value, Headers: headers}
	if err := p.client.ProduceSync(p.t.Context(), record).FirstErr(); err != nil {
		p.t.Fatal("produce: ", err)
	}
	p.ends[partition]++
	p.intent(id, number, value)
}

// sendAll sends orders and copies of them, and some of a kind of their own. Halfway it
// calls a function.
func (p *producer) sendAll(halfway func()) {
	p.t.Helper()
	value := func(n int) []byte { return fmt.Appendf(nil, `{"n":%d,"sum":"sum of %d"}`, n, n) }
	const messages = 3000
	for n := range messages {
		id := fmt.Sprintf("order-%d", n)
		p.send(id, 0, n%partitions, value(n))
		if n%7 == 0 {
			p.send(id, 1, n%partitions, value(n)) // again at once
		}
		if n%10 == 3 {
			p.send(fmt.Sprintf("order-%d", n/2), 2, n%partitions, value(n/2)) // again later, perhaps by another lane
		}
		switch n {
		case 500:
			p.send("", 0, 0, value(n), kgo.RecordHeader{Key: "b", Value: nil}, kgo.RecordHeader{Key: "a", Value: []byte{0xff}})
		case 600:
			p.send("nul\x00", 0, 1, value(n)) // no text can hold it
		case 700:
			p.send("order-650", 3, 2, value(-650)) // another value
		case messages / 2:
			halfway()
		}
	}
}

// sample notes what the broker knows, and then where the lanes stand.
func (r *rig) sample(ctx context.Context, client *kgo.Client, database string) {
	conn, err := pgx.Connect(ctx, database)
	if err != nil {
		r.t.Error("sample: ", err)
		return
	}
	defer func() { _ = conn.Close(context.Background()) }()
	for ctx.Err() == nil {
		offsets, err := committed(ctx, client)
		if err == nil {
			var name string
			var next int64
			var rows pgx.Rows
			if rows, err = conn.Query(ctx, `SELECT lane, next_position FROM dedupd.lanes`); err == nil {
				_, err = pgx.ForEachRow(rows, []any{&name, &next}, func() error {
					r.note("samples", map[string]any{"at": time.Now(), "lane": name, "broker": offsets[name], "next": next})
					return nil
				})
			}
		}
		if err != nil && ctx.Err() == nil && !kerr.IsRetriable(errors.Unwrap(err)) && !kerr.IsRetriable(err) {
			r.t.Error("sample: ", err)
			return
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// committed are the group's offsets by lane; nil where it has none.
func committed(ctx context.Context, client *kgo.Client) (map[string]*int64, error) {
	rt := kmsg.NewOffsetFetchRequestGroupTopic()
	rt.Topic = topic
	for p := range int32(partitions) {
		rt.Partitions = append(rt.Partitions, p)
	}
	g := kmsg.NewOffsetFetchRequestGroup()
	g.Group, g.Topics = scope, append(g.Topics, rt)
	req := kmsg.NewPtrOffsetFetchRequest()
	req.Groups = append(req.Groups, g)
	res, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, err
	}
	if err := kerr.ErrorForCode(res.Groups[0].ErrorCode); err != nil {
		return nil, err
	}
	all := map[string]*int64{}
	for _, p := range res.Groups[0].Topics[0].Partitions {
		if p.Offset >= 0 {
			all[fmt.Sprintf("%s/%d", topic, p.Partition)] = &p.Offset
		}
	}
	return all, nil
}

// oneEffect is the number of one effect.
const oneEffect = `(SELECT max(number) FROM public.effects WHERE lane = 'check-orders/1')`

// What is done by hand to what a run has left, and which invariants that breaks.
var damages = []struct{ name, sql, want string }{
	{name: "an effect is deleted", sql: `DELETE FROM public.effects WHERE number = ` + oneEffect, want: "I1 I6 I8"},
	{name: "an effect and its claim are deleted", sql: `DELETE FROM dedupd.claims_root c USING public.effects e, dedupd.lanes l
		WHERE e.number = ` + oneEffect + ` AND l.id = c.lane AND l.lane = e.lane AND c.position = e.position; DELETE FROM public.effects WHERE number = ` + oneEffect, want: "I1 I8"},
	{name: "an effect is doubled", sql: `INSERT INTO public.effects (id, lane, position, sum, xid)
		SELECT id, lane, position, sum, xid FROM public.effects WHERE number = ` + oneEffect, want: "I2 I5 I8"},
	{name: "an effect is doubled later", sql: `INSERT INTO public.effects (id, lane, position, sum)
		SELECT id, lane, position, sum FROM public.effects WHERE number = ` + oneEffect, want: "I2 I6 I8"},
	{name: "an effect has another position", sql: `UPDATE public.effects SET position = position + 1000000 WHERE number = ` + oneEffect, want: "I3 I6"},
	{name: "an effect has another value", sql: `UPDATE public.effects SET sum = 'sum of -1' WHERE number = ` + oneEffect, want: "I3"},
	{name: "an effect has another transaction", sql: `UPDATE public.effects SET xid = pg_current_xact_id() WHERE number = ` + oneEffect, want: "I6"},
	{name: "effects are swapped", sql: `UPDATE public.effects e SET id = o.id, position = o.position, sum = o.sum FROM public.effects o
		WHERE e.lane = o.lane AND e.xid = o.xid AND (e.number, o.number) IN (SELECT unnest(ARRAY[a, b]), unnest(ARRAY[b, a]) FROM
			(SELECT number a, lead(number) OVER (PARTITION BY lane, xid ORDER BY number) b FROM public.effects) n WHERE b IS NOT NULL LIMIT 2)`, want: "I5"},
	{name: "a claim is deleted", sql: `DELETE FROM dedupd.claims_root c USING public.effects e, dedupd.lanes l
		WHERE e.number = ` + oneEffect + ` AND l.id = c.lane AND l.lane = e.lane AND c.position = e.position`, want: "I6"},
	{name: "a claim is written anew", sql: `UPDATE dedupd.claims_root c SET position = c.position FROM public.effects e, dedupd.lanes l
		WHERE e.number = ` + oneEffect + ` AND l.id = c.lane AND l.lane = e.lane AND c.position = e.position`, want: "I6"},
	{name: "an id is claimed in two generations", sql: `DO $$ DECLARE a text; b text; BEGIN
		SELECT min(table_name), max(table_name) INTO a, b FROM dedupd.generations WHERE state IN ('open', 'sealed');
		EXECUTE format('INSERT INTO dedupd.%I SELECT * FROM dedupd.%I LIMIT 1', b, a); END $$`, want: "I2"},
	{name: "a lane is moved back", sql: `UPDATE dedupd.lanes SET next_position = next_position - 1 WHERE lane = 'check-orders/1'`, want: "I1 I6"},
	{name: "a lane is moved back in secret", sql: `ALTER TABLE dedupd.lanes DISABLE TRIGGER record_move;
		UPDATE dedupd.lanes SET next_position = next_position - 1 WHERE lane = 'check-orders/1'`, want: "I1 I6"},
	{name: "a lane is moved forward", sql: `UPDATE dedupd.lanes SET next_position = next_position + 1 WHERE lane = 'check-orders/1'`, want: "I1"},
	{name: "the books are cooked", sql: `UPDATE dedupd.lanes SET fetched = fetched + 1, resent = resent + 1 WHERE lane = 'check-orders/1'`, want: "I8"},
	{name: "the books are cooked in secret", sql: `ALTER TABLE dedupd.lanes DISABLE TRIGGER record_move;
		UPDATE dedupd.lanes SET written = written - 1, resent = resent + 1 WHERE lane = 'check-orders/1'`, want: "I8"},
	{name: "a dead letter is deleted", sql: `DELETE FROM dedupd.dead_letters WHERE class = 'no_id'`, want: "I1 I6 I8"},
	{name: "a dead letter has another header", sql: `UPDATE dedupd.dead_letters SET header_values[1] = '' WHERE class = 'no_id'`, want: "I3 I6"},
}

// finishedRun is a run over Kafka that has come to its end.
type finishedRun struct {
	folder string
	broker *kafkatest.Broker
}

// copyOf is another database with what the run has left.
func (k *finishedRun) copyOf(t *testing.T) string {
	t.Helper()
	return pgtest.NewFrom(t, "kafka run", func(_ context.Context, url string) error {
		k.broker = kafkaRun(t, k.folder, url)
		return nil
	}).URL
}

func (k *finishedRun) check(t *testing.T, database string, more ...string) (int, report, string) {
	t.Helper()
	return check(t, append([]string{
		"run", "-database", database, "-scope", scope, "-kafka", k.broker.Addr(), "-topic", topic,
		"-intents", filepath.Join(k.folder, "intents"), "-samples", filepath.Join(k.folder, "samples"), "-events", filepath.Join(k.folder, "events"),
		"-logs", filepath.Join(k.folder, "worker-*.log"), "-allow", "no_id,poison,conflict", "-settled", "-seed", "7", "-output", "json",
	}, more...)...)
}

// with is a copy of one of the run's files with one more line.
func (k *finishedRun) with(t *testing.T, from, line string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(k.folder, from))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), from)
	if err := os.WriteFile(file, append(text, line...), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// A real run is valid; and after one change by hand to what it has left, it is
// invalid by just the invariants that the change breaks.
func TestKafkaRun(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the binary against real servers, and -short asks for tests without services")
	}
	k := &finishedRun{folder: t.TempDir()}
	untouched := k.copyOf(t)
	code, r, text := k.check(t, untouched)
	if code != 0 || r.Verdict != "valid" || r.Seed != 7 {
		t.Fatalf("code %d: %s", code, text)
	}
	if s := r.Seen; s.Lanes != partitions || s.Messages != 3732 || s.Intents != 3732 || s.Effects != 3000 || s.DeadLetters != 3 ||
		s.Claims != s.Effects+2 || s.Moves < 20 || s.Samples < 20 || s.Events != 1 || r.Broker.Violations != 0 {
		t.Errorf("it has seen %+v, and lost %d", r.Seen, r.Broker.Violations)
	}
	t.Logf("%+v", r.Seen)
	for _, c := range damages {
		t.Run(c.name, func(t *testing.T) { k.damage(t, c.sql, c.want) })
	}
	k.checkOtherwise(t, untouched)
	t.Run("for people", func(t *testing.T) { k.checkForPeople(t, untouched) })
}

func (k *finishedRun) damage(t *testing.T, sql, want string) {
	database := k.copyOf(t)
	conn, err := pgx.Connect(t.Context(), database)
	if err != nil {
		t.Fatal(err)
	}
	_, err = conn.Exec(t.Context(), sql)
	_ = conn.Close(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if code, r, text := k.check(t, database); code != 1 || broken(r) != want {
		t.Errorf("code %d, broken is %q, want %q\n%s", code, broken(r), want, text)
	}
}

// checkOtherwise checks the run with other arguments, or other notes of what happened.
func (k *finishedRun) checkOtherwise(t *testing.T, database string) {
	now := time.Now().Format(time.RFC3339Nano)
	for _, c := range []struct {
		name string
		args []string
		code int
		want string
		lost int // publishes
	}{
		{name: "not allowed", args: []string{"-allow", "no_id,conflict"}, code: 1, want: "I1"},
		{name: "the broker was ahead", args: []string{"-samples", k.with(t, "samples", `{"at":"`+now+`","lane":"check-orders/1","broker":1000001,"next":1000000}`)}, code: 1, want: "I7"},
		{name: "a deadlock that surfaced", args: []string{"-logs", k.with(t, "worker-1.log", `time=x level=ERROR msg="lane failed" error="claim: ERROR: deadlock (SQLSTATE 40P01)"`)}, code: 1, want: "I8"},
		{name: "a deadlock that was seen to", args: []string{"-logs", k.with(t, "worker-1.log", `time=x level=WARN msg="trying again" error="claim: ERROR: deadlock (SQLSTATE 40P01)"`)}},
		{name: "a publish that the broker lost", args: []string{"-intents", k.with(t, "intents", `{"id":"gone","copy":0,"sum":"00","state":"acked"}`)}, lost: 1},
		{name: "a publish that may have been lost", args: []string{"-intents", k.with(t, "intents", `{"id":"gone","copy":0,"sum":"00","state":"unknown"}`)}},
		{name: "a torn line", args: []string{"-intents", k.with(t, "intents", `{"id":"gone","co`)}, code: 2},
		{name: "no such log", args: []string{"-logs", filepath.Join(k.folder, "nothing-*")}, code: 2},
		{name: "another scope", args: []string{"-scope", "other"}, code: 2},
		{name: "no time", args: []string{"-timeout", "1ms"}, code: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, r, text := k.check(t, database, c.args...)
			if code != c.code || broken(r) != c.want || r.Verdict != verdicts[c.code] || (code == unknown) != (r.Reason != "") {
				t.Errorf("code %d, broken is %q, want %d and %q\n%s", code, broken(r), c.code, c.want, text)
			}
			if code != unknown && r.Broker.Violations != c.lost {
				t.Errorf("%d lost publishes, want %d", r.Broker.Violations, c.lost)
			}
		})
	}
}

func (k *finishedRun) checkForPeople(t *testing.T, database string) {
	var out bytes.Buffer
	code := command(t.Context(), []string{
		"run", "-database", database, "-scope", scope, "-kafka", k.broker.Addr(), "-topic", topic,
		"-intents", os.DevNull, "-samples", os.DevNull, "-events", os.DevNull,
	}, &out, io.Discard)
	text := out.String()
	if code != 1 || !strings.Contains(text, "INVALID") || !strings.Contains(text, "for which this run gave no cause") || !strings.Contains(text, "dead letter ") {
		t.Errorf("code %d:\n%s", code, text)
	}
}

// A queue has no order, and messages that the server delivers again.
func TestNATSRun(t *testing.T) {
	server, js := natstest.Start(t)
	database := pgtest.New(t).URL
	folder := t.TempDir()
	r := newRig(t, folder, scope, database)
	defer r.close()
	r.configure(`
scope: %s
sources:
  - name: edge
    nats: {servers: [%q], stream: ORDERS}
database: {url: %q}
id: {from: "header:message-id"}
sink:
  statement:
    sql: >-
      INSERT INTO public.effects (id, source, lane, position, sum)
      SELECT id, 'edge', lane, position, encode(sha256(value), 'hex') FROM batch ORDER BY ord
`, scope, server, database)
	if err := r.dedupd("migrate", "migrate", "up").Run(); err != nil {
		t.Fatal(err)
	}
	if code, _, _ := check(t, "prepare", "-database", database); code != 0 {
		t.Fatal("check prepare failed")
	}
	const messages = 1000
	for n := range messages {
		msg := nats.NewMsg("orders")
		number := n
		if n%5 == 4 {
			number -= 2
		}
		id := fmt.Sprintf("order-%d", number)
		if n == 100 {
			id = ""
		} else {
			msg.Header.Set("message-id", id)
		}
		msg.Header.Add("b", "2")
		msg.Header.Add("a", "1")
		msg.Data = fmt.Appendf(nil, "not JSON: %d", number)
		if _, err := js.PublishMsg(t.Context(), msg, jetstream.WithExpectStream("ORDERS")); err != nil {
			t.Fatal(err)
		}
		r.intent(id, n-number, msg.Data)
	}
	w := r.worker("worker-1")
	r.await("everything", `SELECT coalesce(sum(fetched), 0) >= $1 FROM dedupd.lanes`, messages)
	r.drain(w)
	run := func(more ...string) (int, report, string) {
		t.Helper()
		return check(t, append([]string{
			"run", "-database", database, "-scope", scope, "-nats", server, "-stream", "ORDERS", "-source", "edge",
			"-intents", filepath.Join(folder, "intents"), "-samples", os.DevNull, "-events", os.DevNull,
			"-logs", filepath.Join(folder, "worker-*.log"), "-allow", "no_id", "-settled", "-output", "json",
		}, more...)...)
	}
	code, rep, text := run()
	if code != 0 || rep.Seen.Messages != messages || rep.Seen.Effects != 800-1 || rep.Seen.DeadLetters != 1 || rep.Broker.Violations != 0 {
		t.Fatalf("code %d: %s", code, text)
	}
	if code, rep, text := run("-source", "other", "-stream", "ORDERS"); code != invalid || broken(rep) != "I1" {
		t.Errorf("a source that has read nothing: code %d, broken is %q\n%s", code, broken(rep), text)
	}
	if _, err := r.conn.Exec(t.Context(), `UPDATE public.effects SET sum = repeat('0', 64) WHERE number = 17`); err != nil {
		t.Fatal(err)
	}
	if code, rep, text := run(); code != 1 || broken(rep) != "I3" {
		t.Errorf("code %d, broken is %q\n%s", code, broken(rep), text)
	}
	if _, err := r.conn.Exec(t.Context(), `DELETE FROM public.effects WHERE number = 17`); err != nil {
		t.Fatal(err)
	}
	if code, rep, text := run(); code != 1 || broken(rep) != "I1 I6 I8" {
		t.Errorf("code %d, broken is %q\n%s", code, broken(rep), text)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{
		nil,
		{"judge"},
		{"prepare"},
		{"run"},
		{"run", "-x"},
		{"run", "stray"},
		{"run", "-database", "x", "-scope", "x", "-intents", "x", "-samples", "x", "-events", "x"},
		{"run", "-database", "x", "-scope", "x", "-intents", "x", "-samples", "x", "-events", "x", "-kafka", "x"},
		{"run", "-database", "x", "-scope", "x", "-intents", "x", "-samples", "x", "-events", "x", "-nats", "x", "-stream", "x"},
		{"run", "-database", "x", "-scope", "x", "-intents", "x", "-samples", "x", "-events", "x", "-kafka", "x", "-topic", "x", "-allow", "x"},
		{"run", "-database", "x", "-scope", "x", "-intents", "x", "-samples", "x", "-events", "x", "-kafka", "x", "-topic", "x", "-output", "x"},
	} {
		var out, errs bytes.Buffer
		if code := command(t.Context(), args, &out, &errs); code != unknown || errs.Len() == 0 || out.Len() > 0 {
			t.Errorf("%v: code %d, %q", args, code, errs.String())
		}
	}
}

// What a transaction has aborted isn't in the log, and neither is its marker,
// though both stand at the end.
func TestReadsCommittedMessages(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a Kafka broker, and -short asks for tests without services")
	}
	const topic = "check-transactions"
	broker := kafkatest.Run(t)
	if err := broker.CreateTopic(t.Context(), topic, 2, nil); err != nil {
		t.Fatal(err)
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(broker.Addr()), kgo.DefaultProduceTopic(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionalID(topic))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for _, end := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort} {
		if err := client.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		if err := client.ProduceSync(t.Context(), kgo.StringRecord("one"), kgo.StringRecord("two")).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if err := client.EndTransaction(t.Context(), end); err != nil {
			t.Fatal(err)
		}
	}
	h := &history{}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := h.readKafka(ctx, broker.Addr(), []string{topic}); err != nil {
		t.Fatal(err)
	}
	full, empty := &h.lanes[0], &h.lanes[1]
	if full.name != topic+"/0" {
		full, empty = empty, full
	}
	if len(full.log) != 2 || full.log[1].position != 1 || full.first != 0 || full.end != 6 || len(empty.log) != 0 || empty.end != 0 || !empty.read {
		t.Errorf("the log spans %d to %d with %d messages, the other one ends at %d", full.first, full.end, len(full.log), empty.end)
	}
}
