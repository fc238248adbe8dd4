package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// backup copies the database as it is now. restore puts the copy in its place
// under running workers, whose connections are lost as when a server ends.
func (f *fixture) backup(others ...*fixture) (restore func()) {
	f.t.Helper()
	config, err := pgxpool.ParseConfig(f.db.URL)
	if err != nil {
		f.t.Fatal(err)
	}
	config.ConnConfig.Database = "postgres"
	admin, err := pgxpool.NewWithConfig(f.t.Context(), config)
	if err != nil {
		f.t.Fatal(err)
	}
	exec := func(sql string, args ...any) {
		if _, err := admin.Exec(context.Background(), sql, args...); err != nil {
			f.t.Fatal(err)
		}
	}
	name := pgx.Identifier{f.db.Name}.Sanitize()
	older, lost := pgx.Identifier{f.db.Name + "_older"}.Sanitize(), pgx.Identifier{f.db.Name + "_lost"}.Sanitize()
	f.t.Cleanup(func() {
		exec("DROP DATABASE IF EXISTS " + older + " WITH (FORCE)")
		exec("DROP DATABASE IF EXISTS " + lost + " WITH (FORCE)")
		admin.Close()
	})
	disconnect := func() {
		exec("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1", f.db.Name)
	}
	for _, w := range append(others, f) {
		w.pool.Reset()
	}
	disconnect()
	exec("CREATE DATABASE " + older + " TEMPLATE " + name)
	return func() {
		disconnect()
		exec("ALTER DATABASE " + name + " RENAME TO " + lost)
		exec("ALTER DATABASE " + older + " RENAME TO " + name)
	}
}

// again tries until connections that were lost are replaced, as a worker does.
func (f *fixture) again(do func() error) {
	f.t.Helper()
	var err error
	for range 10 {
		var fenced *lane.FencedError
		var held *lane.HoldError
		if err = do(); err == nil || errors.As(err, &fenced) || errors.As(err, &held) {
			break
		}
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) handleAgain(batches ...lane.Batch) {
	f.t.Helper()
	f.again(func() error { return f.Handle(f.t.Context(), batches) })
}

// wantOnce checks that the sink holds each of these ids once, and nothing else.
func (f *fixture) wantOnce(ids ...string) {
	f.t.Helper()
	got := f.landed()
	slices.Sort(got)
	slices.Sort(ids)
	if !slices.Equal(got, ids) {
		f.t.Errorf("the sink holds %d ids, %d of them different, want %d", len(got), len(slices.Compact(got)), len(ids))
	}
}

// restored is a worker that has all of a sealed generation in memory, and a
// database of which that is no longer true: the generation was open still when
// the copy was made, and has other claims now, of which it learns by a lane of
// its own.
func restored(t *testing.T, f *fixture, seals int) {
	f.handle(f.acquire("kafka", "orders/0").batch(ids("before-", 300)...))
	restore := f.backup()
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(ids("lost-", 300)...))
	f.rotate()
	f.buildFilters()
	f.loadFilters()
	f.handle(l.batch(ids("lost-later-", 10)...))
	if f.Store.Generations().FilterBytes() == 0 {
		t.Fatal("no filter is loaded")
	}
	restore()

	other := attach(t, f.db)
	other.handle(other.acquire("kafka", "orders/1").batch(ids("since-", 300)...))
	for range seals {
		other.rotate()
		other.buildFilters()
	}
	// A new lane: it has no position that went back, which would reveal everything.
	var fresh *ownedLane
	f.again(func() error {
		assigned, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: message.Lane{Source: "kafka", Name: "orders/2"}, Ordered: true, Committed: -1})
		fresh = &ownedLane{message.Lane{Source: "kafka", Name: "orders/2"}, assigned, assigned.Next, true}
		return err
	})
	for _, list := range [][]string{ids("since-", 300), ids("before-", 300), ids("lost-", 300), ids("since-", 300), ids("lost-later-", 10)} {
		f.handleAgain(fresh.batch(list...))
	}
}

