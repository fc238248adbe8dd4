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

// memory lands large messages from many lanes, once as fast as it goes, and once
// with a Postgres that stands still in between, and reads the most memory that
// the process ever had resident.
func (b *bench) memory(ctx context.Context) error {
	const stall = 15 * time.Second
	t := topic{partitions: 16, messages: b.messages / 10, resends: 20, bytes: 8 << 10}
	c := contenders[0]
	// Postgres stores the bytes as they are: the worker is to have the work.
	c.name = "memory: 16 lanes, values of 8 KiB"
	c.columns, c.sql = "id uuid NOT NULL, payload bytea NOT NULL", "ALTER TABLE rows ALTER payload SET STORAGE EXTERNAL"
	if !b.wanted(c.name) {
		return nil
	}
	rows := [][]string{{"", "msg/s", "most memory"}}
	for _, stalled := range []bool{false, true} {
		var during func(ctx context.Context, conn *pgx.Conn) error
		name := c.name
		if stalled {
			name += fmt.Sprintf(", Postgres stands still for %s", stall)
			during = func(ctx context.Context, conn *pgx.Conn) error { return standStill(ctx, conn, stall) }
		}
		res, err := b.landDuring(ctx, &c, t, during)
		if err != nil {
			return err
		}
		show(name, res)
		rate := measure.Thousands(res.rate)
		if stalled {
			rate = ""
		}
		rows = append(rows, []string{name, rate, fmt.Sprintf("%d MiB", res.memory>>20)})
	}
	b.report.Add("\n## Memory\n\nWith the default `batch.inflight_bytes` of 128 MiB, and no filters to load.\n")
	b.report.Table(rows)
	return nil
}

// standStill stops the server's processes that work for the contender, as a
// storage that hangs would.
func standStill(ctx context.Context, conn *pgx.Conn, d time.Duration) error {
	rows, err := conn.Query(ctx, "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
	if err != nil {
		return err
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	if err != nil {
		return err
	}
	for _, pid := range pids {
		err = errors.Join(err, syscall.Kill(int(pid), syscall.SIGSTOP))
	}
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	for _, pid := range pids {
		err = errors.Join(err, syscall.Kill(int(pid), syscall.SIGCONT))
	}
	return err
}
