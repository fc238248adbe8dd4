package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// result is what a run came to.
type result struct {
	rate             float64 // messages a second, duplicates included
	worker, postgres time.Duration
	wal, memory      int64 // bytes
	messages         int
}

// land runs a contender over a topic until every id stands in the sink, once.
func (b *bench) land(ctx context.Context, c *contender, t topic) (res result, err error) {
	if err := b.fill(ctx, t); err != nil {
		return res, err
	}
	r, err := b.prepare(ctx, c, t)
	if err != nil {
		return res, err
	}
	conn, err := pgx.Connect(ctx, r.url)
	if err != nil {
		return res, err
	}
	defer func() {
		_ = conn.Close(context.WithoutCancel(ctx))
		err = errors.Join(err, b.exec(context.WithoutCancel(ctx), "postgres", "DROP DATABASE "+conn.Config().Database+" WITH (FORCE)"))
	}()
	walBefore, postgresBefore, err := b.used(ctx, conn)
	if err != nil {
		return res, err
	}
	p, err := c.launch(b, r)
	if err != nil {
		return res, err
	}
	defer p.Kill()
	rate, err := watch(ctx, conn, t.ids(), p.Done())
	if err != nil {
		return res, fmt.Errorf("%s: %w\n%s", c.name, err, r.said())
	}
	walAfter, postgresAfter, err := b.used(ctx, conn)
	if err != nil {
		return res, err
	}
	res = result{worker: measure.CPUOf(p.Pid()), postgres: postgresAfter - postgresBefore, wal: walAfter - walBefore, memory: measure.PeakMemory(p.Pid()), messages: t.messages}
	res.rate = rate * float64(t.messages)
	p.Signal(syscall.SIGTERM)
	if !p.Wait(30 * time.Second) {
		return res, fmt.Errorf("%s did not end\n%s", c.name, r.said())
	}
	var rows, ids int
	if err := conn.QueryRow(ctx, "SELECT count(*), count(DISTINCT id) FROM rows").Scan(&rows, &ids); err != nil {
		return res, err
	}
	if rows != t.ids() || ids != rows {
		return res, fmt.Errorf("%s landed %d rows of %d ids, there are %d", c.name, rows, ids, t.ids())
	}
	return res, nil
}

// watch waits until the sink has all rows, and gives the share of them that
// arrived in a second, between its first growth and its last. The table's size
// tells: counting its rows would cost more than some contenders.
func watch(ctx context.Context, conn *pgx.Conn, rows int, ended <-chan struct{}) (rate float64, err error) {
	const stalled = time.Minute
	var first, last, counted time.Time
	var atFirst, size int64
	for {
		var now int64
		if err := conn.QueryRow(ctx, "SELECT pg_relation_size('rows')").Scan(&now); err != nil {
			return 0, err
		}
		at := time.Now()
		switch {
		case now > size && first.IsZero():
			first, atFirst = at, now
			fallthrough
		case now > size:
			last, size = at, now
		}
		quiet := at.Sub(last)
		if size > 0 && quiet > 300*time.Millisecond && at.Sub(counted) > time.Second {
			counted = at
			var n int
			if err := conn.QueryRow(ctx, "SELECT count(*) FROM rows").Scan(&n); err != nil {
				return 0, err
			}
			if n >= rows {
				return float64(size-atFirst) / float64(size) / last.Sub(first).Seconds(), nil
			}
		}
		switch {
		case last.IsZero():
			last = at // it has as long to begin
		case quiet > stalled:
			return 0, fmt.Errorf("nothing has landed for %s", stalled)
		}
		select {
		case <-ended:
			return 0, errors.New("it ended by itself")
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// used is the WAL that was written and the processor time of Postgres.
func (b *bench) used(ctx context.Context, conn *pgx.Conn) (wal int64, cpu measure.CPU, err error) {
	err = conn.QueryRow(ctx, "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").Scan(&wal)
	return wal, measure.CPUOfChildren(b.server.Pid()), err
}

func (b *bench) exec(ctx context.Context, database string, statements ...string) error {
	conn, err := pgx.Connect(ctx, b.server.URL(database))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil && sql != "" {
			return err
		}
	}
	return nil
}
