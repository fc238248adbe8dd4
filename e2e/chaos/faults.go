package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/e2e/tap"
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
	// replicated gives the run a Postgres of its own with an asynchronous replica.
	replicated bool
	// alone tells that it hurts servers which other runs use.
	alone bool
	// allow are the classes of dead letters that there is cause for.
	allow string
	// short is how often it strikes in the slice that every change must pass (0:
	// it isn't part of it), long how often in a night.
	short, long int
}

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
		name: "worker killed", each: true, config: rotating, short: 2, long: 100,
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
				if err := w.start(); err != nil {
					return err
				}
				if err := r.await(w.name+" starts", 30*time.Second, func() error {
					if !w.isReady(from) {
						return errors.New("it doesn't consume yet")
					}
					return nil
				}); err != nil {
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
			case w.process == nil:
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
		strike: func(r *run, _ int) error { return r.zombie(tap.TxBefore) },
	},
	{
		name: "zombie before its COMMIT", each: true, short: 1, long: 12,
		strike: func(r *run, _ int) error { return r.zombie(tap.CommitBefore) },
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
		name: "Postgres crashes", alone: true, each: true, short: 2, long: 20,
		strike: func(r *run, _ int) error {
			r.note("Postgres killed")
			if err := r.rig.postgres.Kill(); err != nil {
				return err
			}
			r.sleep(time.Second, 5*time.Second)
			if err := r.rig.postgres.Restart(); err != nil {
				return err
			}
			r.note("Postgres is back")
			return nil
		},
	},
	{
		name: "broker crashes", alone: true, each: true, short: 1, long: 20,
		strike: func(r *run, _ int) error {
			r.note("broker killed")
			if err := r.broker.Kill(); err != nil {
				return err
			}
			r.sleep(500*time.Millisecond, 4*time.Second)
			if err := r.broker.Restart(); err != nil {
				return err
			}
			r.note("broker is back")
			return nil
		},
	},
	{
		name: "rotations", workers: 4, rate: 3000, short: 30, long: 2000,
		config: "retention: {generation: 4h, schedule: 1h, window: 1d}\n", // the rig rotates
		strike: func(r *run, _ int) error { return r.rotate() },
	},
	{
		name: "poison", allow: "poison,no_id", each: true, short: 1, long: 10, config: rotating,
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
		name: "twins on two lanes at once", each: true, workers: 4, short: 1, long: 10,
		prepare: func(r *run) error {
			r.load.twins.Store(100)
			return nil
		},
		strike: func(r *run, _ int) error {
			r.sleep(3*time.Second, 3*time.Second)
			return nil
		},
	},
	{
		name: "expiry", each: true, short: 1, long: 5,
		config: "retention: {generation: 2s, schedule: 1s, window: 15s}\n",
		prepare: func(r *run) error {
			r.load.far.Store(4000) // well within the window
			return nil
		},
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
		name: "slow and broken lines to Postgres", config: rotating, long: 60,
		strike: func(r *run, _ int) error {
			w := r.anyWorker()
			switch r.rng.IntN(3) {
			case 0:
				w.tap.Delay(time.Duration(r.rng.IntN(300)) * time.Millisecond)
				r.sleep(time.Second, 3*time.Second)
				w.tap.Delay(0)
			case 1:
				w.tap.CutAll()
			default:
				w.tap.Down()
				r.sleep(time.Second, 5*time.Second)
				w.tap.Up()
			}
			r.sleep(0, time.Second)
			return nil
		},
	},
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
		name: mixture, alone: true, workers: 4, config: rotating, long: 60, limit: 3 * time.Minute,
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

// A deathbed is a point at which a worker is killed.
type deathbed struct {
	name  string
	point tap.Point
	// bring is what makes workers come to the point, where their ordinary work
	// doesn't.
	bring func(*run) error
	// later is how long after the point it dies, with what was held let go.
	later time.Duration
}

var deathbeds = []deathbed{
	{name: "tx.before", point: tap.TxBefore},
	{name: "claim.before", point: tap.ClaimBefore},
	{name: "claim.after", point: tap.ClaimAfter},
	{name: "sink.before", point: tap.SinkBefore},
	{name: "sink.after", point: tap.SinkAfter},
	{name: "commit.before", point: tap.CommitBefore},
	{name: "commit.after", point: tap.CommitAfter},
	// What is durable is told to the broker after half a second, or, of a queue,
	// at once.
	{name: "ack.before", point: tap.CommitAfter, later: 300 * time.Microsecond},
	{name: "ack.after", point: tap.CommitAfter, later: 700 * time.Millisecond},
	{name: "flip.before", point: tap.FlipBefore},
	{name: "flip.after", point: tap.FlipAfter},
	{name: "drop.before", point: tap.DropBefore, bring: (*run).expireOne},
	{name: "lane.taken", point: tap.TakeAfter, bring: (*run).restartOne},
	{name: "lane.released", point: tap.TakeBefore, bring: (*run).restartOne},
}

