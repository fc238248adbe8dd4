package kafka

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	broker "github.com/dedupd/dedupd/e2e/kafka"
)

func TestMain(m *testing.M) {
	code := m.Run()
	broker.Stop()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
