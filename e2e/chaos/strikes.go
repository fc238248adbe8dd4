package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/pgrelay"
)

// A deathbed is a point at which a worker is killed.
type deathbed struct {
	name  string
	point pgrelay.Point
	// bring is what makes workers come to the point, where their ordinary work
	// doesn't.
	bring func(*run) error
	// later is how long after the point it dies, with what was held let go.
	later time.Duration
}

var deathbeds = []deathbed{
	{name: "tx.before", point: pgrelay.TxBefore},
	{name: "claim.before", point: pgrelay.ClaimBefore},
	{name: "claim.after", point: pgrelay.ClaimAfter},
	{name: "sink.before", point: pgrelay.SinkBefore},
	{name: "sink.after", point: pgrelay.SinkAfter},
	{name: "commit.before", point: pgrelay.CommitBefore},
	{name: "commit.after", point: pgrelay.CommitAfter},
	// What is durable is told to the broker after half a second, or, of a queue,
	// at once.
	{name: "ack.before", point: pgrelay.CommitAfter, later: 300 * time.Microsecond},
	{name: "ack.after", point: pgrelay.CommitAfter, later: 700 * time.Millisecond},
	{name: "flip.before", point: pgrelay.FlipBefore},
	{name: "flip.after", point: pgrelay.FlipAfter},
	{name: "drop.before", point: pgrelay.DropBefore, bring: (*run).expireOne},
	{name: "lane.acquired", point: pgrelay.TakeAfter, bring: (*run).restartOne},
	{name: "lane.released", point: pgrelay.TakeBefore, bring: (*run).restartOne},
}

