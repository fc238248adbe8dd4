package dedup

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// SetCopyPause changes for how long everything is claimed by ON CONFLICT once a copy has
// met a concurrent duplicate.
func (p *Processor) SetCopyPause(d time.Duration) { p.copies.hold = d }

// SetSlowAfter changes how long a transaction must have taken before a time-out is blamed
// on its size.
func (p *Processor) SetSlowAfter(d time.Duration) { p.slow.after = d }

// SlowLimit is how many messages of a lane a transaction may have; 0: any number.
func (p *Processor) SlowLimit(lane message.Lane) int { return p.slow.most(lane) }

// RecordAttempt records an attempt, like a worker that loses its lane in that moment.
func (s *Store) RecordAttempt(ctx context.Context, run lane.Batch) error {
	_, err := s.recordAttempt(ctx, run)
	return err
}

// Quarantined is 1 for a lane in quarantine.
func (s *Store) Quarantined(lane message.Lane) int {
	if s.quarantine.has(lane) {
		return 1
	}
	return 0
}

// Probes is the counter of look-ups with that result.
func (m *Metrics) Probes(result string) prometheus.Counter { return m.probes.WithLabelValues(result) }

// Retries is the counter of transactions that were retried for that reason.
func (m *Metrics) Retries(reason string) prometheus.Counter {
	return m.retries.WithLabelValues(reason)
}

// WindowUsed is the gauge of the largest recent age.
func (m *Metrics) WindowUsed() prometheus.Gauge { return m.windowUsed }

// CountAges counts ages of duplicates, in seconds, as if they had landed then.
func (p *Processor) CountAges(now time.Time, seconds ...float64) { p.ages.count(seconds, now) }

// RecentAge is the largest age of the time before now.
func (p *Processor) RecentAge(now time.Time) float64 { return p.ages.largest(now) }
