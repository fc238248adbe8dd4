// Package app wires the program. It is the only package that knows both halves,
// brokers and Postgres. The command line handles signals and exit codes.
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// App is one worker process. Set the fields before Run.
type App struct {
	Config *config.Config
	// Sinks are the kinds of sinks this binary has.
	Sinks  *sinks.Registry
	Logger *slog.Logger
	// UntilIdle, if not zero, ends Run once every lane has been caught up for
	// that long.
	UntilIdle time.Duration
	// AcceptLoss permits queues whose broker deletes acknowledged messages, although
	// a failover of the database may lose commits.
	AcceptLoss bool
	// HangTimeout is how long a transaction may last before its sink counts as hung.
	// Zero: a while beyond the transaction's deadline.
	HangTimeout time.Duration
}

// Summary is what a run has done.
type Summary struct {
	Messages int64
	// Duration is from the first message read to the last commit.
	Duration time.Duration
}

// ServerError means that a server, or something in it, isn't as it must be.
type ServerError struct{ Err error }

func (e *ServerError) Error() string { return e.Err.Error() }
func (e *ServerError) Unwrap() error { return e.Err }

// ConfigError means that the configuration is well-formed but unusable.
type ConfigError struct{ Err error }

func (e *ConfigError) Error() string { return e.Err.Error() }
func (e *ConfigError) Unwrap() error { return e.Err }

// Run connects, consumes until ctx ends (or, with UntilIdle, until every lane is
// caught up), and drains. It then closes everything in reverse order. A planned end
// is no error.
func (a *App) Run(ctx context.Context) (Summary, error) {
	cfg, log := a.Config, a.Logger

	sink, err := cfg.NewSink(a.Sinks)
	if err != nil {
		return Summary{}, err
	}
	limit := limitMemory(int64(cfg.Batch.InflightBytes))
	reg := newRegistry()
	worker, err := a.newWorker(reg)
	if err != nil {
		return Summary{}, &ConfigError{err}
	}
	pool, store, err := OpenDatabase(ctx, cfg, cfg.Database.MaxConnections, log)
	if err != nil {
		return Summary{}, err
	}
	if a.AcceptLoss {
		store.AcceptLoss()
	}
	defer closePool(pool, log)
	registerPool(reg, pool)

	probe := &probes{
		alive: worker.Alive,
		ready: func(ctx context.Context) error { return errors.Join(worker.Ready(), store.Ping(ctx)) },
	}
	http, err := listen(cfg.HTTP.Listen, cfg.HTTP.Pprof, reg, probe)
	if err != nil {
		return Summary{}, err
	}
	defer http.close()

	if err := openSchema(ctx, cfg, store, log); err != nil {
		return Summary{}, err
	}
	processor, err := startProcessor(ctx, cfg, store, sink, reg)
	if err != nil {
		return Summary{}, err
	}
	worker.Handler, worker.Lanes = processor, store

	defer a.startRetention(ctx, retentionStore{store, store.Generations(), processor.FlushAges, limit}, worker.Sources, reg)()

	probe.started.Store(true)
	defer context.AfterFunc(ctx, func() { probe.draining.Store(true) })()
	log.Info("consuming", "scope", cfg.Scope, "sources", len(cfg.Sources), "sink", cfg.Sink.Kinds(), "http", http.listener.Addr().String())
	err = worker.Run(ctx)
	if absent := (*consumer.NotReadyError)(nil); errors.As(err, &absent) || errors.Is(err, lane.ErrLoss) {
		err = &ServerError{err}
	}
	messages, duration := worker.Done()
	log.Info("stopped", "messages", messages)
	return Summary{messages, duration}, err
}

// newWorker makes the worker without its database.
func (a *App) newWorker(reg prometheus.Registerer) (*consumer.Worker, error) {
	cfg := a.Config
	sources, err := newSources(cfg)
	if err != nil {
		return nil, err
	}
	budget := consumer.NewBudget(int64(cfg.Batch.InflightBytes))
	return &consumer.Worker{
		Sources:     sources,
		Writers:     cfg.Database.MaxConnections - 1,
		MaxMessages: cfg.Batch.MaxMessages,
		MaxBytes:    int64(cfg.Batch.MaxBytes),
		Budget:      budget,
		Drain:       time.Duration(cfg.Shutdown.Drain),
		UntilIdle:   a.UntilIdle,
		HangTimeout: a.HangTimeout,
		Logger:      a.Logger,
		Metrics:     consumer.NewMetrics(reg, budget),
	}, nil
}

// startRetention runs retention beside the worker, until the returned function ends it.
func (a *App) startRetention(ctx context.Context, store retentionStore, sources []consumer.Source, reg prometheus.Registerer) (end func()) {
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dedupd_filter_bytes", Help: "Memory that the filters of sealed generations take in this process."},
		func() float64 { return float64(store.FilterBytes()) }))
	loop := newLoop(a.Config, store, reg, a.Logger)
	loop.ClockSlack = clockSlack
	running, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { loop.Run(running) })
	all.Go(func() { warnOfShortWindow(running, time.Duration(a.Config.Retention.Window), sources, a.Logger) })
	return func() {
		stop()
		all.Wait()
		flushLast(ctx, store.flush, a.Logger)
	}
}

