package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/lane"
)

const (
	expiryWindow  = 24 * time.Hour
	expiryMaxHold = 60 * 24 * time.Hour
)

// expire retires and drops what has expired, and returns how many generations that were.
func (f *fixture) expire() int {
	f.t.Helper()
	n, led, err := f.Store.Generations().Expire(f.t.Context(), expiryWindow, expiryMaxHold)
	if err != nil || !led {
		f.t.Fatalf("expire: led %v, %v", led, err)
	}
	for _, g := range f.generations() {
		if g.State == "dropping" {
			if led, err := f.Store.Generations().Drop(f.t.Context(), g.Number); err != nil || !led {
				f.t.Fatalf("drop: led %v, %v", led, err)
			}
		}
	}
	return n
}

// backlog stops a worker for three windows. What has gathered meanwhile holds resends of
// ids that it had applied, and resends of its own; one lane works it off before the other
// begins. After each batch generations are sealed, and expiry is attempted. It returns
// how many generations expired while the worker was stopped and after, and what must be
// in the sink.
func backlog(t *testing.T, f *fixture) (early, expired int, applied []string) {
	start := time.Now()
	applied = ids("day-0-", 24)
	fast, slow := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(fast.batchAsOf(start, applied...), slow.batchAsOf(start, applied[:12]...))
	f.rotate()

	// The database's clock is moved, not the worker's.
	f.passTime(3 * expiryWindow)
	early = f.expire()
	next := attach(t, f.db)
	next.Store.Generations().ChunkClaims = 10
	lanes := []*ownedLane{next.acquire("kafka", "orders/0"), next.acquire("kafka", "orders/1")}
	for i, l := range lanes {
		for from := 0; from < 72; from += 4 {
			var b lane.Batch
			for hour := from; hour < from+4; hour++ {
				list := []string{fmt.Sprint("hour-", hour), fmt.Sprint("hour-", max(0, hour-1)), fmt.Sprint("hour-", max(0, hour-20))}
				if hour < 24 {
					list = append(list, fmt.Sprint("day-0-", hour))
				}
				part := l.batchAsOf(start.Add(time.Duration(hour)*time.Hour), list...)
				if hour == from {
					b = part
				} else {
					b.Messages, b.Next = append(b.Messages, part.Messages...), part.Next
				}
				if i == 0 {
					applied = append(applied, list[0])
				}
			}
			next.handle(b)
			next.rotate()
			next.buildFilters()
			next.loadFilters()
			expired += next.expire()
		}
	}
	return early, expired, applied
}

// TestABacklogLongerThanTheWindowAppliesNothingTwice lets more than a window of
// the database's time pass over a stopped worker: its claims must live until the
// stream, not the clock, has passed them.
func TestABacklogLongerThanTheWindowAppliesNothingTwice(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	early, expired, applied := backlog(t, f)
	f.wantLanded(applied...)
	if early != 0 || expired == 0 {
		t.Errorf("%d generations expired while the worker was stopped, %d after it had gone on", early, expired)
	}
}

// TestTheBacklogFindsExpiryByTheClock lets generations expire by the database's
// clock alone, or by the lane that is furthest ahead: the same backlog is then
// applied twice.
func TestTheBacklogFindsExpiryByTheClock(t *testing.T) {
	t.Parallel()
	for name, clock := range map[string]string{
		"the database's clock": `SELECT dedupd.clock()`,
		"the fastest lane":     `SELECT least(dedupd.clock(), (SELECT max(stream_time) FROM dedupd.lanes WHERE scope = p_scope))`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			if _, err := f.pool.Exec(t.Context(), `CREATE OR REPLACE FUNCTION dedupd.stream_clock(p_scope text) RETURNS timestamptz LANGUAGE sql STABLE AS $$`+clock+`$$`); err != nil {
				t.Fatal(err)
			}
			if _, _, applied := backlog(t, f); len(f.landed()) == len(applied) {
				t.Error("nothing was applied twice, so the backlog would not notice")
			}
		})
	}
}

