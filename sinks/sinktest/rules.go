package sinktest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// What a sink writes through a connection of its own stays, whatever becomes of the claim.
func writesWithinTheTransaction(h *harness) {
	before := h.count(h.Pool)
	t := h.begin()
	h.mustWrite(t, h.messages(5))
	h.wantCount(h.Pool, before, "before the commit, seen from outside")
	h.wantCount(t, before+5, "before the commit, seen from inside")
	t.rollback(h)
	h.wantCount(h.Pool, before, "after the rollback")

	t = h.begin()
	h.mustWrite(t, h.messages(5))
	t.commit(h)
	h.wantCount(h.Pool, before+5, "after the commit")
}

// A sink could still say COMMIT or ROLLBACK in SQL. The transaction's id tells.
func leavesTheTransactionOpen(h *harness) {
	const current = "SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text"
	var before, after string
	t := h.begin()
	if err := t.QueryRow(h.Context(), current).Scan(&before); err != nil {
		h.Fatal(err)
	}
	h.mustWrite(t, h.messages(3))
	if err := t.QueryRow(h.Context(), current).Scan(&after); err != nil {
		h.Fatalf("after Write the transaction is no longer usable: %v", err)
	}
	if before != after {
		h.Errorf("Write ended the transaction it was handed (%s) and left another (%s)", before, after)
	}
	t.rollback(h)
}

func allOfABatch(h *harness) {
	for _, n := range []int{1, 2, 1000} {
		before := h.count(h.Pool)
		t := h.begin()
		h.mustWrite(t, h.messages(n))
		t.commit(h)
		h.wantCount(h.Pool, before+n, fmt.Sprintf("after a batch of %d", n))
	}
}

// Books count by what the sink says of each message. One with an effect was written.
func saysWhatItWrote(h *harness) {
	t := h.begin()
	defer t.rollback(h)
	before, batch := h.count(t), sinks.NewBatch(h.messages(5))
	if err := h.writeBatch(h.Context(), t, batch); err != nil {
		h.Fatalf("Write of 5 good messages failed: %v", err)
	}
	written := 0
	for i := range batch.Messages() {
		if batch.OutcomeOf(i) == sinks.Written {
			written++
		}
	}
	if effects := h.count(t) - before; effects != written {
		h.Errorf("%d effects are there, but the sink says that it wrote %d of 5 messages: Batch.Outcome is for those that change nothing", effects, written)
	}
}

// A transaction that was rolled back is tried again with the same messages. A sink that
// remembers having written them would lose them.
func writesAgainAfterARollback(h *harness) {
	before := h.count(h.Pool)
	msgs := h.messages(10)
	for range 2 {
		t := h.begin()
		h.mustWrite(t, msgs)
		t.rollback(h)
	}
	t := h.begin()
	h.mustWrite(t, msgs)
	t.commit(h)
	h.wantCount(h.Pool, before+10, "written twice and rolled back, then written and committed")
}

// A result is kept with its message's claim, so it must be given each time that the message
// is written, and be small enough.
func givesResultsThatAreKept(h *harness) {
	msgs := h.messages(10)
	var first *sinks.Batch
	for try := range 2 {
		t, batch := h.begin(), sinks.NewBatch(msgs)
		if err := h.writeBatch(h.Context(), t, batch); err != nil {
			h.Fatalf("Write of 10 good messages failed: %v", err)
		}
		t.rollback(h)
		if try == 0 {
			first = batch
		}
		for i := range msgs {
			r, given := batch.ResultOf(i)
			if _, before := first.ResultOf(i); given != before {
				h.Errorf("message %d has a result: %v; and when it is written again after a rollback: %v", i, before, given)
			}
			if given && r.Bytes == nil {
				h.Errorf("the result of message %d has %d bytes: above sinks.MaxResult, %d, it isn't kept", i, r.Size, sinks.MaxResult)
			}
		}
	}
}

// The error must blame the message that can't be written, which must not keep the others from
// being written.
func namesThePoison(h *harness) {
	if h.Poison == nil {
		h.Skip("Config.Poison is nil: so the sink accepts anything")
	}
	before := h.count(h.Pool)
	good := h.messages(6)
	const at = 3
	for _, c := range []struct {
		when string
		msgs []message.Message
		at   int
	}{
		{"alone", []message.Message{h.Poison()}, 0},
		{"among others", slices.Insert(slices.Clone(good), at, h.Poison()), at},
		{"first", slices.Insert(slices.Clone(good), 0, h.Poison()), 0},
		{"last", append(slices.Clone(good), h.Poison()), len(good)},
	} {
		t := h.begin()
		err := h.write(t, c.msgs)
		t.rollback(h)
		if err == nil {
			h.Errorf("the poison message %s: Write says that it is written", c.when)
			continue
		}
		index, ok := isPermanent(err)
		switch {
		case !ok:
			h.Errorf("the poison message %s: the error doesn't say that the data is at fault, so it would be tried for ever; use sinks.Permanent: %v", c.when, err)
		case index >= 0 && index != c.at:
			h.Errorf("the poison message %s: the error names message %d, but it is number %d: %v", c.when, index, c.at, err)
		}
		for i := range sinks.AllPermanent(err) {
			if i != c.at {
				h.Errorf("the poison message %s: the error names message %d too, which is good: %v", c.when, i, err)
			}
		}
	}
	t := h.begin()
	h.mustWrite(t, good)
	t.commit(h)
	h.wantCount(h.Pool, before+len(good), "the others, after the poison message was taken out")
}

