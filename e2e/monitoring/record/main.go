// Record runs the real binary against a real Postgres and a real NATS server,
// lets something go wrong, scrapes /metrics once a second, and writes what the
// alerts' tests are made of:
//
//	go run ./e2e/monitoring/record -dedupd .bin/dedupd -out e2e/monitoring/testdata
//
// With -prometheus PROGRAM one noisy run is scraped by that Prometheus instead,
// for the time -for; then the command in the arguments is run, with the server's
// address in PROMETHEUS_URL. All that it starts listens on 127.0.0.1 only and
// ends with it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/e2e/monitoring"
	"github.com/dedupd/dedupd/e2e/rig"
	"github.com/dedupd/dedupd/internal/child"
	"github.com/dedupd/dedupd/internal/natstest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

func main() {
	binary := flag.String("dedupd", ".bin/dedupd", "the dedupd `binary`")
	out := flag.String("out", "e2e/monitoring/testdata", "the `folder` for the recordings")
	alerts := flag.String("alerts", "deploy/helm/dedupd/files/alerts.yaml", "record what this `file` names")
	only := flag.String("only", "", "record only the run of this `name`")
	prometheus := flag.String("prometheus", "", "show one noisy run to this Prometheus `program` instead")
	duration := flag.Duration("for", 5*time.Minute, "how long that run takes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *prometheus != "" {
		err = show(ctx, *binary, *prometheus, *duration, flag.Args())
	} else {
		err = recordAll(ctx, *binary, *out, *alerts, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "record:", err)
		stop()
		os.Exit(1) //nolint:gocritic // stop has been called
	}
}