// wantTidy checks that catalog, tables and filters belong together.
func (f *fixture) wantTidy() {
	f.t.Helper()
	var tables, filters, open int
	if err := f.pool.QueryRow(f.t.Context(), `SELECT
		(SELECT count(*) FROM pg_class t FULL JOIN dedupd.generations g ON g.table_name = t.relname
		 WHERE (t.relnamespace = 'dedupd'::regnamespace AND t.relkind = 'r' AND t.relname ~ '^claims_test_' OR t.oid IS NULL) AND (t.oid IS NULL OR g.table_name IS NULL))
		 + (SELECT count(*) FROM pg_class t FULL JOIN dedupd.generations g ON 'results' || substr(g.table_name, 7) = t.relname
		 WHERE (t.relnamespace = 'dedupd'::regnamespace AND t.relkind = 'r' AND t.relname ~ '^results_test_' OR t.oid IS NULL) AND (t.oid IS NULL OR g.table_name IS NULL)),
		(SELECT count(*) FROM dedupd.filters WHERE identity NOT IN (SELECT identity FROM dedupd.generations WHERE state IN ('sealed', 'dropping'))),
		(SELECT count(*) FROM dedupd.generations WHERE state = 'open')`).Scan(&tables, &filters, &open); err != nil {
		f.t.Fatal(err)
	}
	if tables != 0 || filters != 0 || open != 1 {
		f.t.Errorf("%d tables or generations without the other, %d filters of nothing, %d open generations", tables, filters, open)
	}
}

// TestACrashInAnyStepLeavesNothingBehind kills the server's process in each step of
// retention, before it commits, and then does the step. Another leader may find that a
// step was done that nobody reported.
func TestACrashInAnyStepLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Store.Generations().ChunkClaims = 2
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b", "c"))
	filter := func(f *fixture) error {
		_, _, err := f.Store.Generations().BuildFilter(t.Context())
		return err
	}
	for _, step := range []struct {
		name, sql string
		do        func(f *fixture) error // nil: by its SQL
		before    func()
	}{
		{name: "prepare", sql: `SELECT dedupd.prepare_generation('test')`},
		{name: "prepare again", sql: `SELECT dedupd.prepare_generation('test')`},
		{name: "rotate", sql: `SELECT dedupd.rotate('test', (SELECT identity FROM dedupd.generations WHERE state = 'open'), '1s')`},
		{name: "rotate without a next generation", sql: `SELECT dedupd.rotate('test', (SELECT identity FROM dedupd.generations WHERE state = 'open'), '1s')`},
		{name: "a first chunk", sql: `INSERT INTO dedupd.filters SELECT identity, 0, 1, first_key, false, 1, '' FROM dedupd.generations WHERE state = 'sealed'`, do: filter},
		{name: "a second chunk", sql: `INSERT INTO dedupd.filters SELECT identity, 1, 1, last_key, true, 1, '' FROM dedupd.generations WHERE state = 'sealed'`, do: filter},
		{name: "expire", sql: `SELECT dedupd.expire('test', '24 hours', '100 days', '1s')`, before: func() {
			f.passTime(2 * expiryWindow)
			f.caughtUp(l)
		}},
		{name: "drop", sql: `SELECT dedupd.drop_generation('test', 1, '1s')`},
		{name: "drop again", sql: `SELECT dedupd.drop_generation('test', 1, '1s')`},
		{name: "sweep", sql: `SELECT dedupd.sweep('test', '1s')`},
	} {
		if step.before != nil {
			step.before()
		}
		before := f.generations()
		conn, err := f.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, sql := range []string{"BEGIN", step.sql, "SELECT pg_terminate_backend(pg_backend_pid())"} {
			if _, err = conn.Exec(t.Context(), sql); err != nil && sql != "SELECT pg_terminate_backend(pg_backend_pid())" {
				t.Fatalf("%s: %v", step.name, err)
			}
		}
		if err == nil {
			t.Fatalf("%s: the server's process lives on", step.name)
		}
		conn.Release()
		if after := f.generations(); fmt.Sprintf("%+v", states(after)) != fmt.Sprintf("%+v", states(before)) {
			t.Errorf("%s: a crash left %+v of %+v", step.name, states(after), states(before))
		}
		f.wantTidy()

		// Another process does it. This one's end reaches nobody.
		next := attach(t, f.db)
		next.Store.Generations().ChunkClaims = 2
		if step.do != nil {
			err = step.do(next)
		} else {
			_, err = next.pool.Exec(t.Context(), step.sql)
		}
		if err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		f.wantTidy()
		f.handle(l.batch("d"))
	}
	if all := f.generations(); len(all) != 1 || all[0].Number != 2 || all[0].State != "open" {
		t.Errorf("generations %+v at the end", states(all))
	}
	f.wantLanded("a", "b", "c", "d", "d") // once more, after its claim expired
}

