package consumer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dedupd/dedupd/lane"
)

const (
	// hangTimeout is how long a transaction may take before it is considered to hang.
	// Its context ended at TransactionTimeout; what comes after, such as a rollback,
	// takes a few seconds at most. A lane whose sink hangs is free again within a
	// minute: this, the drain of the others, and answerTimeout.
	hangTimeout = TransactionTimeout + 10*time.Second
	// answerTimeout is how long a transaction may take to end once the drain has cut it
	// off.
	answerTimeout = 5 * time.Second
	// hangTicks is how many ticks of the watchdog hangTimeout has.
	hangTicks = 35
)

// transaction is one in flight: a group of lanes, in the hands of one writer.
type transaction struct {
	group    []*Lane
	batches  []lane.Batch // one of each lane
	messages int          // in all of them
	began    time.Time
	// ticks counts the watchdog's ticks, which say that it hangs. Time doesn't: a process
	// that was stopped for a minute hasn't given it a minute.
	ticks int
}

// HangError says that a transaction goes on although its context has ended: a sink
// waits for something and doesn't heed its context. Only the end of the process ends
// it.
type HangError struct {
	// For is how long the transaction has been going on.
	For time.Duration
	// Batches are those of the transaction, without their messages.
	Batches []lane.Batch
}

func (e *HangError) Error() string {
	var lanes []string
	for i := range e.Batches {
		b := &e.Batches[i]
		lanes = append(lanes, fmt.Sprintf("source %s lane %s positions %d to %d", b.Lane.Source, b.Lane.Name, b.From, b.Next-1))
	}
	return fmt.Sprintf("the sink hangs: its transaction has been in flight for %s, and it doesn't heed its context. The batches are %s. "+
		"Only a new process frees them: let a supervisor start one, and have the sink stop waiting when its context ends",
		e.For.Round(time.Second), strings.Join(lanes, "; "))
}

// watchdog ends the run when a transaction hangs. No broker notices that: the group's
// heartbeats go on. The transaction's lanes are closed at once, so that others can
// acquire them; those of the other writers are drained.
func (w *Worker) watchdog(ctx context.Context, stop context.CancelCauseFunc) {
	tick := time.NewTicker(cmp.Or(w.HangTimeout, hangTimeout) / hangTicks)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.abandonTransactions(stop, func(t *transaction) bool { t.ticks++; return t.ticks > hangTicks })
		}
	}
}

// abandonTransactions takes the transactions that hang away from their writers: their
// lanes are closed, and nobody waits for them any more. Whatever they still write meets
// the fence and the claims of the lanes' next owner.
func (w *Worker) abandonTransactions(stop context.CancelCauseFunc, hangs func(*transaction) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, t := range w.transactions {
		if !hangs(t) {
			continue
		}
		e := &HangError{For: time.Since(t.began)}
		for _, b := range t.batches {
			b.Messages = nil
			e.Batches = append(e.Batches, b)
		}
		slices.SortFunc(e.Batches, func(a, b lane.Batch) int { return a.Lane.Compare(b.Lane) })
		if w.hang == nil {
			w.hang = e
		}
		stop(e) // before the lanes are closed: a source that ends gives back what is abandoned
		delete(w.transactions, id)
		for _, l := range t.group {
			l.running, l.unmoved = false, false
			l.closeLocked()
		}
		w.writing.Done()
	}
}

// endTransaction ends a writer's transaction; false: the watchdog took it.
func (w *Worker) endTransaction(id int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.transactions[id]
	delete(w.transactions, id)
	return ok
}

// Alive returns an error if a transaction hangs. The run is about to end then; this is
// for the case that its end hangs, too.
func (w *Worker) Alive() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hang != nil {
		return w.hang
	}
	return nil
}
