package main

import (
	"context"
	"fmt"
)

const keyedColumns = `id uuid PRIMARY KEY, payload jsonb NOT NULL`

// strategies lands the same topic by each strategy, and by each mode of the table sink.
func (b *bench) strategies(ctx context.Context) error {
	const columns = "columns: {id: id, payload: value}"
	numbered := topic{partitions: 4, messages: b.messages, numbered: true}
	var trials []trial
	add := func(name, rows, dedup, table string) {
		trials = append(trials, trial{name: name, topic: numbered, contender: &contender{name: name, share: 1, columns: rows, command: dedupdWith(dedup, table)}})
	}
	add("claim", plainColumns, "{strategy: claim}", columns)
	add("sequence", plainColumns, "{strategy: sequence}", columns)
	add("position", plainColumns, "{strategy: position}", columns)
	for _, mode := range []string{"insert", "upsert"} {
		for _, strategy := range []string{"claim", "position"} {
			add(fmt.Sprintf("%s with a key, %s", mode, strategy), keyedColumns, "{strategy: "+strategy+"}", columns+"\n    mode: "+mode+"\n    key: [id]")
		}
	}
	for i := range floors {
		if floors[i].name == "rows by COPY alone" {
			trials = append(trials, trial{name: "floor: " + floors[i].name, floor: &floors[i], topic: numbered})
		}
	}
	results, err := b.rounds(ctx, trials)
	if err != nil {
		return err
	}
	b.report.Title("Strategies, measured", "make bench-strategies")
	b.report.Setting(b.server.Version(), settings)
	b.report.Add("\n%d messages in 4 partitions, about 200 bytes of JSON, none sent twice, from 400 producers that number them; rows of\na uuid and jsonb. Runs took turns, %d rounds, medians. A figure above 1 in the second column means that `claim` is\nfaster, one below 1 that it is slower.\n", b.messages, b.roundCount)
	rows := table(trials, results, func(trial) string { return "claim" })
	rows[0][2] = "claim's rate to this"
	b.report.Table(rows)
	return nil
}