// Of two transactions that are open at a time, one may not depend on the other.
func transactionsAreApart(h *harness) {
	before := h.count(h.Pool)
	a, b := h.begin(), h.begin()
	h.mustWrite(a, h.messages(3))
	h.mustWrite(b, h.messages(4))
	h.wantCount(a, before+3, "in the first of two transactions")
	h.wantCount(b, before+4, "in the second of two transactions")
	b.rollback(h)
	a.commit(h)
	h.wantCount(h.Pool, before+3, "after the first was committed and the second rolled back")
}

func manyWriteAtATime(h *harness) {
	const workers, batches, size = 4, 8, 20
	before := h.count(h.Pool)
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		var work [batches][]message.Message
		for i := range work {
			work[i] = h.messages(size)
		}
		wg.Go(func() {
			for _, msgs := range work {
				if errs[w] = h.commitBatch(msgs); errs[w] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		h.Fatalf("%d goroutines, each with transactions of its own: %v", workers, err)
	}
	h.wantCount(h.Pool, before+workers*batches*size, "after many had written at a time")
}

// commitBatch writes in a transaction of its own. It may run in any goroutine. It tries
// again after a deadlock, as dedup does.
func (h *harness) commitBatch(msgs []message.Message) error {
	ctx, cancel := context.WithTimeout(h.Context(), h.Timeout)
	defer cancel()
	for {
		err := pgx.BeginFunc(ctx, h.Pool, func(t pgx.Tx) error { return h.sink.Write(ctx, narrow{t}, sinks.NewBatch(msgs)) })
		if sqlstate.Of(err) != sqlstate.Deadlock {
			return err
		}
	}
}

// A sink must return an error once its context has ended: a shutdown or a lost lane waits for
// it.
func endsWithItsContext(h *harness) {
	before := h.count(h.Pool)
	ended, cancel := context.WithCancel(h.Context())
	cancel()
	t := h.begin()
	if err := h.writeIn(ended, t, h.messages(3)); err == nil {
		h.Errorf("Write with a context that has ended says that all is written")
	}
	t.rollback(h)

	// The server answers nothing until the context ends.
	ctx, cancel := context.WithCancel(h.Context())
	stuck := &stuckTx{called: make(chan struct{}), release: make(chan struct{})}
	defer close(stuck.release)
	done := make(chan error, 1)
	msgs := h.messages(3)
	go func() { done <- h.sink.Write(ctx, stuck, sinks.NewBatch(msgs)) }()
	select {
	case <-stuck.called:
	case err := <-done:
		cancel()
		h.Errorf("Write returned (%v) without using the transaction it was handed", err)
		return
	}
	cancel()
	select {
	case err := <-done:
		if err == nil {
			h.Errorf("Write says that all is written, though the server never answered")
		}
	case <-time.After(min(h.Timeout, 10*time.Second)):
		h.Errorf("Write doesn't end with its context: it must hand that one on to the transaction's methods")
	}
	h.wantCount(h.Pool, before, "after Writes whose context had ended")
}

// The memory of a message is reused as soon as the batch is done.
func leavesMessagesAlone(h *harness) {
	before := h.count(h.Pool)
	msgs := h.messages(20)
	want := fingerprints(msgs)
	t := h.begin()
	h.mustWrite(t, msgs)
	if i := slices.IndexFunc(msgs, func(m message.Message) bool { return !slices.Contains(want, fingerprint(m)) }); i >= 0 {
		h.Errorf("Write changed message %d:\nit was %s\nit is  %s", i, want[i], fingerprint(msgs[i]))
	} else if !slices.Equal(want, fingerprints(msgs)) {
		h.Errorf("Write changed the order of the messages in the caller's slice")
	}
	for i := range msgs {
		scribble(&msgs[i])
	}
	t.commit(h)
	h.wantCount(h.Pool, before+20, "after the commit")

	t = h.begin()
	h.mustWrite(t, h.messages(5))
	t.commit(h)
	h.wantCount(h.Pool, before+25, "after the next batch, with the memory of the first one used for something else")
}

func scribble(m *message.Message) {
	for _, b := range [][]byte{m.Key, m.Value} {
		for i := range b {
			b[i] = 0xFF
		}
	}
	for _, hd := range m.Headers {
		for i := range hd.Value {
			hd.Value[i] = 0xFF
		}
	}
	*m = message.Message{ID: "scribbled"}
}

// Prepare runs at start, after the database's objects have changed, and while
// others write.
func preparesMoreThanOnce(h *harness) {
	if _, ok := h.sink.(sinks.Preparer); !ok {
		h.Skip("the sink is no sinks.Preparer")
	}
	before := h.count(h.Pool)
	h.prepare()
	h.prepare()
	h.wantCount(h.Pool, before, "after Prepare")
	const rounds = 20
	var wg sync.WaitGroup
	var failed error
	batches := make([][]message.Message, rounds)
	for i := range batches {
		batches[i] = h.messages(3)
	}
	wg.Go(func() {
		for _, msgs := range batches {
			if failed = h.commitBatch(msgs); failed != nil {
				return
			}
		}
	})
	for range rounds {
		h.prepare()
	}
	wg.Wait()
	if failed != nil {
		h.Fatalf("Write beside Prepare: %v", failed)
	}
	h.wantCount(h.Pool, before+rounds*3, "after writing beside Prepare")
}
