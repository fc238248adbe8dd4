package dedup

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the processor's.
type Metrics struct {
	messages    *prometheus.CounterVec
	applied     *prometheus.CounterVec
	duplicates  *prometheus.CounterVec
	age         prometheus.Histogram
	delay       prometheus.Histogram
	transaction prometheus.Histogram
	claim       prometheus.Histogram
	sink        prometheus.Histogram
	retries     *prometheus.CounterVec
	deadLetters *prometheus.CounterVec
	probes      *prometheus.CounterVec
	results     *prometheus.CounterVec
	windowUsed  prometheus.Gauge
}

// NewMetrics registers the processor's metrics.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		reg.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: buckets,
			// Native histograms beside the classic buckets, for those who scrape them.
			NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100, NativeHistogramMinResetDuration: time.Hour,
		})
		reg.MustRegister(h)
		return h
	}
	durations := prometheus.ExponentialBuckets(0.0005, 2, 16)
	m := &Metrics{
		messages:   counter("dedupd_messages_total", "Messages by what became of them: applied, duplicate, conflict, dead or filtered (no sink wants it). Each one counts once.", "source", "outcome"),
		applied:    counter("dedupd_applied_total", "Applied messages by what the sink says of them: written, already_present (the target had it), stale (the target is newer) or rejected (the target isn't in the expected state).", "source", "outcome"),
		duplicates: counter("dedupd_duplicates_total", "Duplicates by cause: redelivery (the broker), resend (the producer), cross_source (another source brought it).", "source", "cause"),
		age: histogram("dedupd_duplicate_age_seconds", "Time between the first claim of an id and its duplicate: how long the window must be.",
			prometheus.ExponentialBuckets(0.001, 6, 14)),
		delay: histogram("dedupd_message_delay_seconds", "Time between the broker's timestamp of a message and its commit.",
			prometheus.ExponentialBuckets(0.002, 3, 14)),
		transaction: histogram("dedupd_transaction_seconds", "Duration of a claim transaction, from its start to its commit.", durations),
		claim:       histogram("dedupd_claim_seconds", "Duration of claiming a group's ids.", durations),
		sink:        histogram("dedupd_sink_seconds", "Duration of the sink's write.", durations),
		retries:     counter("dedupd_transaction_retries_total", "Transactions that were rolled back and tried again, by reason.", "reason"),
		deadLetters: counter("dedupd_dead_letters_total", "Messages written to the dead letters, by class.", "class"),
		probes: counter("dedupd_filter_probes_total", "Ids within the zone of a sealed generation: excluded by its filter; found, or false_positive where the filter said maybe and the table no; "+
			"unfiltered: looked up in vain in a table whose filter isn't loaded.", "result"),
		results: counter("dedupd_results_total", "Results that sinks have given messages: kept, too_large, or no_claim where the strategy keeps nothing about ids.", "outcome"),
		windowUsed: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "dedupd_window_used_ratio",
			Help: "Largest age of a duplicate in the last half hour to hour, as a share of the window. Near 1, later copies are probably missed.",
		}),
	}
	reg.MustRegister(m.windowUsed)
	for _, class := range Classes() {
		m.deadLetters.WithLabelValues(class) // 0 from the start, so that the first one is an increase
	}
	return m
}

// count books a lane's outcomes.
func (m *Metrics) count(source string, t tally) {
	for o := written; o.applied(); o++ {
		m.applied.WithLabelValues(source, outcomeNames[o]).Add(float64(t[o]))
	}
	m.messages.WithLabelValues(source, "applied").Add(float64(t.applied()))
	m.messages.WithLabelValues(source, "duplicate").Add(float64(t.duplicates()))
	m.messages.WithLabelValues(source, "conflict").Add(float64(t[conflict]))
	m.messages.WithLabelValues(source, "dead").Add(float64(t[dead]))
	m.messages.WithLabelValues(source, "filtered").Add(float64(t[filtered]))
	m.duplicates.WithLabelValues(source, "redelivery").Add(float64(t[redelivered]))
	m.duplicates.WithLabelValues(source, "resend").Add(float64(t[resent]))
	m.duplicates.WithLabelValues(source, "cross_source").Add(float64(t[crossSource]))
}

// probed counts what became of look-ups in sealed generations.
func (m *Metrics) probed(r probeResult) {
	if r == (probeResult{}) {
		return
	}
	m.probes.WithLabelValues("excluded").Add(float64(r.excluded))
	m.probes.WithLabelValues("found").Add(float64(r.found))
	m.probes.WithLabelValues("false_positive").Add(float64(r.falsePositive))
	m.probes.WithLabelValues("unfiltered").Add(float64(r.unfiltered))
}

// observe books a group that has landed.
func (m *Metrics) observe(p *Processor, g *group, all []tally) {
	now := time.Now()
	for i := range g.batches {
		m.count(g.batches[i].Lane.Source, all[i])
		for j := range g.batches[i].Messages {
			if t := g.batches[i].Messages[j].Time; !t.IsZero() {
				// The timestamp may be of another machine's clock.
				m.delay.Observe(max(0, now.Sub(t).Seconds()))
			}
		}
	}
	for _, age := range g.ages {
		m.age.Observe(age)
	}
	for i := range g.results {
		m.results.WithLabelValues(g.results[i].outcome(g.claimed)).Inc()
	}
	for i := range g.items {
		if it := &g.items[i]; it.deadLettered {
			m.deadLetters.WithLabelValues(p.rejection(it).class).Inc()
		}
	}
}
