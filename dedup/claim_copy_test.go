package dedup_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// TestLookUpsReadTheIndex looks many ids up in a small table. The planner would read all
// of it for that, which is right today and ruinous once the table has grown; and a
// connection may keep its plan for that long, whichever way of claiming it was made for.
func TestLookUpsReadTheIndex(t *testing.T) {
	t.Parallel()
	for name, ways := range map[string][]int{
		"copy": {1}, "on conflict": {math.MaxInt}, "copy after on conflict": {math.MaxInt, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			l := f.acquire("kafka", "orders/0")
			looks := int64(0)
			for _, copyFrom := range ways {
				f.CopyFrom = copyFrom
				for range 8 { // a prepared statement gets its lasting plan after the fifth
					f.handle(l.batch(ids("id", 500)...))
					looks++
				}
				f.handle(l.batch(ids("more", 500)...)) // and is made anew after this
				f.exec(`ANALYZE`)
				f.handle(l.batch(ids("id", 500)...))
				looks++
			}
			f.pool.Reset() // a backend reports its counts when it ends, at the latest
			var whole, index int64
			for end := time.Now().Add(20 * time.Second); index < looks && whole == 0; {
				if time.Now().After(end) {
					t.Fatalf("the index was read %d times in %d looks", index, looks)
				}
				time.Sleep(10 * time.Millisecond)
				if err := f.pool.QueryRow(t.Context(), `SELECT seq_scan, idx_scan FROM pg_stat_user_tables
					WHERE relid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'dedupd.claims_root'::regclass) ORDER BY n_tup_ins DESC LIMIT 1`).Scan(&whole, &index); err != nil {
					t.Fatal(err)
				}
			}
			if whole != 0 {
				t.Errorf("the claims were read whole %d times", whole)
			}
		})
	}
}

// TestTheSinkIsPlannedAsEver has a sink read what was set for the look-ups.
func TestTheSinkIsPlannedAsEver(t *testing.T) {
	bothWays(t, func(t *testing.T, f *fixture) {
		l := f.acquire("kafka", "orders/0")
		f.handle(l.batch("a"))
		writes := 0
		f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			var seqscan string
			if err := tx.QueryRow(ctx, `SHOW enable_seqscan`).Scan(&seqscan); err != nil {
				return err
			}
			if writes++; seqscan != "on" {
				t.Errorf("enable_seqscan is %s", seqscan)
			}
			return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
		})
		f.handle(l.batch("a", "b")) // a look-up that finds something, too
		if writes != 1 {
			t.Errorf("the sink was called %d times", writes)
		}
	})
}

// TestLargeGroupsAreCopied meets concurrent duplicates with groups just below and at the
// number from which a release copies.
func TestLargeGroupsAreCopied(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]float64{255: 0, 256: 1} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			l := f.acquire("kafka", "orders/0")
			f.meetDuplicate(l, true, ids("more", n-2)...)
			f.wantBooks(l, books{applied: int64(n - 2), resent: 2, next: int64(n)})
			if got := testutil.ToFloat64(f.Metrics.Retries("concurrent_duplicate")); got != want {
				t.Errorf("%g retries for a concurrent duplicate, want %g", got, want)
			}
		})
	}
}
