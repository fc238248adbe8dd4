package retention

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the loop's.
type Metrics struct {
	generations        prometheus.Gauge
	claims             prometheus.Gauge
	claimsBytes        prometheus.Gauge
	oldestClaim        prometheus.Gauge
	held               prometheus.Gauge
	clockAhead         prometheus.Gauge
	lanesAhead         prometheus.Gauge
	generationsAhead   prometheus.Gauge
	deadLetters        prometheus.Gauge
	lastSuccess        prometheus.Gauge
	expiredClaims      prometheus.Counter
	expiredDeadLetters prometheus.Counter
	rotation           prometheus.Histogram
}

// NewMetrics registers the loop's metrics. The gauges are about the whole scope, as of the
// last pass; every process shows the same. Counters and the histogram count what this
// process did as the leader.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		reg.MustRegister(g)
		return g
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		reg.MustRegister(c)
		return c
	}
	m := &Metrics{
		generations:        gauge("dedupd_generations", "Generations of claims in the database."),
		claims:             gauge("dedupd_claims", "Claims kept: counted where a generation has its filter, estimated from the table's size elsewhere."),
		claimsBytes:        gauge("dedupd_claims_bytes", "Size of the claims on disk, with their indexes."),
		oldestClaim:        gauge("dedupd_oldest_claim_age_seconds", "Age of the oldest generation of claims."),
		held:               gauge("dedupd_retention_held_seconds", "How long the oldest sealed generation has been kept beyond the window because a lane is behind and has not passed it. At retention.max_hold less the window it is dropped anyway."),
		clockAhead:         gauge("dedupd_database_clock_ahead_seconds", "How far the database's clock is ahead of this process'; negative where it is behind."),
		lanesAhead:         gauge("dedupd_lanes_clock_ahead", "Lanes whose clock is ahead of the database's by more than a minute: while there is one, claims don't expire before retention.max_hold."),
		generationsAhead:   gauge("dedupd_generations_clock_ahead", "Generations that were opened or sealed at a time more than a minute ahead of the database's clock: their claims are kept longer by as much."),
		deadLetters:        gauge("dedupd_dead_letters", "Dead letters kept."),
		lastSuccess:        gauge("dedupd_retention_last_success_timestamp_seconds", "When this process last made a pass as the leader."),
		expiredClaims:      counter("dedupd_expired_claims_total", "Claims dropped with their generations because the window had passed."),
		expiredDeadLetters: counter("dedupd_expired_dead_letters_total", "Dead letters deleted because they were older than dead_letters.retention."),
		rotation: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "dedupd_rotation_seconds", Help: "How long a rotation of the generations held up claims, at most.",
			Buckets:                     prometheus.ExponentialBuckets(0.001, 2, 13),
			NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100, NativeHistogramMinResetDuration: time.Hour,
		}),
	}
	reg.MustRegister(m.rotation)
	return m
}

func (m *Metrics) show(s *Status, window time.Duration) {
	var claims, bytes int64
	kept, ahead := 0, 0
	for _, g := range s.Generations {
		claims += g.Claims
		bytes += g.Bytes
		if g.State != "open" && g.State != "sealed" {
			continue
		}
		if kept == 0 {
			m.oldestClaim.Set(s.Now.Sub(g.OpenedAt).Seconds())
		}
		kept++
		if g.Ahead {
			ahead++
		}
	}
	m.generations.Set(float64(kept))
	m.claims.Set(float64(claims))
	m.claimsBytes.Set(float64(bytes))
	m.held.Set(s.held(window).Seconds())
	m.clockAhead.Set(time.Until(s.Now).Seconds())
	m.lanesAhead.Set(float64(s.LanesAhead))
	m.generationsAhead.Set(float64(ahead))
}
