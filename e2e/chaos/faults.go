package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/internal/pgrelay"
)

const sigterm = syscall.SIGTERM

// fault is a way for things to go wrong.
type fault struct {
	name string
	// brokers are those it is tried with; nil: both.
	brokers    []string
	workers    int // 3 unless set
	partitions int // 8 unless set
	rate       int // messages a second; 1,500 unless set
	config     string
	// prepare is called before the workers start.
	prepare func(*run) error
	// strike lets it happen once, and mends it.
	strike func(r *run, number int) error
	// each tells that the workers are to catch up after every strike.
	each bool
	// limit is how long they may take for that; 90 s unless set.
	limit time.Duration
	// after is one more judgement, of what the fault is to have caused.
	after func(*run) error
	// postgres gives the run one of its own, of this version; own: as the others'.
	postgres string
	// replicated gives it one of its own with an asynchronous replica.
	replicated bool
	// nodes gives it a broker of its own, of so many servers.
	nodes int
	// relayed gives it a broker of its own, which workers reach through lines that
	// can be disturbed.
	relayed bool
	// disk puts its own postgres or broker on a disk that can be filled.
	disk string
	// window is what config sets, where copies come from beyond it.
	window time.Duration
	// allow are the classes of dead letters that there is cause for.
	allow string
	// short is how often it strikes in the slice that every change must pass (0:
	// it isn't part of it), long how often in a night.
	short, long int
}

// own is a server of the run's own, since the fault hurts it.
const own = "own"

// rotating has the generations change every other second.
const rotating = "retention: {generation: 2s, schedule: 1s, window: 30m}\n"