func states(all []generations.Generation) (states []string) {
	for _, g := range all {
		states = append(states, fmt.Sprintf("%d %s %s, filter of %d bytes", g.Number, g.State, g.Identity, g.FilterBytes))
	}
	return states
}

// TestSweepDropsWhatTheCatalogDoesNotKnow leaves tables and filters behind, as a
// restore of a part may, among others that are not the scope's.
func TestSweepDropsWhatTheCatalogDoesNotKnow(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	f.rotate()
	f.buildFilters()
	for _, name := range []string{"claims_test_77", "claims_test_2_77", "claims_test", "claims_test_x", "claims_other_77", "xclaims_test_77"} {
		f.exec(`CREATE TABLE dedupd.` + name + ` (PRIMARY KEY (key)) INHERITS (dedupd.claims_root)`)
	}
	for _, name := range []string{"results_test_77", "results_test_2_77", "results_test_x", "results_other_77"} {
		f.exec(`CREATE TABLE dedupd.` + name + ` (PRIMARY KEY (key)) INHERITS (dedupd.results_root)`)
	}
	if _, err := f.pool.Exec(t.Context(), `INSERT INTO dedupd.filters VALUES (gen_random_uuid(), 0, 1, gen_random_uuid(), true, 1, '')`); err != nil {
		t.Fatal(err)
	}
	dropped, led, err := f.Store.Generations().Sweep(t.Context())
	if slices.Sort(dropped); err != nil || !led || !slices.Equal(dropped, []string{"claims_test_77", "results_test_77"}) {
		t.Errorf("swept %q, led %v, %v", dropped, led, err)
	}
	for name, want := range map[string]int{
		`SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ 'claims.*_(77|test|x)$'`: 5,
		`SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ 'results.*_(77|x)$'`:     3,
		`SELECT count(*) FROM dedupd.filters`:                                                     1,
	} {
		var n int
		if err := f.pool.QueryRow(t.Context(), name).Scan(&n); err != nil || n != want {
			t.Errorf("%s: %d, want %d (%v)", name, n, want, err)
		}
	}
	f.handle(l.batch("a", "b"))
	f.wantLanded("a", "b")
	// A table of a number that the catalog doesn't know is no generation's.
	if _, err := f.pool.Exec(t.Context(), `CREATE TABLE dedupd.claims_test_3 (PRIMARY KEY (key)) INHERITS (dedupd.claims_root)`); err != nil {
		t.Fatal(err)
	}
	f.rotate()
	if n := f.generation("open"); n != 4 {
		t.Errorf("generation %d was opened, want 4", n)
	}
}

