package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks/table"
)

const pgVersion = pgtest.DefaultVersion

// arm is a database of its own with a scope that remembers ids.
type arm struct {
	name string
	url  string
	pool *pgxpool.Pool
	// workers share nothing but the database.
	workers []*worker
	used    func() cpu
	// spent is what the last apply took.
	spent cpu
}

// worker is what one process would be: a store, a processor, and lanes.
type worker struct {
	*dedup.Processor
	registry *prometheus.Registry
	lanes    []*openLane
}

type openLane struct {
	message.Lane
	lane.Assignment
	at int64
}

// options of an arm.
type options struct {
	workers, writers int
	filterMemory     int64
	onDuplicate      policy.Duplicate
}

func (b *bench) newArm(ctx context.Context, name string, o options) (*arm, error) {
	admin, err := pgx.Connect(ctx, b.server.URL("postgres"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = admin.Close(ctx) }()
	if _, err := admin.Exec(ctx, `CREATE DATABASE `+pgx.Identifier{name}.Sanitize()); err != nil {
		return nil, err
	}
	a := &arm{name: name, url: b.server.URL(name), used: b.used}
	if a.pool, err = pgxpool.New(ctx, a.url); err != nil {
		return nil, err
	}
	// Without an index: whatever the sink does more would hide what claims cost.
	if _, err := a.pool.Exec(ctx, `CREATE TABLE public.rows (id uuid NOT NULL, payload jsonb NOT NULL)`); err != nil {
		return nil, err
	}
	for i := range max(o.workers, 1) {
		w, err := a.newWorker(ctx, i, o)
		if err != nil {
			return nil, err
		}
		a.workers = append(a.workers, w)
	}
	return a, nil
}

func (a *arm) newWorker(ctx context.Context, number int, o options) (*worker, error) {
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: a.pool, Scope: "bench", Owner: fmt.Sprint("worker ", number), FilterMemory: o.filterMemory})
	if err != nil {
		return nil, err
	}
	if _, err := store.Schema().Migrate(ctx); err != nil {
		return nil, err
	}
	identity, err := message.NewIdentity([]string{"key"}, 64<<10)
	if err != nil {
		return nil, err
	}
	fingerprint, err := claimkey.NewFingerprint([]string{"value"})
	if err != nil {
		return nil, err
	}
	sink, err := table.Config{Name: "public.rows", Columns: map[string]string{"id": "id", "payload": "value"}}.Sink()
	if err != nil {
		return nil, err
	}
	if o.onDuplicate == "" {
		o.onDuplicate = policy.DuplicateDrop
	}
	w := &worker{registry: prometheus.NewRegistry()}
	w.Processor = &dedup.Processor{
		Store: store, Sink: sink, Identity: identity, Fingerprint: fingerprint,
		Missing: policy.MissingDeadLetter, OnDuplicate: o.onDuplicate, OnConflict: policy.ConflictDeadLetter,
		MaxDeadShare: 1, DeadWindow: 1000, Metrics: dedup.NewMetrics(w.registry),
	}
	if err := w.Start(ctx); err != nil {
		return nil, err
	}
	for i := range max(o.writers, 1) {
		l := &openLane{Lane: message.Lane{Source: "bench", Name: fmt.Sprintf("t/%d-%d", number, i)}}
		if l.Assignment, err = store.Acquire(ctx, lane.Acquire{Lane: l.Lane, Ordered: true, Committed: -1}); err != nil {
			return nil, err
		}
		w.lanes = append(w.lanes, l)
	}
	return w, nil
}

// store is any of the workers'.
func (a *arm) store() *dedup.Store { return a.workers[0].Store }

func (a *arm) open(ctx context.Context) (number int, err error) {
	all, err := a.store().Generations().List(ctx)
	for _, g := range all {
		if g.State == "open" {
			number = g.Number
		}
	}
	return number, err
}

// exec runs statements, each in a transaction of its own.
func (a *arm) exec(ctx context.Context, statements ...string) error {
	for _, sql := range statements {
		if _, err := a.pool.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// remember fills the open generation with claims: random ids, or such as were
// made between two ages ago, in their order.
func (a *arm) remember(ctx context.Context, claims int, key string) error {
	number, err := a.open(ctx)
	if err != nil {
		return err
	}
	t := fmt.Sprintf("claims_bench_%d", number)
	conn, err := a.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	// Far quicker with the index made afterwards.
	for _, sql := range []string{
		`SET synchronous_commit = off`,
		`ALTER TABLE dedupd.` + t + ` DROP CONSTRAINT ` + t + `_pkey`,
		fmt.Sprintf(`INSERT INTO dedupd.%s (key, fingerprint, position, lane) SELECT %s, i, i, 1 FROM generate_series(1, %d) i`, t, key, claims),
		`ALTER TABLE dedupd.` + t + ` ADD CONSTRAINT ` + t + `_pkey PRIMARY KEY (key)`,
		`RESET synchronous_commit`,
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

const randomKeys = `gen_random_uuid()`

// timedKeys are UUIDv7 of a time between two ages.
func timedKeys(from, to time.Duration, claims int) string {
	return fmt.Sprintf(`uuidv7(make_interval(secs => -%f + i * %f))`, from.Seconds(), (from-to).Seconds()/float64(claims))
}

func (a *arm) rotate(ctx context.Context) error {
	number, err := a.open(ctx)
	if err != nil {
		return err
	}
	if _, err := a.store().Generations().Prepare(ctx); err != nil {
		return err
	}
	rotated, _, _, err := a.store().Generations().Rotate(ctx, number)
	if err == nil && !rotated {
		err = fmt.Errorf("generation %d was not rotated", number)
	}
	return err
}

// rememberSealed makes sealed generations of claims each.
func (a *arm) rememberSealed(ctx context.Context, generations, claims int, timed bool) error {
	for i := range generations {
		key := randomKeys
		if timed {
			age := time.Duration(generations-i) * 6 * time.Hour
			key = timedKeys(age, age-6*time.Hour, claims)
		}
		if err := a.remember(ctx, claims, key); err != nil {
			return err
		}
		if err := a.rotate(ctx); err != nil {
			return err
		}
		measure.Progress("%s: %d of %d generations of %d claims", a.name, i+1, generations, claims)
	}
	return nil
}

func (a *arm) buildFilters(ctx context.Context) error {
	for {
		if n, _, err := a.store().Generations().BuildFilter(ctx); err != nil || n == 0 {
			return err
		}
	}
}

func (a *arm) close() { a.pool.Close() }