// clockSlack is how far the database's clock may be ahead of a worker's before the
// worker stops expiring claims. Clocks that NTP sets differ by less.
const clockSlack = 5 * time.Minute

// openSchema upgrades the database's schema, or refuses one that this program
// doesn't fit.
func openSchema(ctx context.Context, cfg *config.Config, store *dedup.Store, log *slog.Logger) error {
	if cfg.Database.Migrate {
		applied, err := store.Schema().Migrate(ctx)
		if err != nil {
			return explainHangUp(err)
		}
		for _, m := range applied {
			log.Info("schema upgraded", "version", m.Version, "name", m.Name)
		}
	}
	if err := store.Load(ctx); err != nil {
		return explainHangUp(err)
	}
	warnOfChanges(ctx, cfg, store, log)
	return nil
}

// OpenProcessor makes a configuration's processor and prepares its sink, for commands.
// The store's schema must be up to date. Nobody reads the processor's metrics.
func OpenProcessor(ctx context.Context, cfg *config.Config, registry *sinks.Registry, store *dedup.Store) (*dedup.Processor, error) {
	sink, err := cfg.NewSink(registry)
	if err != nil {
		return nil, err
	}
	return startProcessor(ctx, cfg, store, sink, prometheus.NewRegistry())
}

func startProcessor(ctx context.Context, cfg *config.Config, store *dedup.Store, sink sinks.Sink, reg prometheus.Registerer) (*dedup.Processor, error) {
	identity, err := message.NewIdentity(cfg.ID.From, int(cfg.ID.MaxBytes))
	if err != nil {
		return nil, fmt.Errorf("id.from: %w", err)
	}
	fingerprint, err := claimkey.NewFingerprint(cfg.Dedup.Fingerprint)
	if err != nil {
		return nil, err
	}
	var sequence *dedup.Sequence
	if cfg.Dedup.Strategy == policy.StrategySequence {
		if sequence, err = newSequence(cfg); err != nil {
			return nil, err
		}
	}
	processor := &dedup.Processor{
		Store: store, Strategy: cfg.Dedup.Strategy, Sequence: sequence, Sink: sink, Identity: identity, Fingerprint: fingerprint,
		Missing: cfg.ID.Missing, OnDuplicate: cfg.Dedup.OnDuplicate, OnConflict: cfg.Dedup.OnConflict,
		MaxDeadShare: cfg.DeadLetters.MaxShare, DeadWindow: cfg.DeadLetters.Window, Window: time.Duration(cfg.Retention.Window),
		MaxMessages: cfg.Batch.MaxMessages, Metrics: dedup.NewMetrics(reg),
	}
	if err := processor.Start(ctx); err != nil {
		return nil, &ServerError{err}
	}
	return processor, nil
}

func newSequence(cfg *config.Config) (s *dedup.Sequence, err error) {
	c, most := cfg.Dedup.Sequence, int(cfg.ID.MaxBytes)
	s = &dedup.Sequence{Gaps: c.Gaps}
	if s.Producer, err = message.NewIdentity(c.Producer, most); err != nil {
		return nil, fmt.Errorf("dedup.sequence.producer: %w", err)
	}
	if s.Number, err = message.NewIdentity([]string{c.Seq}, most); err != nil {
		return nil, fmt.Errorf("dedup.sequence.seq: %w", err)
	}
	if c.Epoch == "" {
		return s, nil
	}
	if s.Epoch, err = message.NewIdentity([]string{c.Epoch}, most); err != nil {
		return nil, fmt.Errorf("dedup.sequence.epoch: %w", err)
	}
	return s, nil
}

func newRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	registerBuildInfo(reg)
	return reg
}

func registerPool(reg prometheus.Registerer, pool *pgxpool.Pool) {
	reg.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dedupd_database_connections", Help: "Open connections to the database."},
			func() float64 { return float64(pool.Stat().TotalConns()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dedupd_database_connections_busy", Help: "Connections to the database in use."},
			func() float64 { return float64(pool.Stat().AcquiredConns()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "dedupd_database_connection_wait_seconds_total", Help: "Time spent waiting for a free connection to the database."},
			func() float64 { return pool.Stat().EmptyAcquireWaitTime().Seconds() }),
	)
}

// closePool waits a moment for connections that are still in use, but no longer: a
// hung sink must not keep the process from ending.
func closePool(pool *pgxpool.Pool, log *slog.Logger) {
	done := make(chan struct{})
	go func() {
		pool.Close()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		log.Warn("a connection to the database is still in use: leaving it behind")
	}
}