// TestALostTableHoldsTheLane drops the table of a sealed generation by hand. What
// it held is not known: no id of its zone may pass for new.
func TestALostTableHoldsTheLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(ids("a", 50)...))
	f.rotate()
	f.handle(l.batch("a1", "b")) // the connection knows the table
	next := attach(t, f.db)      // this one doesn't
	if _, err := f.pool.Exec(t.Context(), `DROP TABLE dedupd.claims_test_1`); err != nil {
		t.Fatal(err)
	}
	before := f.landed()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for name, w := range map[string]*fixture{"warm": f, "cold": next} {
		l = w.acquire("kafka", "orders/0")
		wantHold(t, w.Handle(ctx, []lane.Batch{l.batchAt(l.at, "a2")}), `claims_test_1`)
		wantHold(t, w.Handle(ctx, []lane.Batch{l.batchAt(l.at, ids("c", 50)...)}), `claims_test_1`)
		err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			claims, err := w.Store.Claim(t.Context(), tx, []string{"a3"}, dedup.ClaimOptions{})
			if err == nil {
				t.Errorf("%s: a3 was claimed: %+v", name, claims)
			}
			return err
		})
		if codeOf(err) != "42P01" {
			t.Errorf("%s: a claim got %v, want 42P01", name, err)
		}
	}
	f.wantLanded(before...)
	if g := f.generations()[0]; !g.Missing {
		t.Errorf("nothing shows that the table is missing: %+v", g)
	}
}

// stalls applies messages until the channel is closed, and returns how long the slowest
// took.
func (f *fixture) stalls(l *ownedLane, end <-chan struct{}) (longest time.Duration) {
	for n := 0; ; n++ {
		select {
		case <-end:
			return longest
		case <-time.After(5 * time.Millisecond):
		}
		start := time.Now()
		if err := f.Handle(f.t.Context(), []lane.Batch{l.batch(fmt.Sprint(l.Name, "-", n))}); err != nil {
			f.t.Errorf("handle: %v", err)
			return longest
		}
		longest = max(longest, time.Since(start))
	}
}

// TestADropGivesWayToALongReader reads an expired generation for long, like a backup. The
// drop gives up; workers that still know the table, and have to wait in line behind the
// drop, don't wait for long.
func TestADropGivesWayToALongReader(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b", "c"))
	f.rotate()
	stale := attach(t, f.db)
	behind := stale.acquire("kafka", "orders/1")
	if err := stale.Store.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.passTime(2 * expiryWindow)
	f.caughtUp(l)
	stale.caughtUp(behind)
	if n, _, err := f.Store.Generations().Expire(t.Context(), expiryWindow, expiryMaxHold); err != nil || n != 1 {
		t.Fatalf("%d generations expired: %v", n, err)
	}

	reader, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Rollback(context.Background()) }()
	if _, err := reader.Exec(t.Context(), `SELECT FROM dedupd.claims`); err != nil {
		t.Fatal(err)
	}
	end, dropped := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := f.Store.Generations().Drop(t.Context(), 1)
		dropped <- err
		close(end)
	}()
	f.someoneWaitsFor("claims_test_1")
	start := time.Now()
	// "a" is within the zone of the generation that it believes to be alive.
	if err := stale.Handle(t.Context(), []lane.Batch{behind.batch("a")}); err != nil {
		t.Errorf("a worker with an older catalog: %v", err)
	}
	first := time.Since(start)
	longest := stale.stalls(behind, end)
	if first > time.Second || longest > time.Second {
		t.Errorf("claims waited for %s and %s behind a drop", first, longest)
	}
	if err := <-dropped; codeOf(err) != "55P03" {
		t.Errorf("the drop ended with %v, want 55P03", err)
	}
	if err := reader.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Store.Generations().Drop(t.Context(), 1); err != nil {
		t.Error(err)
	}
	f.wantTidy()
	if n := f.generation("dropping"); n != 0 {
		t.Errorf("generation %d is still there", n)
	}
}

