package nats

import (
	"flag"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// A test mostly waits for its server, so more of them than there are cores run at
	// a time. The command line still has the last word.
	_ = flag.Set("test.parallel", "8")
	goleak.VerifyTestMain(m)
}
