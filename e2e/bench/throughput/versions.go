package main

import (
	"context"
	"os/exec"
	"strings"
)

// versions lands the comparison's topic and each variant's by two of dedupd's binaries in
// turn, this one and an older: what a change costs.
func (b *bench) versions(ctx context.Context) error {
	const suffix = ", before"
	whole := variant{name: "dedupd", topic: topic{partitions: 4, messages: b.messages, resends: 20}, own: contenders[0]}
	all := append([]variant{whole}, variants(b.messages/2)...)
	var trials []trial
	for i := range all {
		v := &all[i]
		v.own.name = v.name
		older := v.own
		older.name += suffix
		older.command = func(b *bench, r *landing) (*exec.Cmd, error) {
			cmd, err := v.own.command(b, r)
			if err == nil {
				cmd.Path = b.before
			}
			return cmd, err
		}
		trials = append(trials, trial{name: v.name, contender: &v.own, topic: v.topic}, trial{name: older.name, contender: &older, topic: v.topic})
	}
	results, err := b.rounds(ctx, trials)
	if err != nil || len(results) == 0 {
		return err
	}
	b.report.Title("Throughput of two binaries", "make bench ARGS=-before=FILE")
	b.report.Setting(b.server.Version(), settings)
	b.report.Add("\nBoth took turns, %d rounds, medians: \"before\" is the older binary. Above 1, this one is faster than it.\n", b.roundCount)
	b.report.Table(table(trials, results, func(t trial) string { return strings.TrimSuffix(t.name, suffix) }))
	return nil
}
