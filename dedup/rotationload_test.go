package dedup_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dedupd/dedupd/lane"
)

// rotationsUnderLoad is how often the load is rotated: DEDUPD_ROTATIONS=2000 for
// a run by hand.
func rotationsUnderLoad(t *testing.T) int {
	text := os.Getenv("DEDUPD_ROTATIONS")
	if text == "" {
		return 150
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("DEDUPD_ROTATIONS: %v", err)
	}
	return n
}

// TestRotationsUnderLoadClaimNothingTwice rotates as fast as it can while workers claim
// the same ids at nearly the same moment, so that concurrent duplicates are on both sides
// of rotations. Filters are built and loaded meanwhile, and old generations expire.
func TestRotationsUnderLoadClaimNothingTwice(t *testing.T) {
	t.Parallel()
	l := newRotationLoad(t, func(enter string) string { return enter })
	rotations := rotationsUnderLoad(t)
	l.run(rotations)
	doubles := l.doubles()
	t.Logf("as it is: %d ids were sent %d times each, over %d rotations: %d of them were applied twice; the longest hand-over took %s", l.ids(), l.lanes, rotations, doubles, l.longest.Round(time.Millisecond))
	if doubles != 0 {
		t.Errorf("%d ids were applied twice", doubles)
	}
	if got := len(l.landed()); got != l.ids() {
		t.Errorf("%d of %d ids were applied", got, l.ids())
	}
	// Otherwise it was no test: duplicates that never meet a sealed generation,
	// generations that never expire, filters that nobody asks.
	found, excluded := 0.0, 0.0
	for _, w := range l.workers {
		found += testutil.ToFloat64(w.Metrics.Probes("found"))
		excluded += testutil.ToFloat64(w.Metrics.Probes("excluded"))
	}
	if found < float64(rotations) || excluded < float64(rotations) {
		t.Errorf("%g ids were found in sealed generations and %g excluded by filters, in %d rotations", found, excluded, rotations)
	}
	if kept := len(l.generations()); kept > rotations/2 || l.expired == 0 {
		t.Errorf("%d generations of %d are kept, %d expired", kept, rotations, l.expired)
	}
	var again int
	if err := l.pool.QueryRow(t.Context(), `SELECT count(*) - count(DISTINCT key) FROM dedupd.claims`).Scan(&again); err != nil || again != 0 {
		t.Errorf("%d keys are in more than one generation, %v", again, err)
	}
}

// TestRotationLoadFindsMissingLocks removes what makes rotations exact. The same load
// must then apply ids twice, or it would prove nothing.
func TestRotationLoadFindsMissingLocks(t *testing.T) {
	t.Parallel()
	for name, without := range map[string]func(enter string) string{
		"without the rotation lock": func(enter string) string {
			at := strings.Index(enter, "PERFORM pg_catalog.pg_advisory_xact_lock_shared(")
			return enter[:at] + enter[at+strings.Index(enter[at:], ";")+1:]
		},
		"without the look at the catalog": func(enter string) string {
			return strings.Replace(enter, "IF NOT EXISTS (SELECT FROM", "IF false AND NOT EXISTS (SELECT FROM", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for round := 1; round <= 5; round++ {
				l := newRotationLoad(t, func(enter string) string {
					changed := without(enter)
					if changed == enter {
						t.Fatalf("enter() is not what this test knows:\n%s", enter)
					}
					return changed
				})
				l.run(30)
				if doubles := l.doubles(); doubles > 0 {
					t.Logf("%s: %d of %d ids were applied twice", name, doubles, l.ids())
					return
				}
			}
			t.Error("nothing was applied twice: the load would not notice a rotation that isn't exact")
		})
	}
}

// rotationLoad is workers on a database that is rotated.
type rotationLoad struct {
	*fixture
	workers []*fixture
	lanes   int
	longest time.Duration
	expired int

	mu       sync.Mutex
	moved    *sync.Cond
	progress []int // the block each worker is at
	end      int   // the block that is not begun any more; 0: not known yet
}

const (
	loadWorkers = 4
	blockIDs    = 20
	loadWindow  = 500 * time.Millisecond
)

