package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/internal/child"
)

// fault is something that goes wrong while a contender lands a topic, at shares
// of the rows.
type fault struct {
	name, told string
	moments    []moment
}

type moment struct {
	share float64
	do    func(ctx context.Context, s *suffering) error
}

var faults = []fault{
	{
		"crash", "SIGKILL at 30 % of the rows, under a supervisor that starts it again after a second; then all its connections to Postgres terminated at 50 % and at 70 %",
		[]moment{{0.3, kill}, {0.5, disconnect}, {0.7, disconnect}},
	},
	{
		"outage", "the sink's table renamed away at 40 % of the rows, for 3 s",
		[]moment{{0.4, outage}},
	},
}

// suffering is a contender's run under a fault.
type suffering struct {
	conn       *pgx.Conn
	supervisor *supervisor
}

func kill(_ context.Context, s *suffering) error {
	s.supervisor.kill()
	return nil
}

func disconnect(ctx context.Context, s *suffering) error {
	_, err := s.conn.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
	return err
}

func outage(ctx context.Context, s *suffering) error {
	if _, err := s.conn.Exec(ctx, "ALTER TABLE rows RENAME TO rows_away"); err != nil {
		return err
	}
	time.Sleep(3 * time.Second)
	_, err := s.conn.Exec(ctx, "ALTER TABLE rows_away RENAME TO rows")
	return err
}

// suffer does the same to each contender, and tells what became of the messages.
func (b *bench) suffer(ctx context.Context) error {
	rows := [][]string{{""}}
	for _, f := range faults {
		rows[0] = append(rows[0], f.name)
	}
	for i := range contenders {
		c := &contenders[i]
		if !b.wanted(c.name) {
			continue
		}
		t := topic{partitions: 4, messages: int(float64(b.messages) * min(1, max(c.share, 0.05))), resends: 20, enveloped: c.enveloped}
		row := []string{c.name}
		for _, f := range faults {
			end, err := b.endOf(ctx, c, t, f)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", c.name, f.name, err)
			}
			measure.Progress("  %-66s %s: %s", c.name, f.name, end)
			row = append(row, end)
		}
		rows = append(rows, row)
	}
	b.report.Title("Faults, side by side", "make bench-faults")
	b.report.Add("The same faults for all, %d messages (fewer for the slow), 4 partitions, a fifth resent.\n\n", b.messages)
	for _, f := range faults {
		b.report.Add("- %s: %s.\n", f.name, f.told)
	}
	b.report.Add("\nExact: every id stands in the table once. In brackets, the longest time without a new row.\n")
	b.report.Table(rows)
	return nil
}

// endOf tells how a contender came through a fault.
func (b *bench) endOf(ctx context.Context, c *contender, t topic, f fault) (end string, err error) {
	const stalled = 100 * time.Second // more than two session time-outs of Connect
	r, err := b.prepare(ctx, c, t)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, r.end(ctx, b)) }()
	s := &suffering{conn: r.conn, supervisor: &supervisor{bench: b, contender: c, landing: r}}
	if err := s.supervisor.start(); err != nil {
		return "", err
	}
	defer s.supervisor.stop()

	moments := f.moments
	last, longest := time.Now(), time.Duration(0)
	var rows, seen int
	for {
		if err := r.conn.QueryRow(ctx, "SELECT count(*) FROM rows").Scan(&rows); err != nil {
			return "", err
		}
		now := time.Now()
		if rows > seen {
			if seen > 0 { // before the first row it only starts
				longest = max(longest, now.Sub(last))
			}
			last, seen = now, rows
		}
		if len(moments) > 0 && float64(rows) >= moments[0].share*float64(t.distinct()) {
			if err := moments[0].do(ctx, s); err != nil {
				return "", err
			}
			moments = moments[1:]
		}
		if rows >= t.distinct() && now.Sub(last) > 5*time.Second || now.Sub(last) > stalled {
			break
		}
		s.supervisor.look()
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	s.supervisor.stop()
	var ids int
	if err := r.conn.QueryRow(ctx, "SELECT count(*), count(DISTINCT id) FROM rows").Scan(&rows, &ids); err != nil {
		return "", err
	}
	end = "exact"
	if lost, doubled := t.distinct()-ids, rows-ids; lost > 0 || doubled > 0 {
		end = fmt.Sprintf("%d of %d missing, %d doubled", lost, t.distinct(), doubled)
		if lost > 0 {
			end += fmt.Sprintf("; stood still for %s, given up", stalled)
		}
	}
	end += fmt.Sprintf(" (%.1f s)", longest.Seconds())
	if len(moments) > 0 && ids == t.distinct() {
		return "", errors.New("it was over before all of the fault had happened: more messages are needed")
	}
	if n := s.supervisor.ended; n > 0 {
		end += fmt.Sprintf(", ended by itself %d times", n)
	}
	return end, nil
}

// supervisor keeps one process of a contender running.
type supervisor struct {
	bench     *bench
	contender *contender
	landing   *landing
	process   *child.Process
	down      time.Time // since when there is none
	ended     int       // by itself
}

func (s *supervisor) start() error {
	s.bench.starts++
	l := *s.landing
	l.folder = filepath.Join(s.landing.folder, fmt.Sprint("start-", s.bench.starts))
	if err := os.Mkdir(l.folder, 0o700); err != nil {
		return err
	}
	all, err := s.contender.launch(s.bench, &l)
	if err == nil {
		s.process, s.down = all[0], time.Time{}
	}
	return err
}

// look starts the process again when it has been down for a second.
func (s *supervisor) look() {
	switch {
	case s.process != nil && s.process.Ended():
		s.ended++
		s.process, s.down = nil, time.Now()
	case s.process == nil && time.Since(s.down) > time.Second:
		if err := s.start(); err != nil {
			measure.Progress("start again: %v", err)
			s.down = time.Now()
		}
	}
}

// kill leaves one alone that has just ended by itself.
func (s *supervisor) kill() {
	if s.process != nil {
		s.process.Kill()
		s.process, s.down = nil, time.Now()
	}
}

func (s *supervisor) stop() {
	if s.process != nil {
		_ = processes{s.process}.stop(syscall.SIGTERM)
		s.process = nil
	}
}