var faults = []*fault{
	{
		name: "none", each: true, short: 1, long: 3,
		strike: func(r *run, _ int) error {
			r.sleep(3*time.Second, 3*time.Second)
			return nil
		},
	},
	{
		name: "worker killed", each: true, config: rotating, short: 2, long: 50,
		strike: func(r *run, _ int) error {
			w := r.anyWorker()
			r.sleep(0, time.Second)
			w.kill()
			r.note("SIGKILL %s", w.name)
			began := time.Now()
			if err := r.catchUp(); err != nil { // the others have to do it
				return err
			}
			r.within("taken over within 12 s of a SIGKILL", time.Since(began), 12*time.Second)
			return w.start()
		},
	},
	{
		name: "workers killed one upon the other", config: rotating, short: 4, long: 60,
		strike: func(r *run, _ int) error {
			r.sleep(200*time.Millisecond, 4*time.Second)
			w := r.anyWorker()
			w.kill()
			r.note("SIGKILL %s", w.name)
			return w.start()
		},
	},
	{
		name: "killed at a point", each: true, config: rotating, short: len(deathbeds), long: 3 * len(deathbeds),
		strike: func(r *run, number int) error { return r.dieAt(deathbeds[number%len(deathbeds)]) },
		after:  everyPoint,
	},
	{
		name: "rolling restart", each: true, short: 1, long: 10,
		strike: func(r *run, _ int) error {
			for _, w := range r.workers {
				r.note("SIGTERM %s", w.name)
				from, began := len(w.text()), time.Now()
				if err := w.terminate(); err != nil {
					return err
				}
				if err := r.catchUp(); err != nil {
					return err
				}
				r.within("taken over within 2 s of a SIGTERM", time.Since(began), 2*time.Second)
				if err := r.startAgain(w, from); err != nil {
					return err
				}
			}
			return nil
		},
	},
	{
		name: "workers come and go", workers: 6, config: rotating, long: 40,
		strike: func(r *run, _ int) error {
			w := r.workers[1+r.rng.IntN(len(r.workers)-1)] // one stays
			switch {
			case w.running() == nil:
				r.note("start %s", w.name)
				if err := w.start(); err != nil {
					return err
				}
			case r.rng.IntN(3) == 0:
				r.note("SIGKILL %s", w.name)
				w.kill()
			default:
				r.note("SIGTERM %s", w.name)
				if err := w.terminate(); err != nil {
					return err
				}
			}
			r.sleep(0, 3*time.Second)
			return nil
		},
	},
	{
		name: "zombie before its transaction", each: true, short: 1, long: 12,
		strike: func(r *run, _ int) error { return r.zombie(pgrelay.TxBefore) },
	},
	{
		name: "zombie before its COMMIT", each: true, short: 1, long: 12,
		strike: func(r *run, _ int) error { return r.zombie(pgrelay.CommitBefore) },
	},
	{
		name: "pauses", config: rotating, long: 60,
		strike: func(r *run, _ int) error {
			w := r.anyWorker()
			r.note("SIGSTOP %s", w.name)
			w.signal(syscall.SIGSTOP)
			r.sleep(200*time.Millisecond, 8*time.Second)
			w.signal(syscall.SIGCONT)
			r.note("SIGCONT %s", w.name)
			r.sleep(0, 2*time.Second)
			return nil
		},
	},
	{
		name: "answer to COMMIT lost", config: rotating, short: 20, long: 300,
		strike: func(r *run, _ int) error { return r.loseCommit() },
	},
	{
		name: "connections ended by the server", config: rotating, short: 30, long: 500,
		strike: func(r *run, _ int) error {
			r.sleep(100*time.Millisecond, 300*time.Millisecond)
			return r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'worker-%' ORDER BY random() LIMIT 1`)
		},
	},
	{
		name: "Postgres crashes", postgres: own, each: true, short: 2, long: 20,
		strike: func(r *run, _ int) error {
			r.note("Postgres killed")
			if err := r.server.Kill(); err != nil {
				return err
			}
			r.sleep(time.Second, 5*time.Second)
			if err := r.server.Restart(); err != nil {
				return err
			}
			r.note("Postgres is back")
			return nil
		},
	},
	{
		name: "broker crashes", nodes: 1, each: true, short: 1, long: 20,
		strike: func(r *run, _ int) error {
			return r.crash(r.broker.Servers()[0], 500*time.Millisecond, 4*time.Second)
		},
	},
	{
		name: "one of three servers of the broker crashes", nodes: 3, each: true, long: 10,
		strike: func(r *run, number int) error {
			return r.crash(r.broker.Servers()[number%3], 2*time.Second, 8*time.Second)
		},
	},
	{
		name: "slow and broken lines to the broker", relayed: true, config: rotating, short: 3, long: 30,
		strike: func(r *run, number int) error { return r.disturb(disturbances[number%len(disturbances)]) },
	},
	{
		name: "the disk of Postgres is full", disk: "postgres", each: true, config: rotating, long: 10,
		strike: (*run).fillPostgres,
	},
	{
		name: "the broker's disk is full", brokers: []string{"kafka"}, disk: "broker", each: true, long: 5,
		strike: func(r *run, _ int) error {
			r.note("the broker's disk is full")
			if err := r.disk.fill(); err != nil {
				return err
			}
			r.sleep(3*time.Second, 6*time.Second)
			if err := r.disk.free(); err != nil {
				return err
			}
			// It gives up a disk for good once it was full, and ends if that was its last.
			r.note("room again, and the broker is started anew")
			s := r.broker.Servers()[0]
			return errors.Join(s.Kill(), s.Restart())
		},
	},
	{
		name: "Postgres takes no writes", each: true, config: rotating, long: 10,
		strike: (*run).refuseWrites,
	},
	{
		name: "the database's password changes", each: true, config: rotating, long: 10,
		strike: (*run).changePassword,
	},
	{
		name: "a long reader of expired claims", each: true, long: 5,
		config: "retention: {generation: 2s, schedule: 1s, window: 6s}\n",
		prepare: func(r *run) error {
			r.load.far.Store(2000) // well within the window
			return nil
		},
		strike: (*run).readLong,
	},
	{
		name: "partitions are added", brokers: []string{"kafka"}, partitions: 2, each: true, config: rotating, short: 2, long: 7,
		strike: func(r *run, _ int) error {
			r.sleep(500*time.Millisecond, time.Second)
			r.note("two partitions more")
			return r.broker.(*kafkaTopic).grow(r.ctx, 2)
		},
	},
	{
		name: "killed at a point, on Postgres 16", postgres: "16.10", each: true, config: rotating, long: len(deathbeds),
		strike: func(r *run, number int) error { return r.dieAt(deathbeds[number%len(deathbeds)]) },
		after:  everyPoint,
	},
	{
		name: "killed at a point, on Postgres 14", postgres: "14.19", each: true, config: rotating, long: len(deathbeds),
		strike: func(r *run, number int) error { return r.dieAt(deathbeds[number%len(deathbeds)]) },
		after:  everyPoint,
	},
	{
		// The rig rotates twice a second. Old generations are dropped: with hundreds of them,
		// each batch would look into all.
		name: "rotations", workers: 4, short: 30, long: 1000,
		config: "retention: {generation: 30s, schedule: 2s, window: 30s}\n",
		prepare: func(r *run) error {
			r.load.far.Store(4000) // well within the window
			return nil
		},
		strike: func(r *run, _ int) error { return r.rotate() },
	},
	{
		// A tenth of it is poison, and each one costs its search: more than a hundred
		// transactions a second.
		name: "poison", allow: "poison,no_id", each: true, rate: 500, short: 1, long: 10, config: rotating,
		prepare: func(r *run) error {
			r.load.poison.Store(10)
			return nil
		},
		strike: func(r *run, _ int) error {
			r.sleep(3*time.Second, 3*time.Second)
			return nil
		},
		after: func(r *run) error {
			return r.atLeast(`SELECT count(*) FROM dedupd.dead_letters WHERE class = 'poison'`, 10)
		},
	},
	{
		name: "copies with another payload", allow: "conflict", each: true, short: 1, long: 10,
		prepare: func(r *run) error {
			r.load.differ.Store(20)
			return nil
		},
		strike: func(r *run, _ int) error {
			r.sleep(3*time.Second, 3*time.Second)
			return nil
		},
		after: func(r *run) error {
			return r.atLeast(`SELECT count(*) FROM dedupd.dead_letters WHERE class = 'conflict'`, 10)
		},
	},
	{
		// Groups of many lanes fail, and their lanes are tried alone.
		name: "transactions that fail", each: true, workers: 2, partitions: 16, short: 1, long: 10,
		prepare: func(r *run) error {
			r.load.copiesAtOnce.Store(50)
			return failingTransactions(r)
		},
		strike: (*run).killAmidFailures,
		after:  func(r *run) error { return r.atLeast(`SELECT last_value FROM public.failures`, 10) },
	},
	{
		// Its neighbours go on beside it.
		name: "one lane is held", brokers: []string{"kafka"}, allow: "poison", each: true, workers: 1, short: 1, long: 5,
		config: "dead_letters: {max_share: 0.01, window: 1000}\n",
		strike: (*run).refuseOne,
	},
	{
		name: "concurrent duplicates on two lanes", each: true, workers: 4, short: 1, long: 10,
		prepare: func(r *run) error {
			r.load.copiesAtOnce.Store(100)
			return nil
		},
		strike: func(r *run, _ int) error {
			r.sleep(3*time.Second, 3*time.Second)
			return nil
		},
	},
	{
		// Copies come from within the window and from beyond it.
		name: "expiry", each: true, short: 1, long: 5, window: 15 * time.Second,
		config: "retention: {generation: 2s, schedule: 1s, window: 15s}\n",
		strike: func(r *run, _ int) error {
			return r.await("generations are dropped", time.Minute, func() error {
				return r.atLeast(`SELECT min(generation) FROM dedupd.generations WHERE scope = 'chaos'`, 3)
			})
		},
	},
	{
		name: "one hot id", each: true, short: 1, long: 5, config: rotating,
		prepare: func(r *run) error {
			r.load.hot.Store(90)
			return nil
		},
		strike: func(r *run, _ int) error {
			r.sleep(3*time.Second, 3*time.Second)
			return nil
		},
	},
	{
		name: "failover to an asynchronous replica", replicated: true, each: true, config: rotating, short: 1, long: 20,
		strike: func(r *run, _ int) error { return r.failOver() },
	},
	{
		name: "an older copy of the database is put back", postgres: own, each: true, config: rotating, short: 2, long: 20,
		strike: func(r *run, number int) error { return r.putBack(number) },
	},
	{
		name: "a log is cut and grows again", brokers: []string{"kafka"}, nodes: 1, each: true, short: 1, long: 5,
		strike: func(r *run, number int) error { return r.cutLog(number) },
	},
	{
		// Its claims would expire while somebody else lands today's messages.
		name: "a slot is held beyond the window", brokers: []string{"nats"}, each: true, short: 1, long: 5, window: 4 * time.Second,
		config: "retention: {generation: 1s, schedule: 1s, window: 4s}\n",
		strike: func(r *run, _ int) error { return r.holdSlot() },
	},
	{
		name: "slow and broken lines to Postgres", config: rotating, long: 60,
		strike: func(r *run, _ int) error {
			w := r.anyWorker()
			switch r.rng.IntN(3) {
			case 0:
				w.relay.Delay(time.Duration(r.rng.IntN(300)) * time.Millisecond)
				r.sleep(time.Second, 3*time.Second)
				w.relay.Delay(0)
			case 1:
				w.relay.CutAll()
			default:
				w.relay.Down()
				r.sleep(time.Second, 5*time.Second)
				w.relay.Up()
			}
			r.sleep(0, time.Second)
			return nil
		},
	},
}

// shaped are the faults that runs of any shape meet: they need nothing of the sink's table,
// and leave no claims behind that are gone.
var shaped = []string{
	"worker killed", "workers killed one upon the other", "rolling restart", "workers come and go", "pauses",
	"zombie before its transaction", "zombie before its COMMIT", "answer to COMMIT lost", "connections ended by the server",
	"Postgres crashes", "broker crashes", "slow and broken lines to Postgres", "failover to an asynchronous replica",
	"an older copy of the database is put back",
}

// mixture is the fault that is all others.
const mixture = "everything at random"

// mixed are those it draws from: they leave the fleet as it was.
var mixed = []string{
	"workers killed one upon the other", "pauses", "answer to COMMIT lost", "connections ended by the server",
	"slow and broken lines to Postgres", "rolling restart", "zombie before its transaction", "zombie before its COMMIT",
	"Postgres crashes", "broker crashes",
}

func init() { // it looks at the list that it stands in
	faults = append(faults, &fault{
		name: mixture, postgres: own, nodes: 1, workers: 4, config: rotating, long: 60, limit: 3 * time.Minute,
		strike: func(r *run, number int) error {
			f := faultNamed(mixed[r.rng.IntN(len(mixed))])
			r.count(f.name)
			if err := f.strike(r, number); err != nil {
				return fmt.Errorf("%s: %w", f.name, err)
			}
			r.sleep(0, 2*time.Second)
			return nil
		},
	})
}

// within counts what took too long beside how often it was in time.
func (r *run) within(what string, took, limit time.Duration) {
	if took <= limit {
		r.count(what)
	} else {
		r.count("not " + what)
	}
}

// atLeast demands a number of the run's database.
func (r *run) atLeast(sql string, want int64) error {
	var n int64
	if err := r.pool.Load().QueryRow(context.WithoutCancel(r.ctx), sql).Scan(&n); err != nil {
		return err
	}
	if n < want {
		return fmt.Errorf("%s: %d, want %d at least: the fault hasn't met its cause", sql, n, want)
	}
	return nil
}