// TestARotationGivesWayToALongTransaction holds a claim open for two seconds. The
// rotation comes after it; until then the claims of others wait for no longer
// than one of its tries.
func TestARotationGivesWayToALongTransaction(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	other := attach(t, f.db)
	l := other.acquire("kafka", "orders/0")
	if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := f.Store.Claim(t.Context(), tx, []string{"held"}, dedup.ClaimOptions{}); err != nil {
		t.Fatal(err)
	}
	end, rotated := make(chan struct{}), make(chan error, 1)
	go func() {
		done, _, took, err := f.Store.Generations().Rotate(t.Context(), 1)
		if err == nil && (!done || took > time.Second) {
			err = fmt.Errorf("rotated %v, in %s", done, took)
		}
		rotated <- err
		close(end)
	}()
	committed := make(chan error, 1)
	time.AfterFunc(2*time.Second, func() { committed <- tx.Commit(context.Background()) })
	if longest := other.stalls(l, end); longest > 700*time.Millisecond {
		t.Errorf("claims waited for %s behind a rotation that could not begin", longest)
	}
	if err := <-committed; err != nil {
		t.Fatal(err)
	}
	if err := <-rotated; err != nil {
		t.Error(err)
	}
	other.handle(l.batch("held"))
	if slices.Contains(f.landed(), "held") {
		t.Error("the claim that was open before the rotation is not known after it")
	}
}

