package kafka

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/dedupd/dedupd/internal/kafkatest"
)

func TestMain(m *testing.M) {
	// A test mostly waits for its broker, so more of them than there are cores run at
	// a time. The command line still has the last word.
	_ = flag.Set("test.parallel", "8")
	code := m.Run()
	kafkatest.Stop()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
