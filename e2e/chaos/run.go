package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/e2e/shape"
	"github.com/dedupd/dedupd/internal/pgrelay"
	"github.com/dedupd/dedupd/internal/pgtest"
)

// run is one fault, met again and again by a fleet of workers under load, and
// the verdict on it.
type run struct {
	ctx      context.Context
	servers  *servers
	fault    *fault
	shape    *shape.Shape
	rng      *rand.Rand
	binary   string // of the workers
	folder   string
	broker   broker
	database string // its name
	// server is the primary. Unless it is the one that runs share, it is ours to
	// stop, and replica follows it through link.
	server  *pgtest.Server
	replica *pgtest.Server
	link    *pgrelay.Relay
	disk    *disk                        // nil: none that can be filled
	lines   []*line                      // to the broker's servers
	owned   []server                     // brokers of the run's own
	pool    atomic.Pointer[pgxpool.Pool] // straight to the server
	load    *load
	beside  *application // nil: the shape has none
	workers []*worker

	events  *json.Encoder
	mu      sync.Mutex
	strikes int
	notes   map[string]int // what else is counted, such as the outcomes of cut COMMITs
	caught  []time.Duration
}

// outcome is a run's line in the report.
type outcome struct {
	Fault      string         `json:"fault"`
	Broker     string         `json:"broker"`
	Shape      string         `json:"shape,omitempty"` // empty: claim
	Seed       uint64         `json:"seed"`
	Messages   int64          `json:"messages"`
	Strikes    int            `json:"strikes"`
	Notes      map[string]int `json:"notes,omitempty"`
	Caught     float64        `json:"caught_up_median_seconds"`
	Slowest    float64        `json:"caught_up_most_seconds"`
	Seconds    float64        `json:"seconds"`
	Verdict    string         `json:"verdict"`
	Violations int            `json:"violations"`
	Complaint  string         `json:"complaint,omitempty"`
	Date       string         `json:"date"`
}

// event is one line of the fault timeline.
type event struct {
	At       time.Time `json:"at"`
	What     string    `json:"what"`
	Failover bool      `json:"failover,omitempty"`
	// Until is how long people may put lanes elsewhere.
	Until *time.Time `json:"rewind_allowed_until,omitempty"`
	// Lane is one whose log has lost all from Position on.
	Lane     string `json:"cut_lane,omitempty"`
	Position int64  `json:"cut_position,omitempty"`
}

// do is one run and its verdict. Errors are of the rig; what is wrong with the
// workers stands in the outcome.
func (g *servers) do(ctx context.Context, j job) (outcome, error) {
	f := j.fault
	number := g.runs.Add(1)
	r := &run{
		ctx: ctx, servers: g, fault: f, shape: cmp.Or(j.shape, shape.Claim), rng: rand.New(rand.NewPCG(j.seed, 0)), notes: map[string]int{}, binary: cmp.Or(j.binary, g.dedupd),
		folder: filepath.Join(g.folder, fmt.Sprint("run-", number)), database: fmt.Sprint("run_", number),
	}
	out := outcome{Fault: f.name, Broker: j.kind, Seed: j.seed, Verdict: "valid"}
	if r.shape != shape.Claim {
		out.Shape = r.shape.Name
	}
	began := time.Now()
	complain := func(err error) {
		out.Verdict = "invalid"
		out.Complaint = strings.TrimSpace(out.Complaint + "\n" + err.Error())
	}
	if err := r.prepare(j.kind); err != nil {
		r.takeDown()
		return out, errors.Join(fmt.Errorf("%s, %s: %w", f.name, j.kind, err), r.cleanUp())
	}
	err := r.suffer(j.times, j.until)
	if settled := r.settle(); err == nil {
		err = settled
	}
	if err != nil {
		complain(err)
	}
	r.takeDown()
	violations, said, err := r.judge()
	if err != nil {
		return out, fmt.Errorf("%s, %s: %w", f.name, j.kind, err)
	}
	if violations > 0 {
		complain(errors.New(said))
	}
	for _, demand := range []func(*run) error{noDeadlocks, f.after} {
		if demand == nil {
			continue
		}
		if err := demand(r); err != nil {
			complain(err)
		}
	}
	out.Messages, out.Strikes, out.Notes, out.Violations = r.load.total.Load(), r.strikes, r.notes, violations
	out.Caught, out.Slowest = median(r.caught).Seconds(), longest(r.caught).Seconds()
	out.Seconds = time.Since(began).Seconds()
	err = r.cleanUp()
	if out.Verdict == "valid" && !g.keep {
		_ = os.RemoveAll(r.folder)
	}
	return out, err
}

