package crash_test

import (
	"flag"
	"testing"

	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/internal/pgtest"
)

func TestMain(m *testing.M) {
	// A cell mostly waits for the database and for back-offs, so more of them than
	// there are cores run at a time. The command line still has the last word.
	_ = flag.Set("test.parallel", "8")
	pgtest.Main(m, func() error { return goleak.Find() })
}
