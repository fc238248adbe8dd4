package dedup

import "github.com/prometheus/client_golang/prometheus"

// SetChunkClaims makes filters of smaller chunks.
func (s *Store) SetChunkClaims(n int) { s.chunkClaims = n }

// SetFilterMemory changes the budget for filters.
func (s *Store) SetFilterMemory(n int64) { s.filterMemory = n }

// Probes is the counter of look-ups that ended so.
func (m *Metrics) Probes(result string) prometheus.Counter { return m.probes.WithLabelValues(result) }
