package sinktest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// harness is what a rule works with.
type harness struct {
	testing.TB
	Config
	sink sinks.Sink
}

// numbers keeps the messages of all rules and runs apart: what they write stays in the
// database.
var numbers atomic.Int64

// messages makes n messages that were never made before.
func (h *harness) messages(n int) []message.Message {
	first := int(numbers.Add(int64(n))) - n
	msgs := make([]message.Message, n)
	for i := range msgs {
		msgs[i] = h.Message(first + i)
	}
	return msgs
}

// tx is a transaction as dedup opens it.
type tx struct {
	pgx.Tx
}

func (h *harness) begin() tx {
	h.Helper()
	t, err := h.Pool.BeginTx(h.Context(), pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		h.Fatalf("begin: %v", err)
	}
	h.Cleanup(func() { _ = t.Rollback(context.Background()) })
	return tx{t}
}

func (t tx) commit(h *harness) {
	h.Helper()
	if err := t.Commit(h.Context()); err != nil {
		h.Fatalf("commit: %v", err)
	}
}

func (t tx) rollback(h *harness) {
	h.Helper()
	if err := t.Rollback(h.Context()); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		h.Fatalf("roll back: %v", err)
	}
}

// narrow shows the sink no more of the transaction than sinks.Tx has.
type narrow struct{ sinks.Tx }

// write calls the sink, and fails the test if it hangs.
func (h *harness) write(t sinks.Tx, msgs []message.Message) error {
	h.Helper()
	ctx, cancel := context.WithTimeout(h.Context(), h.Timeout)
	defer cancel()
	return h.writeIn(ctx, t, msgs)
}

func (h *harness) writeIn(ctx context.Context, t sinks.Tx, msgs []message.Message) error {
	h.Helper()
	return h.writeBatch(ctx, t, sinks.NewBatch(msgs))
}

func (h *harness) writeBatch(ctx context.Context, t sinks.Tx, batch *sinks.Batch) error {
	h.Helper()
	const grace = 5 * time.Second
	return h.within(h.Timeout+grace, "Write", func() error { return h.sink.Write(ctx, narrow{t}, batch) })
}

// within ends the test when f takes too long. A panic of f is its error.
func (h *harness) within(limit time.Duration, what string, f func() error) error {
	h.Helper()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- sinks.Recovered(p)
			}
		}()
		done <- f()
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(limit):
		h.Fatalf("%s hangs: it hasn't returned after %v", what, limit)
		return nil
	}
}

func (h *harness) mustWrite(t sinks.Tx, msgs []message.Message) {
	h.Helper()
	if err := h.write(t, msgs); err != nil {
		h.Fatalf("Write of %d good messages failed: %v", len(msgs), err)
	}
}

func (h *harness) count(db Querier) int {
	h.Helper()
	ctx, cancel := context.WithTimeout(h.Context(), h.Timeout)
	defer cancel()
	n, err := h.Count(ctx, db)
	if err != nil {
		h.Fatalf("Count: %v", err)
	}
	return n
}

// wantCount compares what db sees with what it should.
func (h *harness) wantCount(db Querier, want int, when string) {
	h.Helper()
	if got := h.count(db); got != want {
		h.Errorf("%s: %d effects are there, want %d", when, got, want)
	}
}

// prepare does what dedup does at start. It rolls its transaction back.
func (h *harness) prepare() {
	h.Helper()
	p, ok := h.sink.(sinks.Preparer)
	if !ok {
		return
	}
	t := h.begin()
	defer t.rollback(h)
	ctx, cancel := context.WithTimeout(h.Context(), h.Timeout)
	defer cancel()
	if err := h.within(h.Timeout, "Prepare", func() error { return p.Prepare(ctx, narrow{t}) }); err != nil {
		h.Fatalf("Prepare: %v", err)
	}
}

// isPermanent reports whether dedup takes an error to blame the data, and which message.
func isPermanent(err error) (index int, ok bool) {
	if index, ok := sinks.AsPermanent(err); ok {
		return index, true
	}
	return -1, sqlstate.Means(sqlstate.Of(err), sqlstate.Data)
}

// fingerprint is everything in a message; it tells nil from empty.
func fingerprint(m message.Message) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q %q %#v %#v %d %d %q %#v", m.ID, m.Topic, m.Key, m.Value, m.Time.UnixNano(), m.Position.Offset, m.Position.Lane, len(m.Headers))
	for _, h := range m.Headers {
		fmt.Fprintf(&b, " %q=%#v", h.Key, h.Value)
	}
	return b.String()
}

func fingerprints(msgs []message.Message) []string {
	all := make([]string, len(msgs))
	for i := range msgs {
		all[i] = fingerprint(msgs[i])
	}
	return all
}
