package kafkatest

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

// Own starts a broker for one test, which may stop and kill it; it ends with the
// test. Where the environment names another broker, the test is skipped: that
// one isn't ours to kill.
func Own(tb testing.TB) *Broker {
	tb.Helper()
	return OwnWith(tb, Options{})
}

// OwnWith is Own of a broker with options; of several nodes, it is the first.
func OwnWith(tb testing.TB, o Options) *Broker {
	tb.Helper()
	if addr := os.Getenv(AddrEnv); addr != "" {
		tb.Skip("needs a broker of its own, and " + AddrEnv + " names one that isn't ours: " + addr)
	}
	brokers, err := StartCluster(tb.TempDir(), o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		for _, b := range brokers {
			if b.proc != nil && b.proc.Ended() {
				tb.Errorf("the broker ended by itself: %v\n%s", b.proc.Err(), tail(b.log()))
			}
			if err := b.Kill(); err != nil {
				tb.Error(err)
			}
		}
	})
	return brokers[0]
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
