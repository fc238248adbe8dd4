// Package crash_test is the crash table: whatever goes wrong, at whatever step of
// a batch's way, each message id ends with one effect and none is missing. It
// wires the program's own halves to a real Postgres and to a broker in memory.
// Faults come from wrapped connections, sinks, handlers and sources; the product
// has no switch for them.
package crash_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
)

// Four batches of four: copies within a batch, of a batch before and of a far
// one; a message that the sink's table refuses, for which its batch is divided; a
// copy with another payload; a message without an id.
const (
	logA = `a0 a1 a0 o0    b0 a1 bad=poison o1    c0 a0=other - c1    b0 c2 c2 o2`
	// logB brings ids of logA by another lane. The ids o0, o1 and o2 are missing:
	// every batch with a step to fail at has something for the sink, however
	// late it comes.
	logB = `x0 c2 a1 b0    a1 c0 x1 c1    b0 x2 a0 c2    a0 x3 x0 x3`
)

// phases are where in the log the event happens, by commits before it.
var phases = []struct {
	name  string
	after int32
}{
	{"first batch", 0},
	{"between the parts of a divided batch", 2},
}

// TestCrashTable has one worker on one lane.
func TestCrashTable(t *testing.T) {
	t.Parallel()
	for _, phase := range phases {
		each(t, phase.name+"/", func(t *testing.T, by way, s step, e event) {
			c := newCell(t, by, entries(logA))
			c.produce(c.broker)
			c.run(newTrap(s, e, phase.after))
		})
	}
}

// TestCrashTableTwoLanes has two workers on two lanes that share ids. The event
// hits one of them, while the other goes on.
func TestCrashTableTwoLanes(t *testing.T) {
	t.Parallel()
	each(t, "", func(t *testing.T, by way, s step, e event) {
		c := newCell(t, by, entries(logA), entries(logB))
		c.run(newTrap(s, e, 0))
	})
}

// each runs a test for every event at every step of both ways of claiming.
func each(t *testing.T, name string, test func(t *testing.T, by way, s step, e event)) {
	for _, by := range ways {
		for _, s := range by.steps {
			for _, e := range events {
				t.Run(fmt.Sprintf("%s%s/%s/%s", name, by.name, s, e), func(t *testing.T) {
					t.Parallel()
					test(t, by, s, e)
				})
			}
		}
	}
}

// run runs workers over the cell's logs, one for each lane, of which the first
// steps into the trap, and judges what came of it.
func (c *cell) run(trap *trap) {
	c.noteKeys()
	stop := c.sample()
	defer stop()
	victim := c.start("a1", trap, c.member)
	all := []*worker{victim}
	if len(c.logs) > 1 {
		c.ready(victim) // the first member gets the first lane
		neighbour := c.start("b1", nil, c.member)
		all = append(all, neighbour)
		c.ready(neighbour)
		c.await("the lanes to be shared out", func() bool { return c.ask(`SELECT count(DISTINCT owner) = 2 FROM dedupd.lanes`) })
		c.produce(c.broker)
	}
	c.reach(trap)
	switch trap.event {
	case kill, cancel, cutOff:
		c.ended(victim)
		if at := c.broker.Committed(0); trap.event == cancel && len(c.logs) == 1 && !c.ask(`SELECT next_position = $1 FROM dedupd.lanes`, at) {
			c.Errorf("the drain has not told the broker all that is durable; %s", c.standings())
		}
		all[0] = c.start("a2", nil, c.member)
	}
	c.settled()
	for _, w := range all {
		w.end()
		c.ended(w)
	}
	stop()
	c.verify()
	if n := trap.fired.Load(); n != 1 {
		c.Errorf("the event happened %d times", n)
	}
}

// reach waits for the event. A cell whose event never happens proves nothing.
func (c *cell) reach(t *trap) {
	c.Helper()
	select {
	case <-t.reached:
	case <-time.After(patience):
		c.Fatalf("the step %s was never reached; %s", t.step, c.standings())
	}
}

func (c *cell) ready(w *worker) {
	c.Helper()
	c.await("a worker to be ready", func() bool { return w.Ready() == nil })
}

// TestCrashTableZombie holds a worker at a step until another one has taken its
// lane, and then lets it go on: from then on it must write nothing.
func TestCrashTableZombie(t *testing.T) {
	t.Parallel()
	for _, by := range ways {
		for _, s := range by.steps {
			t.Run(by.name+"/"+s.String(), func(t *testing.T) {
				t.Parallel()
				zombie(t, by, newTrap(s, hold, 0), nil)
			})
			if s < begun || s > fenced {
				continue
			}
			// What a zombie holds, it holds for as long as its session lives; the
			// server's time-outs end that.
			t.Run(by.name+"/"+s.String()+"/session ended", func(t *testing.T) {
				t.Parallel()
				zombie(t, by, newTrap(s, hold, 0), func(c *cell, w *worker) {
					c.ask(`SELECT count(pg_terminate_backend(pid)) > 0 FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database() AND state <> 'idle'`, w.name)
				})
			})
		}
		t.Run(by.name+"/committed/answer lost", func(t *testing.T) {
			t.Parallel()
			trap := newTrap(committed, hold, 0)
			trap.silent = true
			zombie(t, by, trap, nil)
		})
	}
}

func zombie(t *testing.T, by way, trap *trap, endSession func(*cell, *worker)) {
	c := newCell(t, by, entries(logA))
	c.noteKeys()
	c.produce(c.broker)
	stop := c.sample()
	defer stop()
	// The zombie has a broker of its own, for it hears nothing of what the real
	// one decides: that is what makes it one.
	deaf := consumertest.NewBroker(len(c.logs))
	c.produce(deaf)
	old := c.start("zombie", trap, func(w *worker) consumer.Source { return deaf.Intercepted(sourceName, w.ack) })
	c.reach(trap)
	old.deposed.Store(true)

	for range 3 {
		c.broker.Rebalance() // the real broker's generation is a later one
	}
	owner := c.start("owner", nil, c.member)
	if endSession != nil {
		endSession(c, old)
	}
	next := int64(-1)
	c.await("the lane to be taken over, as far as that can go", func() bool {
		select {
		case taken := <-owner.took:
			next = taken.Next
		default:
		}
		// Everything done, or waiting for what the zombie has locked.
		return c.broker.Committed(0) == int64(len(c.logs[0])) || c.waitsForLock(owner.name)
	})
	close(trap.release)
	c.settled()
	if next < 0 {
		next = (<-owner.took).Next
	}
	c.await("the zombie to be fenced", func() bool { return old.metric("dedupd_fenced_total") > 0 })
	c.await("the zombie to be refused the lane", func() bool { return old.stale.Load() > 0 })
	for _, w := range []*worker{old, owner} {
		w.end()
		c.ended(w)
	}
	stop()
	c.verify()
	c.none("written by a zombie, after its lane had been taken", fmt.Sprintf(
		`SELECT id || ' at ' || position FROM public.rows WHERE worker = 'zombie' AND position >= %d`, next))
	c.none("moved by a zombie, after its lane had been taken", fmt.Sprintf(
		`SELECT format('from %%s to %%s', "from", "to") FROM public.moves WHERE worker = 'zombie' AND "to" > %d`, next))
}
