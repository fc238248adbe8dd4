package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/e2e/rig"
)

const (
	latencyRate = 1000 // messages a second
	// latencyWarm is how long a contender runs at that rate before anything
	// counts, from its first row on; a JVM needs it.
	latencyWarm = 5 * time.Second
	latencyRun  = 10 * time.Second
	// latencyPoll is how often the table is looked at: the resolution.
	latencyPoll = 2 * time.Millisecond
)

// delays are from before a message's hand-over to the producer until another
// session sees its row.
type delays struct{ median, p99 time.Duration }

// latency sends few messages, evenly, and tells how long each takes. Whoever
// commits offsets for each message can't keep up with them.
func (b *bench) latency(ctx context.Context) error {
	names := []int{0, 1, 2, 3}
	results := make(map[string][]delays)
	if b.wanted("latency: " + contenders[3].name) {
		measure.Progress("latency: a run that doesn't count, for the broker to get warm")
		if _, err := b.delay(ctx, &contenders[3]); err != nil {
			return err
		}
	}
	for round := range b.roundCount {
		for i := range names {
			c := &contenders[names[(i+round)%len(names)]]
			if !b.wanted("latency: " + c.name) {
				continue
			}
			d, err := b.delay(ctx, c)
			if err != nil {
				return fmt.Errorf("latency of %s: %w", c.name, err)
			}
			measure.Progress("  %-66s median %s, p99 %s", c.name, millis(d.median), millis(d.p99))
			results[c.name] = append(results[c.name], d)
		}
	}
	if len(results) == 0 {
		return nil
	}
	rows := [][]string{{"", "median", "p99", "dedupd's p99, of this"}}
	for _, i := range names {
		c := &contenders[i]
		var medians, p99s []time.Duration
		var ratios []float64
		for round, d := range results[c.name] {
			medians, p99s = append(medians, d.median), append(p99s, d.p99)
			if own := results[contenders[0].name]; len(own) > round {
				ratios = append(ratios, own[round].p99.Seconds()/d.p99.Seconds())
			}
		}
		if len(medians) > 0 {
			ratio := ""
			if len(ratios) > 0 {
				ratio = fmt.Sprintf("%.2f", measure.Median(ratios))
			}
			rows = append(rows, []string{c.name, millis(measure.Median(medians)), millis(measure.Median(p99s)), ratio})
		}
	}
	b.report.Add("\n## Latency\n\n%d messages a second into 4 partitions, evenly, for %s: from the hand-over to the producer until another session, which\nasks every %s, finds the row; the table has a primary key for that. Producer, broker, worker and Postgres share the cores.\n", latencyRate, latencyRun, latencyPoll)
	b.report.Table(rows)
	return nil
}

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", 1e3*d.Seconds()) }

func (b *bench) delay(ctx context.Context, c *contender) (d delays, err error) {
	// Nothing stands in it yet.
	t := topic{partitions: 4, ids: fmt.Sprint("latency", b.runCount), enveloped: c.enveloped}
	indexed := *c
	indexed.columns = cmp.Or(c.columns, "id uuid PRIMARY KEY, payload jsonb NOT NULL")
	r, err := b.prepare(ctx, &indexed, t)
	if err != nil {
		return d, err
	}
	defer func() { err = errors.Join(err, r.end(ctx, b)) }()
	all, err := c.launch(b, r)
	if err != nil {
		return d, err
	}

	s := sender{topic: t, sent: make([]atomic.Int64, 120*latencyRate)}
	sending, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.send(sending, b) }()
	seen, err := s.observe(ctx, r.conn, all)
	stop()
	if sendErr := <-done; err == nil {
		err = sendErr
	}
	if err != nil {
		return d, fmt.Errorf("%w\n%s", err, rig.Tail(r.log()))
	}
	slices.Sort(seen)
	return delays{seen[len(seen)/2], seen[len(seen)*99/100]}, nil
}

// sender sends a message each millisecond, and remembers when.
type sender struct {
	topic topic
	sent  []atomic.Int64 // Unix nanoseconds, by number; 0: not sent yet
}

func (s *sender) send(ctx context.Context, b *bench) error {
	client, err := b.producer(s.topic.name(), kgo.ProducerLinger(0))
	if err != nil {
		return err
	}
	defer client.Close()
	var failed error
	start := time.Now()
	for i := range s.sent {
		select {
		case <-time.After(time.Until(start.Add(time.Duration(i) * time.Second / latencyRate))):
		case <-ctx.Done():
			flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			return errors.Join(client.Flush(flush), failed)
		}
		id := []byte(pgtype.UUID{Bytes: numbered(i), Valid: true}.String())
		value := s.topic.value(id)
		s.sent[i].Store(time.Now().UnixNano())
		client.Produce(context.WithoutCancel(ctx), record{id: id, value: value}.kafka(int32(i)%s.topic.partitions), func(_ *kgo.Record, err error) {
			if err != nil {
				failed = err // one goroutine calls all of these
			}
		})
	}
	return errors.New("the contender was too slow to begin")
}

// observe asks for the rows that are still missing until all messages of the
// time that counts are there, and returns their delays.
func (s *sender) observe(ctx context.Context, conn *pgx.Conn, all processes) ([]time.Duration, error) {
	const most = 1000 // rows asked for at a time, the oldest
	var missing [][16]byte
	next := 0          // to be sent
	var from, to int64 // of the sending that counts
	var seen []time.Duration
	for {
		for ; next < len(s.sent) && s.sent[next].Load() != 0; next++ {
			missing = append(missing, numbered(next))
		}
		rows, err := conn.Query(ctx, `SELECT id FROM rows WHERE id = ANY ($1)`, missing[:min(len(missing), most)])
		if err != nil {
			return nil, err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[[16]byte])
		if err != nil {
			return nil, err
		}
		now := time.Now().UnixNano()
		found := make(map[[16]byte]bool, len(ids))
		for _, id := range ids {
			found[id] = true
			if at := s.sent[number(id)].Load(); at >= from && at < to {
				seen = append(seen, time.Duration(now-at))
			}
		}
		missing = slices.DeleteFunc(missing, func(id [16]byte) bool { return found[id] })
		switch {
		case from == 0 && len(ids) > 0:
			from = now + latencyWarm.Nanoseconds()
			to = from + latencyRun.Nanoseconds()
		case from > 0 && now > to:
			if len(missing) == 0 || s.sent[number(missing[0])].Load() >= to {
				return seen, nil
			}
			if now > to+20*time.Second.Nanoseconds() {
				return nil, errors.New("rows are missing 20 s after their messages were sent")
			}
		}
		if all.ended() {
			return nil, errors.New("it ended by itself")
		}
		select {
		case <-time.After(latencyPoll):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// numbered is an id that tells which message has it.
func numbered(n int) (id [16]byte) {
	id[6], id[8] = 0x40, 0x80
	binary.BigEndian.PutUint32(id[12:], uint32(n))
	return id
}

func number(id [16]byte) int { return int(binary.BigEndian.Uint32(id[12:])) }
