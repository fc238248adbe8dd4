package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// mostApart is how much two runs of the same floor may differ within a round. In
// a round in which they differ by more, something else was at work.
const mostApart = 0.25

// trial is one thing to measure in each round.
type trial struct {
	name string
	// contender and topic, or floor, whose rows are those of the topic.
	contender *contender
	floor     *floor
	topic     topic
}

// compare lands the same topic by each contender in turn.
func (b *bench) compare(ctx context.Context) error {
	whole := topic{partitions: 4, messages: b.messages, resends: 20}
	var trials []trial
	for i := range contenders {
		c := &contenders[i]
		part := whole
		part.messages, part.enveloped = int(float64(whole.messages)*c.share), c.enveloped
		trials = append(trials, trial{name: c.name, contender: c, topic: part})
	}
	for i := range floors {
		trials = append(trials, trial{name: "floor: " + floors[i].name, floor: &floors[i], topic: whole})
	}
	results, err := b.rounds(ctx, trials)
	if err != nil {
		return err
	}
	b.report.Add("\n## The same topic, the same kind of table\n\n%d messages in 4 partitions, about 200 bytes of JSON, every fifth a resend; rows of a uuid and jsonb, without an index.\n", b.messages)
	b.report.Add("Each run was checked: every id stands in the table once. A floor has no broker, no copies and nothing to do but\nwrite: its batches were made beforehand. Its rate counts the copies all the same, as if they came for nothing.\n")
	b.report.Table(table(trials, results, func(trial) string { return "dedupd" }))
	return nil
}

// rounds has the trials take turns, between two runs of the floor. A round whose
// floors differ too much is refused.
func (b *bench) rounds(ctx context.Context, trials []trial) (map[string][]result, error) {
	trials = slices.DeleteFunc(trials, func(r trial) bool { return !b.wanted(r.name) })
	results := make(map[string][]result)
	if len(trials) == 0 {
		return results, nil
	}
	judge, whole := &floors[0], topic{partitions: 4, messages: min(b.messages, 500_000)}
	for round, tries := 0, 0; round < b.roundCount; tries++ {
		if tries == 3*b.roundCount {
			return nil, fmt.Errorf("in %d of %d rounds two runs of the floor differed by more than %.0f %%: this machine is too busy to measure", tries-round, tries, 100*mostApart)
		}
		measure.Progress("round %d", round+1)
		before, err := judge.run(ctx, b, whole)
		if err != nil {
			return nil, err
		}
		one := make(map[string]result)
		for i := range trials {
			r := &trials[(i+round)%len(trials)]
			var res result
			if r.floor != nil {
				res, err = r.floor.run(ctx, b, r.topic)
			} else {
				res, err = b.land(ctx, r.contender, r.topic)
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r.name, err)
			}
			show(r.name, res)
			one[r.name] = res
		}
		after, err := judge.run(ctx, b, whole)
		if err != nil {
			return nil, err
		}
		if apart := max(before.rate, after.rate)/min(before.rate, after.rate) - 1; apart > mostApart {
			measure.Progress("the floors are %.0f %% apart: this round is refused", 100*apart)
			continue
		}
		for name, res := range one {
			results[name] = append(results[name], res)
		}
		round++
	}
	return results, nil
}

func show(name string, res result) {
	measure.Progress("  %-66s %9s msg/s, worker %s, Postgres %s a message, %d bytes of WAL, %d MiB", name, measure.Thousands(res.rate),
		measure.Micros(res.worker, res.messages), measure.Micros(res.postgres, res.messages), res.wal/int64(res.messages), res.memory>>20)
}

// table shows the medians. against names the run whose rate is divided by a
// run's; "" for none.
func table(trials []trial, results map[string][]result, against func(trial) string) [][]string {
	rows := [][]string{{"", "msg/s", "dedupd is faster by", "CPU a message: worker", "Postgres", "WAL a message", "memory"}}
	for _, r := range trials {
		all := results[r.name]
		if len(all) == 0 {
			continue
		}
		var rates, ratios, workers, servers, wal, memory []float64
		own := results[against(r)]
		for i, res := range all {
			rates = append(rates, res.rate)
			workers, servers = append(workers, res.worker.Seconds()/float64(res.messages)), append(servers, res.postgres.Seconds()/float64(res.messages))
			wal, memory = append(wal, float64(res.wal)/float64(res.messages)), append(memory, float64(res.memory))
			if len(own) > i {
				ratios = append(ratios, own[i].rate/res.rate)
			}
		}
		ratio := ""
		if len(ratios) > 0 {
			ratio = fmt.Sprintf("%.2f", measure.Median(ratios))
		}
		worker, resident := "", ""
		if m := measure.Median(workers); m > 0 {
			worker, resident = fmt.Sprintf("%.1f µs", 1e6*m), fmt.Sprintf("%.0f MiB", measure.Median(memory)/(1<<20))
		}
		rows = append(rows, []string{r.name, measure.Thousands(measure.Median(rates)), ratio, worker, fmt.Sprintf("%.1f µs", 1e6*measure.Median(servers)), fmt.Sprintf("%.0f B", measure.Median(wal)), resident})
	}
	return rows
}