// newRotationLoad changes enter(), and lets it pause for a moment between its
// look at the catalog and the claims: that is where a rotation must not get in.
func newRotationLoad(t *testing.T, change func(enter string) string) *rotationLoad {
	l := &rotationLoad{fixture: newFixture(t), progress: make([]int, loadWorkers)}
	l.moved = sync.NewCond(&l.mu)
	var enter string
	if err := l.pool.QueryRow(t.Context(), `SELECT pg_get_functiondef('dedupd.enter(integer, uuid, text, text, text)'::regprocedure)`).Scan(&enter); err != nil {
		t.Fatal(err)
	}
	end := strings.LastIndex(enter, "END")
	enter = change(enter[:end] + "PERFORM pg_catalog.pg_sleep(pg_catalog.random() * 0.01);\n" + enter[end:])
	if _, err := l.pool.Exec(t.Context(), enter); err != nil {
		t.Fatal(err)
	}
	for i := range loadWorkers {
		w := attach(t, l.db)
		if i%2 == 0 {
			w.CopyFrom = 1
			w.SetCopyPause(0)
		}
		w.Store.Generations().ChunkClaims = 50
		l.workers = append(l.workers, w)
	}
	l.Store.Generations().ChunkClaims = 50
	return l
}

// run lets all workers apply the same ids, block after block, while the claims
// are rotated so many times.
func (l *rotationLoad) run(rotations int) {
	var work, follow sync.WaitGroup
	ctx, stop := context.WithCancel(l.t.Context())
	for i, w := range l.workers {
		lane := w.acquire("kafka", fmt.Sprint("orders/", i))
		l.lanes++
		work.Go(func() { l.work(i, w, lane) })
		follow.Go(func() {
			for ctx.Err() == nil {
				if err := w.Store.Generations().LoadFilters(ctx); err != nil && ctx.Err() == nil {
					l.t.Errorf("load filters: %v", err)
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	defer func() {
		l.finish()
		work.Wait()
		stop()
		follow.Wait()
	}()
	for n := 1; n <= rotations && !l.t.Failed(); n++ {
		l.maintain(n)
	}
}

// work hands over one block after the other. Nobody is more than a block ahead of
// the slowest, so that all copies of an id are under way at the same time.
func (l *rotationLoad) work(i int, w *fixture, name *ownedLane) {
	for block := 0; ; block++ {
		l.mu.Lock()
		l.progress[i] = block
		l.moved.Broadcast()
		for l.end == 0 && block > 1+slices.Min(l.progress) {
			l.moved.Wait()
		}
		over := l.end > 0 && block >= l.end
		l.mu.Unlock()
		if over {
			return
		}
		ids := make([]string, blockIDs)
		for at, n := range rand.Perm(blockIDs) {
			ids[at] = fmt.Sprint(block, "/", n)
		}
		if rand.N(40) == 0 {
			w.Store.Generations().Forget("the load says so")
		}
		start := time.Now()
		if err := w.Handle(l.t.Context(), []lane.Batch{name.batch(ids...)}); err != nil {
			l.t.Errorf("worker %d: %v", i, err)
			l.finish()
			return
		}
		l.mu.Lock()
		l.longest = max(l.longest, time.Since(start))
		l.mu.Unlock()
	}
}

// finish lets all workers come to the same end.
func (l *rotationLoad) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end = max(l.end, 1+slices.Max(l.progress))
	l.moved.Broadcast()
}

// maintain rotates, builds filters, and from time to time drops what is old.
func (l *rotationLoad) maintain(n int) {
	ctx := l.t.Context()
	l.rotate()
	l.buildFilters()
	if n%10 != 0 {
		return
	}
	expired, _, err := l.Store.Generations().Expire(ctx, loadWindow, time.Hour)
	if err != nil {
		l.t.Fatal(err)
	}
	l.expired += expired
	for _, g := range l.generations() {
		if g.State == "dropping" {
			if _, err := l.Store.Generations().Drop(ctx, g.Number); err != nil {
				l.t.Fatal(err)
			}
		}
	}
}

// ids is how many different ids the workers were given.
func (l *rotationLoad) ids() int { return l.end * blockIDs }

// doubles is how many ids the sink was given more than once.
func (l *rotationLoad) doubles() (n int) {
	l.t.Helper()
	if err := l.pool.QueryRow(l.t.Context(), `SELECT count(*) FROM (SELECT FROM public.rows GROUP BY id HAVING count(*) > 1) d`).Scan(&n); err != nil {
		l.t.Fatal(err)
	}
	return n
}
