package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/lane"
)

func newStore(t *testing.T, pool *pgxpool.Pool, schema, scope string) *dedup.Store {
	t.Helper()
	s, err := dedup.NewStore(dedup.StoreConfig{FilterMemory: 1 << 20, Pool: pool, Schema: schema, Scope: scope, Owner: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestManyPodsMigrateAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var all sync.WaitGroup
	var mu sync.Mutex
	worked := 0
	for i := range 8 {
		store := newStore(t, db.Pool(t), "dedupd", fmt.Sprint("scope-", i%2))
		all.Go(func() {
			applied, err := store.Schema().Migrate(t.Context())
			if err == nil {
				err = store.Load(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
			if len(applied) > 0 {
				mu.Lock()
				worked++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if worked != 1 {
		t.Errorf("%d of 8 applied the migrations, want 1", worked)
	}
}

func TestSchemasOfOtherVersionsAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	store := newStore(t, pool, "dedupd", "test")
	var wrong *schema.Error
	if err := store.Load(t.Context()); !errors.As(err, &wrong) || wrong.Have != 0 || !strings.Contains(err.Error(), "dedupd migrate up") {
		t.Errorf("no schema: %v", err)
	}
	if _, err := store.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := newStore(t, pool, "dedupd", "other").Load(t.Context()); !errors.As(err, &wrong) || !strings.Contains(err.Error(), `no scope "other"`) {
		t.Errorf("no scope: %v", err)
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO dedupd.migrations (version, name) VALUES (99, 'later')`); err != nil {
		t.Fatal(err)
	}
	if err := store.Load(t.Context()); !errors.As(err, &wrong) || wrong.Have != 99 || !strings.Contains(err.Error(), "newer") {
		t.Errorf("newer schema: %v", err)
	}
	if _, err := store.Schema().Migrate(t.Context()); !errors.As(err, &wrong) {
		t.Errorf("migrate on a newer schema: %v", err)
	}
	status, err := store.Schema().Migrations(t.Context())
	if err != nil || status[len(status)-1].Version != 99 || status[0].AppliedAt == nil {
		t.Errorf("status %+v, %v", status, err)
	}
}

// asRole makes a role without rights, and a pool of connections that have its rights.
func asRole(t *testing.T, db *pgtest.DB, pool *pgxpool.Pool, role string) *pgxpool.Pool {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `CREATE ROLE `+role+` LOGIN`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = pool.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	})
	return as(t, db, role)
}

// granted is a scope whose worker has no rights but the grants: in a schema with an
// awkward name.
type granted struct {
	*fixture
	role    string
	limited *pgxpool.Pool
	lane    *ownedLane
}

func newGranted(t *testing.T) *granted {
	t.Helper()
	db := pgtest.New(t)
	const schema = `De"dup`
	g := &granted{fixture: newFixture(t), role: strings.ReplaceAll(db.Name, "pgtest", "worker")}
	g.pool = db.Pool(t)
	g.limited = asRole(t, db, g.pool, g.role)
	g.exec(newStore(t, g.pool, schema, "a-b").Schema().SQL(g.role))
	g.exec(createRows + `; GRANT INSERT ON public.rows TO ` + g.role)
	g.Store = newStore(t, g.limited, schema, "a-b")
	return g
}

// exec is the owner's.
func (g *granted) exec(sql string) {
	g.t.Helper()
	if _, err := g.pool.Exec(g.t.Context(), sql); err != nil {
		g.t.Fatal(err)
	}
}

// TestLeastPrivilege runs what a DBA would: the printed SQL, with grants; then the
// worker's role does its whole work, and is kept from what it has no business with.
func TestLeastPrivilege(t *testing.T) {
	t.Parallel()
	g := newGranted(t)
	// A start with database.migrate: true and nothing to do needs no rights.
	if applied, err := g.Store.Schema().Migrate(t.Context()); err != nil || len(applied) != 0 {
		t.Fatalf("migrate without rights: %v, %v", applied, err)
	}
	g.lane = g.acquire("kafka", "orders/0")
	g.handle(g.lane.batch("a", "", "a", "b=1", "b=2"))
	g.wantBooks(g.lane, books{applied: 2, resent: 1, conflicts: 1, dead: 1, next: 5})
	g.wantDead("no_id@1", "conflict@4")
	g.CopyFrom = 1 // the other way of claiming
	g.handle(g.lane.batch("c", "a"))
	g.wantBooks(g.lane, books{applied: 3, resent: 2, conflicts: 1, dead: 1, next: 7})
	if _, led, err := g.Store.ExpireDeadLetters(t.Context(), 0); err != nil || !led {
		t.Errorf("expire: %v, %v", led, err)
	}
	g.wantEachMissed()
	// A queue confirms its checkpoint, and its rewind after its database went back.
	q := g.acquireQueue("nats")
	g.handle(q.batch("q"))
	if err := g.confirm(q, true); err != nil {
		t.Errorf("confirm: %v", err)
	}
	q = g.reacquire(q)
	if sure, err := g.Store.ConfirmRewind(t.Context(), q.Lane, q.Assignment, 0); err != nil || sure != 100 {
		t.Errorf("resume: %d, %v", sure, err)
	}
	g.lead()
	g.keepResults() // in a generation that the worker's role has made
	g.countAges()
	g.operate()
	g.wantDenied()
	// A later start must not need the owner either.
	var held *lane.HoldError
	g.exec(`REVOKE INSERT ON public.rows FROM ` + g.role)
	if err := g.Handle(t.Context(), []lane.Batch{g.lane.batch("c")}); !errors.As(err, &held) || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a missing grant: %v", err)
	}
}

// wantEachMissed wants that a right is missed once it was revoked.
func (g *granted) wantEachMissed() {
	g.t.Helper()
	lacks := func(want ...string) {
		g.t.Helper()
		if got, err := g.Store.Schema().MissingRights(g.t.Context()); err != nil || !slices.Equal(got, want) {
			g.t.Errorf("the role is said to lack %q, %v; want %q", got, err, want)
		}
	}
	lacks()
	for _, right := range []string{
		`SELECT ON "De""dup".scopes`, `INSERT ON "De""dup"."claims_root"`, `UPDATE ON "De""dup"."lanes"`, `DELETE ON "De""dup"."dead_letters"`,
		`UPDATE (reason) ON "De""dup"."dead_letters"`, `EXECUTE ON FUNCTION "De""dup"."sweep"(text, text)`, `USAGE ON SCHEMA "De""dup"`,
	} {
		g.exec("REVOKE " + right + " FROM " + g.role)
		lacks(right)
		g.exec("GRANT " + right + " TO " + g.role)
	}
	lacks()
}

// lead does a leader's work from one generation's seal to its drop.
func (g *granted) lead() {
	g.t.Helper()
	ctx, generations := g.t.Context(), g.Store.Generations()
	if led, err := generations.Prepare(ctx); err != nil || !led {
		g.t.Fatalf("prepare: %v, %v", led, err)
	}
	if rotated, led, _, err := generations.Rotate(ctx, 1); err != nil || !led || !rotated {
		g.t.Fatalf("rotate: %v, %v, %v", rotated, led, err)
	}
	if n, led, err := generations.BuildFilter(ctx); err != nil || !led || n == 0 {
		g.t.Fatalf("build a filter: %v, %v, %v", n, led, err)
	}
	if err := generations.LoadFilters(ctx); err != nil || generations.FilterBytes() == 0 {
		g.t.Fatalf("load filters: %v, %d bytes", err, generations.FilterBytes())
	}
	g.handle(g.lane.batch("a", "x"))
	g.wantBooks(g.lane, books{applied: 4, resent: 3, conflicts: 1, dead: 1, next: 9})
	g.exec(`UPDATE "De""dup".lanes SET stream_time = now() + interval '1 day'; UPDATE "De""dup".generations SET sealed_at = now() - interval '1 day' WHERE state = 'sealed'`)
	if n, led, err := generations.Expire(ctx, time.Hour, 24*time.Hour); err != nil || !led || n != 1 {
		g.t.Fatalf("expire: %v, %v, %v", n, led, err)
	}
	if led, err := generations.Drop(ctx, 1); err != nil || !led {
		g.t.Fatalf("drop: %v, %v", led, err)
	}
	if dropped, led, err := generations.Sweep(ctx); err != nil || !led || len(dropped) != 0 {
		g.t.Fatalf("sweep: %v, %v, %v", dropped, led, err)
	}
}

// keepResults has a sink's result and a service's kept, and read again.
func (g *granted) keepResults() {
	g.t.Helper()
	sink := g.Sink
	g.Sink = answering{sink}
	other := g.acquire("kafka", "orders/1")
	g.handle(other.batch("r=answer r"))
	g.Sink = sink
	for try := range 2 {
		tx, err := g.limited.Begin(g.t.Context())
		if err != nil {
			g.t.Fatal(err)
		}
		claims, err := g.Store.Claim(g.t.Context(), tx, []string{"r", "s"}, dedup.ClaimOptions{})
		if err != nil || string(claims[0].Result) != "answer r" || claims[1].IsNew != (try == 0) || !claims[1].IsNew && string(claims[1].Result) != "s" {
			g.t.Errorf("claim: %v, %v", claims, err)
		} else if claims[1].IsNew {
			err = claims[1].SetResult(g.t.Context(), tx, []byte("s"))
		}
		if err := errors.Join(err, tx.Commit(g.t.Context())); err != nil {
			g.t.Fatal(err)
		}
	}
}

// countAges counts the duplicates so far and two more, and deletes an old count.
func (g *granted) countAges() {
	g.t.Helper()
	ctx := g.t.Context()
	g.exec(`INSERT INTO "De""dup".duplicate_ages VALUES ('a-b', current_date - 500, 1, 1)`)
	if err := g.FlushAges(ctx); err != nil {
		g.t.Fatalf("flush ages: %v", err)
	}
	g.handle(g.lane.batch("a", "a"))
	if err := g.FlushAges(ctx); err != nil {
		g.t.Fatalf("flush ages again: %v", err)
	}
	all, err := g.Store.DuplicateAges(ctx, 600*24*time.Hour)
	if err != nil {
		g.t.Fatal(err)
	}
	duplicates := int64(0)
	for _, bucket := range all { // how old they are depends on how fast this runs
		duplicates += bucket.Duplicates
	}
	if duplicates != 4 {
		g.t.Fatalf("%d duplicates in the ages %+v", duplicates, all)
	}
}

// operate is what an operator may do with the worker's configuration: dead letters.
func (g *granted) operate() {
	g.t.Helper()
	ctx := g.t.Context()
	g.handle(g.lane.batch("d=check", "e=check", "f=check"))
	if r, err := g.Replay(ctx, "ann@host", g.deadLetters()[0].ID); err != nil || r.Outcome != dedup.ReplayDead {
		g.t.Fatalf("replay: %+v, %v", r, err)
	}
	g.exec(`ALTER TABLE public.rows DROP CONSTRAINT rows_value_check`)
	if r, err := g.Replay(ctx, "ann@host", g.deadLetters()[0].ID); err != nil || r.Outcome != dedup.ReplayApplied {
		g.t.Fatalf("replay: %+v, %v", r, err)
	}
	if gone, err := g.Store.DiscardDeadLetters(ctx, "ann@host", []int64{g.deadLetters()[0].ID}, nil); err != nil || len(gone) != 1 {
		g.t.Fatalf("discard: %v, %v", gone, err)
	}
	g.wantDead(fmt.Sprintf("poison@%d", g.lane.at-1))
	var audited int
	if err := g.pool.QueryRow(ctx, `SELECT count(*) FROM "De""dup".audit WHERE db_role = session_user AND subject LIKE 'dead letter %'`).Scan(&audited); err != nil || audited != 3 {
		g.t.Errorf("%d lines of audit, %v", audited, err)
	}
}

// wantDenied tries what only the owner may do.
func (g *granted) wantDenied() {
	g.t.Helper()
	ctx := g.t.Context()
	// The audit records it.
	if _, err := g.Store.ForgetClaim(ctx, "ann@host", "f"); !isDenied(err) {
		g.t.Errorf("forget a claim: %v, want insufficient_privilege", err)
	}
	if _, err := g.Store.SetPosition(ctx, "ann@host", "kafka", "orders/0", 0, true); !isDenied(err) {
		g.t.Errorf("set a position: %v, want insufficient_privilege", err)
	}
	for _, sql := range []string{
		`INSERT INTO "De""dup".audit (scope, actor, action, subject) VALUES ('a-b', 'x', 'y', 'z')`, `UPDATE "De""dup".dead_letters SET value = NULL`,
		`DELETE FROM "De""dup".lanes`, `DROP TABLE "De""dup"."claims_a-b_2"`, `DELETE FROM "De""dup"."claims_a-b_2"`,
		`DELETE FROM "De""dup".results_root`, `UPDATE "De""dup".scopes SET catalog_epoch = 0`, `CREATE TABLE "De""dup".x (y int)`,
	} {
		if _, err := g.limited.Exec(ctx, sql); !isDenied(err) {
			g.t.Errorf("%s: %v, want insufficient_privilege", sql, err)
		}
	}
}

// The database's default privileges say what everybody may call, so the grants name every
// function; and nobody else may call one, except the few that readers need.
func TestGrantsNameEveryFunction(t *testing.T) {
	t.Parallel()
	for _, defaults := range []string{`REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC`, `GRANT EXECUTE ON FUNCTIONS TO PUBLIC`} {
		db := pgtest.New(t)
		pool := db.Pool(t)
		role := strings.ReplaceAll(db.Name, "pgtest", "worker")
		limited := asRole(t, db, pool, role)
		// In this database only, by the one role that migrates.
		if _, err := pool.Exec(t.Context(), `ALTER DEFAULT PRIVILEGES `+defaults+`; `+createRows+`; GRANT INSERT ON public.rows TO `+role); err != nil {
			t.Fatal(err)
		}
		owner := newStore(t, pool, "dedupd", "test")
		if _, err := owner.Schema().Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		store := newStore(t, limited, "dedupd", "test")
		if err := owner.Schema().Grant(t.Context(), role); err != nil {
			t.Fatal(err)
		}
		var strangers, worker []string
		if err := pool.QueryRow(t.Context(), `
			SELECT coalesce(array_agg(proname::text ORDER BY proname) FILTER (WHERE EXISTS (SELECT FROM aclexplode(coalesce(proacl, acldefault('f', proowner))) WHERE grantee = 0)), '{}'),
				coalesce(array_agg(p.oid::regprocedure::text) FILTER (WHERE NOT has_function_privilege($1, p.oid, 'EXECUTE')), '{}')
			FROM pg_proc p WHERE pronamespace = 'dedupd'::regnamespace AND prorettype <> 'trigger'::regtype -- which nobody can call
			`, role).Scan(&strangers, &worker); err != nil || !slices.Equal(strangers, []string{"clock", "enter", "stream_clock"}) || len(worker) > 0 {
			t.Errorf("%s: everybody may call %q, the worker may not call %q: %v", defaults, strangers, worker, err)
		}
		if missing, err := store.Schema().MissingRights(t.Context()); err != nil || len(missing) > 0 {
			t.Errorf("%s: the role is said to lack %q, %v", defaults, missing, err)
		}
		f := newFixture(t)
		f.Store, f.pool = store, pool
		f.handle(f.acquire("kafka", "orders/0").batch("a"))
		f.wantLanded("a")
		if _, err := pool.Exec(t.Context(), `REVOKE EXECUTE ON FUNCTION dedupd.leave() FROM `+role); err != nil {
			t.Fatal(err)
		}
		if missing, err := store.Schema().MissingRights(t.Context()); err != nil || !slices.Equal(missing, []string{`EXECUTE ON FUNCTION "dedupd"."leave"()`}) {
			t.Errorf("%s: the role is said to lack %q, %v", defaults, missing, err)
		}
	}
}

func isDenied(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "42501"
}

func TestScopesShareADatabase(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	store := newStore(t, f.pool, "dedupd", "other")
	if _, err := store.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Store = store
	f.handle(f.acquire("kafka", "orders/0").batch("a"))
	f.wantLanded("a", "a") // each scope applies it once
	var claims int
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM dedupd.claims WHERE key = $1::uuid AND lane = 'orders/0'`, claimkey.Of("a").String()).Scan(&claims); err != nil || claims != 2 {
		t.Errorf("the view claims shows %d, %v", claims, err)
	}
}

func TestNamesThatNoTableCouldBear(t *testing.T) {
	t.Parallel()
	for _, scope := range []string{"", "A", "a b", "-a", strings.Repeat("a", 41), `a"b`, "ä"} {
		if _, err := dedup.NewStore(dedup.StoreConfig{Scope: scope}); err == nil {
			t.Errorf("scope %q was accepted", scope)
		}
	}
	for _, schema := range []string{strings.Repeat("s", 64), "it's", "100%", "a$$b"} {
		if _, err := dedup.NewStore(dedup.StoreConfig{Scope: "a", Schema: schema}); err == nil {
			t.Errorf("schema %q was accepted", schema)
		}
	}
}

// TestTheCatalogIsLost seals the only generation behind the processor's back:
// nothing may be skipped, and the lane must be seen to be held.
func TestTheCatalogIsLost(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	for _, sql := range []string{`UPDATE dedupd.generations SET state = 'sealed', sealed_at = now()`, `UPDATE dedupd.scopes SET catalog = gen_random_uuid()`} {
		if _, err := f.pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batch("b")}), "no scope")
	f.wantLanded("a")
}
