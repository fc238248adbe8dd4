package dedup_test

import (
	"testing"
	"time"
)

// TestLooksReadTheIndex looks many ids up in a small table. The planner would
// read all of it for that, which is right today and ruinous when the table has
// grown; a plan may be kept for that long.
func TestLooksReadTheIndex(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.CopyFrom = 1
	l := f.take("kafka", "orders/0")
	for range 8 { // a prepared statement gets its lasting plan after the fifth
		f.handle(l.batch(ids("id", 500)...))
	}
	if _, err := f.pool.Exec(t.Context(), `ANALYZE`); err != nil {
		t.Fatal(err)
	}
	f.handle(l.batch(ids("id", 500)...))
	f.pool.Reset() // a backend tells its counts when it ends, at the latest
	var whole, index int64
	for end := time.Now().Add(20 * time.Second); index < 9 && whole == 0; {
		if time.Now().After(end) {
			t.Fatalf("the index was read %d times in 9 looks", index)
		}
		time.Sleep(10 * time.Millisecond)
		if err := f.pool.QueryRow(t.Context(), `SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relid = 'dedupd.claims_root'::regclass
			OR relid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'dedupd.claims_root'::regclass)
			ORDER BY n_tup_ins DESC LIMIT 1`).Scan(&whole, &index); err != nil {
			t.Fatal(err)
		}
	}
	if whole != 0 {
		t.Errorf("the claims were read whole %d times", whole)
	}
}
