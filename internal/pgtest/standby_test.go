package pgtest

import (
	"fmt"
	"testing"
	"time"
)

// A standby follows, knows nothing of what it didn't receive, and takes writes
// once it is promoted; the next standby can follow it.
func TestStandby(t *testing.T) {
	for _, version := range []string{"", "14.20"} {
		primary := start(t, Options{Version: version, Fsync: true})
		query(t, primary.URL("postgres"), "CREATE TABLE t (n int)")
		for generation := range 2 {
			standby, err := primary.Standby(t.Context(), fmt.Sprintf("127.0.0.1:%d", primary.port), nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := standby.Stop(); err != nil {
					t.Error(err)
				}
			})
			query(t, primary.URL("postgres"), "INSERT INTO t VALUES (1)")
			want := fmt.Sprint(generation + 1)
			for end := time.Now().Add(20 * time.Second); query(t, standby.URL("postgres"), "SELECT count(*)::text FROM t") != want; {
				if time.Now().After(end) {
					t.Fatal("the standby doesn't follow")
				}
				time.Sleep(10 * time.Millisecond)
			}
			if got := query(t, standby.URL("postgres"), "SELECT pg_is_in_recovery()::text"); got != "true" {
				t.Error("the standby is none")
			}
			if err := primary.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := standby.Promote(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := query(t, standby.URL("postgres"), "SELECT pg_is_in_recovery()::text"); got != "false" {
				t.Error("the promoted standby still is one")
			}
			primary = standby
		}
	}
}