// TestAWorkerSurvivesARestoreOfAnOlderCopy lets a worker remember a generation
// that the database then has with other claims: what was claimed since is a
// duplicate, and what was lost is new.
func TestAWorkerSurvivesARestoreOfAnOlderCopy(t *testing.T) {
	t.Parallel()
	for seals, name := range []string{
		"the generation is open again",
		"it is sealed again, under the same number of the catalog",
		"the catalog has gone further than the worker knows",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			restored(t, f, seals)
			f.wantOnce(slices.Concat(ids("before-", 300), ids("since-", 300), ids("lost-", 300), ids("lost-later-", 10))...)
		})
	}
}

// TestRestoreFindsASealWithoutItsOwnIdentity keeps a generation's identity when it is
// sealed: the worker then mistakes what it remembers for what there is.
func TestRestoreFindsASealWithoutItsOwnIdentity(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var rotate string
	if err := f.pool.QueryRow(t.Context(), `SELECT pg_get_functiondef('dedupd.rotate(text, uuid, text)'::regprocedure)`).Scan(&rotate); err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(rotate, "SET state = 'sealed', identity = gen_random_uuid(),", "SET state = 'sealed',", 1)
	if changed == rotate {
		t.Fatalf("rotate() is not what this test knows:\n%s", rotate)
	}
	if _, err := f.pool.Exec(t.Context(), changed); err != nil {
		t.Fatal(err)
	}
	restored(t, f, 2)
	if n := len(f.landed()); n <= 910 {
		t.Errorf("%d rows landed: nothing was applied twice, so the test would not notice", n)
	}
}

// TestATableOfTheSameNumberIsAnotherTable puts the database back under living
// connections, which have statements prepared on tables that are gone; the next rotation
// makes tables of the same names. The next generation was prepared before, so that its
// identity is the same on both timelines.
func TestATableOfTheSameNumberIsAnotherTable(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	other := attach(t, f.db)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := f.pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`CREATE SCHEMA older;
		CREATE TABLE older.scopes AS SELECT * FROM dedupd.scopes;
		CREATE TABLE older.generations AS SELECT * FROM dedupd.generations;
		CREATE TABLE older.claims AS SELECT * FROM dedupd.claims_test_1`)
	l = f.acquire("kafka", "orders/0")
	f.handle(l.batch("b"))
	f.rotate()
	f.handle(l.batch("c", "a"))
	f.rotate()
	f.buildFilters()
	f.loadFilters()
	f.handle(l.batch("d", "b", "c"))

	exec(`BEGIN;
		DROP TABLE dedupd.claims_test_2, dedupd.claims_test_3;
		CREATE TABLE dedupd.claims_test_2 (PRIMARY KEY (key)) INHERITS (dedupd.claims_root);
		TRUNCATE dedupd.claims_test_1;
		INSERT INTO dedupd.claims_test_1 SELECT * FROM older.claims;
		DELETE FROM dedupd.filters;
		DELETE FROM dedupd.generations;
		INSERT INTO dedupd.generations SELECT * FROM older.generations;
		UPDATE dedupd.scopes s SET (catalog, catalog_epoch) = (SELECT catalog, catalog_epoch FROM older.scopes o WHERE o.id = s.id);
		COMMIT`)
	l2 := other.acquire("kafka", "orders/1")
	other.handle(l2.batch("e"))
	other.rotate()
	other.handle(l2.batch("f"))
	other.rotate()
	other.handle(l2.batch("g"))

	f.handle(l.batch("a", "e", "f", "g"))
	f.handle(l.batch("b", "c", "d", "h"))
	f.wantLanded("a", "b", "c", "d", "e", "f", "g", "b", "c", "d", "h")
	f.wantBooks(l, books{applied: 8, resent: 7, next: 15})

	var stale []string
	for _, conn := range f.pool.AcquireAllIdle(t.Context()) {
		var names []string
		if err := conn.QueryRow(t.Context(), `SELECT coalesce(array_agg(name), '{}') FROM pg_prepared_statements p
			WHERE name ~ '_[0-9a-f-]{36}$' AND NOT EXISTS (SELECT FROM dedupd.generations WHERE p.name LIKE '%' || identity)`).Scan(&names); err != nil {
			t.Fatal(err)
		}
		stale = append(stale, names...)
		conn.Release()
	}
	if len(stale) > 0 {
		t.Errorf("statements about tables that are gone: %q", stale)
	}
}