// dieAt kills the first worker that comes to the point, and starts it again.
func (r *run) dieAt(bed deathbed) error {
	dead := make(chan *worker, len(r.workers))
	nth := 1 // what has to be brought about comes once
	if bed.bring == nil {
		nth += r.rng.IntN(3)
	}
	for _, w := range r.workers {
		w.relay.Set(bed.point, nth, func(*pgrelay.Held) pgrelay.Verdict {
			for _, other := range r.workers {
				other.relay.Clear()
			}
			if bed.later > 0 {
				time.AfterFunc(bed.later, func() {
					w.kill()
					dead <- w
				})
				return pgrelay.GoOn
			}
			w.kill()
			dead <- w
			return pgrelay.Cut
		})
	}
	within := 45 * time.Second
	var failed error
	if bed.bring != nil {
		// Who was to end in good order may have come to the point, and be dead.
		if failed = bed.bring(r); failed != nil {
			within = time.Second
		}
	}
	select {
	case w := <-dead:
		r.note("SIGKILL %s at %s", w.name, bed.name)
		r.count(bed.name)
		return w.start()
	case <-time.After(within):
		return cmp.Or(failed, fmt.Errorf("no worker came to %s within %s", bed.name, within))
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
func (r *run) zombie(at pgrelay.Point) error {
	victim := r.anyWorker()
	from := len(victim.text())
	stopped, release := make(chan struct{}), make(chan struct{})
	victim.relay.Set(at, 1, func(*pgrelay.Held) pgrelay.Verdict {
		victim.signal(syscall.SIGSTOP)
		close(stopped)
		<-release
		return pgrelay.GoOn
	})
	select {
	case <-stopped:
	case <-time.After(30 * time.Second):
		victim.relay.Clear()
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
		point   pgrelay.Point
		verdict pgrelay.Verdict
	}{
		{"COMMIT not sent", pgrelay.CommitBefore, pgrelay.Cut},
		{"COMMIT done, not heard of", pgrelay.CommitAfter, pgrelay.Cut},
		{"COMMIT under way", pgrelay.CommitBefore, pgrelay.Mute},
	}
	k := kinds[r.rng.IntN(len(kinds))]
	w := r.anyWorker()
	cut := make(chan struct{})
	w.relay.Set(k.point, 1+r.rng.IntN(4), func(*pgrelay.Held) pgrelay.Verdict {
		close(cut)
		return k.verdict
	})
	select {
	case <-cut:
		r.count(k.what)
		return nil
	case <-time.After(30 * time.Second):
		w.relay.Clear()
		return fmt.Errorf("%s came not to %s within 30 s", w.name, k.point)
	}
}

// rotate seals the open generation, as the workers' leader would.
func (r *run) rotate() error {
	r.sleep(200*time.Millisecond, 300*time.Millisecond)
	for {
		err := pgx.BeginFunc(r.ctx, r.pool.Load(), func(tx pgx.Tx) error {
			_, err := tx.Exec(r.ctx, `SELECT dedupd.prepare_generation('chaos')`)
			return err
		})
		if isState(err, "42P07") || isState(err, "23505") {
			continue // the workers' leader was at it, which has just begun
		}
		if err != nil {
			return err
		}
		var done bool
		err = pgx.BeginFunc(r.ctx, r.pool.Load(), func(tx pgx.Tx) error {
			return tx.QueryRow(r.ctx, `SELECT dedupd.rotate('chaos', (SELECT identity FROM dedupd.generations WHERE scope = 'chaos' AND state = 'open'), '1s')`).Scan(&done)
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

// failingTransactions has inserts fail for a reason that passes: one in ten, and all
// of them in one second of four.
func failingTransactions(r *run) error {
	return r.exec(`
		CREATE SEQUENCE public.failures;
		CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF random() < 0.1 OR floor(extract(epoch FROM clock_timestamp()))::bigint % 4 = 0 THEN
				PERFORM nextval('public.failures');
				RAISE EXCEPTION 'try again' USING ERRCODE = '55006';
			END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER fail AFTER INSERT ON public.effects FOR EACH STATEMENT EXECUTE FUNCTION public.fail()`)
}

// killAmidFailures lets transactions fail for a while, and kills a worker while all
// of its own do.
func (r *run) killAmidFailures(int) error {
	r.sleep(3*time.Second, 3*time.Second)
	if err := r.exec(`SELECT pg_sleep(ceil(e / 4) * 4 - e + 0.3 + 0.4 * random()) FROM extract(epoch FROM clock_timestamp()) AS e`); err != nil {
		return err
	}
	w := r.anyWorker()
	w.kill()
	r.note("SIGKILL %s", w.name)
	return r.startAgain(w, len(w.text()))
}

// refuseOne has the sink's table refuse all rows of one lane for a while: a constraint
// is at fault, and not the messages. Postgres is slow until the lane is held, so that
// groups of many lanes gather, and fail as a whole.
func (r *run) refuseOne(number int) error {
	slow := func(d time.Duration) {
		for _, w := range r.workers {
			w.relay.Delay(d)
		}
	}
	slow(40 * time.Millisecond)
	defer slow(0)
	ctx, cancel := context.WithTimeout(r.ctx, requestTimeout)
	defer cancel()
	all, err := r.positions(ctx)
	if err != nil {
		return err
	}
	lanes := slices.Sorted(maps.Keys(all))
	lane := lanes[number%len(lanes)]
	r.note("the sink refuses %s", lane)
	if err := r.exec(`ALTER TABLE public.effects ADD CONSTRAINT refused CHECK (lane <> '` + lane + `') NOT VALID`); err != nil {
		return err
	}
	if err := r.await("the lane is held", 30*time.Second, func() error {
		for _, w := range r.workers {
			if strings.Contains(w.text(), "lane held") {
				return nil
			}
		}
		return errors.New("no worker says so")
	}); err != nil {
		return err
	}
	slow(0)
	r.sleep(2*time.Second, 4*time.Second)
	r.note("the sink takes %s again", lane)
	return r.exec(`ALTER TABLE public.effects DROP CONSTRAINT refused`)
}

// putBack puts an older copy of the database's disk in its place: of the same
// cluster and timeline, without what was committed since. Workers live through it,
// or one of them does, or none.
func (r *run) putBack(number int) error {
	for _, w := range r.workers {
		w.relay.Down() // nobody is in the middle of a COMMIT that the copy may or may not have
	}
	err := r.server.Snapshot()
	for _, w := range r.workers {
		w.relay.Up()
	}
	if err != nil {
		return err
	}
	r.note("a copy of the database is taken")
	r.sleep(time.Second, 6*time.Second)
	before, err := r.positions(r.ctx)
	if err != nil {
		return err
	}
	dead := r.workers[:[]int{0, len(r.workers), len(r.workers) - 1}[number%3]]
	for _, w := range dead {
		w.kill()
	}
	r.write(event{What: fmt.Sprintf("%d workers are killed, and the copy is put back", len(dead)), Failover: true})
	if err := r.server.PutBack(); err != nil {
		return err
	}
	after, err := r.positions(r.ctx)
	if err != nil {
		return err
	}
	for lane, at := range before {
		if after[lane] < at {
			r.count("lanes that went back")
		}
	}
	r.count(fmt.Sprintf("%d of %d workers lived through it", len(r.workers)-len(dead), len(r.workers)))
	for _, w := range dead {
		if err := r.startAgain(w, len(w.text())); err != nil {
			return err
		}
	}
	return nil
}

// cutLog puts an older copy of one partition's log back, which then grows past where
// its lane stands. The lane must be held until somebody says where to go on.
func (r *run) cutLog(number int) error {
	topic := r.broker.(*kafkaTopic)
	partition := number % topic.Partitions()
	lane := fmt.Sprintf("%s/%d", topic.name, partition)
	broker, saved := topic.servers[0], filepath.Join(r.folder, fmt.Sprint("log-", number))
	if err := broker.Stop(); err != nil {
		return err
	}
	if err := broker.SaveLog(topic.name, int32(partition), saved); err != nil {
		return err
	}
	if err := broker.Restart(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.ctx, time.Minute)
	defer cancel()
	end, err := kafkatest.SavedEnd(saved)
	if err != nil {
		return err
	}
	r.note("a copy of the log of %s is taken, to %d", lane, end)
	if err := r.await("the lane is past the copy", time.Minute, func() error {
		next, err := r.positions(ctx)
		if err == nil && next[lane] < end+100 {
			err = fmt.Errorf("it stands at %d", next[lane])
		}
		return err
	}); err != nil {
		return err
	}
	if err := broker.Stop(); err != nil {
		return err
	}
	if err := broker.CutLog(topic.name, int32(partition), saved); err != nil {
		return err
	}
	until := time.Now().Add(10 * time.Minute)
	r.write(event{What: "the copy is put back: the log has lost its end", Lane: lane, Position: end, Until: &until})
	if err := broker.Restart(); err != nil {
		return err
	}
	var cut *int64
	if err := r.await("the lane is held for its cut", 2*time.Minute, func() error {
		err := r.pool.Load().QueryRow(r.ctx, `SELECT cut_at FROM dedupd.lanes WHERE lane = $1`, lane).Scan(&cut)
		if err == nil && cut == nil {
			err = errors.New("it goes on")
		}
		return err
	}); err != nil {
		return err
	}
	if *cut != end {
		return fmt.Errorf("%s was cut at %d, and is held for a cut at %d", lane, end, *cut)
	}
	r.sleep(time.Second, 3*time.Second) // the log goes on to grow
	if _, err := command(r.ctx, r.binary, "lanes", "set-position", sourceName, lane, fmt.Sprint(*cut), "-c", r.workers[0].config); err != nil {
		return err
	}
	// The group is told half a second after the lane has moved, and may know more until
	// then; the sampler is to see that it is taken back.
	return r.await("the group is taken back", 30*time.Second, func() error {
		next, err := r.positions(ctx)
		if err != nil {
			return err
		}
		told, err := r.broker.Told(ctx)
		if err == nil && told[lane] > next[lane] {
			err = fmt.Errorf("it was told %d, the lane stands at %d", told[lane], next[lane])
		}
		return err
	})
}

// holdSlot stops a worker whose transaction is committed and not acknowledged, for
// longer than the window, while the others go on; then it is killed, and what it held
// comes again.
func (r *run) holdSlot() error {
	victim := r.anyWorker()
	stopped, release := make(chan struct{}), make(chan struct{})
	victim.relay.Set(pgrelay.CommitAfter, 1, func(*pgrelay.Held) pgrelay.Verdict {
		victim.signal(syscall.SIGSTOP)
		close(stopped)
		<-release
		return pgrelay.Cut
	})
	select {
	case <-stopped:
	case <-time.After(30 * time.Second):
		victim.relay.Clear()
		return fmt.Errorf("%s came not to %s within 30 s", victim.name, pgrelay.CommitAfter)
	}
	r.note("SIGSTOP %s with what it has committed", victim.name)
	r.sleep(r.fault.window+8*time.Second, r.fault.window+10*time.Second) // AckWait ends in between
	r.note("SIGKILL %s", victim.name)
	victim.kill()
	close(release)
	return r.startAgain(victim, len(victim.text()))
}

// startAgain starts a worker and waits until it consumes: before that a signal just
// ends it. Its log goes on from there.
func (r *run) startAgain(w *worker, from int) error {
	if err := w.start(); err != nil {
		return err
	}
	return r.await(w.name+" starts", 30*time.Second, func() error {
		if !w.isReady(from) {
			return errors.New("it doesn't consume yet")
		}
		return nil
	})
}

// crash kills a server of the broker, and starts it again after a while.
func (r *run) crash(s server, least, most time.Duration) error {
	r.note("a server of the broker is killed")
	if err := s.Kill(); err != nil {
		return err
	}
	r.sleep(least, most)
	if err := s.Restart(); err != nil {
		return err
	}
	r.note("it is back")
	return nil
}

// A disturbance is what may become of the lines to the broker.
type disturbance struct {
	what string
	// The name of Toxiproxy's kind, with its attributes; empty: the lines are cut,
	// and new ones refused.
	kind, attributes string
}

var disturbances = []disturbance{
	{what: "down"},
	{"slow", "latency", `{"latency": 200, "jitter": 100}`},
	{"narrow", "bandwidth", `{"rate": 40}`},
	{"nothing comes through", "timeout", `{"timeout": 0}`},
	{"in pieces", "slicer", `{"average_size": 100, "size_variation": 50, "delay": 1000}`},
	{"reset", "reset_peer", `{"timeout": 50}`},
}

func (r *run) disturb(d disturbance) error {
	r.note("the lines to the broker: %s", d.what)
	r.count(d.what)
	for _, l := range r.lines {
		if d.kind == "" {
			l.down()
		} else if err := l.disturb(d.kind, d.attributes); err != nil {
			return err
		}
	}
	r.sleep(2*time.Second, 12*time.Second)
	for _, l := range r.lines {
		if d.kind != "" {
			l.mend(r.ctx)
		} else if err := l.up(); err != nil {
			return err
		}
	}
	r.note("the lines are well again")
	r.sleep(0, 3*time.Second)
	return nil
}

// fillPostgres leaves Postgres no room for a while. It ends by itself when its log
// finds none.
func (r *run) fillPostgres(int) error {
	r.note("the disk of Postgres is full")
	if err := r.disk.fill(); err != nil {
		return err
	}
	r.sleep(3*time.Second, 8*time.Second)
	if err := r.disk.free(); err != nil {
		return err
	}
	if r.server.Pid() != 0 {
		r.count("it went on")
		return nil
	}
	r.count("it had ended")
	r.note("room again, and Postgres is started anew")
	return r.server.Restart()
}

// refuseWrites has Postgres take no writes for a while, as a former primary does,
// and ends all connections, which would go on as they began.
func (r *run) refuseWrites(int) error {
	set := func(value string) error {
		if err := execute(r.ctx, r.server.URL("postgres"), fmt.Sprintf("ALTER DATABASE %s SET default_transaction_read_only = %s", r.database, value)); err != nil {
			return err
		}
		return r.endSessions()
	}
	r.note("Postgres takes no writes")
	if err := set("on"); err != nil {
		return err
	}
	r.sleep(2*time.Second, 5*time.Second)
	r.note("it does again")
	return set("off")
}

func (r *run) endSessions() error {
	return r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'worker-%'`)
}

// changePassword gives the workers' role another password. They are told only
// after a while.
func (r *run) changePassword(number int) error {
	role, password := r.database+"_worker", fmt.Sprint("secret-", number)
	err := r.exec(fmt.Sprintf(`DO $$ BEGIN CREATE ROLE %[1]s LOGIN SUPERUSER; EXCEPTION WHEN duplicate_object THEN END $$`, role))
	if err == nil {
		err = r.exec(fmt.Sprintf(`ALTER ROLE %s PASSWORD '%s'`, role, password))
	}
	if err == nil {
		err = r.endSessions()
	}
	if err != nil {
		return err
	}
	r.note("the password is changed")
	r.sleep(time.Second, 4*time.Second)
	for _, w := range r.workers {
		if err := w.login(url.UserPassword(role, password)); err != nil {
			return err
		}
		if strings.Contains(w.text(), "secret-") {
			return fmt.Errorf("%s has logged one of its passwords", w.name)
		}
	}
	r.note("the workers are told")
	return nil
}

// readLong reads a sealed generation for longer than it is kept, as a dump does.
// Nobody may be held up by that, and it must go as soon as it can.
func (r *run) readLong(int) error {
	var table string
	if err := r.await("a generation is sealed", 30*time.Second, func() error {
		return r.pool.Load().QueryRow(r.ctx, `SELECT table_name FROM dedupd.generations WHERE scope = $1 AND state = 'sealed' ORDER BY generation DESC LIMIT 1`, scope).Scan(&table)
	}); err != nil {
		return err
	}
	err := pgx.BeginFunc(r.ctx, r.pool.Load(), func(tx pgx.Tx) error {
		if _, err := tx.Exec(r.ctx, `LOCK TABLE dedupd.`+pgx.Identifier{table}.Sanitize()+` IN ACCESS SHARE MODE`); err != nil {
			return err
		}
		r.note("somebody reads %s", table)
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); r.sleep(50*time.Millisecond, 50*time.Millisecond) {
			var waits float64
			if err := r.pool.Load().QueryRow(r.ctx, `SELECT coalesce(max(extract(epoch FROM clock_timestamp() - query_start)), 0)::float8 FROM pg_stat_activity
				WHERE datname = current_database() AND application_name LIKE 'worker-%' AND wait_event_type = 'Lock' AND wait_event = 'relation'`).Scan(&waits); err != nil {
				return err
			}
			if waits > 0.5 {
				return fmt.Errorf("a statement waits for a table for %.1f s while somebody reads %s", waits, table)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.note("nobody reads it any more")
	return r.await(table+" goes", 10*time.Second, func() error {
		var there bool
		err := r.pool.Load().QueryRow(r.ctx, `SELECT to_regclass('dedupd.' || quote_ident($1)) IS NOT NULL`, table).Scan(&there)
		if err == nil && there {
			err = errors.New("it is still there")
		}
		return err
	})
}
