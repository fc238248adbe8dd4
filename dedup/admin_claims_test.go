package dedup_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/lane"
)

// as connects with another role.
func as(t *testing.T, db *pgtest.DB, role string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, `SET ROLE `+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func (f *fixture) find(id string) dedup.ClaimAnswer {
	f.t.Helper()
	a, err := f.Store.FindClaim(f.t.Context(), id)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func TestFindingAClaim(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("old", "bad=1", "bad=2"))
	f.rotate()
	f.handle(l.batch("new"))

	a := f.find("old")
	if c := a.Claim; !a.Found || c == nil || c.Generation != 1 || c.State != "sealed" || *c.Source != "kafka" || *c.Lane != "orders/0" || *c.Position != 0 ||
		c.Fingerprint == nil || c.AgeSeconds < 0 || c.AgeSeconds > 60 || time.Since(c.ClaimedAt) > time.Minute || len(a.DeadLetters) != 0 {
		t.Errorf("%+v, %+v", a, c)
	}
	if a := f.find("new"); !a.Found || a.Claim.Generation != 2 || a.Claim.State != "open" || *a.Claim.Position != 3 {
		t.Errorf("%+v", a.Claim)
	}
	if a := f.find("bad"); !a.Found || len(a.DeadLetters) != 1 || a.DeadLetters[0].Class != "conflict" {
		t.Errorf("%+v", a)
	}
	// A key is the id of its own.
	if a := f.find(claimkey.Of("old").String()); !a.Found || a.Claim.Generation != 1 {
		t.Errorf("by its key: %+v", a)
	}
	never := f.find("never")
	if never.Found || never.Claim != nil || never.DeadLetters == nil {
		t.Errorf("%+v", never)
	}
	if first := f.generations()[0].OpenedAt; !never.ClaimsSince.Equal(*first) {
		t.Errorf("claims are said to be kept since %s, want %s", never.ClaimsSince, first)
	}

	text, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"found":true`, `"generation":1`, `"key":"` + claimkey.Of("old").String() + `"`, `"fingerprint":"`, `"dead_letters":[]`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
	f.exec(`DELETE FROM dedupd.lanes`)
	if c := f.find("old").Claim; c.Source != nil || c.LaneNumber == nil {
		t.Errorf("a forgotten lane: %+v", c)
	}
}

// TestOnlyWhatCountsIsFound leaves out generations that have expired, and says since when
// claims are kept.
func TestOnlyWhatCountsIsFound(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("old"))
	f.rotate()
	f.passTime(48 * time.Hour)
	f.caughtUp(l)
	other := attach(t, f.db) // its catalog stays behind
	if a := other.find("old"); !a.Found || a.Claim.AgeSeconds < 47*3600 {
		t.Fatalf("%+v", a)
	}
	if n, _, err := f.Store.Generations().Expire(t.Context(), time.Hour, 28*24*time.Hour); err != nil || n != 1 {
		t.Fatalf("expire: %d, %v", n, err)
	}
	a := other.find("old")
	if a.Found {
		t.Errorf("a claim that nobody counts any more: %+v", a.Claim)
	}
	if open := f.generation("open"); open != 2 || !a.ClaimsSince.Equal(*f.generations()[1].OpenedAt) {
		t.Errorf("claims are said to be kept since %s", a.ClaimsSince)
	}
}

func TestAMissingTableIsReported(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	f.rotate()
	f.exec(`DROP TABLE dedupd.claims_test_1`)
	_, find := f.Store.FindClaim(t.Context(), "b")
	_, forget := f.Store.ForgetClaim(t.Context(), "ann@host", "b")
	for _, err := range []error{find, forget} {
		if err == nil || !strings.Contains(err.Error(), `the table "dedupd"."claims_test_1" of generation 1 is gone`) {
			t.Errorf("%v", err)
		}
	}
}

// TestForgettingAClaim applies the id once more, whatever generation it was in
// and whatever a filter says.
func TestForgettingAClaim(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("old", "kept"))
	f.rotate()
	f.buildFilters()
	f.loadFilters()
	f.handle(l.batch("new"))
	other := attach(t, f.db)
	f.rotate() // the other's catalog is behind
	f.handle(l.batch("newest"))
	for i, id := range []string{"old", "new", "newest"} {
		gone, err := other.Store.ForgetClaim(t.Context(), "ann@host", id)
		if err != nil {
			t.Fatal(err)
		}
		if gone == nil || gone.Generation != i+1 || *gone.Lane != "orders/0" {
			t.Errorf("%s: %+v", id, gone)
		}
		line, detail := f.audited()
		if line != "test ann@host claims forget "+id || detail["generation"] != float64(i+1) || detail["key"] != claimkey.Of(id).String() || detail["lane"] != "orders/0" {
			t.Errorf("audit: %s, %v", line, detail)
		}
		if f.find(id).Found {
			t.Errorf("%s is still claimed", id)
		}
	}
	gone, err := other.Store.ForgetClaim(t.Context(), "ann@host", "old")
	if err != nil || gone != nil || f.audits() != 3 {
		t.Errorf("once more: %+v, %v, %d lines of audit", gone, err, f.audits())
	}
	f.handle(l.batch("old", "new", "newest", "kept"))
	f.wantLanded("old", "kept", "new", "newest", "old", "new", "newest")
	f.wantBooks(l, books{applied: 7, resent: 1, next: 8})
}

// TestForgettingKeepsRotationsOut: no generation is sealed between the look-up in one
// table and the next.
func TestForgettingKeepsRotationsOut(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	// The delete waits for this row, and holds the rotation lock meanwhile.
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `SELECT FROM dedupd.claims_test_1 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := f.Store.ForgetClaim(context.Background(), "ann@host", "a")
		done <- err
	}()
	f.awaitLock()
	if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	var rotated bool
	var pg *pgconn.PgError
	err = f.pool.QueryRow(t.Context(), `SELECT dedupd.rotate('test', (SELECT identity FROM dedupd.generations WHERE state = 'open'), '50ms')`).Scan(&rotated)
	if !errors.As(err, &pg) || pg.Code != "55P03" {
		t.Errorf("a rotation meanwhile: %v, %v", rotated, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if f.find("a").Found {
		t.Error("still claimed")
	}
}

// TestAPoisonedIDIsSetFree is how a dead letter is repaired: its id is forgotten and sent
// again.
func TestAPoisonedIDIsSetFree(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.MaxDeadShare = 1
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a=check"))
	f.wantDead("poison@0")
	if a := f.find("a"); !a.Found || len(a.DeadLetters) != 1 || a.DeadLetters[0].Class != "poison" {
		t.Fatalf("%+v", a)
	}
	if err := f.Handle(t.Context(), []lane.Batch{l.batch("a=fine")}); err != nil {
		t.Fatal(err)
	}
	f.wantLanded()
	if _, err := f.Store.ForgetClaim(t.Context(), "ann@host", "a"); err != nil {
		t.Fatal(err)
	}
	f.handle(l.batch("a=fine"))
	f.wantLanded("a")
}
