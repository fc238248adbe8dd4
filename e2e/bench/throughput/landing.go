package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/e2e/rig"
)

// result is what a run came to.
type result struct {
	usage
	rate     float64 // messages a second, duplicates included
	memories int64   // bytes of claims and marks
	memory   int64   // bytes
	messages int
}

// land runs a contender over a topic until every id stands in the sink, once.
func (b *bench) land(ctx context.Context, c *contender, t topic) (result, error) {
	return b.landDuring(ctx, c, t, nil)
}

// landDuring does something to it, if not nil, when the first rows are there.
func (b *bench) landDuring(ctx context.Context, c *contender, t topic, during func(context.Context, *pgx.Conn) error) (res result, err error) {
	r, err := b.prepare(ctx, c, t)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, r.end(ctx, b)) }()
	all, err := c.launch(b, r)
	if err != nil {
		return res, err
	}
	var used usage
	progress := c.progress(r.conn, t)
	steady, err := watch(ctx, progress, all.ended, func() (err error) {
		used, err = b.used(ctx, r.conn, all)
		if err == nil && during != nil {
			err = during(ctx, r.conn)
		}
		return err
	})
	if err != nil {
		return res, fmt.Errorf("%s: %w\n%s", c.name, err, rig.Tail(r.log()))
	}
	end, err := b.used(ctx, r.conn, all)
	if err != nil {
		return res, err
	}
	res = result{usage: end.since(used), memory: all.memory(), messages: int(steady.share * float64(t.messages))}
	res.rate = float64(res.messages) / steady.took.Seconds()
	if err := all.stop(syscall.SIGTERM); err != nil {
		return res, fmt.Errorf("%s: %w\n%s", c.name, err, rig.Tail(r.log()))
	}
	if err := r.conn.QueryRow(ctx, memoriesSQL).Scan(&res.memories); err != nil {
		return res, err
	}
	if c.check != "" {
		var holds bool
		if err := r.conn.QueryRow(ctx, "SELECT "+c.check).Scan(&holds); err != nil || !holds {
			return res, errors.Join(fmt.Errorf("%s: this doesn't hold: %s", c.name, c.check), err)
		}
		return res, nil
	}
	var rows, ids int
	if err := r.conn.QueryRow(ctx, "SELECT count(*), count(DISTINCT id) FROM rows").Scan(&rows, &ids); err != nil {
		return res, err
	}
	if rows != t.distinct() || ids != rows {
		return res, fmt.Errorf("%s landed %d rows of %d ids, there are %d", c.name, rows, ids, t.distinct())
	}
	return res, nil
}

// steady is the part of a run between the sink's first growth and its last: the
// start of a process, and of a group, comes before.
type steady struct {
	share float64 // of the rows
	took  time.Duration
}

// memoriesSQL is the size of what dedupd remembers messages by.
const memoriesSQL = `SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
	WHERE n.nspname = 'dedupd' AND c.relkind = 'r' AND (c.relname LIKE 'claims\_%' OR c.relname = 'sequences')`

// progress tells how far a landing is.
type progress struct {
	size func(ctx context.Context) (int64, error) // cheap
	done func(ctx context.Context) (bool, error)  // not
}

// progress is the size of the sink's table: counting its rows would cost more than some
// contenders. A contender that may write no row is asked for its books.
func (c *contender) progress(conn *pgx.Conn, t topic) progress {
	number := func(sql string) func(context.Context) (n int64, err error) {
		return func(ctx context.Context) (n int64, err error) {
			err = conn.QueryRow(ctx, sql).Scan(&n)
			if sqlstate := (*pgconn.PgError)(nil); errors.As(err, &sqlstate) && sqlstate.Code == "42P01" {
				return 0, nil // dedupd's schema isn't there yet
			}
			return n, err
		}
	}
	size, count, all := number("SELECT pg_relation_size('rows')"), number("SELECT count(*) FROM rows"), int64(t.distinct())
	if c.check != "" {
		size = number("SELECT coalesce(sum(fetched), 0)::bigint FROM dedupd.lanes")
		count, all = size, int64(t.messages)
	}
	return progress{size, func(ctx context.Context) (bool, error) {
		n, err := count(ctx)
		return n >= all, err
	}}
}

// watch waits until a contender is done, and calls begun when it has begun.
func watch(ctx context.Context, p progress, ended func() bool, begun func() error) (steady, error) {
	const stalled = time.Minute
	var first, counted time.Time
	var atFirst, size int64
	last := time.Now() // it has as long to begin
	for {
		now, err := p.size(ctx)
		if err != nil {
			return steady{}, err
		}
		at := time.Now()
		if now > size {
			if size == 0 {
				first, atFirst = at, now
				if err := begun(); err != nil {
					return steady{}, err
				}
			}
			last, size = at, now
		}
		quiet := at.Sub(last)
		if size > 0 && quiet > 300*time.Millisecond && at.Sub(counted) > time.Second {
			counted = at
			done, err := p.done(ctx)
			if err != nil {
				return steady{}, err
			}
			if done {
				return steady{float64(size-atFirst) / float64(size), last.Sub(first)}, nil
			}
		}
		if quiet > stalled {
			return steady{}, fmt.Errorf("nothing has landed for %s", stalled)
		}
		if ended() {
			return steady{}, errors.New("it ended by itself")
		}
		select {
		case <-ctx.Done():
			return steady{}, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// usage is what has been used so far: the processor time of the contender and of
// Postgres, and bytes of WAL.
type usage struct {
	worker, postgres measure.CPU
	wal              int64
}

func (u usage) since(before usage) usage {
	return usage{u.worker - before.worker, u.postgres - before.postgres, u.wal - before.wal}
}

// used reads it. Of backends that have ended nothing is known; none ends while a
// contender is at work.
func (b *bench) used(ctx context.Context, conn *pgx.Conn, workers processes) (u usage, err error) {
	err = conn.QueryRow(ctx, "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").Scan(&u.wal)
	u.worker = workers.cpu()
	u.postgres = measure.CPUOfChildren(b.server.Pid())
	return u, err
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
