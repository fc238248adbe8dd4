package consumer

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/message"
)

// Metrics are the worker's. No label ever carries an id, a key or an offset.
type Metrics struct {
	fetched       *prometheus.CounterVec
	abandoned     *prometheus.CounterVec
	skipped       *prometheus.CounterVec
	lag           *prometheus.GaugeVec
	undecided     *prometheus.GaugeVec
	lanePosition  *prometheus.GaugeVec
	batchMessages prometheus.Histogram
	fenced        prometheus.Counter
	rewinds       prometheus.Counter
	rebalances    prometheus.Counter
	commitErrors  prometheus.Counter
	held          prometheus.Gauge
	ready         *prometheus.GaugeVec
}

// NewMetrics registers the worker's metrics, and its budget's use.
func NewMetrics(reg prometheus.Registerer, budget *Budget) *Metrics {
	m := &Metrics{
		fetched: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dedupd_messages_fetched_total",
			Help: "Messages read from the broker. Each one ends in messages_total or in messages_abandoned_total.",
		}, []string{"source"}),
		abandoned: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dedupd_messages_abandoned_total",
			Help: "Messages read but left to whoever reads their lane next: the lane was closed or lost before they were committed.",
		}, []string{"source"}),
		skipped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dedupd_positions_skipped_total",
			Help: "Positions that the broker had already deleted when they were to be read, skipped by on_gap: skip.",
		}, []string{"source"}),
		lag: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dedupd_lag_messages",
			Help: "Messages the broker holds beyond what was read, by lane; beyond what was committed, while nothing can be read.",
		}, []string{"source", "lane"}),
		undecided: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dedupd_open_transaction_messages",
			Help: "Messages the broker holds behind a producer's transaction that is still open, by lane. They can't be read before it ends, and aren't counted in the lag.",
		}, []string{"source", "lane"}),
		lanePosition: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dedupd_lane_position",
			Help: "Where the lane goes on: the next position, as committed in the database.",
		}, []string{"source", "lane"}),
		batchMessages: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "dedupd_batch_messages",
			Help:    "Messages of one transaction.",
			Buckets: prometheus.ExponentialBuckets(1, 4, 8),
		}),
		fenced: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dedupd_fenced_total",
			Help: "Batches refused because another worker owned their lane, or the database had gone back.",
		}),
		rewinds: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dedupd_rewinds_total",
			Help: "Lanes that went back: the database had lost commits, an operator reset the group, or on_gap: skip followed a log that was cut.",
		}),
		rebalances: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dedupd_rebalances_total",
			Help: "New assignments of lanes to this worker.",
		}),
		commitErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dedupd_broker_commit_errors_total",
			Help: "Commits and acknowledgements that the broker refused or did not answer. The database is the authority; the broker has a copy.",
		}),
		held: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "dedupd_lanes_held",
			Help: "Lanes that wait for somebody to repair something: see the log for the reason.",
		}),
		ready: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dedupd_source_ready",
			Help: "1: the source has reached its broker and reads the lanes it was assigned, if any. 0: it can't.",
		}, []string{"source"}),
	}
	inflight := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "dedupd_inflight_bytes",
		Help: "Bytes of messages held in memory, or reserved for a fetch, of the budget batch.inflight_bytes.",
	}, func() float64 { return float64(budget.Used()) })
	reg.MustRegister(m.fetched, m.abandoned, m.skipped, m.lag, m.undecided, m.lanePosition, m.batchMessages, m.fenced,
		m.rewinds, m.rebalances, m.commitErrors, m.held, m.ready, inflight)
	return m
}

func (m *Metrics) forget(l message.Lane) {
	m.lag.DeleteLabelValues(l.Source, l.Name)
	m.undecided.DeleteLabelValues(l.Source, l.Name)
	m.lanePosition.DeleteLabelValues(l.Source, l.Name)
}