func recordAll(ctx context.Context, binary, out, alerts, only string) error {
	text, err := os.ReadFile(alerts)
	if err != nil {
		return err
	}
	named := monitoring.Metrics(string(text))
	for _, s := range scenarios {
		if only != "" && s.name != only {
			continue
		}
		fmt.Println("recording", s.name)
		recording, err := s.record(ctx, binary, func(metric string) bool { return slices.Contains(named, metric) })
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		f, err := os.Create(filepath.Join(out, s.name+".txt"))
		if err != nil {
			return err
		}
		if err := errors.Join(recording.Write(f), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// scenario is one run.
type scenario struct {
	name    string
	about   []string
	seconds int
	config  string // keys beside the sources, the database and the sink
	load    load
	// acts happen at their second.
	acts map[int]func(ctx context.Context, r *run) error
}

// load is what the producer sends.
type load struct {
	rate    int     // messages a second
	resend  float64 // share of them that are resends
	poison  float64 // share of them that the sink's table refuses
	sources int     // 1 or 2
}

var scenarios = []scenario{
	{
		name: "quiet", seconds: 110,
		about: []string{
			"Nothing goes wrong. 300 messages a second, of which one in fifty is a resend.",
			"At 30 s the worker is stopped by SIGTERM and started again, as by a roll-out.",
			"From 60 s on nothing is sent.",
		},
		load: load{rate: 300, resend: 0.02},
		acts: map[int]func(context.Context, *run) error{
			30: func(_ context.Context, r *run) error {
				if err := r.stopWorker(); err != nil {
					return err
				}
				return r.startWorker()
			},
			60: func(_ context.Context, r *run) error {
				r.idle.Store(true)
				return nil
			},
		},
	},
	{
		name: "duplicates", seconds: 90,
		about: []string{
			"Of 300 messages a second 45 % are resends of any message before. The window is 60 s, so that",
			"the oldest of them soon are nearly as old.",
		},
		config: "retention: {window: 60s, generation: 10s, schedule: 1s}\n",
		load:   load{rate: 300, resend: 0.45},
	},
	{
		name: "deadletters", seconds: 60,
		about: []string{"From 20 s on the sink's table refuses one message in a hundred, by a CHECK."},
		load:  load{rate: 300, resend: 0.02, poison: 0.01},
		acts: map[int]func(context.Context, *run) error{20: func(ctx context.Context, r *run) error {
			return r.exec(ctx, `ALTER TABLE public.orders ADD CHECK (note IS DISTINCT FROM 'bad') NOT VALID`)
		}},
	},
	{
		name: "held", seconds: 75,
		about: []string{
			"At 15 s the sink's table is renamed: the lane is held. The window is 6 s, so that claims are soon",
			"kept for the lane only.",
		},
		config: "retention: {window: 6s, generation: 2s, schedule: 1s}\n",
		load:   load{rate: 300, resend: 0.02},
		acts: map[int]func(context.Context, *run) error{15: func(ctx context.Context, r *run) error {
			return r.exec(ctx, `ALTER TABLE public.orders RENAME TO gone`)
		}},
	},
	{
		name: "outage", seconds: 75,
		about:  []string{"At 15 s Postgres is killed, and stays away."},
		config: "retention: {window: 7d, schedule: 1s}\n",
		load:   load{rate: 300, resend: 0.02},
		acts: map[int]func(context.Context, *run) error{15: func(_ context.Context, r *run) error {
			r.cut()
			return r.postgres.Kill()
		}},
	},
	{
		name: "broker", seconds: 60,
		about: []string{"At 15 s the NATS server is stopped, and stays away."},
		load:  load{rate: 300, resend: 0.02},
		acts: map[int]func(context.Context, *run) error{15: func(_ context.Context, r *run) error {
			natstest.Stop(r.broker)
			return nil
		}},
	},
	{
		name: "slow", seconds: 90,
		about: []string{
			"From 15 s on somebody locks the claims and the lanes again and again, for 1.8 s of 2 s. The pool",
			"has two connections, and /readyz is asked ten times a second.",
		},
		config: "retention: {window: 7d, schedule: 1s}\n",
		load:   load{rate: 300, resend: 0.02},
		acts: map[int]func(context.Context, *run) error{15: func(ctx context.Context, r *run) error {
			go r.lock(ctx)
			go r.probe(ctx)
			return nil
		}},
	},
	{
		name: "behind", seconds: 75,
		about:  []string{"Of 1000 messages a second, the sink's table takes a hundred from 15 s on: a trigger waits for 10 ms."},
		config: "batch: {max_messages: 100}\n",
		load:   load{rate: 1000, resend: 0.02},
		acts: map[int]func(context.Context, *run) error{15: func(ctx context.Context, r *run) error {
			return r.exec(ctx, `CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.01); RETURN NEW; END $$;
				CREATE TRIGGER slow BEFORE INSERT ON public.orders FOR EACH ROW EXECUTE FUNCTION public.slow()`)
		}},
	},
	{
		name: "gone", seconds: 40,
		about: []string{"At 15 s the worker is killed, and stays away."},
		load:  load{rate: 300, resend: 0.02},
		acts: map[int]func(context.Context, *run) error{15: func(_ context.Context, r *run) error {
			r.worker.Kill()
			return nil
		}},
	},
}

func (s *scenario) record(ctx context.Context, binary string, wanted func(string) bool) (*monitoring.Recording, error) {
	r, err := newRun(ctx, binary, s.config, s.load)
	if err != nil {
		return nil, err
	}
	defer r.close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go r.produce(ctx)
	if err := r.startWorker(); err != nil {
		return nil, err
	}
	recording := &monitoring.Recording{About: append(s.about, "", "Scraped once a second. "+lastSuccess+" is told from the first scrape on.")}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	began := time.Now()
	for second := range s.seconds {
		if act := s.acts[second]; act != nil {
			if err := act(ctx, r); err != nil {
				return nil, fmt.Errorf("at %d s: %w", second, err)
			}
		}
		recording.Add(r.scrape(ctx, began, wanted))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return recording, nil
}

const lastSuccess = "dedupd_retention_last_success_timestamp_seconds"

// run is the servers, the worker and the producer of one run.
type run struct {
	postgres *pgtest.Server
	pool     *pgxpool.Pool
	broker   *server.Server
	conn     *nats.Conn
	js       jetstream.JetStream
	folder   string
	binary   string
	address  string // of the worker's HTTP server
	worker   *child.Process
	load     load
	idle     atomic.Bool // nothing is sent
}

const table = `CREATE TABLE public.orders (id text NOT NULL, payload jsonb, note text)`

func newRun(ctx context.Context, binary, config string, l load) (_ *run, err error) {
	r := &run{binary: binary, load: l}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.folder, err = os.MkdirTemp("", "dedupd-record-"); err != nil {
		return nil, err
	}
	if r.postgres, err = pgtest.StartServer(pgtest.Options{}); err != nil {
		return nil, err
	}
	if r.pool, err = pgxpool.New(ctx, r.postgres.URL("postgres")); err != nil {
		return nil, err
	}
	if err := r.exec(ctx, table); err != nil {
		return nil, err
	}
	if r.broker, err = natstest.Run(filepath.Join(r.folder, "nats")); err != nil {
		return nil, err
	}
	if r.conn, err = nats.Connect(r.broker.ClientURL()); err != nil {
		return nil, err
	}
	if r.js, err = jetstream.New(r.conn); err != nil {
		return nil, err
	}
	sources := ""
	for i := range max(1, l.sources) {
		stream := names[i]
		if _, err := r.js.CreateStream(ctx, jetstream.StreamConfig{Name: strings.ToUpper(stream), Subjects: []string{stream}}); err != nil {
			return nil, err
		}
		sources += fmt.Sprintf("  - {name: %s, nats: {servers: [%q], stream: %s}}\n", stream, r.broker.ClientURL(), strings.ToUpper(stream))
	}
	if r.address, err = rig.FreeAddress(); err != nil {
		return nil, err
	}
	text := fmt.Sprintf(`scope: orders
sources:
%sdatabase: {url: %q, max_connections: %d}
dead_letters: {max_share: 0.5}
sink: {table: {name: public.orders, columns: {id: id, payload: value, note: "header:note"}}}
http: {listen: %q}
%s`, sources, r.postgres.URL("postgres"), 1+max(1, l.sources), r.address, config)
	return r, os.WriteFile(r.file(), []byte(text), 0o600) // it holds a password
}

var names = []string{"shop", "edge"}

func (r *run) file() string { return filepath.Join(r.folder, "dedupd.yaml") }

func (r *run) exec(ctx context.Context, sql string) error {
	_, err := r.pool.Exec(ctx, sql)
	return err
}

// cut ends our own connections to the database.
func (r *run) cut() {
	if r.pool != nil {
		r.pool.Close()
	}
	r.pool = nil
}

func (r *run) startWorker() (err error) {
	r.worker, err = rig.Start(exec.Command(r.binary, "run", "-c", r.file()), filepath.Join(r.folder, "dedupd.log"))
	return err
}

func (r *run) stopWorker() error { return rig.Stop(r.worker, time.Minute) }

func (r *run) close() {
	if r.worker != nil && !r.worker.Ended() {
		r.worker.Kill()
	}
	if r.conn != nil {
		r.conn.Close()
	}
	if r.broker != nil {
		natstest.Stop(r.broker)
	}
	r.cut()
	if r.postgres != nil {
		_ = r.postgres.Stop()
	}
	if os.Getenv("KEEP") == "" {
		_ = os.RemoveAll(r.folder)
	}
}

// produce sends messages until the context ends.
func (r *run) produce(ctx context.Context) {
	const step = 50 * time.Millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	dice := rand.New(rand.NewPCG(1, 2)) // #nosec: it must be repeatable
	began, sent, ids := time.Now(), 0, 0
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if r.idle.Load() {
			continue
		}
		for due := int(time.Since(began).Seconds() * float64(r.load.rate)); sent < due; sent++ {
			var subject int
			id := ids
			if ids > 0 && dice.Float64() < r.load.resend {
				id = ids - 1 - dice.IntN(min(ids, 80*r.load.rate)) // of the last minutes
				if dice.IntN(2) == 0 {                             // a retry, soon after
					id = max(0, ids-1-dice.IntN(200))
				}
				subject = dice.IntN(max(1, r.load.sources)) // perhaps by the other way
			} else {
				subject = id % 4 / 3 % max(1, r.load.sources)
				ids++
			}
			header := nats.Header{"message-id": {"order-" + strconv.Itoa(id)}, "note": {"good"}}
			if float64(id*7919%10000)/10000 < r.load.poison {
				header.Set("note", "bad")
			}
			if _, err := r.js.PublishMsgAsync(&nats.Msg{Subject: names[subject], Header: header, Data: fmt.Appendf(nil, `{"order":%d}`, id)}); err != nil {
				break // the server doesn't keep up: what is due is sent at the next step
			}
		}
	}
}

// lock locks what claims need, again and again.
func (r *run) lock(ctx context.Context) {
	pool := r.pool
	for ctx.Err() == nil {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return
		}
		_, err = tx.Exec(ctx, `DO $$ DECLARE t text; BEGIN
			LOCK TABLE dedupd.lanes IN ACCESS EXCLUSIVE MODE;
			FOR t IN SELECT table_name FROM dedupd.generations WHERE state = 'open' LOOP
				EXECUTE format('LOCK TABLE dedupd.%I IN ACCESS EXCLUSIVE MODE', t);
			END LOOP;
			PERFORM pg_sleep(1.8);
		END $$`)
		_ = tx.Rollback(ctx)
		if err != nil {
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// probe asks for readiness, as many probes would.
func (r *run) probe(ctx context.Context) {
	for ctx.Err() == nil {
		go func() { _, _ = get(ctx, "http://"+r.address+"/readyz") }()
		time.Sleep(100 * time.Millisecond)
	}
}

func get(ctx context.Context, url string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return string(text), err
}

// scrape reads the metrics; none if the worker doesn't answer.
func (r *run) scrape(ctx context.Context, began time.Time, wanted func(string) bool) map[string]string {
	text, err := get(ctx, "http://"+r.address+"/metrics")
	if err != nil {
		return nil
	}
	all := monitoring.ParseExposition(text, "worker-0", wanted)
	for series, value := range all {
		if f, err := strconv.ParseFloat(value, 64); err == nil && f != 0 && strings.HasPrefix(series, lastSuccess+"{") {
			all[series] = strconv.FormatFloat(f-float64(began.UnixMilli())/1000, 'f', 2, 64)
		}
		if strings.HasPrefix(series, "dedupd_build_info{") {
			delete(all, series)
			all[`dedupd_build_info{namespace="orders",job="dedupd",instance="worker-0"}`] = value
		}
	}
	return all
}

// show lets Prometheus watch a noisy run, and then runs the command.
func show(ctx context.Context, binary, prometheus string, d time.Duration, command []string) error {
	if len(command) == 0 {
		return errors.New("no command to run in the end: give it as arguments")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, err := newRun(ctx, binary, "retention: {window: 4m, generation: 20s, schedule: 2s}\n",
		load{rate: 400, resend: 0.18, poison: 0.0005, sources: 2})
	if err != nil {
		return err
	}
	defer r.close()
	if err := r.exec(ctx, `ALTER TABLE public.orders ADD CHECK (note IS DISTINCT FROM 'bad')`); err != nil {
		return err
	}
	if err := r.startWorker(); err != nil {
		return err
	}
	address, err := rig.FreeAddress()
	if err != nil {
		return err
	}
	config := filepath.Join(r.folder, "prometheus.yml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `global: {scrape_interval: 2s}
scrape_configs:
  - job_name: dedupd
    static_configs: [{targets: [%q], labels: {namespace: orders, instance: worker-0}}]
`, r.address), 0o600); err != nil {
		return err
	}
	p, err := rig.Start(exec.Command(prometheus, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(r.folder, "tsdb"), // #nosec: the user names it
		"--web.listen-address="+address, "--log.level=warn"), filepath.Join(r.folder, "prometheus.log"))
	if err != nil {
		return err
	}
	defer p.Kill()
	go r.produce(ctx)
	// The sink's table is away for a while: a curve without a dent
	// shows little.
	for _, step := range []struct {
		sql  string
		wait time.Duration
	}{
		{"SELECT", d * 7 / 15},
		{"ALTER TABLE public.orders RENAME TO away", d / 15},
		{"ALTER TABLE public.away RENAME TO orders", d * 7 / 15},
	} {
		if err := r.exec(ctx, step.sql); err != nil {
			return err
		}
		select {
		case <-time.After(step.wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if p.Ended() {
		return fmt.Errorf("prometheus has ended: %s", rig.Tail(filepath.Join(r.folder, "prometheus.log")))
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...) // #nosec: the user names it
	cmd.Env = append(os.Environ(), "PROMETHEUS_URL=http://"+address)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}
