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
	// hangTimeout is how long a writer may be in one transaction before it is
	// taken to hang. Its context ended at TransactionTimeout; what comes after,
	// such as a rollback or a word to the database, takes a few seconds at most.
	// A lane whose sink hangs is free again within a minute: this, the drain of
	// the others, and answerTimeout.
	hangTimeout = TransactionTimeout + 10*time.Second
	// answerTimeout is how long a transaction may take to answer once the drain
	// has cut it off.
	answerTimeout = 5 * time.Second
	// looks is how often a writer is looked at until it is taken to hang.
	hangTicks = 35
)

// turn is one writer's time in a transaction.
type transaction struct {
	group    []*Lane
	batches  []lane.Batch // one of each lane
	messages int          // in all of them
	began    time.Time
	// looks counts how often it was met. That, and not the time, tells that it
	// hangs: a process that was stopped for a minute hasn't given it a minute.
	ticks int
}

// HangError says that a transaction goes on although its context has ended: a
// sink waits for something and doesn't heed its context. It can't be ended from
// outside, only with the process.
type HangError struct {
	// For is how long the transaction has been going on.
	For time.Duration
	// Batches are what is in hand, without their messages.
	Batches []lane.Batch
}

func (e *HangError) Error() string {
	var lanes []string
	for i := range e.Batches {
		b := &e.Batches[i]
		lanes = append(lanes, fmt.Sprintf("source %s lane %s positions %d to %d", b.Lane.Source, b.Lane.Name, b.From, b.Next-1))
	}
	return fmt.Sprintf("the sink hangs: it has been in one transaction for %s and doesn't heed its context; in hand are %s. "+
		"Only a new process frees them: let a supervisor start it, and have the sink end what it waits for when its context ends",
		e.For.Round(time.Second), strings.Join(lanes, "; "))
}

// watch ends the run when a writer hangs, which neither broker notices: the
// heartbeats go on. Its lanes are given up at once, so that others can take them,
// and those of the other writers are drained.
func (w *Worker) watchdog(ctx context.Context, stop context.CancelCauseFunc) {
	tick := time.NewTicker(cmp.Or(w.HangTimeout, hangTimeout) / hangTicks)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.giveUp(stop, func(t *transaction) bool { t.ticks++; return t.ticks > hangTicks })
		}
	}
}

// giveUp gives up the writers for which that is so: their lanes are closed, and
// nobody waits for them any more. What their transactions still do is a matter
// between them and the next owner's fence and claims.
func (w *Worker) giveUp(stop context.CancelCauseFunc, hangs func(*transaction) bool) {
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
		stop(e) // before the lanes are told: a source gives back what is abandoned when it ends
		delete(w.transactions, id)
		for _, l := range t.group {
			l.running, l.fresh = false, false
			l.shutLocked()
		}
		w.writing.Done()
	}
}

// answered ends a writer's turn; false: it was given up meanwhile.
func (w *Worker) answered(id int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.transactions[id]
	delete(w.transactions, id)
	return ok
}

// Alive tells whether a writer hangs. The run is about to end then; this is for
// the case that its end hangs, too.
func (w *Worker) Alive() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hang != nil {
		return w.hang
	}
	return nil
}
