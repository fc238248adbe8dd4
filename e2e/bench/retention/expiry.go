package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// expiry measures how a generation goes, beside a DELETE of as many claims from
// a single table with the vacuum that it needs.
func (b *bench) expiry(ctx context.Context) error {
	claims := b.scaled(10_000_000)
	rows := [][]string{{"", "time", "longest stall of a batch", "longest stall without", "throughput meanwhile, of that without"}}
	for _, way := range []struct {
		name, what string
		fill       func(a *arm) error
		expire     func(ctx context.Context, a *arm) error
	}{
		{
			"dropped", fmt.Sprintf("DROP of a sealed generation of %.1f M", float64(claims)/1e6),
			func(a *arm) error { return a.rememberSealed(ctx, 1, claims, false) },
			func(ctx context.Context, a *arm) error {
				if _, err := a.pool.Exec(ctx, `UPDATE dedupd.generations SET sealed_at = now() - interval '1 year' WHERE state = 'sealed'`); err != nil {
					return err
				}
				if n, _, err := a.store().Generations().Expire(ctx, time.Hour, 24*time.Hour); err != nil || n != 1 {
					return fmt.Errorf("%d generations expired: %w", n, err)
				}
				_, err := a.store().Generations().Drop(ctx, 1)
				return err
			},
		},
		{
			"deleted", fmt.Sprintf("DELETE of %.1f M of twice as many, and VACUUM", float64(claims)/1e6),
			func(a *arm) error {
				if err := a.remember(ctx, 2*claims, randomKeys); err != nil {
					return err
				}
				return a.exec(ctx,
					fmt.Sprintf(`UPDATE dedupd.claims_bench_1 SET claimed_at = claimed_at - interval '1 year' WHERE position <= %d`, claims),
					`VACUUM FULL dedupd.claims_bench_1`,
					`ANALYZE dedupd.claims_bench_1`)
			},
			func(ctx context.Context, a *arm) error {
				return a.exec(ctx, `DELETE FROM dedupd.claims_bench_1 WHERE claimed_at < now() - interval '1 month'`, `VACUUM dedupd.claims_bench_1`)
			},
		},
	} {
		a, err := b.newArm(ctx, "expiry_"+way.name, options{writers: writers, filterMemory: memory256})
		if err != nil {
			return err
		}
		measure.Progress("expiry: %s", way.what)
		if err := way.fill(a); err != nil {
			return err
		}
		if _, _, err := a.apply(ctx, b.messages, batchSize, measure.RandomID, nil); err != nil {
			return err
		}
		quiet, before, err := a.apply(ctx, 2*b.messages, batchSize, measure.RandomID, nil)
		if err != nil {
			return err
		}
		// The load goes on until the claims are gone.
		var during span
		done := make(chan error, 1)
		started := make(chan struct{})
		go func() {
			<-started
			time.Sleep(500 * time.Millisecond)
			during.from = time.Now()
			err := way.expire(ctx, a)
			during.to = time.Now()
			done <- err
		}()
		var spans []span
		var loud []float64
		for ended := false; !ended; {
			rate, some, err := a.apply(ctx, b.messages, batchSize, measure.RandomID, started)
			if err != nil {
				return err
			}
			started = nil
			spans, loud = append(spans, some...), append(loud, rate)
			select {
			case err := <-done:
				if err != nil {
					return err
				}
				ended = true
			default:
			}
		}
		usual := measure.Median(durations(before))
		overlapping := slices.DeleteFunc(slices.Clone(spans), func(s span) bool { return s.to.Before(during.from) || s.from.After(during.to) })
		rows = append(rows, []string{
			way.what, measure.Millis(during.duration()), measure.Millis(longest(durations(overlapping)) - usual), measure.Millis(longest(durations(before)) - usual),
			fmt.Sprintf("%.2f", measure.Median(loud)/quiet),
		})
		a.close()
	}
	b.report.Add("\n## Expiry under load\n\nOne worker with three writers claims as fast as it can meanwhile. One run each.\n")
	b.report.Table(rows)
	return nil
}

func durations(spans []span) (all []time.Duration) {
	for _, s := range spans {
		all = append(all, s.duration())
	}
	return all
}
