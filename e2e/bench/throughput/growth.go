package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/e2e/rig"
)

// grow tells what a message costs when a million have landed, five and twenty:
// without an index on the sink's table, where only the claims grow, and with
// one; and by how many lanes they come.
func (b *bench) grow(ctx context.Context) error {
	millions := []int{1, 5, 20}
	whole := topic{partitions: 4, messages: 20 * b.messages, resends: 20}
	b.report.Title("Cost as work grows, measured", "make bench-growth")
	b.report.Setting(b.server.Version(), settings)
	b.report.Add("\n## By what has landed\n\nOne topic of %d messages, a fifth resent. The processor time of a message is that of the last half million before the\nfigure. The claims are in one table: `retention.generation_max_claims` is 20,000,000 by default.\n", whole.messages)
	rows := [][]string{{"", "", "msg/s", "CPU a message: worker", "Postgres", "WAL a message"}}
	for _, columns := range []string{plainColumns, "id uuid PRIMARY KEY, payload jsonb NOT NULL"} {
		name := "no index on the sink's table"
		if columns != plainColumns {
			name = "a primary key on the sink's table"
		}
		c := contenders[0]
		c.columns = columns
		at := make([]int, len(millions))
		for i, m := range millions {
			at[i] = m * b.messages
		}
		slices, err := b.milestones(ctx, &c, whole, at, b.messages/2)
		if err != nil {
			return err
		}
		for i, s := range slices {
			measure.Progress("  %s, at %d: %s", name, at[i], measure.Micros(s.postgres, s.messages))
			rows = append(rows, []string{name, fmt.Sprintf("at %.1f M", float64(at[i])/1e6), measure.Thousands(s.rate), measure.Micros(s.worker, s.messages), measure.Micros(s.postgres, s.messages), fmt.Sprintf("%d B", s.wal/int64(s.messages))})
		}
	}
	b.report.Table(rows)

	var trials []trial
	for _, lanes := range []int32{1, 4, 16, 64} {
		c := contenders[0]
		trials = append(trials, trial{name: counted(lanes, "lane"), contender: &c, topic: topic{partitions: lanes, messages: b.messages, resends: 20}})
	}
	results, err := b.rounds(ctx, trials)
	if err != nil {
		return err
	}
	b.report.Add("\n## By lanes\n\n%d messages each, %d rounds, medians; the ratio is that of four lanes.\n", b.messages, b.roundCount)
	table := table(trials, results, func(trial) string { return "4 lanes" })
	table[0][2] = "4 lanes', of this"
	b.report.Table(table)
	return nil
}

// milestones lands a topic and measures the messages that come just before each
// of these numbers.
func (b *bench) milestones(ctx context.Context, c *contender, t topic, at []int, span int) (slices []result, err error) {
	r, err := b.prepare(ctx, c, t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.end(ctx, b)) }()
	all, err := c.launch(b, r)
	if err != nil {
		return nil, err
	}
	type reading struct {
		usage
		messages int
		when     time.Time
	}
	read := func() (now reading, err error) {
		if err := r.conn.QueryRow(ctx, "SELECT coalesce(sum(fetched), 0) FROM dedupd.books").Scan(&now.messages); err != nil {
			return now, err
		}
		now.when = time.Now()
		now.usage, err = b.used(ctx, r.conn, all)
		return now, err
	}
	// reach waits until so many messages are durable.
	reach := func(n int) (reading, error) {
		for last := time.Now(); ; {
			now, err := read()
			if err != nil && time.Since(last) > time.Minute || all.ended() {
				return now, fmt.Errorf("waiting for message %d: %w\n%s", n, err, rig.Tail(r.log()))
			}
			if err == nil && now.messages >= n {
				return now, nil
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
				return now, ctx.Err()
			}
		}
	}
	for _, n := range at {
		from, err := reach(n - span)
		if err != nil {
			return nil, err
		}
		to, err := reach(n)
		if err != nil {
			return nil, err
		}
		s := result{usage: to.since(from.usage), messages: to.messages - from.messages, memory: all.memory()}
		s.rate = float64(s.messages) / to.when.Sub(from.when).Seconds()
		slices = append(slices, s)
	}
	return slices, all.stop(syscall.SIGTERM)
}

// counted is a number of things.
func counted(n int32, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
