package kafka

import (
	"os"
	"sync"
	"testing"
)

var shared struct {
	mu     sync.Mutex
	broker *Broker
	err    error
}

// Run returns the broker that all tests of this binary share, starting it with
// the first call. A broker that can't be had fails the test and says how to get
// one. TestMain must call Stop at the end.
func Run(tb testing.TB) *Broker {
	tb.Helper()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.broker == nil && shared.err == nil {
		shared.broker, shared.err = startShared()
	}
	if shared.err != nil {
		tb.Fatal(shared.err)
	}
	return shared.broker
}

func startShared() (*Broker, error) {
	if addr := os.Getenv(AddrEnv); addr != "" {
		return At(addr), nil
	}
	dir, err := os.MkdirTemp("", "dedupd-kafka-")
	if err != nil {
		return nil, err
	}
	b, err := Start(dir)
	if err != nil {
		_ = os.RemoveAll(dir)
	}
	return b, err
}

// Stop ends the shared broker, if there is one, and removes its data.
func Stop() {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if b := shared.broker; b != nil && b.dir != "" {
		_ = b.Kill() // nobody will read its data again
		_ = os.RemoveAll(b.dir)
	}
	shared.broker = nil
}
