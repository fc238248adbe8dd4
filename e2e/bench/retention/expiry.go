package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// expiryWay is a way in which old claims go.
type expiryWay struct {
	name, what string
	fill       func(ctx context.Context, a *arm) error
	expire     func(ctx context.Context, a *arm) error
}

// dropped drops a generation of so many claims.
func dropped(claims int) expiryWay {
	return expiryWay{
		name: "dropped", what: fmt.Sprintf("DROP of a sealed generation of %.1f M", float64(claims)/1e6),
		fill: func(ctx context.Context, a *arm) error { return a.rememberSealed(ctx, 1, claims, false) },
		expire: func(ctx context.Context, a *arm) error {
			if _, err := a.pool.Exec(ctx, `UPDATE dedupd.generations SET sealed_at = now() - interval '1 year' WHERE state = 'sealed'`); err != nil {
				return err
			}
			if n, _, err := a.store().Generations().Expire(ctx, time.Hour, 24*time.Hour); err != nil || n != 1 {
				return fmt.Errorf("%d generations expired: %w", n, err)
			}
			_, err := a.store().Generations().Drop(ctx, 1)
			return err
		},
	}
}

// deleted deletes so many claims from a single table of twice as many.
func deleted(claims int) expiryWay {
	return expiryWay{
		name: "deleted", what: fmt.Sprintf("DELETE of %.1f M of twice as many, and VACUUM", float64(claims)/1e6),
		fill: func(ctx context.Context, a *arm) error {
			if err := a.remember(ctx, 2*claims, randomKeys); err != nil {
				return err
			}
			return a.exec(ctx,
				fmt.Sprintf(`UPDATE dedupd.claims_bench_1 SET claimed_at = claimed_at - interval '1 year' WHERE position <= %d`, claims),
				`VACUUM FULL dedupd.claims_bench_1`,
				`ANALYZE dedupd.claims_bench_1`)
		},
		expire: func(ctx context.Context, a *arm) error {
			return a.exec(ctx, `DELETE FROM dedupd.claims_bench_1 WHERE claimed_at < now() - interval '1 month'`, `VACUUM dedupd.claims_bench_1`)
		},
	}
}

// expiry measures how a generation goes, beside a DELETE of as many claims from
// a single table with the vacuum that it needs.
func (b *bench) expiry(ctx context.Context) error {
	claims := b.scaled(10_000_000)
	rows := [][]string{{"", "time", "longest stall of a batch", "longest stall without", "throughput meanwhile, of that without"}}
	for _, way := range []expiryWay{dropped(claims), deleted(claims)} {
		row, err := b.expireBy(ctx, way)
		if err != nil {
			return err
		}
		rows = append(rows, row)
	}
	b.report.Add("\n## Expiry under load\n\nOne worker with three writers claims as fast as it can meanwhile. One run each.\n")
	b.report.Table(rows)
	return nil
}

func (b *bench) expireBy(ctx context.Context, way expiryWay) (row []string, err error) {
	a, err := b.newArm(ctx, "expiry_"+way.name, options{writers: writers, filterMemory: memory256})
	if err != nil {
		return nil, err
	}
	measure.Progress("expiry: %s", way.what)
	if err := way.fill(ctx, a); err != nil {
		return nil, err
	}
	if _, _, err := a.apply(ctx, b.messages, batchSize, measure.RandomID, nil); err != nil {
		return nil, err
	}
	quiet, before, err := a.apply(ctx, 2*b.messages, batchSize, measure.RandomID, nil)
	if err != nil {
		return nil, err
	}
	during, spans, loud, err := b.loadWhile(ctx, a, way.expire)
	if err != nil {
		return nil, err
	}
	usual := measure.Median(durations(before))
	overlapping := slices.DeleteFunc(slices.Clone(spans), func(s span) bool { return s.to.Before(during.from) || s.from.After(during.to) })
	a.close()
	return []string{
		way.what, measure.Millis(during.duration()), measure.Millis(longest(durations(overlapping)) - usual), measure.Millis(longest(durations(before)) - usual),
		fmt.Sprintf("%.2f", measure.Median(loud)/quiet),
	}, nil
}

// loadWhile has the load go on until the claims are gone.
func (b *bench) loadWhile(ctx context.Context, a *arm, expire func(context.Context, *arm) error) (during span, spans []span, rates []float64, err error) {
	done := make(chan error, 1)
	started := make(chan struct{})
	go func() {
		<-started
		time.Sleep(500 * time.Millisecond)
		during.from = time.Now()
		err := expire(ctx, a)
		during.to = time.Now()
		done <- err
	}()
	for {
		rate, some, err := a.apply(ctx, b.messages, batchSize, measure.RandomID, started)
		if err != nil {
			return during, nil, nil, err
		}
		started = nil
		spans, rates = append(spans, some...), append(rates, rate)
		select {
		case err := <-done:
			return during, spans, rates, err
		default:
		}
	}
}

func durations(spans []span) (all []time.Duration) {
	for _, s := range spans {
		all = append(all, s.duration())
	}
	return all
}
