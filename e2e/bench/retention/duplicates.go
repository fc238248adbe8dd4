package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/internal/policy"
)

// duplicates measures the rate by the share of duplicates and by what is done
// with them. Half of the ids that come again stand in a sealed generation.
func (b *bench) duplicates(ctx context.Context) error {
	rows := [][]string{{"duplicates", "are dropped: msg/s", "of none", "become dead letters: msg/s", "of none"}}
	shares := []float64{0, 0.01, 0.5, 1}
	results := make(map[policy.Duplicate][]*contender)
	for _, handling := range []policy.Duplicate{policy.DuplicateDrop, policy.DuplicateDeadLetter} {
		var all []*contender
		for _, share := range shares {
			a, err := b.newArm(ctx, fmt.Sprintf("duplicates_%s_%g", handling, share), options{writers: writers, filterMemory: memory256, onDuplicate: handling})
			if err != nil {
				return err
			}
			var seen [][]byte
			remember := func() []byte {
				id := measure.RandomID()
				seen = append(seen, id)
				return id
			}
			for half := range 2 {
				if _, _, err := a.apply(ctx, 600_000, batchSize, remember, nil); err != nil {
					return err
				}
				if half == 0 {
					if err := a.rotate(ctx); err != nil {
						return err
					}
					if err := a.buildFilters(ctx); err != nil {
						return err
					}
					if err := a.store().Generations().LoadFilters(ctx); err != nil {
						return err
					}
				}
			}
			c := &contender{arm: a, what: fmt.Sprintf("%g %% duplicates, %s", share*100, handling), id: func() []byte {
				if rand.Float64() < share {
					return seen[rand.IntN(len(seen))]
				}
				return measure.RandomID()
			}}
			all = append(all, c)
			c.against = all[0]
		}
		if err := b.takeTurns(ctx, all, batchSize); err != nil {
			return err
		}
		for _, c := range all {
			c.close()
		}
		results[handling] = all
	}
	for i, share := range shares {
		drop, bury := results[policy.DuplicateDrop][i], results[policy.DuplicateDeadLetter][i]
		rows = append(rows, []string{
			fmt.Sprintf("%g %%", share*100), measure.Thousands(measure.Median(drop.rates)), fmt.Sprintf("%.2f", drop.ratio()),
			measure.Thousands(measure.Median(bury.rates)), fmt.Sprintf("%.2f", bury.ratio()),
		})
	}
	b.report.Add("\n## Duplicates\n\nOne worker with three writers, random ids, %d million remembered, half of them sealed.\n", 1)
	b.report.Table(slices.Clip(rows))
	return nil
}
