package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// drainLimit is the configuration's default for transactions in hand, with what
// leaving the group and a busy machine may take.
const drainLimit = 20 * time.Second

// fleet are workers of one scope.
type fleet struct {
	t       *testing.T
	rng     *rand.Rand
	workers []*worker
}

func newFleet(t *testing.T, rng *rand.Rand, size int, config string) *fleet {
	t.Helper()
	f := &fleet{t: t, rng: rng}
	for i := range size {
		f.workers = append(f.workers, newWorker(t, fmt.Sprintf("worker %d", i+1), config))
	}
	for _, w := range f.workers {
		w.start()
	}
	return f
}

// mustLive: between the faults of a test no worker may end by itself.
func (f *fleet) mustLive() {
	f.t.Helper()
	for _, w := range f.workers {
		if w.Ended() {
			f.t.Fatalf("%s has ended by itself, with code %d", w.name, w.Code())
		}
	}
}

// killOne kills a random worker and starts it again at once.
func (f *fleet) killOne(number int) (what string, pid int, at time.Time) {
	f.t.Helper()
	f.mustLive()
	w := f.workers[f.rng.IntN(len(f.workers))]
	pid, at = w.Pid(), time.Now()
	w.Kill()
	w.start()
	return fmt.Sprintf("kill %d (%s)", number, w.name), pid, at
}

// killThrough sends something in as many parts as it kills workers: each time one dies that
// is at work. evict makes the broker forget the dead one.
func (f *fleet) killThrough(db *database, kills int, send func(part int) error, evict func()) {
	f.t.Helper()
	for n := range kills {
		sent, before := make(chan error, 1), db.fetched()
		go func() { sent <- send(n) }()
		await(f.t, "messages are landing", time.Minute, func() error {
			f.mustLive()
			if db.fetched() == before {
				return errors.New("none has")
			}
			return nil
		})
		f.pause(0, 80*time.Millisecond)
		what, _, _ := f.killOne(n + 1)
		f.t.Log(what)
		if err := <-sent; err != nil {
			f.t.Fatal(err)
		}
		evict()
		await(f.t, "nothing is suspected", time.Minute, func() error {
			f.mustLive()
			if one[int](db, `SELECT count(*) FROM dedupd.attempts`) > 0 {
				return errors.New("some messages have records of attempts")
			}
			return nil
		})
	}
}

// roll restarts the workers one after the other, as a deployment does. It tells
// of each SIGTERM when it is due: other workers may have the lanes before the
// process has ended. After each restart it waits until settled returns.
func (f *fleet) roll(due func(what string, pid int, at time.Time), settled func()) {
	f.t.Helper()
	for _, w := range f.workers {
		w.address() // before, it may not listen to signals yet
		f.mustLive()
		due("SIGTERM to "+w.name, w.Pid(), time.Now())
		took := w.drain(drainLimit)
		f.t.Logf("%s drained in %.1f s", w.name, took.Seconds())
		w.start()
		settled()
	}
}

// end drains them all at once.
func (f *fleet) end() {
	f.t.Helper()
	for _, w := range f.workers {
		w.address()
	}
	f.mustLive()
	for _, w := range f.workers {
		w.Signal(syscall.SIGTERM)
	}
	for _, w := range f.workers {
		w.mustEnd(drainLimit)
	}
}

func (f *fleet) pause(least, most time.Duration) {
	time.Sleep(least + time.Duration(f.rng.Int64N(int64(most-least))))
}