// dieAt kills the first worker that comes to the point, and starts it again.
func (r *run) dieAt(bed deathbed) error {
	dead := make(chan *worker, len(r.workers))
	nth := 1 // what has to be brought about comes once
	if bed.bring == nil {
		nth += r.rng.IntN(3)
	}
	for _, w := range r.workers {
		w.tap.Set(bed.point, nth, func(*tap.Held) tap.Verdict {
			for _, other := range r.workers {
				other.tap.Clear()
			}
			if bed.later > 0 {
				time.AfterFunc(bed.later, func() {
					w.kill()
					dead <- w
				})
				return tap.GoOn
			}
			w.kill()
			dead <- w
			return tap.Cut
		})
	}
	if bed.bring != nil {
		if err := bed.bring(r); err != nil {
			return err
		}
	}
	select {
	case w := <-dead:
		r.note("SIGKILL %s at %s", w.name, bed.name)
		r.count(bed.name)
		return w.start()
	case <-time.After(45 * time.Second):
		return fmt.Errorf("no worker came to %s within 45 s", bed.name)
	}
}

// everyPoint demands that each point was met as often as the run was long.
func everyPoint(r *run) error {
	for i, bed := range deathbeds {
		if want := (r.strikes + len(deathbeds) - 1 - i) / len(deathbeds); r.notes[bed.name] < want {
			return fmt.Errorf("%s was met %d times, want %d", bed.name, r.notes[bed.name], want)
		}
	}
	return nil
}

// expireOne leaves an expired generation to be dropped.
func (r *run) expireOne() error {
	return r.exec(`
		DO $$ DECLARE n integer := 900000 + (SELECT count(*) FROM dedupd.generations) + floor(random() * 90000); BEGIN
			EXECUTE format('CREATE TABLE dedupd.claims_chaos_%s (PRIMARY KEY (key)) INHERITS (dedupd.claims_root)', n);
			INSERT INTO dedupd.generations (scope, generation, table_name, state, sealed_at) VALUES ('chaos', n, 'claims_chaos_' || n, 'dropping', now());
		END $$`)
}

// restartOne makes lanes change hands.
func (r *run) restartOne() error {
	w := r.anyWorker()
	r.note("SIGTERM %s", w.name)
	if err := w.terminate(); err != nil {
		return err
	}
	return w.start()
}

// sessionTimeout is how long the group waits for a dead member.
const sessionTimeout = 10 * time.Second

// zombie stops a worker at the point until its lanes have moved, and lets it go
// on with what it held.
func (r *run) zombie(at tap.Point) error {
	victim := r.anyWorker()
	from := len(victim.text())
	stopped, release := make(chan struct{}), make(chan struct{})
	victim.tap.Set(at, 1, func(*tap.Held) tap.Verdict {
		victim.signal(syscall.SIGSTOP)
		close(stopped)
		<-release
		return tap.GoOn
	})
	select {
	case <-stopped:
	case <-time.After(30 * time.Second):
		victim.tap.Clear()
		return fmt.Errorf("%s came not to %s within 30 s", victim.name, at)
	}
	r.note("SIGSTOP %s at %s", victim.name, at)
	r.sleep(sessionTimeout+3*time.Second, sessionTimeout+6*time.Second)
	close(release)
	victim.signal(syscall.SIGCONT)
	r.note("SIGCONT %s", victim.name)
	if !r.broker.Ordered() {
		return nil // nobody else can have its lane
	}
	if err := victim.says("lane lost|lanes assigned", from, 30*time.Second); err != nil {
		return err
	}
	r.count("fenced or refused")
	return nil
}

// loseCommit cuts a connection before its COMMIT, behind it, or while it is under
// way.
func (r *run) loseCommit() error {
	kinds := []struct {
		what    string
		point   tap.Point
		verdict tap.Verdict
	}{
		{"COMMIT not sent", tap.CommitBefore, tap.Cut},
		{"COMMIT done, not heard of", tap.CommitAfter, tap.Cut},
		{"COMMIT under way", tap.CommitBefore, tap.Mute},
	}
	k := kinds[r.rng.IntN(len(kinds))]
	w := r.anyWorker()
	cut := make(chan struct{})
	w.tap.Set(k.point, 1+r.rng.IntN(4), func(*tap.Held) tap.Verdict {
		close(cut)
		return k.verdict
	})
	select {
	case <-cut:
		r.count(k.what)
		return nil
	case <-time.After(30 * time.Second):
		w.tap.Clear()
		return fmt.Errorf("%s came not to %s within 30 s", w.name, k.point)
	}
}

// rotate seals the open generation, as the workers' leader would.
func (r *run) rotate() error {
	r.sleep(200*time.Millisecond, 300*time.Millisecond)
	for {
		err := pgx.BeginFunc(r.ctx, r.pool.Load(), func(tx pgx.Tx) error {
			if _, err := tx.Exec(r.ctx, `SELECT dedupd.prepare_generation('chaos')`); err != nil {
				return err
			}
			return nil
		})
		if err != nil {
			return err
		}
		var done bool
		err = pgx.BeginFunc(r.ctx, r.pool.Load(), func(tx pgx.Tx) error {
			return tx.QueryRow(r.ctx, `SELECT dedupd.rotate('chaos', (SELECT identity FROM dedupd.generations WHERE scope = 'chaos' AND state = 'open'), '100ms')`).Scan(&done)
		})
		switch {
		case isState(err, "55P03"):
			r.count("rotation tried again")
			continue
		case err != nil:
			return err
		case !done:
			continue
		}
		r.count("rotations")
		return nil
	}
}