// TestLanesThatWentBackAreReadAgain restores a copy in which a lane's row is older, and
// in which a lane is missing whose number goes to another. The worker is fenced, acquires
// its lanes again, and reads again what was lost.
func TestLanesThatWentBackAreReadAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	log := func(name string) (all []string) {
		for i := range 30 {
			all = append(all, fmt.Sprint(name, i), fmt.Sprint(name, i/2)) // resends among them
		}
		return all
	}
	a, b := log("a"), log("b")
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(a[:20]...))
	restore := f.backup()
	l = f.acquire("kafka", "orders/0")
	f.handle(l.batch(a[20:40]...))
	f.rotate()
	f.buildFilters()
	f.loadFilters()
	missing := f.acquire("kafka", "orders/1")
	f.handle(missing.batch(b[:20]...), l.batch(a[40:50]...))
	restore()

	other := attach(t, f.db)
	another := other.acquire("kafka", "orders/2")
	// It has the missing lane's number, and its position.
	other.handle(another.batch(append(ids("c", 18), "a5", "b5")...))

	var fenced *lane.FencedError
	for _, lost := range []*ownedLane{l, missing} {
		next := lost.batch("a59", "b59")
		for try := 0; ; try++ {
			err := f.Handle(t.Context(), []lane.Batch{next})
			if errors.As(err, &fenced) {
				break
			}
			if err == nil || try == 10 {
				t.Fatalf("a lane that went back got %v, want a fence", err)
			}
		}
		lost.at -= 2
	}
	reacquire := func(lost *ownedLane, next int64) {
		t.Helper()
		acquire := lane.Acquire{Lane: lost.Lane, Ordered: true, Committed: lost.at, Start: lost.at, OffsetMetadata: lost.OffsetMetadata, HonourReset: true}
		f.again(func() (err error) {
			lost.Assignment, err = f.Store.Acquire(t.Context(), acquire)
			return err
		})
		if lost.Next != next || !lost.Rewound {
			t.Fatalf("lane %s was acquired as %+v, want it to start at %d", lost.Lane, lost.Assignment, next)
		}
		lost.at = next
	}
	reacquire(l, 20)
	reacquire(missing, 0)
	f.handle(l.batch(a[20:]...), missing.batch(b...))
	want := slices.Concat(a, b)
	slices.Sort(want)
	f.wantOnce(append(slices.Compact(want), ids("c", 18)...)...)
	f.wantBooks(l, books{applied: 30, resent: 30, next: 60})
	f.wantBooks(missing, books{applied: 29, resent: 31, next: 60})
	f.wantBooks(another, books{applied: 19, resent: 1, next: 20})
}

// TestALostEpochIsNotGivenOutAgain loses an acquisition. The next one gets a number of
// its own, so that whoever had the lost one can't pass for the owner.
func TestALostEpochIsNotGivenOutAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.handle(f.acquire("kafka", "orders/0").batch("a"))
	restore := f.backup()
	zombie := f.acquire("kafka", "orders/0")
	restore()
	other := attach(t, f.db)
	owner := other.acquire("kafka", "orders/0")
	if owner.Epoch <= zombie.Epoch {
		t.Errorf("epoch %d was given out after %d, which was lost", owner.Epoch, zombie.Epoch)
	}
	late := zombie.batch("b")
	for try := 0; ; try++ {
		err := f.Handle(t.Context(), []lane.Batch{late})
		var fenced *lane.FencedError
		if errors.As(err, &fenced) {
			break
		}
		if err == nil || try == 10 {
			t.Fatalf("a lost owner got %v, want a fence", err)
		}
	}
	f.wantLanded("a")
	other.handle(owner.batch("b"))
	f.wantLanded("a", "b")
}

