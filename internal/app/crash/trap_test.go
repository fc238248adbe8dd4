package crash_test

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/dedupd/dedupd/lane"
)

// step is how far a batch has come.
type step int

const (
	fetched   step = iota // handed over, no transaction yet
	begun                 // the transaction is open and holds the rotation lock
	looked                // by COPY only: the ids were looked up, and nothing is claimed
	copied                // by COPY only: all the claims are sent, but not that it is all
	claimed               // the ids are claimed
	written               // the sink has written its rows
	fenced                // the lane rows have moved; COMMIT has not been sent
	committed             // COMMIT is done, and its answer lost
	acked                 // the broker has been told
)

// way is one of the two ways of claiming.
type way struct {
	name     string
	copyFrom int // of the Processor
	steps    []step
}

var ways = []way{
	{"on conflict", math.MaxInt, []step{fetched, begun, claimed, written, fenced, committed, acked}},
	{"copy", 1, []step{fetched, begun, looked, copied, claimed, written, fenced, committed, acked}},
}

func (s step) String() string {
	return [...]string{"fetched", "begun", "looked", "copied", "claimed", "written", "fenced", "committed", "acked"}[s]
}

// event is what happens at a step.
type event int

const (
	kill   event = iota // the process ends as by kill -9
	fail                // this step ends in a transient error
	cancel              // SIGTERM, with time to drain
	cutOff              // SIGTERM, and the drain runs out within the step
	lose                // another worker takes the lane, and lets it go again
	hold                // the process stands still until the test lets it go on
)

var events = []event{kill, fail, cancel, cutOff, lose}

func (e event) String() string {
	return [...]string{"kill", "error", "cancel", "cut off", "lane lost", "hold"}[e]
}

// outcome is how a step goes on after its event.
type outcome int

const (
	goOn outcome = iota
	cut          // it doesn't: by a transient error, or since the process is gone
	late         // an answer that was held back arrives after all
)

// trap lets one event happen at one step of one worker, once.
type trap struct {
	step  step
	event event
	// after is how many commits the worker has sent before.
	after int32
	// silent: a held worker whose answer to COMMIT is lost when it goes on.
	silent bool

	fired   atomic.Int32
	reached chan struct{} // closed when the event begins
	release chan struct{} // ends a hold
}

func newTrap(s step, e event, after int32) *trap {
	if s == acked {
		after = max(after, 1) // the first position told is where the lane starts
	}
	return &trap{step: s, event: e, after: after, reached: make(chan struct{}), release: make(chan struct{})}
}

// due reports whether the trap is set for this step, and springs it.
func (w *worker) due(s step) bool {
	t := w.trap
	return t != nil && t.step == s && w.commits.Load() >= t.after && t.fired.CompareAndSwap(0, 1)
}

// strike lets the event happen. c is the connection whose round trip is held; nil
// where the step is none.
func (w *worker) strike(s step, c *conn) outcome {
	t := w.trap
	close(t.reached)
	switch t.event {
	case kill:
		w.kill()
		return cut
	case fail:
		if s != fenced {
			return cut
		}
		// As an administrator does, or a server that goes down: FATAL, in the
		// place of an answer to COMMIT.
		w.cell.terminate(c)
	case cancel:
		w.end()
		time.Sleep(10 * time.Millisecond) // until the source has noticed
	case cutOff:
		w.end()
		time.Sleep(drainNone + 30*time.Millisecond)
	case lose:
		w.cell.takeOver()
	case hold:
		select {
		case <-t.release:
		case <-time.After(patience):
			w.cell.Errorf("%s was held for too long", w.name)
		}
		if !t.silent {
			return late
		}
	}
	return goOn
}

// takeOver lets another worker take the lane of partition 0. Where the lane's row
// is locked it has to wait, which is as far as it can get at this moment.
func (c *cell) takeOver() {
	done := make(chan struct{})
	c.others.Go(func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		for _, t := range c.takes() {
			// A generation may just have begun: then this one is stale.
			for {
				var generation int64
				if err := c.pool.QueryRow(ctx, `SELECT group_generation FROM dedupd.lanes WHERE lane = $1`, t.Lane.Name).Scan(&generation); err != nil {
					c.Errorf("take over: %v", err)
					return
				}
				t.GroupGeneration = generation
				if _, err := c.other.Acquire(ctx, t); err == nil {
					break
				} else if ctx.Err() != nil {
					c.Errorf("take over: %v", err)
					return
				}
			}
		}
	})
	c.await("the other worker to take the lane", func() bool {
		select {
		case <-done:
			return true
		default:
			return c.waitsForLock(otherName)
		}
	})
}

// awaitBackend waits until a server process is in the state that the condition
// on pg_stat_activity tells.
func (c *cell) awaitBackend(port int, condition string) {
	c.await("the server: "+condition, func() bool {
		return c.ask(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE client_port = $1 AND `+condition+`)`, port)
	})
}

// terminate ends the server's side of a connection.
func (c *cell) terminate(conn *conn) {
	c.ask(`SELECT count(pg_terminate_backend(pid)) = 1 FROM pg_stat_activity WHERE client_port = $1`, conn.port())
	c.await("the server process to end", func() bool {
		return c.ask(`SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE client_port = $1)`, conn.port())
	})
}

// waitsForLock reports whether a worker waits for a lock in the database.
func (c *cell) waitsForLock(name string) bool {
	return c.ask(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database() AND wait_event_type = 'Lock')`, name)
}

// ask asks the database a yes or no question.
func (c *cell) ask(sql string, args ...any) (yes bool) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := c.pool.QueryRow(ctx, sql, args...).Scan(&yes); err != nil {
		c.Errorf("%s: %v", sql, err)
	}
	return yes
}

// await polls until ok holds; patience is for broken products, not for slow ones.
func (c *cell) await(what string, ok func() bool) bool {
	for end := time.Now().Add(patience); !ok(); {
		if time.Now().After(end) {
			c.Errorf("waited in vain for %s; %s", what, c.standings())
			return false
		}
		time.Sleep(time.Millisecond)
	}
	return true
}

// standings tells where everything is, for a failure's text.
func (c *cell) standings() string {
	var rows string
	err := c.pool.QueryRow(context.Background(), `SELECT string_agg(format('%s at %s of %s', lane, next_position, owner), ', ') FROM dedupd.lanes`).Scan(&rows)
	if err != nil {
		rows = err.Error()
	}
	return fmt.Sprintf("lanes: %s; broker: %v", rows, c.brokerPositions())
}

// takes are what another worker asks for to get this cell's first lane.
func (c *cell) takes() []lane.Acquire {
	return []lane.Acquire{{Lane: laneOf(0), Ordered: true, Committed: -1}}
}
