package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// page is one lane's line in the books, or the sum of several: what became of
// the messages that were fetched.
type page struct {
	Source, Lane                     string
	Fetched, Applied, Duplicates     int64
	Redelivered, Resent, CrossSource int64
	Conflicts, Dead                  int64
}

// books are dedupd's own, as its view tells them.
type books []page

func (b books) sum() page {
	var s page
	for _, p := range b {
		s.Fetched += p.Fetched
		s.Applied += p.Applied
		s.Duplicates += p.Duplicates
		s.Redelivered += p.Redelivered
		s.Resent += p.Resent
		s.CrossSource += p.CrossSource
		s.Conflicts += p.Conflicts
		s.Dead += p.Dead
	}
	return s
}

// readBooks returns none while the worker hasn't made its schema.
func readBooks(ctx context.Context, pool *pgxpool.Pool) (books, error) {
	rows, err := pool.Query(ctx, `
		SELECT source, lane, fetched, applied, duplicates, redelivered, resent, cross_source, conflicts, dead
		FROM dedupd.books WHERE scope = $1 ORDER BY source DESC, lane`, scope)
	if err == nil {
		var b books
		if b, err = pgx.CollectRows(rows, pgx.RowToStructByPos[page]); err == nil {
			return b, nil
		}
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == "42P01" || pg.Code == "3F000") { // no such table, no such schema
		return nil, nil
	}
	return nil, fmt.Errorf("read the books: %w", err)
}

// landed is what the sink's table holds.
type landed struct {
	rows, ids int64
	cents     int64
	missing   []string // some ids that were sent and are not there
	twice     []string // some ids that are there more than once
}

// readLanded counts the table against the orders 0 to orders-1.
func readLanded(ctx context.Context, pool *pgxpool.Pool, orders int64) (landed, error) {
	var l landed
	err := pool.QueryRow(ctx, "SELECT count(*), count(DISTINCT id), coalesce(sum(cents), 0)::bigint FROM public.orders").
		Scan(&l.rows, &l.ids, &l.cents)
	if err != nil {
		return l, fmt.Errorf("count the orders: %w", err)
	}
	for _, q := range []struct {
		ids *[]string
		sql string
	}{
		{&l.missing, `SELECT 'order-' || to_char(n, 'FM0000000') AS id FROM generate_series(0, $1::bigint - 1) n
			EXCEPT SELECT id FROM public.orders ORDER BY 1 LIMIT 5`},
		{&l.twice, `SELECT id FROM public.orders WHERE $1::bigint IS NOT NULL GROUP BY id HAVING count(*) > 1 ORDER BY 1 LIMIT 5`},
	} {
		rows, err := pool.Query(ctx, q.sql, orders)
		if err == nil {
			*q.ids, err = pgx.CollectRows(rows, pgx.RowTo[string])
		}
		if err != nil {
			return l, fmt.Errorf("look for missing and double orders: %w", err)
		}
	}
	return l, nil
}

// truth is what the producer knows it has sent.
type truth struct {
	sent, orders, cents int64
}

// judge returns everything that isn't as promised.
func judge(b books, l landed, t truth) error {
	var wrong []error
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	if l.rows != t.orders {
		say("%s rows landed for %s orders that were sent", count(l.rows), count(t.orders))
	}
	if l.rows != l.ids {
		say("%s rows hold only %s different ids", count(l.rows), count(l.ids))
	}
	if len(l.missing) > 0 {
		say("missing, among others: %s", strings.Join(l.missing, ", "))
	}
	if len(l.twice) > 0 {
		say("more than once, among others: %s", strings.Join(l.twice, ", "))
	}
	if l.cents != t.cents {
		say("the orders are worth %s cents, but %s landed", count(t.cents), count(l.cents))
	}
	for _, p := range b {
		if p.Fetched != p.Applied+p.Duplicates+p.Conflicts+p.Dead || p.Duplicates != p.Redelivered+p.Resent+p.CrossSource {
			say("the books of %s/%s don't balance: %+v", p.Source, p.Lane, p)
		}
	}
	s := b.sum()
	if s.Applied != t.orders {
		say("the books say %s applied, the producer says %s orders", count(s.Applied), count(t.orders))
	}
	if s.Fetched < t.sent {
		say("only %s of %s messages were fetched", count(s.Fetched), count(t.sent))
	}
	if s.Conflicts != 0 || s.Dead != 0 {
		say("the books say %s conflicts and %s dead letters; there is no cause for any", count(s.Conflicts), count(s.Dead))
	}
	return errors.Join(wrong...)
}
