package main

import (
	"context"
	"fmt"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// filters measures one large generation's filter: building, storing, loading.
func (b *bench) filters(ctx context.Context) error {
	a, err := b.newArm(ctx, "filters", options{filterMemory: memory256})
	if err != nil {
		return err
	}
	defer a.close()
	claims := b.scaled(10_000_000)
	if err := a.rememberSealed(ctx, 1, claims, false); err != nil {
		return err
	}
	var builds, loads []time.Duration
	for range b.rounds {
		if _, err := a.pool.Exec(ctx, `DELETE FROM dedupd.filters`); err != nil {
			return err
		}
		start := time.Now()
		if err := a.buildFilters(ctx); err != nil {
			return err
		}
		builds = append(builds, time.Since(start))
		a.store().Generations().Forget("bench")
		start = time.Now()
		if err := a.store().Generations().LoadFilters(ctx); err != nil {
			return err
		}
		loads = append(loads, time.Since(start))
	}
	bytes := a.store().Generations().FilterBytes()
	if _, _, err := a.apply(ctx, b.messages, batchSize, measure.RandomID, nil); err != nil {
		return err
	}
	excluded, wrong := a.probes("excluded"), a.probes("false_positive")
	million := float64(claims) / 1e6
	b.report.Add("\n## Filters\n\nOf a sealed generation of %.1f M random ids: read from its index, built, checked in; then read and checked by a worker.\n", million)
	b.report.Table([][]string{
		{"bytes a claim", "build, a million claims", "load, a million claims", "new ids looked up", "let through by mistake"},
		{
			fmt.Sprintf("%.2f", float64(bytes)/float64(claims)), measure.Millis(time.Duration(float64(measure.Median(builds)) / million)), measure.Millis(time.Duration(float64(measure.Median(loads)) / million)),
			fmt.Sprintf("%.0f", excluded+wrong), fmt.Sprintf("%.0f (1 of 65,536 would be %.1f)", wrong, (excluded+wrong)/65536),
		},
	})
	return nil
}
