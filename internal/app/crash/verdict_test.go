package crash_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/message"
)

// entry is a message as the tests write it: "id" or "id=value".
type entry struct{ id, value string }

const poison = "poison" // the value that the sink's table refuses

// entries reads "a b=poison -": "-" is a message without an id.
func entries(text string) (all []entry) {
	for _, word := range strings.Fields(text) {
		id, value, ok := strings.Cut(word, "=")
		if !ok {
			value = "v"
		}
		if id == "-" {
			id = ""
		}
		all = append(all, entry{id, value})
	}
	return all
}

func (e entry) message() message.Message {
	m := message.Message{Topic: "t", Value: []byte(e.value)}
	if e.id != "" {
		m.Headers = []message.Header{{Key: "id", Value: []byte(e.id)}}
	}
	return m
}

// expected is what must have become of the logs, whatever happened on the way.
type expected struct {
	rows map[string]int // position of the copy that wins; -1: several lanes have one
	dead []string       // lane, position and class
}

func (c *cell) expect() expected {
	x := expected{rows: make(map[string]int)}
	first := make(map[string]entry)
	lanes := make(map[string]int)
	for partition, log := range c.logs {
		for position, e := range log {
			place := fmt.Sprintf("%s %d ", laneOf(partition).Name, position)
			if e.id == "" {
				x.dead = append(x.dead, place+"no_id")
				continue
			}
			was, seen := first[e.id]
			switch {
			case !seen:
				first[e.id], lanes[e.id] = e, partition
				if e.value == poison {
					x.dead = append(x.dead, place+"poison")
				} else {
					x.rows[e.id] = position
				}
			case was.value != e.value:
				x.dead = append(x.dead, place+"conflict")
			}
			if lanes[e.id] != partition {
				x.rows[e.id] = -1
			}
		}
	}
	slices.Sort(x.dead)
	return x
}

// verify judges what is in the database and at the broker when all is done.
func (c *cell) verify() {
	c.Helper()
	c.others.Wait()
	x := c.expect()
	c.verifyRows(x)
	c.verifyDead(x)
	c.verifyBooks(x)
	// One transaction carries the row, its claim and the lane's move: they are
	// one version of the database (xmin), or the promise is luck.
	c.none("rows without exactly one claim of the same transaction", `
		SELECT r.id || ' at ' || r.position FROM public.rows r
		WHERE (SELECT count(*) FROM `+claimsTable+` k WHERE k.key = (SELECT key FROM public.keys WHERE id = r.id) AND k.xmin = r.xmin) <> 1`)
	c.none("rows outside the one move of their lane that made them durable", `
		SELECT r.id || ' at ' || r.position FROM public.rows r
		WHERE (SELECT count(*) FROM public.moves m WHERE m.lane = r.lane AND m.xmin = r.xmin AND m.worker = r.worker AND (`+within+`)) <> 1`)
	c.none("dead letters outside the move of their lane", `
		SELECT class || ' at ' || position FROM dedupd.dead_letters r
		WHERE (SELECT count(*) FROM public.moves m WHERE m.lane = r.lane AND m.xmin = r.xmin AND (`+within+`)) <> 1`)
	c.none("moves by a worker that did not own the lane", `
		SELECT format('%s moved %s from %s to %s, which was of %s', worker, lane, "from", "to", owner) FROM public.moves WHERE worker <> owner AND `+ordered)
	c.none("moves that leave a hole or overlap, or under an epoch that fell", `
		SELECT format('lane %s from %s to %s', lane, "from", "to") FROM (
			SELECT *, lag("to", 1, 0) OVER w AS last, lag(epoch) OVER w AS before FROM public.moves WHERE `+ordered+` WINDOW w AS (PARTITION BY lane ORDER BY n)) m
		WHERE "from" <> last OR "to" <= "from" OR epoch < before`)
	// The server takes a moment to notice that a client has gone.
	c.await("the last transaction to end", func() bool {
		return c.ask(`SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%')`)
	})
}

const (
	claimsTable = `dedupd.claims_root`
	// ordered lanes are those with numbers.
	ordered = `lane ~ '^[0-9]+$'`
	within  = `r.lane !~ '^[0-9]+$' OR r.position >= m."from" AND r.position < m."to"`
)

