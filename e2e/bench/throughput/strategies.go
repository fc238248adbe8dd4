package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// strategies lands the same topic by each strategy, and another one by each way to write its
// messages.
func (b *bench) strategies(ctx context.Context) error {
	const producers, states = 100, 4 // of a partition; of a row
	numbered := topic{partitions: 4, messages: b.messages, producers: producers}
	changes := topic{partitions: 4, messages: b.messages / 2, producers: b.messages / 2 / 4 / states}
	var trials []trial
	add := func(t topic, c contender) {
		c.share = 1
		trials = append(trials, trial{name: c.name, topic: t, contender: &c})
	}
	for _, strategy := range []string{"claim", "sequence", "position"} {
		add(numbered, contender{name: strategy, command: dedupdWith("{strategy: "+strategy+"}", "columns: {id: id, payload: value}")})
	}
	for _, c := range ways(changes) {
		add(changes, c)
	}
	results, err := b.rounds(ctx, trials)
	if err != nil {
		return err
	}
	b.report.Title("Strategies and modes, measured", "make bench-strategies")
	b.report.Setting(b.server.Version(), settings)
	b.report.Add("\nRuns took turns, %d rounds, medians. The aim for `versioned`, `update` and `append` is 0.8 of `upsert`.\n", b.roundCount)
	b.report.Add("\n## Strategies\n\n%d messages in 4 partitions, about 200 bytes of JSON, none sent twice, from %d producers that number them; rows of\na uuid and jsonb without an index.\n", b.messages, 4*producers)
	b.report.Table(beside(trials[:3], results, "claim"))
	b.report.Add("\n## Ways to write\n\n%d messages in 4 partitions, %d of each key, all with `dedup.strategy: claim`. The rows are there before, except\nfor inserts, append and two tables, which gets two rows of each message.\n", changes.messages, states)
	b.report.Table(beside(trials[3:], results, "upsert"))
	return nil
}

// ways to write a topic of changes to rows that are there.
func ways(t topic) []contender {
	rows := 4 * t.producers
	state := fmt.Sprintf(`INSERT INTO rows (key, seq, state, payload) SELECT 'client-' || p || '-' || n, -1, 'open', '{}' FROM generate_series(0, 3) p, generate_series(0, %d) n; ANALYZE rows`, t.producers-1)
	const columns = `key text PRIMARY KEY, seq bigint NOT NULL, state text NOT NULL DEFAULT 'open', payload jsonb NOT NULL`
	const filled = `key: [key]
    columns: {key: "header:client-id", seq: "header:client-seq", payload: value}`
	last := fmt.Sprintf("(SELECT count(*) = %d AND min(seq) = %d AND max(seq) = %[2]d FROM rows)", rows, t.messages/rows-1)
	way := func(name, columns, sql, check, sink string) contender {
		return contender{name: name, columns: columns, sql: sql, check: check, command: dedupdTo("{}", sink)}
	}
	table := func(lines string) string { return "table:\n    name: public.rows\n    " + lines }
	return []contender{
		way("insert", "id uuid NOT NULL, payload jsonb NOT NULL", "", fmt.Sprintf("(SELECT count(*) = %d FROM rows)", t.messages), table("columns: {id: id, payload: value}")),
		way("insert with a key", "id uuid PRIMARY KEY, payload jsonb NOT NULL", "", fmt.Sprintf("(SELECT count(*) = %d FROM rows)", t.messages), table("key: [id]\n    columns: {id: id, payload: value}")),
		way("upsert", columns, state, last, table("mode: upsert\n    "+filled)),
		way("upsert, a column absent", columns, state, last, table("mode: upsert\n    "+strings.Replace(filled, "{", `{state: "header:state", `, 1))),
		way("versioned", columns, state, last, table("mode: versioned\n    version: seq\n    "+filled)),
		way("update", columns, state, last, table("mode: update\n    expect: {state: const:open}\n    "+filled)),
		way("upsert with a history of 20", columns+", last_ids uuid[] NOT NULL DEFAULT '{}'", state, last, table("mode: upsert\n    absent: null\n    history: {column: last_ids, size: 20}\n    "+filled)),
		way("append", "stream text NOT NULL, version bigint NOT NULL, operation uuid NOT NULL, payload jsonb NOT NULL, UNIQUE (stream, version), UNIQUE (stream, operation)", "",
			fmt.Sprintf("(SELECT count(*) = %d AND max(version) = %d FROM rows)", t.messages, t.messages/rows), table("mode: append\n    stream: stream\n    version: version\n    operation: operation\n    columns: {stream: \"header:client-id\", payload: value}")),
		way("statement with expect", columns, state, last, `statement:
    expect: returned
    key: [key]
    columns: {key: "header:client-id", seq: "header:client-seq::bigint", payload: "value::jsonb"}
    sql: UPDATE public.rows t SET seq = b.seq, payload = b.payload FROM batch b WHERE t.key = b.key AND t.state = 'open' RETURNING b.ord`),
		way("two tables, each with a filter", "id uuid NOT NULL, payload jsonb NOT NULL", "CREATE TABLE others (LIKE rows)", fmt.Sprintf("(SELECT count(*) = %d FROM rows) AND (SELECT count(*) = %[1]d FROM others)", t.messages), `
  - table: {name: public.rows, columns: {id: id, payload: value}}
    filter: {json:currency: [EUR, USD]}
  - table: {name: public.others, columns: {id: id, payload: value}}
    filter: {json:currency: {not: [GBP]}}`),
	}
}

// beside makes a table of trials, each beside one of them.
func beside(trials []trial, results map[string][]result, base string) [][]string {
	rows := [][]string{{"", "msg/s", "of " + base + "'s", "CPU a message: worker", "Postgres", "WAL a message", "claims and marks, a message"}}
	for _, r := range trials {
		if len(results[r.name]) == 0 {
			continue
		}
		var rates, ratios, workers, servers, wal, memories []float64
		for i, res := range results[r.name] {
			n := float64(res.messages)
			rates, workers, servers = append(rates, res.rate), append(workers, res.worker.Seconds()/n), append(servers, res.postgres.Seconds()/n)
			wal, memories = append(wal, float64(res.wal)/n), append(memories, float64(res.memories)/float64(r.topic.messages))
			if own := results[base]; len(own) > i {
				ratios = append(ratios, res.rate/own[i].rate)
			}
		}
		rows = append(rows, []string{
			r.name, measure.Thousands(measure.Median(rates)), ratio(ratios), fmt.Sprintf("%.1f µs", 1e6*measure.Median(workers)),
			fmt.Sprintf("%.1f µs", 1e6*measure.Median(servers)), fmt.Sprintf("%.0f B", measure.Median(wal)), fmt.Sprintf("%.1f B", measure.Median(memories)),
		})
	}
	return rows
}

func ratio(of []float64) string {
	if len(of) == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", measure.Median(of))
}