// whileLoading calls do while a store reads its next chunk of a filter.
func (f *fixture) whileLoading(do func()) {
	f.t.Helper()
	tx, err := f.pool.Begin(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(f.t.Context(), `LOCK TABLE dedupd.filters IN ACCESS EXCLUSIVE MODE`); err != nil {
		f.t.Fatal(err)
	}
	loaded := make(chan error, 1)
	ctx, cancel := context.WithTimeout(f.t.Context(), 5*time.Second)
	defer cancel()
	go func() { loaded <- f.Store.Generations().LoadFilters(ctx) }()
	f.someoneWaitsFor("filters")
	do()
	if err := tx.Rollback(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	if err := <-loaded; err != nil {
		f.t.Errorf("load filters: %v", err)
	}
}

// someoneWaitsFor returns when a lock of the table is waited for.
func (f *fixture) someoneWaitsFor(table string) {
	f.t.Helper()
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		var waits bool
		if err := f.pool.QueryRow(f.t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = to_regclass('dedupd.' || $1) AND NOT granted)`, table).Scan(&waits); err != nil {
			f.t.Fatal(err)
		}
		if waits {
			return
		}
	}
	f.t.Fatalf("nobody waits for a lock of %s", table)
}

// TestForgettingWhileFiltersLoad forgets the first chunk of a filter while the
// second is read. The second alone would pass for the filter of all keys up to
// its own last one.
func TestForgettingWhileFiltersLoad(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Store.Generations().ChunkClaims = 300
	l := f.acquire("kafka", "orders/0")
	old := ids("old-", 1000)
	f.handle(l.batch(old...))
	f.rotate()
	f.buildFilters()
	f.Store.Generations().FilterMemory = f.generations()[0].FilterBytes / 2
	f.loadFilters()
	if f.Store.Generations().FilterBytes() == 0 {
		t.Fatal("no chunk was loaded")
	}
	f.Store.Generations().FilterMemory = 1 << 20
	f.whileLoading(func() {
		f.Store.Generations().Forget("a lane went back")
		f.handle(l.batch("new"))
	})
	f.handle(l.batch(old...))
	f.wantBooks(l, books{applied: 1001, resent: 1000, next: 2001})
	f.loadFilters()
	f.handle(l.batch(old...))
	f.wantLanded(append(slices.Clone(old), "new")...)
}

// TestLoadingFiltersEndsWhenTheyAreForgotten forgets the catalog, or lets the
// generation expire, while its filter is read: there is nothing to load it into.
func TestLoadingFiltersEndsWhenTheyAreForgotten(t *testing.T) {
	t.Parallel()
	for name, do := range map[string]func(f *fixture, l *ownedLane){
		"the catalog is forgotten": func(f *fixture, _ *ownedLane) { f.Store.Generations().Forget("the database went back") },
		"the generation expires": func(f *fixture, l *ownedLane) {
			f.passTime(25 * time.Hour)
			f.caughtUp(l)
			if n, _, err := f.Store.Generations().Expire(f.t.Context(), 24*time.Hour, 28*24*time.Hour); err != nil || n != 1 {
				f.t.Fatalf("%d generations expired: %v", n, err)
			}
			f.handle(l.batch("new"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a", "b"))
			f.rotate()
			f.buildFilters()
			f.whileLoading(func() { do(f, l) })
			if n := f.Store.Generations().FilterBytes(); n != 0 {
				t.Errorf("%d bytes of filters are kept", n)
			}
		})
	}
}