func (c *cell) verifyRows(x expected) {
	c.Helper()
	rows := collect[struct {
		ID, Lane string
		Position int64
		Value    string
	}](c, `SELECT id, lane, position, value FROM public.rows ORDER BY n`)
	got := make(map[string]int)
	last := make(map[string]int64)
	for _, r := range rows {
		got[r.ID]++
		want, ok := x.rows[r.ID]
		switch {
		case !ok:
			c.Errorf("the sink holds %q, which nobody sent or which can't be applied", r.ID)
		case want >= 0 && r.Lane != queueName && int64(want) != r.Position:
			c.Errorf("of the copies of %q the one at %d won, not the first at %d", r.ID, r.Position, want)
		}
		if before, ok := last[r.Lane]; ok && r.Lane != queueName && r.Position <= before {
			c.Errorf("lane %s is out of order: %d was written after %d", r.Lane, r.Position, before)
		}
		last[r.Lane] = r.Position
	}
	for id := range x.rows {
		if got[id] != 1 {
			c.Errorf("%q had %d effects, want 1", id, got[id])
		}
	}
}

func (c *cell) verifyDead(x expected) {
	c.Helper()
	got := collect[struct{ Text string }](c, `SELECT lane || ' ' || position || ' ' || class FROM dedupd.dead_letters`)
	var dead []string
	for _, d := range got {
		dead = append(dead, strings.Replace(d.Text, queueName+" ", "0 ", 1))
	}
	slices.Sort(dead)
	if !slices.Equal(dead, x.dead) {
		c.Errorf("dead letters %q, want %q", dead, x.dead)
	}
}

// verifyBooks balances the books: each message has one outcome, and an ordered
// lane has booked exactly the positions it moved by.
func (c *cell) verifyBooks(x expected) {
	c.Helper()
	books, err := c.other.Books(c.Context())
	if err != nil {
		c.Fatal(err)
	}
	applied, dead := int64(0), int64(0)
	for _, b := range books {
		applied += b.Applied
		dead += b.Dead + b.Conflicts
		if b.Fetched != b.Applied+b.Duplicates+b.Conflicts+b.Dead+b.Filtered {
			c.Errorf("the books of lane %s do not balance: %+v", b.Lane, b)
		}
		if b.Lane != queueName && (b.Fetched != b.NextPosition || b.Redelivered != 0) {
			c.Errorf("lane %s has booked %d messages, of which %d redelivered, over %d positions", b.Lane, b.Fetched, b.Redelivered, b.NextPosition)
		}
	}
	if applied != int64(len(x.rows)) || dead != int64(len(x.dead)) {
		c.Errorf("the books tell of %d applied and %d dead, want %d and %d", applied, dead, len(x.rows), len(x.dead))
	}
}

// none expects a query for what may not be to find nothing.
func (c *cell) none(what, sql string) {
	c.Helper()
	for _, r := range collect[struct{ Text string }](c, sql) {
		c.Errorf("%s: %s", what, r.Text)
	}
}

func collect[T any](c *cell, sql string, args ...any) []T {
	c.Helper()
	rows, err := c.pool.Query(context.Background(), sql, args...)
	if err != nil {
		c.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[T])
	if err != nil {
		c.Fatalf("%s: %v", sql, err)
	}
	return all
}

// noteKeys makes the ids' keys known to SQL.
func (c *cell) noteKeys() {
	c.Helper()
	var ids, keys []string
	for _, log := range c.logs {
		for _, e := range log {
			if e.id != "" {
				ids, keys = append(ids, e.id), append(keys, claimkey.Of(e.id).String())
			}
		}
	}
	if _, err := c.pool.Exec(c.Context(), `CREATE TABLE public.keys AS SELECT DISTINCT id, key FROM unnest($1::text[], $2::uuid[]) AS k (id, key)`, ids, keys); err != nil {
		c.Fatal(err)
	}
}

// sample watches, until the returned function is called, that the broker is never
// ahead of the database. The broker is asked first: the database only moves on.
func (c *cell) sample() (stop func()) {
	end := make(chan struct{})
	var sampler sync.WaitGroup
	sampler.Go(func() {
		for {
			for partition, position := range c.brokerPositions() {
				if position > 0 && !c.ask(`SELECT coalesce((SELECT next_position FROM dedupd.lanes WHERE lane = $1), 0) >= $2`, laneOf(partition).Name, position) {
					c.Errorf("the broker is told %d of lane %d, but the database does not hold it", position, partition)
					return
				}
			}
			select {
			case <-end:
				return
			case <-time.After(3 * time.Millisecond):
			}
		}
	})
	return sync.OnceFunc(func() {
		close(end)
		sampler.Wait()
	})
}

func (c *cell) brokerPositions() (all []int64) {
	for partition := range c.logs {
		all = append(all, c.broker.Committed(partition))
	}
	return all
}

// settled waits until every lane stands at its end, in the database and at the
// broker.
func (c *cell) settled() {
	c.Helper()
	c.await("all messages to be durable and acknowledged", func() bool {
		for partition, log := range c.logs {
			if c.broker.Committed(partition) != int64(len(log)) {
				return false
			}
		}
		return true
	})
}
