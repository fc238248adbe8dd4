package app

import (
	"os"
	"runtime/debug"
	"testing"
)

// Not parallel: the limits are the process's.
func TestLimitMemory(t *testing.T) {
	const mib = 1 << 20
	before, percent := debug.SetMemoryLimit(-1), debug.SetGCPercent(100)
	defer func() {
		debug.SetMemoryLimit(before)
		debug.SetGCPercent(percent)
	}()
	for _, name := range []string{"GOMEMLIMIT", "GOGC"} {
		t.Setenv(name, "") // put back by the test
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
	limit := limitMemory(128*mib, 1)
	if got := debug.SetMemoryLimit(-1); got != 176*mib {
		t.Errorf("the limit is %d MiB, want 176", got/mib)
	}
	if limit(10 * mib); debug.SetMemoryLimit(-1) != 186*mib {
		t.Errorf("the limit is %d MiB with filters, want 186", debug.SetMemoryLimit(-1)/mib)
	}
	if got := debug.SetGCPercent(100); got != 400 {
		t.Errorf("the collector runs at %d %%, want 400", got)
	}
	// What the operator has set stays.
	for _, name := range []string{"GOMEMLIMIT", "GOGC"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "300")
			debug.SetMemoryLimit(before)
			limitMemory(128*mib, 1)(10 * mib)
			if got := debug.SetMemoryLimit(-1); got != before {
				t.Errorf("the limit became %d", got)
			}
		})
	}
}
