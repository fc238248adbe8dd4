package dedup_test

import (
	"strings"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
)

// TestSample compares what it reads at once with what single questions do.
func TestSample(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	sample := func() dedup.Sample {
		t.Helper()
		v, err := f.Store.Sample(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if v := sample(); len(v.Lanes) != 0 || len(v.Generations) != 1 || v.Stream == nil || v.LatestDuplicate != nil || v.Database == "" {
		t.Errorf("a scope without lanes: %+v", v)
	}
	known, unknown := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(known.batch("a", "b", "c"))
	f.handle(known.batch("a", "d"))
	f.caughtUp(known)
	_ = unknown
	v := sample()
	books, err := f.Store.Books(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(v.Lanes) != 2 || len(books) != 2 {
		t.Fatalf("%d lanes, %d books, want 2", len(v.Lanes), len(books))
	}
	for i, b := range books {
		l := v.Lanes[i]
		if l.Source != b.Source || l.Lane != b.Lane || l.Fetched != b.Fetched || l.Applied != b.Applied || l.Duplicates != b.Duplicates || l.Owner != b.Owner ||
			l.NextPosition != b.NextPosition || (l.Lag == nil) != (b.Lag == nil) || (l.StreamTime == nil) != (b.StreamTime == nil) || !l.Ordered || l.InQuarantine() {
			t.Errorf("%+v, the books say %+v", l, b)
		}
	}
	if v.Lanes[0].Fetched != 5 || v.Lanes[0].Duplicates != 1 || v.Lanes[0].Lag == nil || v.Lanes[1].StreamTime != nil || v.Stream != nil {
		t.Errorf("%+v", v)
	}
	f.exec(`INSERT INTO dedupd.duplicate_ages (scope, day, up_to_seconds, duplicates) VALUES ('test', (now() AT TIME ZONE 'UTC')::date, 300, 2),
		('test', (now() AT TIME ZONE 'UTC')::date - 9, 86400, 1)`)
	f.exec(`UPDATE dedupd.lanes SET acquisitions = 3 WHERE lane = 'orders/1'`)
	v = sample()
	if v.LatestDuplicate == nil || *v.LatestDuplicate != 300 || !v.Lanes[1].InQuarantine() {
		t.Errorf("%+v", v)
	}
	// What was set for the sample ends with it.
	var timeout string
	for range 4 {
		if err := f.pool.QueryRow(t.Context(), `SELECT current_setting('statement_timeout')`).Scan(&timeout); err != nil || timeout != "0" {
			t.Fatalf("statement_timeout is %s; %v", timeout, err)
		}
	}
	// A lock that lasts makes it fail, soon.
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `LOCK TABLE dedupd.lanes IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := f.Store.Sample(t.Context()); err == nil || !strings.Contains(err.Error(), "55P03") || time.Since(began) > 20*time.Second {
		t.Errorf("%v after %s", err, time.Since(began))
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	sample()
}
