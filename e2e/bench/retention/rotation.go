package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// rotation measures what a rotation costs those who claim: four workers at full
// load, with and without a rotation every two seconds.
func (b *bench) rotation(ctx context.Context) error {
	rows := [][]string{{"batches of", "batch, median", "longest stall in a rotation", "longest stall without any", "rotations", "of them held up claims for, at most", "throughput with rotations, of that without"}}
	for _, size := range []int{500, batchSize} {
		a, err := b.newArm(ctx, fmt.Sprint("rotation_", size), options{workers: 4, filterMemory: memory256})
		if err != nil {
			return err
		}
		var with, without, all, took []time.Duration
		var ratios []float64
		rotations := 0
		for round := range b.rounds + 1 {
			var rates [2]float64
			for _, rotating := range []bool{round%2 == 0, round%2 != 0} {
				if err := a.fresh(ctx); err != nil {
					return err
				}
				rate, spans, flips, err := a.underLoad(ctx, 3*b.messages, size, func(ctx context.Context) ([]flip, error) {
					if !rotating {
						return nil, nil
					}
					return a.rotateEvery(ctx, 2*time.Second)
				})
				if err != nil {
					return err
				}
				measure.Progress("round %d: batches of %d, %d rotations: %s msg/s", round, size, len(flips), measure.Thousands(rate))
				if round == 0 {
					continue
				}
				for _, s := range spans {
					all = append(all, s.duration())
					if !rotating {
						without = append(without, s.duration())
					} else if slices.ContainsFunc(flips, func(f flip) bool { return s.from.Before(f.to) && f.from.Before(s.to) }) {
						with = append(with, s.duration())
					}
				}
				if rotating {
					rates[1] = rate
					rotations += len(flips)
					for _, f := range flips {
						took = append(took, f.took)
					}
				} else {
					rates[0] = rate
				}
			}
			if round > 0 {
				ratios = append(ratios, rates[1]/rates[0])
			}
		}
		usual := measure.Median(all)
		rows = append(rows, []string{
			fmt.Sprint(size), measure.Millis(usual), measure.Millis(longest(with) - usual), measure.Millis(longest(without) - usual), fmt.Sprint(rotations), measure.Millis(longest(took)),
			fmt.Sprintf("%.2f (%.2f to %.2f)", measure.Median(ratios), slices.Min(ratios), slices.Max(ratios)),
		})
		a.close()
	}
	b.report.Add("\n## Rotation under load\n\nFour workers with one lane each, as fast as they can, and a rotation every two seconds, each with its filter built and loaded by all.\nA stall is what a batch takes longer than the median batch. ")
	b.report.Add("Who rotates waits for the transactions that are under way, and whoever comes meanwhile waits with it, for 100 ms at most a try.\n")
	b.report.Table(rows)
	return nil
}

func longest(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	return slices.Max(all)
}

// flip is one rotation: from its first try to its end; took is its last try.
type flip struct {
	span
	took time.Duration
}

// underLoad runs work beside the load, until the load has ended.
func (a *arm) underLoad(ctx context.Context, messages, size int, work func(ctx context.Context) ([]flip, error)) (float64, []span, []flip, error) {
	beside, stop := context.WithCancel(ctx)
	type result struct {
		flips []flip
		err   error
	}
	done := make(chan result, 1)
	started := make(chan struct{})
	go func() {
		<-started
		flips, err := work(beside)
		done <- result{flips, err}
	}()
	rate, spans, err := a.apply(ctx, messages, size, measure.RandomID, started)
	stop()
	r := <-done
	if err == nil {
		err = r.err
	}
	return rate, spans, r.flips, err
}

func (a *arm) rotateEvery(ctx context.Context, interval time.Duration) (all []flip, err error) {
	for {
		select {
		case <-ctx.Done():
			return all, nil
		case <-time.After(interval):
		}
		// A step that the end of the load cuts off isn't counted.
		number, err := a.open(ctx)
		if err == nil {
			_, err = a.store().Generations().Prepare(ctx)
		}
		f := flip{span: span{from: time.Now()}}
		var rotated bool
		if err == nil {
			rotated, _, f.took, err = a.store().Generations().Rotate(ctx, number)
		}
		f.to = time.Now()
		if err == nil && rotated {
			all = append(all, f)
			err = a.buildFilters(ctx)
		}
		for _, w := range a.workers {
			if err == nil {
				err = w.Store.Generations().LoadFilters(ctx)
			}
		}
		if ctx.Err() != nil {
			return all, nil
		}
		if err != nil {
			return all, err
		}
	}
}
