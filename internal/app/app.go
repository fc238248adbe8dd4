// Package app wires the program. It is the only package that knows both halves,
// brokers and Postgres. The command line handles signals and exit codes.
package app

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
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
// is no error. If one of several pipelines can't start or fails, all end.
func (a *App) Run(ctx context.Context) (Summary, error) {
	cfg, log := a.Config, a.Logger
	limits := shareLimit(limitMemory(int64(cfg.Batch.InflightBytes), len(cfg.All())), len(cfg.All()))
	reg := newRegistry()
	budgets := consumer.NewBudgets(int64(cfg.Batch.InflightBytes), len(cfg.All()))
	var pipelines pipelines
	for i, one := range cfg.All() {
		p := &pipeline{App: a, cfg: one, log: log, reg: reg, limit: limits[i]}
		if len(cfg.Pipelines) > 0 {
			p.name, p.log, p.reg = one.Scope, log.With("scope", one.Scope), prometheus.WrapRegistererWith(prometheus.Labels{"scope": one.Scope}, reg)
		}
		if err := p.open(ctx, budgets[i]); err != nil {
			return Summary{}, p.named(err)
		}
		defer closePool(p.pool, p.log)
		pipelines = append(pipelines, p)
	}

	probe := &probes{alive: pipelines.alive, ready: pipelines.ready}
	http, err := listen(cfg.HTTP.Listen, cfg.HTTP.Pprof, reg, probe)
	if err != nil {
		return Summary{}, err
	}
	defer http.close()

	for _, p := range pipelines {
		if err := p.start(ctx); err != nil {
			return Summary{}, p.named(err)
		}
		defer p.endRetention()
	}
	probe.started.Store(true)
	defer context.AfterFunc(ctx, func() { probe.draining.Store(true) })()
	for _, p := range pipelines {
		log.Info("consuming", "scope", p.cfg.Scope, "sources", len(p.cfg.Sources), "sink", p.cfg.Sink.Kinds(), "http", http.listener.Addr().String())
	}
	err = pipelines.run(ctx)
	done := pipelines.done()
	log.Info("stopped", "messages", done.Messages)
	return done, err
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