// prepare makes everything up to workers that have lanes and a load that lands.
func (r *run) prepare(kind string) error {
	if err := os.MkdirAll(r.folder, 0o700); err != nil {
		return err
	}
	if err := r.makeServers(kind); err != nil {
		return err
	}
	if err := r.makeWorkers(); err != nil {
		return err
	}
	if err := r.makeSchema(); err != nil {
		return err
	}
	return r.begin()
}

func (r *run) makeServers(kind string) (err error) {
	b, err := r.newBroker(kind, strings.ReplaceAll(r.database, "_", "-"))
	if err != nil {
		return err
	}
	r.broker = b
	if r.server, err = r.newServer(); err != nil {
		return err
	}
	if err := execute(r.ctx, r.server.URL("postgres"), "CREATE DATABASE "+r.database); err != nil {
		return err
	}
	return r.connect()
}

func (r *run) makeWorkers() error {
	file, err := os.Create(filepath.Join(r.folder, "events"))
	if err != nil {
		return err
	}
	r.events = json.NewEncoder(file)
	for i := range max(r.fault.workers, 3) {
		w, err := r.newWorker(fmt.Sprint("worker-", i+1))
		if err != nil {
			return err
		}
		r.workers = append(r.workers, w)
	}
	return nil
}

func (r *run) makeSchema() error {
	if _, err := command(r.ctx, r.binary, "migrate", "up", "-c", r.workers[0].config); err != nil {
		return err
	}
	if _, err := command(r.ctx, r.servers.check, "prepare", "-database", r.url()); err != nil {
		return err
	}
	if err := r.exec(r.shape.Setup()); err != nil {
		return err
	}
	if r.fault.replicated {
		return r.replicate()
	}
	return nil
}

// begin starts the workers and the load, and waits for its first messages.
func (r *run) begin() (err error) {
	if r.load, err = newLoad(r.broker, rand.New(rand.NewPCG(r.rng.Uint64(), 1)), filepath.Join(r.folder, "intents")); err != nil {
		return err
	}
	if r.shape.Draw != nil {
		r.load.next = r.shape.Draw(rand.New(rand.NewPCG(r.rng.Uint64(), 2)), r.broker.Partitions())
	}
	if r.fault.prepare != nil {
		if err := r.fault.prepare(r); err != nil {
			return err
		}
	}
	for _, w := range r.workers {
		if err := w.start(); err != nil {
			return err
		}
	}
	r.load.start(r.ctx, cmp.Or(r.fault.rate, 1500))
	if r.shape.Beside != nil {
		r.startApplication(rand.New(rand.NewPCG(r.rng.Uint64(), 3)))
	}
	return r.await("the first messages land", time.Minute, func() error {
		n, err := r.applied()
		if err == nil && n == 0 {
			err = errors.New("none has")
		}
		return err
	})
}

// suffer lets the fault strike so many times, or until then, and measures how long it takes
// until everything that had been sent by then has landed.
func (r *run) suffer(times int, until time.Time) (err error) {
	samples, err := r.startSampler(filepath.Join(r.folder, "samples"))
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := samples.stop(); err == nil {
			err = stopErr
		}
	}()
	r.sleep(500*time.Millisecond, 1500*time.Millisecond)
	for i := 0; i < times && (until.IsZero() || time.Now().Before(until)); i++ {
		if err := r.ctx.Err(); err != nil {
			return err
		}
		if err := r.fault.strike(r, i); err != nil {
			return fmt.Errorf("%s, number %d: %w", r.fault.name, i+1, err)
		}
		r.strikes++
		if r.fault.each {
			if err := r.catchUp(); err != nil {
				return fmt.Errorf("after %s, number %d: %w", r.fault.name, i+1, err)
			}
		}
	}
	if !r.fault.each {
		return r.catchUp()
	}
	return nil
}

