package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func TestPoisonIsFoundAlone(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(m *message.Message) error{
		"by the database": nil, // the CHECK of the table
		"by the sink": func(m *message.Message) error {
			if string(m.Value) == "check" {
				return sinks.Permanent(errors.New("no good"))
			}
			return nil
		},
		"by a panic": func(m *message.Message) error {
			if string(m.Value) == "check" {
				panic("no good")
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.sink.fail = fail
			l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
			var ids []string
			for i := range 100 {
				id := fmt.Sprint("m", i)
				if i == 37 || i == 38 || i == 99 {
					id += "=check"
				}
				ids = append(ids, id)
			}
			f.handle(l.batch(ids...), other.batch("m37=check", "x", "y=check"))
			f.wantBooks(l, books{applied: 97, dead: 3, next: 100})
			f.wantBooks(other, books{applied: 1, resent: 1, dead: 1, next: 3})
			f.wantDead("poison@37", "poison@38", "poison@99", "poison@2")
			landed := f.landed()
			if len(landed) != 98 || !slices.IsSortedFunc(landed[:97], func(a, b string) int { return num(a) - num(b) }) {
				t.Errorf("the neighbours of poison are missing or out of order: %q", landed)
			}
		})
	}
}

func num(id string) (n int) {
	_, _ = fmt.Sscanf(id, "m%d", &n)
	return n
}

func TestPermanentAtNeedsNoSearch(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var writes atomic.Int32
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		writes.Add(1)
		var bad []error
		for i := range msgs {
			if string(msgs[i].Value) == "bad" {
				bad = append(bad, sinks.PermanentAt(i, errors.New("bad value")))
			}
		}
		if err := errors.Join(bad...); err != nil {
			return err
		}
		return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
	})
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b=bad", "c", "d=bad", "e"))
	f.wantLanded("a", "c", "e")
	f.wantDead("poison@1", "poison@3")
	if n := writes.Load(); n != 2 {
		t.Errorf("%d writes for two messages that the sink pointed at, want 2", n)
	}
}

type sinkFunc func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error

func (f sinkFunc) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	return f(ctx, tx, msgs)
}

func TestSystemicPoisonHoldsTheLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.MaxDeadShare, f.DeadWindow = 0.1, 100
	if err := f.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("", "", "", "", "", "", "", "", "", ""))
	b := l.batch("a", "", "b")
	wantHold(t, f.Handle(t.Context(), []lane.Batch{b}), "max_share")
	f.wantBooks(l, books{dead: 10, next: 10})
	// Once enough good ones have passed, a few bad ones are dead letters again.
	var good []string
	for i := range 100 {
		good = append(good, fmt.Sprint("g", i))
	}
	l.at = 10
	f.handle(l.batch(good...))
	f.handle(l.batch("a", "", "b"))
	f.wantBooks(l, books{applied: 102, dead: 11, next: 113})
}

func TestSinksThatBreakTheirPromise(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		write func(ctx context.Context, tx sinks.Tx) error
		want  string
	}{
		"commits": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Exec(ctx, "commit")
			return err
		}, "ended the transaction"},
		"commits and goes on": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Exec(ctx, "commit and chain")
			return err
		}, "ended the transaction"},
		"rolls back and begins anew": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Exec(ctx, "rollback; begin", pgx.QueryExecModeSimpleProtocol)
			return err
		}, "ended the transaction"},
		"hides an error": {func(ctx context.Context, tx sinks.Tx) error {
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			return nil
		}, "hid an error"},
		"leaves rows open": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Query(ctx, "SELECT generate_series(1, 1000000)")
			return err
		}, "left a query open"},
		"fails for its own reasons": {func(context.Context, sinks.Tx) error { return errors.New("out of ink") }, "out of ink"},
		"has no table": {func(ctx context.Context, tx sinks.Tx) error {
			_, err := tx.Exec(ctx, "INSERT INTO public.nowhere VALUES (1)")
			return err
		}, "nowhere"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, _ []message.Message) error { return c.write(ctx, tx) })
			l := f.acquire("kafka", "orders/0")
			wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("a")}), c.want)
			f.Sink, l.at = f.sink, 0
			if strings.HasPrefix(name, "commits") {
				return // that sink has broken its promise; this is reported, not undone
			}
			f.handle(l.batch("a"))
			f.wantLanded("a")
		})
	}
}
