package dedup_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
)

// A group that is retried after the answer to COMMIT was lost must find out anew what
// becomes of its messages: in between, others may have claimed its ids, or forgotten them.
// What the first try found no longer counts.
func TestARetryForgetsWhatTheLastTryFound(t *testing.T) { bothWays(t, testARetryForgets) }

func testARetryForgets(t *testing.T, f *fixture) {
	broken, cut := f.attachBroken()
	broken.CopyFrom, broken.OnDuplicate = f.CopyFrom, policy.DuplicateDeadLetter
	mine, other := broken.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	// lose loses a hand-over's COMMIT before the server has it; meanwhile happens
	// before the next try.
	lose := func(meanwhile func(), ids ...string) {
		t.Helper()
		cut.then.Store(&meanwhile)
		cut.armed.Store(1)
		broken.handle(mine.batch(ids...))
		if cut.armed.Load() != 0 {
			t.Fatal("no COMMIT was lost")
		}
	}
	// In the first try a and b are new, and a's claim is for its copy, too; in the
	// second, only c is new.
	lose(func() { f.handle(other.batch("a", "b")) }, "a", "b", "c", "a")
	f.wantLanded("a", "b", "c")
	f.wantBooks(mine, books{applied: 1, resent: 3, next: 4})
	f.wantDead("duplicate@0", "duplicate@1", "duplicate@3")
	if n := count(t, broken.reg, "dedupd_duplicate_age_seconds"); n != 3 {
		t.Errorf("%d ages of three duplicates were counted", n)
	}

	// In the first try d was another's; in the second it is new.
	f.handle(other.batch("d"))
	lose(func() { f.forget("d") }, "d", "e")
	f.wantLanded("a", "b", "c", "d", "d", "e") // d was forgotten, and may be applied anew
	f.wantBooks(mine, books{applied: 3, resent: 3, next: 6})
	f.wantDead("duplicate@0", "duplicate@1", "duplicate@3")
	if n := count(t, broken.reg, "dedupd_duplicate_age_seconds"); n != 3 {
		t.Errorf("%d ages of three duplicates were counted", n)
	}

	// Lost both times: it counts once.
	f.handle(other.batch("g"))
	lose(func() {}, "g", "h")
	f.wantBooks(mine, books{applied: 4, resent: 4, next: 8})
	if n := count(t, broken.reg, "dedupd_duplicate_age_seconds"); n != 4 {
		t.Errorf("%d ages of four duplicates were counted", n)
	}
	if n := count(t, broken.reg, "dedupd_dead_letters_total"); n != 4 {
		t.Errorf("%d of four dead letters were counted", n)
	}

	// A message without an id whose dead letter is forgotten in between is nobody's copy
	// any more.
	broken.handle(mine.batch(""))
	f.exec(`UPDATE dedupd.lanes SET next_position = next_position - 1 WHERE lane = 'orders/0'`)
	mine.at--
	lose(func() {
		f.exec(`DELETE FROM dedupd.claims_root WHERE position = 8; DELETE FROM dedupd.dead_letters WHERE class = 'no_id'`)
	}, "")
	f.wantBooks(mine, books{applied: 4, resent: 4, dead: 2, next: 9})
	deadLetters, err := f.Store.DeadLetters(t.Context(), dedup.DeadLetterFilter{Classes: []string{"no_id"}})
	if err != nil || len(deadLetters) != 1 {
		t.Fatalf("dead letters: %+v, %v", deadLetters, err)
	}
	if d := deadLetters[0]; d.OriginalPosition != nil || d.OriginalLane != nil {
		t.Errorf("a message whose place nobody had claimed has an original: %+v", d)
	}
}

// count is a counter's value, or how often a histogram was observed, over all
// labels.
func count(t *testing.T, reg *prometheus.Registry, name string) (n int) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		found = true
		for _, m := range family.GetMetric() {
			n += int(m.GetCounter().GetValue()) + int(m.GetHistogram().GetSampleCount())
		}
	}
	if !found {
		t.Fatalf("there is no metric %s", name)
	}
	return n
}

// A claim may be forgotten between being met and being looked up. The error reads like
// any of the server's. Here a trigger keeps the claim from being made at all.
func TestAClaimThatVanishes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	if _, err := f.pool.Exec(t.Context(), `
		CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
		DO $$ BEGIN EXECUTE (SELECT format('CREATE TRIGGER lose BEFORE INSERT ON dedupd.%I FOR EACH ROW EXECUTE FUNCTION lose()', table_name)
			FROM dedupd.generations WHERE state = 'open'); END $$`); err != nil {
		t.Fatal(err)
	}
	err := f.Handle(t.Context(), []lane.Batch{l.batch("b")})
	if pg := (*pgconn.PgError)(nil); !errors.As(err, &pg) || pg.Code != "40001" {
		t.Fatalf("Handle: %v", err)
	}
	if !strings.Contains(err.Error(), "claim: ERROR: a claim vanished") {
		t.Errorf("the error reads %q", err)
	}
}
