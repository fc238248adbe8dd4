package dedup_test

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dedupd/dedupd/lane"
)

// dropTables drops tables of claims by hand.
func (f *fixture) dropTables(generations ...int) {
	f.t.Helper()
	for _, g := range generations {
		if _, err := f.pool.Exec(f.t.Context(), fmt.Sprint(`DROP TABLE dedupd.claims_test_`, g)); err != nil {
			f.t.Fatal(err)
		}
	}
}

// TestALostNextTableIsMadeAgain drops the table that the next rotation opens.
func TestALostNextTableIsMadeAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.dropTables(2)
	rotated, led, _, err := f.Store.Generations().Rotate(t.Context(), 1)
	if err != nil || !led || rotated {
		t.Fatalf("rotated to a table that isn't there: %v, led %v, %v", rotated, led, err)
	}
	f.handle(l.batch("a", "b"))
	f.rotate()
	f.handle(l.batch("a", "b", "c"))
	f.wantLanded("a", "b", "c")
	f.wantTidy()
}

// TestALostOpenTableIsGivenUp drops the table that gets claims, with and without that of
// the next generation.
func TestALostOpenTableIsGivenUp(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepared bool
		drop     []int
		open     int
	}{
		"no next one":                 {false, []int{2}, 3},
		"with a next one":             {true, []int{2}, 3},
		"the next one's is gone, too": {true, []int{2, 3}, 3},
		"and a sealed one's":          {true, []int{1, 2, 3}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			l := f.acquire("kafka", "orders/0")
			f.handle(l.batch("a", "b"))
			f.rotate()
			f.handle(l.batch("c"))
			if c.prepared {
				if _, err := f.Store.Generations().Prepare(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			f.dropTables(c.drop...)
			wantHold(t, f.Handle(t.Context(), []lane.Batch{l.batchAt(l.at, "a", "c", "d")}), `claims_test_`)

			other := attach(t, f.db)
			given, err := other.Store.Generations().AcceptMissing(t.Context(), "tester")
			if err != nil {
				t.Fatal(err)
			}
			want := slices.DeleteFunc(slices.Clone(c.drop), func(g int) bool { return g == 3 })
			if slices.Sort(given); !slices.Equal(given, want) {
				t.Errorf("gave up %d, want %d", given, want)
			}
			if again, err := other.Store.Generations().AcceptMissing(t.Context(), "tester"); err != nil || len(again) > 0 {
				t.Errorf("gave up %d once more: %v", again, err)
			}
			if open := f.generation("open"); open != c.open {
				t.Errorf("generation %d is open, want %d", open, c.open)
			}
			// The worker goes on. What the lost table held is applied again.
			f.handle(l.batch("a", "c", "d"))
			f.handle(l.batch("a", "c", "d"))
			if slices.Contains(want, 1) {
				f.wantLanded("a", "b", "c", "a", "c", "d")
			} else {
				f.wantLanded("a", "b", "c", "c", "d")
			}
			for _, g := range given {
				if _, err := f.Store.Generations().Drop(t.Context(), g); err != nil {
					t.Fatal(err)
				}
			}
			f.wantTidy()
			var audited int
			if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM dedupd.audit WHERE action = 'accept missing generation' AND actor = 'tester'`).Scan(&audited); err != nil || audited != len(want) {
				t.Errorf("%d lines of the audit, want %d: %v", audited, len(want), err)
			}
		})
	}
}

// TestAnOpenTableIsGivenUpOnce has several people give up the same one while
// leaders are at work and workers try to claim.
func TestAnOpenTableIsGivenUpOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a"))
	f.dropTables(1)
	var group sync.WaitGroup
	var given atomic.Int32
	end := make(chan struct{})
	for range 2 {
		leader := attach(t, f.db)
		group.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				if _, err := leader.Store.Generations().Prepare(t.Context()); err != nil {
					t.Error(err)
					return
				}
				if _, _, err := leader.Store.Generations().Expire(t.Context(), expiryWindow, expiryMaxHold); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var people sync.WaitGroup
	for range 4 {
		person := attach(t, f.db)
		people.Go(func() {
			all, err := person.Store.Generations().AcceptMissing(t.Context(), "tester")
			if err != nil {
				t.Error(err)
			}
			given.Add(int32(len(all)))
		})
	}
	people.Wait()
	close(end)
	group.Wait()
	if n := given.Load(); n != 1 {
		t.Errorf("%d generations were given up, want 1", n)
	}
	f.handle(l.batch("a", "b", "a"))
	f.wantLanded("a", "a", "b")
	if n := f.generation("open"); n != 2 {
		t.Errorf("generation %d is open, want 2", n)
	}
}
