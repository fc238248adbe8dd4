package crash_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	sourceName = "log"
	otherName  = "other"
	// perBatch makes each batch four messages, so that every cell knows what stands
	// in which transaction.
	perBatch = 4

	patience  = 20 * time.Second
	drain     = 10 * time.Second
	drainNone = time.Millisecond
)

func laneOf(partition int) message.Lane {
	return message.Lane{Source: sourceName, Name: strconv.Itoa(partition)}
}

// cell is one cell of the table: a database, a broker, and the workers that come
// and go.
type cell struct {
	*testing.T
	by     way
	db     *pgtest.DB
	pool   *pgxpool.Pool // the test's own, which no fault touches
	other  *dedup.Store  // of the worker that takes a lane away
	others sync.WaitGroup

	broker  *consumertest.Broker
	logs    [][]entry // by partition
	workers []*worker
}

// The sink's table has no unique index on the id: one would hide the doubles that
// the table is to show. The trigger notes every move of a lane, by whom, and who
// owned the lane at that moment.
const schema = `
CREATE TABLE public.rows (
	n bigint GENERATED ALWAYS AS IDENTITY, id text, lane text, position bigint,
	value text CHECK (value <> 'poison'), worker text DEFAULT current_setting('application_name'));
CREATE TABLE public.moves (
	n bigint GENERATED ALWAYS AS IDENTITY, lane text, "from" bigint, "to" bigint, epoch bigint, owner text,
	worker text DEFAULT current_setting('application_name'));
CREATE FUNCTION public.note_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO public.moves (lane, "from", "to", epoch, owner) VALUES (NEW.lane, OLD.next_position, NEW.next_position, NEW.epoch, NEW.owner);
	RETURN NULL;
END $$;
CREATE TRIGGER note_move AFTER UPDATE ON dedupd.lanes FOR EACH ROW
	WHEN (OLD.fetched IS DISTINCT FROM NEW.fetched OR OLD.next_position IS DISTINCT FROM NEW.next_position)
	EXECUTE FUNCTION public.note_move();`

func newCell(t *testing.T, by way, logs ...[]entry) *cell {
	t.Helper()
	c := &cell{T: t, by: by, broker: consumertest.NewBroker(len(logs)), logs: logs}
	c.db = pgtest.NewFrom(t, "crash", func(ctx context.Context, url string) error {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		defer pool.Close()
		if _, err := newStore(pool, "").Schema().Migrate(ctx); err != nil {
			return err
		}
		_, err = pool.Exec(ctx, schema)
		return err
	})
	c.pool = c.db.Pool(t)
	c.other = newStore(c.newPool(otherName, nil), otherName)
	c.rotate()
	return c
}

// rotate seals a generation after the other while the cell lasts, so that every
// step falls before, into or after a rotation, now here and now there.
func (c *cell) rotate() {
	keeper := newStore(c.newPool("keeper", nil), "keeper")
	ctx, stop := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for number := 1; ctx.Err() == nil; number++ {
			_, err := keeper.Generations().Prepare(ctx)
			for rotated := false; err == nil && !rotated; {
				rotated, _, _, err = keeper.Generations().Rotate(ctx, number)
			}
			if err == nil {
				_, _, err = keeper.Generations().BuildFilter(ctx)
			}
			if err != nil && ctx.Err() == nil {
				c.Error("rotate: ", err)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(rand.N(60 * time.Millisecond)):
			}
		}
	})
	c.Cleanup(func() {
		stop()
		done.Wait()
	})
}

func newStore(pool *pgxpool.Pool, owner string) *dedup.Store {
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "crash", Owner: owner})
	if err != nil {
		panic(err)
	}
	return store
}

// newPool connects under a name that the server shows.
func (c *cell) newPool(name string, change func(*pgxpool.Config)) *pgxpool.Pool {
	config, err := pgxpool.ParseConfig(c.db.URL)
	if err != nil {
		c.Fatal(err)
	}
	config.MaxConns = 3
	config.ConnConfig.RuntimeParams["application_name"] = name
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(pool.Close)
	return pool
}

// produce fills the broker. What stands there before a worker starts is fetched
// in batches of perBatch.
func (c *cell) produce(b *consumertest.Broker) {
	for partition, entries := range c.logs {
		for _, e := range entries {
			b.Produce(partition, e.message())
		}
	}
}

