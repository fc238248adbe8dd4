package app

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/retention"
)

// newLoop makes the scope's retention loop.
func newLoop(cfg *config.Config, store retention.Store, reg prometheus.Registerer, log *slog.Logger) *retention.Loop {
	r := &cfg.Retention
	return &retention.Loop{
		Store:    store,
		Schedule: time.Duration(r.Schedule),
		Window:   time.Duration(r.Window), MaxHold: time.Duration(r.MaxHold),
		Generation: time.Duration(r.Generation), MaxClaims: r.GenerationMaxClaims,
		DeadLetterAge: time.Duration(cfg.DeadLetters.Retention),
		Logger:        log, Metrics: retention.NewMetrics(reg),
	}
}

// Retain makes one retention pass now, as a running worker does by its schedule.
// With rotate it seals the open generation whatever its age and size.
func Retain(ctx context.Context, cfg *config.Config, store *dedup.Store, log *slog.Logger, rotate bool) (retention.Report, error) {
	s := retentionStore{Store: store, Set: store.Generations(), flush: func(context.Context) error { return nil }}
	return newLoop(cfg, s, prometheus.NewRegistry(), log).Pass(ctx, rotate)
}

// BrokerRetention asks the configured brokers how long they keep messages. unknown
// names the sources whose broker didn't say, and why.
func BrokerRetention(ctx context.Context, cfg *config.Config) (all []retention.BrokerRetention, unknown []string, err error) {
	sources, err := newSources(cfg)
	if err != nil {
		return nil, nil, &ConfigError{err}
	}
	all = brokerRetention(ctx, sources, func(source string, err error) { unknown = append(unknown, source+": "+err.Error()) })
	return all, unknown, nil
}

func brokerRetention(ctx context.Context, sources []consumer.Source, failed func(source string, err error)) (all []retention.BrokerRetention) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for _, s := range sources {
		reporter, ok := s.(consumer.RetentionReporter)
		if !ok {
			continue
		}
		kept, err := reporter.BrokerRetention(ctx)
		if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
			failed(s.Name(), err)
		}
		for _, k := range kept {
			all = append(all, retention.BrokerRetention{Name: s.Name() + ":" + k.Name, Keeps: k.For})
		}
	}
	return all
}

// warnOfShortWindow warns of brokers that keep messages longer than claims are kept.
// If somebody moves the group back to the oldest message, messages older than the
// window are applied again.
func warnOfShortWindow(ctx context.Context, window time.Duration, sources []consumer.Source, log *slog.Logger) {
	failed := func(source string, err error) {
		log.Info("the broker doesn't say how long it keeps messages, so that retention.window isn't compared with it", "source", source, "error", err)
	}
	for _, b := range brokerRetention(ctx, sources, failed) {
		switch {
		case b.Keeps == 0:
			log.Info("the broker keeps messages without a time limit: if the group is moved back, those older than retention.window are applied again",
				"name", b.Name, "window", window)
		case b.Keeps > window:
			log.Warn("the broker keeps messages longer than retention.window: if the group is moved back, those older than the window are applied again; `dedupd retention advise` says what a longer window costs",
				"name", b.Name, "kept", b.Keeps, "window", window)
		}
	}
}

// retentionStore is the store as package retention uses it.
type retentionStore struct {
	*dedup.Store
	*generations.Set
	// flush records the ages of duplicates that the process has seen since the last
	// call; limit gets how much memory the filters take. Nil: this process claims nothing,
	// and needs none.
	flush func(context.Context) error
	limit func(filters int64)
}

func (h retentionStore) FlushAges(ctx context.Context) error { return h.flush(ctx) }

func (h retentionStore) LoadFilters(ctx context.Context) error {
	if h.limit == nil {
		return nil
	}
	defer func() { h.limit(h.FilterBytes()) }()
	return h.Set.LoadFilters(ctx)
}

func (h retentionStore) Status(ctx context.Context) (s retention.Status, err error) {
	status, err := h.Store.Status(ctx)
	if err != nil {
		return s, err
	}
	s.Now, s.Stream, s.Lane, s.LanesAhead = status.Now, status.Stream, status.Lane, status.LanesAhead
	for _, g := range status.Generations {
		s.Generations = append(s.Generations, retention.Generation{
			Number: g.Number, State: g.State, OpenedAt: orZero(g.OpenedAt), SealedAt: orZero(g.SealedAt),
			Claims: g.Claims, Bytes: g.Bytes, Missing: g.Missing, Ahead: g.Ahead(status.Now),
		})
	}
	return s, nil
}

// flushLast records what came since the last pass. A database that doesn't answer
// must not delay the end.
func flushLast(ctx context.Context, flush func(context.Context) error, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := flush(ctx); err != nil {
		log.Warn("the last ages of duplicates are not counted", "error", err)
	}
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}