// catchUp waits until all that the broker has now is durable.
func (r *run) catchUp() error {
	began := time.Now()
	var ends map[string]int64
	err := r.await("the broker tells its ends", time.Minute, func() (err error) {
		ctx, cancel := context.WithTimeout(r.ctx, requestTimeout)
		defer cancel()
		ends, err = r.broker.Ends(ctx)
		return err
	})
	if err != nil {
		return err
	}
	limit := r.fault.limit
	if limit == 0 {
		limit = 90 * time.Second
	}
	err = r.await("all that was sent so far has landed", limit, func() error {
		ctx, cancel := context.WithTimeout(r.ctx, requestTimeout)
		defer cancel()
		next, err := r.positions(ctx)
		if err != nil {
			return err
		}
		for lane, end := range ends {
			if next[lane] < end {
				return fmt.Errorf("%s stands at %d of %d", lane, next[lane], end)
			}
		}
		if r.broker.Ordered() {
			return nil
		}
		// A queue's row tells only how far it has come.
		if done, err := r.broker.Done(ctx, ends); err != nil || !done {
			return errors.Join(err, errors.New("the queue still holds some of it"))
		}
		return nil
	})
	r.caught = append(r.caught, time.Since(began))
	return err
}

// settle ends the load, waits for the rest, and drains the workers.
func (r *run) settle() error {
	if _, err := r.load.stop(); err != nil {
		return err
	}
	if r.beside != nil {
		if err := r.beside.stop(); err != nil {
			return err
		}
	}
	if err := r.catchUp(); err != nil {
		return err
	}
	r.caught = r.caught[:len(r.caught)-1] // no fault came before it
	var failed []error
	for _, w := range r.workers {
		if err := w.alive(); err != nil {
			failed = append(failed, err)
		} else if w.running() != nil {
			w.signal(sigterm)
		}
	}
	for _, w := range r.workers {
		if len(failed) == 0 && w.running() != nil {
			failed = append(failed, w.mustEnd())
		}
	}
	return errors.Join(failed...)
}

// takeDown ends whatever still runs of the run.
func (r *run) takeDown() {
	if r.load != nil && r.load.cancel != nil {
		r.load.cancel()
	}
	if r.beside != nil {
		r.beside.cancel()
	}
	for _, w := range r.workers {
		w.kill()
		w.relay.Close()
	}
}

// cleanUp gives back what was made for the run, however far that came.
func (r *run) cleanUp() error {
	if pool := r.pool.Load(); pool != nil {
		pool.Close()
	}
	if r.broker != nil {
		r.broker.Close()
	}
	var all []error
	for _, s := range r.owned {
		all = append(all, s.Stop())
	}
	for _, l := range r.lines {
		l.down()
	}
	switch r.server {
	case nil:
	case r.servers.postgres:
		all = append(all, execute(context.WithoutCancel(r.ctx), r.server.URL("postgres"), "DROP DATABASE "+r.database+" WITH (FORCE)"))
	default:
		all = append(all, r.server.Stop())
	}
	if r.link != nil {
		r.link.Close()
	}
	if r.replica != nil {
		all = append(all, r.replica.Stop())
	}
	if r.disk != nil {
		all = append(all, r.disk.close())
	}
	return errors.Join(all...)
}

// newServer is the Postgres that all runs share or, where the fault asks for it,
// one of the run's own.
func (r *run) newServer() (_ *pgtest.Server, err error) {
	o := r.servers.settings()
	switch {
	case r.fault.disk == "postgres":
		if r.disk, err = newDisk(512 << 20); err != nil {
			return nil, err
		}
		o.Folder = r.disk.folder
		o.Settings["max_wal_size"] = "64MB"
	case r.fault.postgres == own, r.fault.replicated:
	case r.fault.postgres != "":
		o.Version = r.fault.postgres
	default:
		return r.servers.postgres, nil
	}
	return pgtest.StartServer(o)
}

func (r *run) url() string { return r.server.URL(r.database) }

// connect leads the run's own questions to the primary.
func (r *run) connect() error {
	pool, err := pgxpool.New(r.ctx, r.url())
	if err != nil {
		return err
	}
	if old := r.pool.Swap(pool); old != nil {
		old.Close()
	}
	return nil
}