// worker is one run of dedupd, wired as the program is, with a trap in it.
type worker struct {
	*consumer.Worker
	cell      *cell
	name      string
	trap      *trap
	processor *dedup.Processor
	store     *dedup.Store
	registry  *prometheus.Registry
	end       context.CancelFunc // SIGTERM
	done      chan error

	dead    atomic.Bool
	deposed atomic.Bool  // the broker takes it for dead and hears nothing of it
	commits atomic.Int32 // sent
	told    atomic.Int64 // messages of hand-overs that were answered by nil
	stale   atomic.Int32 // takes refused
	took    chan lane.Assignment

	mu    sync.Mutex
	conns map[*conn]struct{}
}

// start starts a worker. Each has a name of its own, so that the database shows
// who wrote what.
func (c *cell) start(name string, t *trap, source func(w *worker) consumer.Source) *worker {
	c.Helper()
	w := &worker{
		cell: c, name: name, trap: t, registry: prometheus.NewRegistry(), done: make(chan error, 1),
		conns: make(map[*conn]struct{}), took: make(chan lane.Assignment, 1000),
	}
	pool := c.newPool(name, func(config *pgxpool.Config) { config.ConnConfig.DialFunc = w.dial })
	w.store = newStore(pool, name)
	identity, err := message.NewIdentity([]string{"header:id"}, 1000)
	if err != nil {
		c.Fatal(err)
	}
	fingerprint, err := claimkey.NewFingerprint([]string{"value"})
	if err != nil {
		c.Fatal(err)
	}
	w.processor = &dedup.Processor{
		Store: w.store, Sink: &sink{w}, Identity: identity, Fingerprint: fingerprint,
		Missing: policy.MissingDeadLetter, OnDuplicate: policy.DuplicateDrop, OnConflict: policy.ConflictDeadLetter,
		MaxDeadShare: 0.9, DeadWindow: 1000, CopyFrom: c.by.copyFrom, Metrics: dedup.NewMetrics(w.registry),
	}
	if err := w.processor.Start(c.Context()); err != nil {
		c.Fatal(err)
	}
	budget := consumer.NewBudget(1 << 20)
	w.Worker = &consumer.Worker{
		Handler: &handler{w}, Lanes: &lanes{w}, Sources: []consumer.Source{source(w)},
		Writers: 2, MaxMessages: perBatch, MaxBytes: 1 << 20, Budget: budget, Drain: drain,
		Logger: logger().With("worker", name), Metrics: consumer.NewMetrics(w.registry, budget),
	}
	if t != nil && (t.event == kill || t.event == cutOff) {
		w.Drain = drainNone
	}
	ctx, end := context.WithCancel(context.Background())
	w.end = end
	c.workers = append(c.workers, w)
	c.Cleanup(func() { // of a cell that failed half-way
		w.kill()
		<-w.done
	})
	go func() {
		defer close(w.done)
		w.done <- w.Run(ctx)
	}()
	return w
}

// member is a worker's source at the cell's broker.
func (c *cell) member(w *worker) consumer.Source { return c.broker.Intercepted(sourceName, w.ack) }

// kill ends a worker as kill -9 does: nothing it does from now on reaches the
// database or the broker. (Its goroutines have to end some time, too, for no
// test may leak; they can't do any good or harm.)
func (w *worker) kill() {
	w.mu.Lock()
	w.dead.Store(true)
	conns := w.conns
	w.conns = nil
	w.mu.Unlock()
	for c := range conns {
		c.vanish()
	}
	w.end()
}

// ended waits until a worker's Run has returned, and looks at its books.
func (c *cell) ended(w *worker) {
	c.Helper()
	select {
	case err := <-w.done:
		if err != nil {
			c.Errorf("%s: Run: %v", w.name, err)
		}
	case <-time.After(patience):
		c.Fatalf("%s does not end", w.name)
	}
	if n := w.Budget.Used(); n != 0 {
		c.Errorf("%s: the budget still holds %d bytes", w.name, n)
	}
	fetched, abandoned := w.metric("dedupd_messages_fetched_total"), w.metric("dedupd_messages_abandoned_total")
	if told := w.told.Load(); fetched != float64(told)+abandoned {
		c.Errorf("%s: fetched %v messages, but made %d durable and abandoned %v", w.name, fetched, told, abandoned)
	}
}

// metric is a metric's sum over all labels.
func (w *worker) metric(name string) (sum float64) {
	families, err := w.registry.Gather()
	if err != nil {
		w.cell.Error(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

func logger() *slog.Logger {
	if os.Getenv("CONSUMERTEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.DiscardHandler)
}
