package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

const (
	generations = 24
	writers     = 3 // the default: database.max_connections less one
	memory256   = 256 << 20
)

// contender is an arm that takes turns with others.
type contender struct {
	*arm
	what  string
	id    func() []byte
	rates []float64
	cpu   []cpu
	// against is whose rate this one's is divided by.
	against *contender
}

func (c *contender) ratio() float64 {
	var all []float64
	for i := range c.rates {
		all = append(all, c.rates[i]/c.against.rates[i])
	}
	return measure.Median(all)
}

// cpuRatio is the processor time of a message, of that of the other.
func (c *contender) cpuRatio() float64 {
	var all []float64
	for i := range c.cpu {
		all = append(all, float64(c.cpu[i].total())/float64(c.against.cpu[i].total()))
	}
	return measure.Median(all)
}

// contest is a set of contenders, with what is to be remembered before they begin.
type contest struct {
	*bench
	all   []*contender
	fills []func() error
}

func (k *contest) close() {
	for _, c := range k.all {
		c.close()
	}
}

// add adds a contender, whose arm has the options. One without another that it is
// compared with is compared with itself.
func (k *contest) add(ctx context.Context, name string, c *contender, o options, fill func(ctx context.Context, a *arm) error) (*contender, error) {
	o.writers = writers
	a, err := k.newArm(ctx, name, o)
	if err != nil {
		return nil, err
	}
	c.arm = a
	if c.against == nil {
		c.against = c
	}
	k.all = append(k.all, c)
	if fill != nil {
		k.fills = append(k.fills, func() error { return fill(ctx, a) })
	}
	return c, nil
}

// sealed fills 24 generations with so many claims, and loads their filters.
func (b *bench) sealed(claims int, timed, filters bool) func(ctx context.Context, a *arm) error {
	return func(ctx context.Context, a *arm) error {
		if err := a.rememberSealed(ctx, generations, b.scaled(claims)/generations, timed); err != nil || !filters {
			return err
		}
		if err := a.buildFilters(ctx); err != nil {
			return err
		}
		return a.store().Generations().LoadFilters(ctx)
	}
}

// single fills one table with so many claims.
func (b *bench) single(claims int) func(ctx context.Context, a *arm) error {
	return func(ctx context.Context, a *arm) error {
		measure.Progress("%s: %d claims in one table", a.name, b.scaled(claims))
		return a.remember(ctx, b.scaled(claims), randomKeys)
	}
}

// throughput measures claims with the sink's write, with few and many ids to
// remember.
func (b *bench) throughput(ctx context.Context) error {
	k := &contest{bench: b}
	defer k.close()
	filtered := options{filterMemory: memory256}
	none, err := k.add(ctx, "none", &contender{what: "nothing remembered", id: measure.RandomID}, filtered, nil)
	if err != nil {
		return err
	}
	for _, c := range []struct {
		name, what string
		fill       func(ctx context.Context, a *arm) error
	}{
		{"sealed_10m", "10 M in 24 sealed generations", b.sealed(10_000_000, false, true)},
		{"sealed_100m", "100 M in 24 sealed generations", b.sealed(100_000_000, false, true)},
		{"single_20m", "20 M in a single table", b.single(20_000_000)},
	} {
		if _, err := k.add(ctx, c.name, &contender{what: c.what, id: measure.RandomID, against: none}, filtered, c.fill); err != nil {
			return err
		}
	}
	timed, err := k.add(ctx, "timed_none", &contender{what: "UUIDv7, nothing remembered", id: measure.TimedID}, options{}, nil)
	if err != nil {
		return err
	}
	last := &contender{what: "UUIDv7, 100 M in 24 sealed generations, no filters", id: measure.TimedID, against: timed}
	if _, err := k.add(ctx, "timed_100m", last, options{}, b.sealed(100_000_000, true, false)); err != nil {
		return err
	}
	if err := twoAtATime(k.fills); err != nil {
		return err
	}
	if err := b.takeTurns(ctx, k.all, batchSize); err != nil {
		return err
	}
	rows := [][]string{{"remembered", "msg/s", "of an empty memory's", "spread of the rounds", "CPU a message: worker", "Postgres", "both, of an empty memory's", "excluded by filters", "looked up in vain", "of them without a filter"}}
	for _, c := range k.all {
		rows = append(rows, c.row(b.messages))
	}
	b.report.Add("\n## Claims with the sink's write, by what is remembered\n\nOne worker with three writers, new ids only, batches of %d, rows of a uuid and %d bytes of JSON.\n", batchSize, len(payload))
	b.report.Table(rows)
	return nil
}

// row is the contender's line of the table.
func (c *contender) row(messages int) []string {
	ratios := make([]float64, len(c.rates))
	for i := range c.rates {
		ratios[i] = c.rates[i] / c.against.rates[i]
	}
	var workers, postgres []time.Duration
	for _, u := range c.cpu {
		workers, postgres = append(workers, u.workers), append(postgres, u.postgres)
	}
	return []string{
		c.what, measure.Thousands(measure.Median(c.rates)), fmt.Sprintf("%.2f", c.ratio()), fmt.Sprintf("%.2f to %.2f", slices.Min(ratios), slices.Max(ratios)),
		measure.Micros(measure.Median(workers), messages), measure.Micros(measure.Median(postgres), messages), fmt.Sprintf("%.2f", c.cpuRatio()),
		fmt.Sprintf("%.0f", c.probes("excluded")), fmt.Sprintf("%.0f", c.probes("false_positive")+c.probes("unfiltered")), fmt.Sprintf("%.0f", c.probes("unfiltered")),
	}
}

// takeTurns runs all contenders in each round, each round in another order. The
// first round warms up and doesn't count.
func (b *bench) takeTurns(ctx context.Context, all []*contender, size int) error {
	for round := range b.rounds + 1 {
		for i := range all {
			c := all[(i+round)%len(all)]
			if err := c.fresh(ctx); err != nil {
				return err
			}
			rate, _, err := c.apply(ctx, b.messages, size, c.id, nil)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			if round > 0 {
				c.rates = append(c.rates, rate)
				c.cpu = append(c.cpu, c.spent)
			}
			measure.Progress("round %d: %-52s %s msg/s", round, c.what, measure.Thousands(rate))
		}
	}
	return nil
}

// twoAtATime does the work on two cores.
func twoAtATime(work []func() error) error {
	errs := make([]error, len(work))
	turns := make(chan struct{}, 2)
	var group sync.WaitGroup
	for i, do := range work {
		turns <- struct{}{}
		group.Go(func() {
			errs[i] = do()
			<-turns
		})
	}
	group.Wait()
	return errors.Join(errs...)
}
