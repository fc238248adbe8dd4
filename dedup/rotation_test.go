package dedup_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/lane"
)

// rotate seals the open generation.
func (f *fixture) rotate() {
	f.t.Helper()
	if led, err := f.Store.Generations().Prepare(f.t.Context()); err != nil || !led {
		f.t.Fatalf("prepare: led %v, %v", led, err)
	}
	rotated, led, _, err := f.Store.Generations().Rotate(f.t.Context(), f.generation("open"))
	if err != nil || !led || !rotated {
		f.t.Fatalf("rotate: %v, led %v, %v", rotated, led, err)
	}
}

// generation is the number of the oldest generation in that state; 0: none.
func (f *fixture) generation(state string) int {
	f.t.Helper()
	for _, g := range f.generations() {
		if g.State == state {
			return g.Number
		}
	}
	return 0
}

func (f *fixture) generations() []generations.Generation {
	f.t.Helper()
	all, err := f.Store.Generations().List(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	return all
}

// buildFilters builds all filters there are to build.
func (f *fixture) buildFilters() (chunks int) {
	f.t.Helper()
	for {
		n, led, err := f.Store.Generations().BuildFilter(f.t.Context())
		if err != nil || !led {
			f.t.Fatalf("build a filter: led %v, %v", led, err)
		}
		if n == 0 {
			return chunks
		}
		chunks++
	}
}

func (f *fixture) loadFilters() {
	f.t.Helper()
	if err := f.Store.Generations().LoadFilters(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
}

// wantProbes checks the counts of look-ups in sealed generations since the start.
func (f *fixture) wantProbes(excluded, found, falsePositive, unfiltered float64) {
	f.t.Helper()
	for result, want := range map[string]float64{"excluded": excluded, "found": found, "false_positive": falsePositive, "unfiltered": unfiltered} {
		if got := testutil.ToFloat64(f.Metrics.Probes(result)); got != want {
			f.t.Errorf("%g probes ended as %s, want %g", got, result, want)
		}
	}
}

func ids(prefix string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprint(prefix, i)
	}
	return all
}

func TestClaimsAreKnownAfterRotations(t *testing.T) { bothWays(t, testClaimsAreKnownAfterRotations) }

func testClaimsAreKnownAfterRotations(t *testing.T, f *fixture) {
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b"))
	f.rotate()
	f.handle(l.batch("b", "c"))
	f.rotate()
	f.handle(l.batch("a", "c", "d", "a=other"))
	f.wantLanded("a", "b", "c", "d")
	f.wantBooks(l, books{applied: 4, resent: 3, conflicts: 1, next: 8})
	// The conflict's original is found in its generation, too.
	f.wantDead("conflict@7")

	var claims []string
	rows, err := f.pool.Query(t.Context(), `SELECT generation || ':' || position FROM dedupd.claims ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var c string
		if err := rows.Scan(&c); err != nil {
			t.Fatal(err)
		}
		claims = append(claims, c)
	}
	if want := []string{"1:0", "1:1", "2:3", "3:6"}; !slices.Equal(claims, want) {
		t.Errorf("claims at %q, want %q", claims, want)
	}
}

// TestFiltersSpareLookUps rotates with filters in several chunks: what was claimed is
// found, what was not is hardly ever looked up.
func TestFiltersSpareLookUps(t *testing.T) { bothWays(t, testFiltersSpareLookUps) }

func testFiltersSpareLookUps(t *testing.T, f *fixture) {
	f.Store.Generations().ChunkClaims = 300
	l := f.acquire("kafka", "orders/0")
	old := ids("old-", 1000)
	f.handle(l.batch(old...))
	f.rotate()
	if n := f.buildFilters(); n != 4 {
		t.Errorf("the filter has %d chunks, want 4", n)
	}
	for _, g := range f.generations() {
		if g.State == "sealed" && (g.Claims != 1000 || !g.Exact || !g.FilterComplete || g.FilterBytes < 2000) {
			t.Errorf("generation %+v", g)
		}
	}
	f.loadFilters()
	if f.Store.Generations().FiltersBehind() || f.Store.Generations().FilterBytes() < 2000 {
		t.Errorf("filters behind: %v, %d bytes", f.Store.Generations().FiltersBehind(), f.Store.Generations().FilterBytes())
	}
	f.handle(l.batch(ids("new-", 1000)...))
	f.handle(l.batch(old...))
	f.wantBooks(l, books{applied: 2000, resent: 1000, next: 3000})
	excluded, falsePositive := testutil.ToFloat64(f.Metrics.Probes("excluded")), testutil.ToFloat64(f.Metrics.Probes("false_positive"))
	if excluded+falsePositive > 1000 || excluded < 980 {
		t.Errorf("%g of 1000 new ids were excluded, %g not", excluded, falsePositive)
	}
	f.wantProbes(excluded, 1000, falsePositive, 0)
}

// TestTimeOrderedIDsNeedNoProbes claims UUIDv7 ids: the zone maps keep new ones
// out of the old generations without any filter.
func TestTimeOrderedIDsNeedNoProbes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	at := 0
	batch := func(n int) lane.Batch {
		list := make([]string, n)
		for i := range list {
			at++
			list[i] = fmt.Sprintf("%08x-%04x-7000-8000-%012x", 0x019aa000+at>>16, at&0xffff, at*7919)
		}
		return l.batch(list...)
	}
	first := batch(100)
	f.handle(first)
	for range 3 {
		f.rotate()
		f.handle(batch(100))
	}
	f.wantProbes(0, 0, 0, 0)
	again := l.batchAt(l.at)
	again.Messages = slices.Clone(first.Messages)
	for i := range again.Messages {
		again.Messages[i].Position.Offset = l.at + int64(i)
	}
	again.Next = l.at + 100
	f.handle(again)
	f.wantBooks(l, books{applied: 400, resent: 100, next: 500})
	f.wantProbes(0, 100, 0, 0)
}

func TestTheBudgetOfFiltersIsKept(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Store.Generations().ChunkClaims = 300
	l := f.acquire("kafka", "orders/0")
	var all []string
	for g := range 4 {
		list := ids(fmt.Sprint(g, "-"), 900)
		all = append(all, list...)
		f.handle(l.batch(list...))
		f.rotate()
		f.buildFilters()
	}
	f.loadFilters()
	whole := f.Store.Generations().FilterBytes()
	for _, budget := range []int64{whole / 2, whole / 3, 100, 0} {
		other := attach(t, f.db)
		other.Store.Generations().FilterMemory = budget
		other.loadFilters()
		if n := other.Store.Generations().FilterBytes(); n > budget || n < budget-whole/12 {
			t.Errorf("%d bytes of filters within %d", n, budget)
		}
		if other.Store.Generations().FiltersBehind() {
			t.Errorf("with a budget of %d it never comes to rest", budget)
		}
		lane := other.acquire("kafka", "orders/0")
		other.handle(lane.batch(append(slices.Clone(all), fmt.Sprint("new-", budget))...))
	}
	// A newer generation's filter replaces an older one's.
	f.Store.Generations().FilterMemory = whole
	f.acquire("kafka", "orders/0")
	l = f.acquire("kafka", "orders/0")
	f.handle(l.batch(ids("last-", 900)...))
	f.rotate()
	f.buildFilters()
	f.loadFilters()
	if n := f.Store.Generations().FilterBytes(); n > whole {
		t.Errorf("%d bytes of filters within %d", n, whole)
	}
	f.handle(l.batch(append(slices.Clone(all), ids("last-", 900)...)...))
	if n := len(f.landed()); n != 4*900+4+900 {
		t.Errorf("%d rows landed", n)
	}
}

// TestBrokenFiltersAreBuiltAgain damages stored filters in every part.
func TestBrokenFiltersAreBuiltAgain(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{
		`UPDATE dedupd.filters SET data = set_byte(data, 100, get_byte(data, 100) # 1)`,
		`UPDATE dedupd.filters SET data = set_byte(data, 8, 3)`,
		`UPDATE dedupd.filters SET data = '\x'`,
		`UPDATE dedupd.filters SET data = substring(data for 1000)`,
		`UPDATE dedupd.filters SET claims = claims + 1`,
		`UPDATE dedupd.filters SET last = NOT last`,
		`UPDATE dedupd.filters SET last_key = gen_random_uuid()`,
		`UPDATE dedupd.filters SET chunk = 3 - chunk WHERE chunk IN (0, 3)`,
		`DELETE FROM dedupd.filters WHERE chunk = 1`,
		`DELETE FROM dedupd.filters WHERE chunk = 0`,
		`DELETE FROM dedupd.filters`,
	} {
		t.Run(damage, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.Store.Generations().ChunkClaims = 300
			l := f.acquire("kafka", "orders/0")
			old := ids("old-", 1000)
			f.handle(l.batch(old...))
			f.rotate()
			f.buildFilters()
			if _, err := f.pool.Exec(t.Context(), damage); err != nil {
				t.Skip("the database itself refuses it: ", err)
			}
			f.loadFilters()
			f.handle(l.batch(old...))
			f.wantBooks(l, books{applied: 1000, resent: 1000, next: 2000})
			for range 2 {
				f.buildFilters()
				f.loadFilters()
			}
			if f.Store.Generations().FiltersBehind() {
				t.Error("the filter was not built again")
			}
			f.handle(l.batch(ids("new-", 1000)...))
			f.handle(l.batch(old...))
			f.wantBooks(l, books{applied: 2000, resent: 2000, next: 4000})
			if n := testutil.ToFloat64(f.Metrics.Probes("excluded")); n < 980 {
				t.Errorf("the filter that was built again excluded %g of 1000", n)
			}
		})
	}
}

// TestExpiryFollowsTheSlowestLane moves the database's clock.
func TestExpiryFollowsTheSlowestLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	fast, slow := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(fast.batch("a"), slow.batch("b"))
	f.rotate()
	expire := func() int {
		n, led, err := f.Store.Generations().Expire(t.Context(), 24*time.Hour, 28*24*time.Hour)
		if err != nil || !led {
			t.Fatalf("expire: led %v, %v", led, err)
		}
		return n
	}
	f.passTime(25 * time.Hour)
	if n := expire(); n != 0 {
		t.Errorf("%d generations expired though no lane had moved", n)
	}
	f.caughtUp(fast)
	if n := expire(); n != 0 {
		t.Errorf("%d generations expired though one lane had not moved", n)
	}
	f.caughtUp(slow)
	if n := expire(); n != 1 {
		t.Errorf("%d generations expired though every lane had passed them, want 1", n)
	}
	if _, err := f.Store.Generations().Drop(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	f.handle(fast.batch("a"))
	f.wantLanded("a", "b", "a")

	// A lane that never moves holds claims for so long, and no longer.
	f.rotate()
	f.passTime(27 * 24 * time.Hour)
	f.caughtUp(fast)
	if n := expire(); n != 0 {
		t.Errorf("%d generations expired before max_hold", n)
	}
	f.passTime(30 * 24 * time.Hour)
	if n := expire(); n != 1 {
		t.Errorf("%d generations expired after max_hold, want 1", n)
	}
}

// passTime sets the database's clock ahead of the real one.
func (f *fixture) passTime(d time.Duration) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), fmt.Sprintf(
		`CREATE OR REPLACE FUNCTION dedupd.clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$ SELECT pg_catalog.now() + interval '%d seconds' $$`, int64(d.Seconds()))); err != nil {
		f.t.Fatal(err)
	}
}

