package main

import (
	"context"
	"fmt"
)

// variant is the same work with one thing changed, for dedupd and, where it can,
// for what a team would write by hand.
type variant struct {
	name   string
	topic  topic
	own    contender
	byHand *contender
}

// variants change one thing each of: 4 partitions, a fifth resent, values of 200
// bytes, UUIDv4, one worker, a uuid and jsonb.
func variants(messages int) []variant {
	usual := topic{partitions: 4, messages: messages, resends: 20}
	var all []variant
	add := func(name string, change func(v *variant)) {
		v := variant{name: name, topic: usual, own: contenders[0], byHand: &contenders[1]}
		change(&v)
		all = append(all, v)
	}
	for _, resends := range []int{0, 50} {
		add(fmt.Sprintf("%d %% resent", resends), func(v *variant) { v.topic.resends = resends })
	}
	for _, size := range []int{1, 8} {
		add(fmt.Sprintf("values of %d KiB", size), func(v *variant) { v.topic.bytes, v.topic.messages = size<<10, messages/(2*size) })
	}
	for _, partitions := range []int32{1, 16} {
		add(counted(partitions, "partition"), func(v *variant) {
			v.topic.partitions = partitions
			c := contenders[1]
			c.command = peer("byhand-batched", "-readers", fmt.Sprint(partitions), "-batch", "1000")
			v.byHand = &c
		})
	}
	for _, workers := range []int{2, 4} {
		add(fmt.Sprintf("%d workers", workers), func(v *variant) {
			v.own.processes = workers
			c := contenders[1]
			c.processes, c.command = workers, peer("byhand-batched", "-readers", fmt.Sprint(4/workers), "-batch", "1000")
			v.byHand = &c
		})
	}
	add("UUIDv7", func(v *variant) { v.topic.ids = "v7" })
	add("ids of 40 characters", func(v *variant) {
		v.topic.ids, v.own.columns, v.byHand = "text", "id text NOT NULL, payload jsonb NOT NULL", nil
	})
	add("3 typed columns", func(v *variant) {
		v.own.columns, v.own.command, v.byHand = "id uuid NOT NULL, customer text NOT NULL, total numeric NOT NULL", dedupd(`id: id, customer: "json:customer", total: "json:total"`), nil
	})
	add("12 typed columns", func(v *variant) {
		v.topic.wide, v.byHand = true, nil
		v.own.columns = `id uuid NOT NULL, customer text NOT NULL, currency text, total numeric, quantity integer, express boolean,
			country text, channel text, weight double precision, revision bigint, placed_at timestamptz, note text`
		v.own.command = dedupd(`id: id, customer: "json:customer", currency: "json:currency", total: "json:total", quantity: "json:quantity", express: "json:express",
      country: "json:country", channel: "json:channel", weight: "json:weight", revision: "json:revision", placed_at: "json:placed_at", note: "json:note"`)
	})
	add("NATS, a queue", func(v *variant) {
		v.topic.nats, v.topic.partitions = true, 0
		v.byHand = &contender{sql: claimsTable, command: peer("nats", "-consumers", "4")}
	})
	return all
}

// vary lands each variant's topic by dedupd and by hand.
func (b *bench) vary(ctx context.Context) error {
	const suffix = ", by hand"
	all := variants(b.messages / 2)
	var trials []trial
	for i := range all {
		v := &all[i]
		v.own.name = v.name
		trials = append(trials, trial{name: v.name, contender: &v.own, topic: v.topic})
		if v.byHand == nil {
			continue
		}
		c := *v.byHand
		c.name = v.name + suffix
		t := v.topic
		if t.nats {
			t.messages = max(1000, t.messages/50) // it is slow
		}
		trials = append(trials, trial{name: c.name, contender: &c, topic: t})
	}
	results, err := b.rounds(ctx, trials)
	if err != nil || len(results) == 0 {
		return err
	}
	b.report.Add("\n## Variants\n\nOne thing changed in each: %d messages (fewer where they are larger), 4 partitions, a fifth resent, values of 200\nbytes, UUIDv4, one worker, a uuid and jsonb. By hand: batches of 1,000 as above, where that program can do it; for NATS\na consumer of nats.go with four goroutines that makes a transaction of each message.\n", b.messages/2)
	b.report.Table(table(trials, results, func(t trial) string {
		if n := len(t.name) - len(suffix); n > 0 && t.name[n:] == suffix {
			return t.name[:n]
		}
		return t.name
	}))
	return nil
}
