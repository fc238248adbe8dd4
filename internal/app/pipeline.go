package app

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/sinks"
)

// pipeline is one scope at work: its worker, its database and its retention.
type pipeline struct {
	*App
	cfg *config.Config
	// name is the scope if the process runs several pipelines.
	name  string
	log   *slog.Logger
	reg   prometheus.Registerer
	limit func(filters int64)

	sink         sinks.Sink
	worker       *consumer.Worker
	pool         *pgxpool.Pool
	store        *dedup.Store
	endRetention func()
}

// PipelineError is the error of one of several pipelines.
type PipelineError struct {
	Scope string
	Err   error
}

func (e *PipelineError) Error() string { return "scope " + e.Scope + ": " + e.Err.Error() }
func (e *PipelineError) Unwrap() error { return e.Err }

// named says which of several pipelines an error is of.
func (p *pipeline) named(err error) error {
	if p.name == "" || err == nil {
		return err
	}
	return &PipelineError{p.name, err}
}

// open makes what needs no server, and the pool.
func (p *pipeline) open(ctx context.Context, budget *consumer.Budget) (err error) {
	if p.sink, err = p.cfg.NewSink(p.Sinks); err != nil {
		return err
	}
	if p.worker, err = p.newWorker(budget); err != nil {
		return &ConfigError{err}
	}
	if p.pool, p.store, err = OpenDatabase(ctx, p.cfg, p.cfg.Database.MaxConnections, p.log); err != nil {
		return err
	}
	if p.AcceptLoss {
		p.store.AcceptLoss()
	}
	registerPool(p.reg, p.pool)
	return nil
}

// newWorker makes the worker without its database.
func (p *pipeline) newWorker(budget *consumer.Budget) (*consumer.Worker, error) {
	sources, err := newSources(p.cfg)
	if err != nil {
		return nil, err
	}
	return &consumer.Worker{
		Sources:     sources,
		Writers:     p.cfg.Database.MaxConnections - 1,
		MaxMessages: p.cfg.Batch.MaxMessages,
		MaxBytes:    int64(p.cfg.Batch.MaxBytes),
		Budget:      budget,
		Drain:       time.Duration(p.cfg.Shutdown.Drain),
		UntilIdle:   p.UntilIdle,
		HangTimeout: p.HangTimeout,
		Logger:      p.log,
		Metrics:     consumer.NewMetrics(p.reg, budget),
	}, nil
}

// start prepares the database and the sink, and starts retention.
func (p *pipeline) start(ctx context.Context) error {
	if err := openSchema(ctx, p.cfg, p.store, p.log); err != nil {
		return err
	}
	processor, err := startProcessor(ctx, p.cfg, p.store, p.sink, p.reg)
	if err != nil {
		return err
	}
	p.worker.Handler, p.worker.Lanes = processor, p.store
	p.endRetention = p.startRetention(ctx, retentionStore{p.store, p.store.Generations(), processor.FlushAges, p.limit})
	return nil
}

// startRetention runs retention beside the worker, until the returned function ends it.
func (p *pipeline) startRetention(ctx context.Context, store retentionStore) (end func()) {
	p.reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dedupd_filter_bytes", Help: "Memory that the filters of sealed generations take in this process."},
		func() float64 { return float64(store.FilterBytes()) }))
	loop := newLoop(p.cfg, store, p.reg, p.log)
	loop.ClockSlack = clockSlack
	running, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { loop.Run(running) })
	all.Go(func() { warnOfShortWindow(running, time.Duration(p.cfg.Retention.Window), p.worker.Sources, p.log) })
	return func() {
		stop()
		all.Wait()
		flushLast(ctx, store.flush, p.log)
	}
}

// pipelines are those of a process.
type pipelines []*pipeline

func (all pipelines) alive() error {
	errs := make([]error, len(all))
	for i, p := range all {
		errs[i] = p.named(p.worker.Alive())
	}
	return errors.Join(errs...)
}

func (all pipelines) ready(ctx context.Context) error {
	errs := make([]error, len(all))
	for i, p := range all {
		errs[i] = p.named(errors.Join(p.worker.Ready(), p.store.Ping(ctx)))
	}
	return errors.Join(errs...)
}

// run runs the workers until ctx ends, all of them are idle, or one fails: the others are
// then drained, and the error is that one's.
func (all pipelines) run(ctx context.Context) (err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var working sync.WaitGroup
	var first sync.Once
	for _, p := range all {
		working.Go(func() {
			failed := p.worker.Run(ctx)
			if absent := (*consumer.NotReadyError)(nil); errors.As(failed, &absent) || errors.Is(failed, lane.ErrLoss) {
				failed = &ServerError{failed}
			}
			if failed != nil {
				first.Do(func() { err = p.named(failed) })
				stop()
			}
		})
	}
	working.Wait()
	return err
}

// done is what all have done.
func (all pipelines) done() (s Summary) {
	for _, p := range all {
		messages, duration := p.worker.Done()
		s.Messages += messages
		s.Duration = max(s.Duration, duration)
	}
	return s
}