// TestARotationOutlastsTransactionsOfSeconds has claims open at any time, none of which
// ends within two seconds and a half of a rotation's request for the lock.
func TestARotationOutlastsTransactionsOfSeconds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Store.Claim(t.Context(), tx, []string{"held"}, dedup.ClaimOptions{}); err != nil {
		t.Fatal(err)
	}
	rotated := make(chan error, 1)
	go func() {
		done, _, _, err := f.Store.Generations().Rotate(t.Context(), 1)
		if err == nil && !done {
			err = errors.New("nothing was rotated")
		}
		rotated <- err
	}()
	end := func() error {
		var since time.Time
		for ; ; time.Sleep(10 * time.Millisecond) {
			select {
			case err := <-rotated:
				return fmt.Errorf("the rotation has ended beside an open claim: %w", err)
			default:
			}
			var waits bool
			// By the transaction itself, which must not be idle for long.
			if err := tx.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database d ON d.oid = database
				WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND NOT granted AND datname = current_database())`).Scan(&waits); err != nil {
				return err
			}
			switch {
			case !waits:
				since = time.Time{}
			case since.IsZero():
				since = time.Now()
			case time.Since(since) > 2500*time.Millisecond:
				return tx.Commit(t.Context())
			}
		}
	}
	if err := end(); err != nil {
		t.Fatal(errors.Join(err, tx.Rollback(context.WithoutCancel(t.Context()))))
	}
	if err := <-rotated; err != nil {
		t.Error(err)
	}
}

// TestASweepWithinARestoreDropsNothing removes the rows that name the tables, as they are
// missing for a while when a dump is put back under running workers.
func TestASweepWithinARestoreDropsNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	f.rotate()
	f.handle(l.batch("b"))
	f.exec(`CREATE TABLE public.kept AS TABLE dedupd.generations`)
	f.exec(`DELETE FROM dedupd.generations`)
	if dropped, led, err := f.Store.Generations().Sweep(t.Context()); err != nil || !led || len(dropped) != 0 {
		t.Errorf("swept %q, led %v, %v", dropped, led, err)
	}
	f.exec(`INSERT INTO dedupd.generations SELECT * FROM public.kept`)
	f.handle(l.batch("a", "b", "c"))
	f.wantLanded("a", "b", "c")
	// Nor does the name of a scope become a pattern.
	f.exec(`INSERT INTO dedupd.scopes (scope) VALUES ('zzz|^audit$|zzz')`)
	f.exec(`INSERT INTO dedupd.generations (scope, generation, table_name, state, opened_at) VALUES ('zzz|^audit$|zzz', 1, 'x', 'open', now())`)
	f.exec(`SELECT dedupd.sweep('zzz|^audit$|zzz', '1s')`)
	f.exec(`TABLE dedupd.audit`)
}

// TestALeaderThatFreezesLetsClaimsGoOn stops a leader between the seal and its
// COMMIT, when it holds the lock that everybody needs.
func TestALeaderThatFreezesLetsClaimsGoOn(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, step := range []string{
		`SELECT dedupd.rotate('test', (SELECT identity FROM dedupd.generations WHERE state = 'open'), '1s')`,
		`SELECT dedupd.expire('test', '1h', '1d', '1s')`,
	} {
		tx, err := f.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(context.Background()) }()
		if _, err := tx.Exec(t.Context(), step); err != nil {
			t.Fatal(err)
		}
		f.handle(l.batch("a", "b")) // gives up after five seconds
		if err := tx.Commit(t.Context()); err == nil {
			t.Errorf("%s: the transaction was not ended", step)
		}
	}
	f.wantLanded("a", "b")
	if n := f.generation("open"); n != 1 {
		t.Errorf("generation %d is open, want 1", n)
	}
}

// TestExpiryWaitsForTransactionsUnderWay lets a generation expire while a worker is at
// its sink and a replay holds a claim of that generation. Both have read the catalog as
// it was: it must not change under them, or a copy of the dead letter would be applied
// beside it.
func TestExpiryWaitsForTransactionsUnderWay(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]func(f *fixture, l *ownedLane) (end func()){
		"a worker's": func(f *fixture, l *ownedLane) func() {
			g := newGate(f.t, f.sink)
			f.Sink = g
			done := make(chan error, 1)
			go func() { done <- f.Handle(context.Background(), []lane.Batch{l.batch("b")}) }()
			<-g.entered
			return func() {
				g.open()
				if err := <-done; err != nil {
					f.t.Error(err)
				}
			}
		},
		"a replay's": func(f *fixture, _ *ownedLane) func() {
			end := f.replayHeld(f.deadLetters()[0].ID)
			return func() {
				if got := end(); got != "applied" {
					f.t.Errorf("replayed: %s", got)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a=check"))
			f.mend()
			f.rotate() // the claim is sealed
			f.passTime(3 * time.Hour)
			end := begin(f, l)
			keeper, other := attach(t, f.db), attach(t, f.db)
			var n int
			expired := make(chan error, 1)
			go func() (err error) {
				defer func() { expired <- err }()
				n, _, err = keeper.Store.Generations().Expire(context.Background(), time.Hour, 2*time.Hour)
				return err
			}()
			for waits := false; !waits; time.Sleep(5 * time.Millisecond) {
				select {
				case err := <-expired:
					t.Errorf("%d generations expired under a transaction that knows them: %v", n, err)
					expired <- nil
					waits = true
				default:
					waits = f.waitsForLock()
				}
			}
			if g := f.generation("sealed"); g != 1 {
				t.Error("generation 1 was removed from the catalog under a transaction that knows it")
			}
			other.handle(other.acquire("kafka", "orders/1").batch("a=check"))
			end()
			if err := <-expired; err != nil || n != 1 {
				t.Errorf("%d generations expired after that, want 1: %v", n, err)
			}
			if name == "a replay's" {
				f.wantLanded("a")
			} else {
				f.wantLanded("b")
			}
		})
	}
}

// TestClaimsNeedReadCommitted claims under one snapshot for a whole transaction,
// which would not see a rotation.
func TestClaimsNeedReadCommitted(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		err := pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
			_, err := f.Store.Claim(t.Context(), tx, []string{"a"}, dedup.ClaimOptions{})
			if _, failed := tx.Exec(t.Context(), `SELECT 1`); failed != nil {
				t.Errorf("%s: the transaction has failed: %v", level, failed)
			}
			return err
		})
		if codeOf(err) != "DD005" {
			t.Errorf("%s: %v", level, err)
		}
	}
}
