package main

import (
	"context"
	"fmt"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// mostApart is how much two runs of the same floor may differ within a round. In
// a round in which they differ by more, something else was at work.
const mostApart = 0.25

// compare lands the same topic by each contender in turn, between two runs of the
// floor.
func (b *bench) compare(ctx context.Context) error {
	results := make(map[string][]result)
	whole := topic{partitions: 4, messages: b.messages, resends: 20}
	for round, tries := 0, 0; round < b.rounds; tries++ {
		if tries == 3*b.rounds {
			return fmt.Errorf("in %d of %d rounds two runs of the floor differed by more than %.0f %%: this machine is too busy to measure", tries-round, tries, 100*mostApart)
		}
		measure.Progress("round %d", round+1)
		one := make(map[string]result)
		for i := range contenders {
			c := &contenders[(i+round)%len(contenders)]
			if !b.wanted(c.name) {
				continue
			}
			part := whole
			part.messages, part.enveloped = int(float64(whole.messages)*c.share), c.enveloped
			res, err := b.land(ctx, c, part)
			if err != nil {
				return err
			}
			show(c.name, res)
			one[c.name] = res
		}
		var before float64
		for i := range floors {
			f := &floors[i]
			if !b.wanted("floor") && !b.wanted(f.name) {
				continue
			}
			res, err := f.run(ctx, b, whole)
			if err != nil {
				return fmt.Errorf("floor: %w", err)
			}
			show("floor: "+f.name, res)
			one[f.name] = res
			if i == 0 {
				before = res.rate
			}
		}
		if before > 0 {
			after, err := floors[0].run(ctx, b, whole)
			if err != nil {
				return fmt.Errorf("floor: %w", err)
			}
			show("floor: again", after)
			if apart := max(before, after.rate)/min(before, after.rate) - 1; apart > mostApart {
				measure.Progress("the floors are %.0f %% apart: this round is refused", 100*apart)
				continue
			}
		}
		for name, res := range one {
			results[name] = append(results[name], res)
		}
		round++
	}
	b.show(results)
	return nil
}

func show(name string, res result) {
	measure.Progress("  %-66s %9s msg/s, worker %s, Postgres %s a message, %d bytes of WAL, %d MiB", name, measure.Thousands(res.rate),
		measure.Micros(res.worker, res.messages), measure.Micros(res.postgres, res.messages), res.wal/int64(res.messages), res.memory>>20)
}

func (b *bench) show(results map[string][]result) {
	rows := [][]string{{"", "msg/s", "dedupd's, of this", "CPU a message: worker", "Postgres", "WAL a message", "memory"}}
	add := func(name, title string) {
		all := results[name]
		if len(all) == 0 {
			return
		}
		var rates, ratios, workers, servers, wal, memory []float64
		for i, r := range all {
			rates = append(rates, r.rate)
			workers, servers = append(workers, r.worker.Seconds()/float64(r.messages)), append(servers, r.postgres.Seconds()/float64(r.messages))
			wal, memory = append(wal, float64(r.wal)/float64(r.messages)), append(memory, float64(r.memory))
			if own := results["dedupd"]; len(own) > i {
				ratios = append(ratios, own[i].rate/r.rate)
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
		rows = append(rows, []string{title, measure.Thousands(measure.Median(rates)), ratio, worker, fmt.Sprintf("%.1f µs", 1e6*measure.Median(servers)), fmt.Sprintf("%.0f B", measure.Median(wal)), resident})
	}
	for i := range contenders {
		add(contenders[i].name, contenders[i].name)
	}
	for i := range floors {
		add(floors[i].name, "floor: "+floors[i].name)
	}
	b.report.Add("\n## The same topic, the same kind of table\n\n%d messages in 4 partitions, about 200 bytes of JSON, every fifth a resend; rows of a uuid and jsonb, without an index.\n", b.messages)
	b.report.Add("Each run was checked: every id stands in the table once. A floor has no broker, no copies and nothing to do but\nwrite: its batches were made beforehand. Its rate counts the copies all the same, as if they came for nothing.\n")
	b.report.Table(rows)
}
