package dedup

import (
	"context"
	"fmt"
	"math"
	"sort"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	hour = 60 * 60
	day  = 24 * hour
)

// ageBounds are the upper bounds, in seconds, of the buckets in which ages of duplicates
// are counted: fine where windows are short, coarse where they are long. The last means
// "or older". Rows with other bounds, of another version, are counted beside them and do
// no harm.
var ageBounds = [...]int64{
	1, 10, 60, 300, 900, 1800, hour, 2 * hour, 4 * hour, 6 * hour, 12 * hour,
	day, 2 * day, 3 * day, 4 * day, 5 * day, 6 * day, 7 * day, 10 * day, 14 * day, 21 * day, 28 * day, 42 * day, 60 * day, 90 * day,
	math.MaxInt64,
}

const (
	// agesKept is how many days the counts of a day are kept: a year, and a month
	// to look at it.
	agesKept = 400
	// recentSlot is half of the time over which the largest recent age is taken.
	recentSlot = 30 * time.Minute
)

// ageCounts are duplicates by age, in the buckets of ageBounds.
type ageCounts [len(ageBounds)]int64

// ageCounter counts the ages of the duplicates that have landed, except those of a commit
// whose answer was lost.
type ageCounter struct {
	mu     sync.Mutex
	counts ageCounts // not yet in the database
	// recent are the largest ages, in seconds, of the slot that began at turned
	// and of the one before.
	recent [2]float64
	turned time.Time
}

// count adds the ages of one transaction, in seconds.
func (a *ageCounter) count(seconds []float64, now time.Time) {
	if len(seconds) == 0 {
		return
	}
	var counts ageCounts
	largest := 0.0
	for _, s := range seconds {
		counts[bucketOf(s)]++
		largest = max(largest, s)
	}
	a.add(&counts)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.turn(now)
	a.recent[0] = max(a.recent[0], largest)
}

func (a *ageCounter) add(counts *ageCounts) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, n := range counts {
		a.counts[i] += n
	}
}

func bucketOf(seconds float64) int {
	return sort.Search(len(ageBounds)-1, func(i int) bool { return seconds <= float64(ageBounds[i]) })
}

// turn begins new slots as time passes.
func (a *ageCounter) turn(now time.Time) {
	switch passed := now.Sub(a.turned); {
	case passed >= 2*recentSlot:
		a.recent, a.turned = [2]float64{}, now
	case passed >= recentSlot:
		a.recent, a.turned = [2]float64{0, a.recent[0]}, a.turned.Add(recentSlot)
	}
}

// largest is the largest age, in seconds, of the last half hour to hour.
func (a *ageCounter) largest(now time.Time) float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.turn(now)
	return max(a.recent[0], a.recent[1])
}

// take takes the counts that aren't in the database yet.
func (a *ageCounter) take() (counts ageCounts) {
	a.mu.Lock()
	defer a.mu.Unlock()
	counts, a.counts = a.counts, counts
	return counts
}

// FlushAges adds the ages of duplicates that were counted since the last call to the
// database's, and sets the metric of how much of the window they use. After an error the
// counts wait for the next call. Only if the answer to a COMMIT is lost may they be in
// the database already; then they are counted twice: shares hardly change, and the late
// copy that shows a window to be too short is never left out.
//
// What was counted is lost when the process is killed: call it once more at the end.
func (p *Processor) FlushAges(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if p.Window > 0 {
		p.Metrics.windowUsed.Set(p.ages.largest(time.Now()) / p.Window.Seconds())
	}
	counts := p.ages.take()
	if counts == (ageCounts{}) {
		return nil
	}
	err := p.Store.addAges(ctx, counts)
	if err != nil {
		p.ages.add(&counts)
	}
	return err
}

// today is the database's date, by UTC: sessions may have different time zones.
func (s *Store) today() string { return `(` + s.name("clock") + `() AT TIME ZONE 'UTC')::date` }

// addAges adds to the counts of today, and deletes those of days long ago. Many workers
// do so at once: all lock the rows in the order of their key.
func (s *Store) addAges(ctx context.Context, counts ageCounts) error {
	var bounds, duplicates []int64
	for i, n := range counts {
		if n > 0 {
			bounds, duplicates = append(bounds, ageBounds[i]), append(duplicates, n)
		}
	}
	_, err := s.pool.Exec(ctx, `
		WITH old AS (DELETE FROM `+s.name("duplicate_ages")+` WHERE scope = $1 AND day < `+s.today()+` - $4::integer)
		INSERT INTO `+s.name("duplicate_ages")+` AS a (scope, day, up_to_seconds, duplicates)
		SELECT $1, `+s.today()+`, u.up_to_seconds, u.duplicates
		FROM unnest($2::bigint[], $3::bigint[]) AS u (up_to_seconds, duplicates) ORDER BY u.up_to_seconds
		ON CONFLICT (scope, day, up_to_seconds) DO UPDATE SET duplicates = a.duplicates + EXCLUDED.duplicates`,
		s.scope, bounds, duplicates, agesKept)
	if err != nil {
		return fmt.Errorf("count the ages of duplicates: %w", err)
	}
	return nil
}

// AgeBucket counts the duplicates whose age was above the bound of the bucket before, and
// at most its own.
type AgeBucket struct {
	// UpToSeconds is the upper bound; math.MaxInt64: none.
	UpToSeconds int64 `json:"up_to_seconds"`
	Duplicates  int64 `json:"duplicates"`
	// FirstDay and LastDay are the first and the last day with such a duplicate.
	FirstDay time.Time `json:"first_day"`
	LastDay  time.Time `json:"last_day"`
}

// DuplicateAges are the ages of the scope's duplicates since then, from the beginning of
// that day, youngest first. Empty buckets are left out.
func (s *Store) DuplicateAges(ctx context.Context, since time.Duration) ([]AgeBucket, error) {
	rows, _ := s.pool.Query(ctx, `
		SELECT up_to_seconds, sum(duplicates)::bigint, min(day), max(day) FROM `+s.name("duplicate_ages")+`
		WHERE scope = $1 AND day >= ((`+s.name("clock")+`() - make_interval(secs => $2)) AT TIME ZONE 'UTC')::date
		GROUP BY up_to_seconds ORDER BY up_to_seconds`, s.scope, since.Seconds())
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[AgeBucket])
	if err != nil {
		return nil, fmt.Errorf("read the ages of duplicates: %w", err)
	}
	return all, nil
}
