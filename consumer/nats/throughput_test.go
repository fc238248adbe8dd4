package nats

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func TestThroughput(t *testing.T) {
	t.Parallel()
	const n = 200_000
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, n)
	begun := time.Now()
	w := r.start(nil)
	r.wait(n)
	d := time.Since(begun)
	handled, _, calls := r.store.Counts()
	t.Logf("%d messages in %s: %.0f/s, %d handled in %d transactions", n, d.Round(time.Millisecond), n/d.Seconds(), handled, calls)
	r.until("all to be acknowledged", func() bool {
		c, err := r.consumer()
		return err == nil && c.CachedInfo().NumAckPending == 0
	})
	w.stop()
	if handled != n {
		t.Errorf("%d were handled", handled)
	}
}