// caughtUp sends a lane's heartbeat, and reports whether its row is as reported.
func (f *fixture) caughtUp(l *ownedLane) (asReported bool) {
	f.t.Helper()
	gone, err := f.Store.Heartbeat(f.t.Context(), []lane.Heartbeat{{Lane: l.Lane, Epoch: l.Epoch, Next: l.at, Checkpoint: l.Checkpoint}})
	if err != nil {
		f.t.Fatal(err)
	}
	return len(gone) == 0
}

// TestAFilterBuiltAnewWithOtherChunksIsNotMixed has the first chunk of a filter in memory
// when the stored filter is built anew and its chunks end elsewhere (a claim was
// forgotten, or another version cuts other chunks). The keys between the old end of the
// first chunk and the new one are in neither.
func TestAFilterBuiltAnewWithOtherChunksIsNotMixed(t *testing.T) {
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
	if _, err := f.pool.Exec(t.Context(), `DELETE FROM dedupd.filters`); err != nil {
		t.Fatal(err)
	}
	f.Store.Generations().ChunkClaims = 400
	f.buildFilters()
	f.Store.Generations().FilterMemory = 1 << 20
	f.loadFilters()
	f.handle(l.batch(old...))
	f.wantBooks(l, books{applied: 1000, resent: 1000, next: 2000})
}