// judge asks the checker. It knows nothing of this program.
func (r *run) judge() (violations int, said string, err error) {
	file := func(name string) string { return filepath.Join(r.folder, name) }
	args := append([]string{
		"run", "-database", r.url(), "-scope", scope, "-intents", file("intents"), "-samples", file("samples"),
		"-events", file("events"), "-shape", r.shape.Name, "-settled", "-output", "json",
	}, r.broker.Judge()...)
	for _, w := range r.workers {
		args = append(args, "-logs", w.log)
	}
	if r.fault.window > 0 {
		args = append(args, "-window", r.fault.window.String())
	}
	if r.fault.allow != "" {
		args = append(args, "-allow", r.fault.allow)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), 5*time.Minute)
	defer cancel()
	out, err := command(ctx, r.servers.check, args...)
	var verdict struct {
		Verdict    string `json:"verdict"`
		Invariants []struct {
			Invariant  string          `json:"invariant"`
			Promise    string          `json:"promise"`
			Violations int             `json:"violations"`
			First      []string        `json:"first"`
			Witness    json.RawMessage `json:"witness"`
		} `json:"invariants"`
	}
	if jsonErr := json.Unmarshal([]byte(out), &verdict); jsonErr != nil {
		return 0, "", errors.Join(err, jsonErr)
	}
	var text strings.Builder
	for _, i := range verdict.Invariants {
		if i.Violations > 0 {
			violations += i.Violations
			fmt.Fprintf(&text, "%s (%s): %d violations\n    %s\n    %s\n", i.Invariant, i.Promise, i.Violations, strings.Join(i.First, "\n    "), i.Witness)
		}
	}
	if verdict.Verdict == "valid" || verdict.Verdict == "invalid" && violations > 0 {
		return violations, text.String(), nil
	}
	return 0, "", fmt.Errorf("the checker can't tell: %s", out)
}

// note writes an event down.
func (r *run) note(format string, args ...any) { r.write(event{What: fmt.Sprintf(format, args...)}) }

func (r *run) write(e event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.At = time.Now()
	_ = r.events.Encode(e) // a lost line makes the checker stricter
}

func (r *run) count(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes[what]++
}

// positions are the lanes' rows.
func (r *run) positions(ctx context.Context) (map[string]int64, error) {
	rows, err := r.pool.Load().Query(ctx, `SELECT lane, next_position FROM dedupd.books WHERE scope = $1`, scope)
	if err != nil {
		return nil, err
	}
	next := map[string]int64{}
	var lane string
	var at int64
	_, err = pgx.ForEachRow(rows, []any{&lane, &at}, func() error {
		next[lane] = at
		return nil
	})
	return next, err
}

func (r *run) applied() (n int64, err error) {
	err = r.pool.Load().QueryRow(r.ctx, `SELECT coalesce(sum(applied), 0)::bigint FROM dedupd.books WHERE scope = $1`, scope).Scan(&n)
	return n, err
}

// exec runs SQL in the run's database, past the taps.
func (r *run) exec(sql string) error {
	ctx, cancel := context.WithTimeout(r.ctx, 30*time.Second)
	defer cancel()
	_, err := r.pool.Load().Exec(ctx, sql)
	return err
}

// noDeadlocks demands that everybody took locks in one order: workers would get
// over a deadlock, each after a second of standing still.
func noDeadlocks(r *run) error {
	var n int64
	if err := r.pool.Load().QueryRow(context.WithoutCancel(r.ctx), `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&n); err != nil {
		return err
	}
	if n > 0 && r.shape.Retries {
		r.notes["deadlocks"] = int(n)
		return nil
	}
	if n > 0 {
		return fmt.Errorf("Postgres has found %d deadlocks (40P01)", n)
	}
	return nil
}

// await asks until there is no complaint any more. A worker that has ended by
// itself ends the wait: nothing in here asks for that.
func (r *run) await(what string, within time.Duration, complaint func() error) error {
	for end := time.Now().Add(within); ; {
		err := complaint()
		if err == nil {
			return nil
		}
		for _, w := range r.workers {
			if dead := w.alive(); dead != nil {
				return dead
			}
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %s: %s: %w", within, what, err)
		}
		select {
		case <-r.ctx.Done():
			return r.ctx.Err()
		case <-time.After(25 * time.Millisecond):
		}
	}
}

func (r *run) sleep(least, most time.Duration) {
	d := least
	if most > least {
		d += time.Duration(r.rng.Int64N(int64(most - least)))
	}
	sleep(r.ctx, d)
}

// sleep reports whether ctx still lives.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

func (r *run) anyWorker() *worker { return r.workers[r.rng.IntN(len(r.workers))] }

// command runs a program to its end.
func command(ctx context.Context, binary string, args ...string) (stdout string, err error) {
	cmd := exec.CommandContext(ctx, binary, args...)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(binary), args[0], err, out.String(), said.String())
	}
	return out.String(), nil
}
