// Package retention decides when the housekeeping of one scope is done: on a
// schedule, with jitter, by one process at a time. It imports nothing of dedupd's
// own: how it is done is the store's affair.
//
// Dead letters expire by their age. Claims do not expire yet: a generation stays
// open, and keeps every claim.
package retention

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Store does what the Loop decides. It may be called by one goroutine at a time.
type Store interface {
	// ExpireDeadLetters deletes dead letters that are older than age, by the
	// database's clock. led is false while another process is at it.
	ExpireDeadLetters(ctx context.Context, age time.Duration) (n int64, led bool, err error)
	// Stats looks at what is kept.
	Stats(ctx context.Context) (Stats, error)
}

// Stats is what the scope keeps.
type Stats struct {
	Generations int
	// Claims is an estimate, ClaimsBytes their size on disk with the index.
	Claims, ClaimsBytes int64
	// OldestClaim is the age of the oldest generation's start.
	OldestClaim time.Duration
	DeadLetters int64
}

// passTimeout bounds one pass: the next one goes on where it ended.
const passTimeout = 2 * time.Minute

// Loop does the housekeeping until its context ends.
type Loop struct {
	Store Store
	// Schedule is the time between passes; each wait is up to a tenth longer, so
	// that many processes don't come at the same moment.
	Schedule time.Duration
	// DeadLetterAge is how long dead letters are kept.
	DeadLetterAge time.Duration
	Logger        *slog.Logger
	Metrics       *Metrics
}

// Run makes a pass soon after the start and then by the schedule. It returns when
// ctx ends. A pass that fails is logged when its reason changes, and made again:
// housekeeping is never a reason to stop consuming.
func (l *Loop) Run(ctx context.Context) {
	last := ""
	wait := rand.N(max(min(l.Schedule, 5*time.Second), 1))
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		wait = l.Schedule + rand.N(max(l.Schedule/10, 1))
		err := l.Pass(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			last = ""
		} else if text := err.Error(); text != last {
			last = text
			l.Logger.Warn("retention failed, trying again by the schedule", "error", err)
		}
	}
}

// Pass does the housekeeping once.
func (l *Loop) Pass(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	n, led, err := l.Store.ExpireDeadLetters(ctx, l.DeadLetterAge)
	l.Metrics.expiredDeadLetters.Add(float64(n))
	if err != nil {
		return err
	}
	if n > 0 {
		l.Logger.Info("dead letters expired", "count", n, "age", l.DeadLetterAge)
	}
	stats, err := l.Store.Stats(ctx)
	if err != nil {
		return err
	}
	l.Metrics.generations.Set(float64(stats.Generations))
	l.Metrics.claims.Set(float64(stats.Claims))
	l.Metrics.claimsBytes.Set(float64(stats.ClaimsBytes))
	l.Metrics.oldestClaim.Set(stats.OldestClaim.Seconds())
	l.Metrics.deadLetters.Set(float64(stats.DeadLetters))
	if led {
		l.Metrics.lastSuccess.SetToCurrentTime()
	}
	return nil
}

// Metrics are the loop's.
type Metrics struct {
	generations        prometheus.Gauge
	claims             prometheus.Gauge
	claimsBytes        prometheus.Gauge
	oldestClaim        prometheus.Gauge
	deadLetters        prometheus.Gauge
	lastSuccess        prometheus.Gauge
	expiredDeadLetters prometheus.Counter
}

// NewMetrics registers the loop's metrics. The gauges are of the whole scope, as
// of the last pass; every process shows the same.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		reg.MustRegister(g)
		return g
	}
	m := &Metrics{
		generations: gauge("dedupd_generations", "Generations of claims in the database."),
		claims:      gauge("dedupd_claims", "Claims kept, as the database's statistics estimate them."),
		claimsBytes: gauge("dedupd_claims_bytes", "Size of the claims on disk, with their indexes."),
		oldestClaim: gauge("dedupd_oldest_claim_age_seconds", "Age of the oldest generation of claims."),
		deadLetters: gauge("dedupd_dead_letters", "Dead letters kept."),
		lastSuccess: gauge("dedupd_retention_last_success_timestamp_seconds", "When this process last made a pass as the leader."),
		expiredDeadLetters: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dedupd_expired_dead_letters_total", Help: "Dead letters deleted since they were older than dead_letters.retention.",
		}),
	}
	reg.MustRegister(m.expiredDeadLetters)
	return m
}
