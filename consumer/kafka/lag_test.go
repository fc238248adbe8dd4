package kafka

import (
	"errors"
	"testing"

	broker "github.com/dedupd/dedupd/e2e/kafka"
	"github.com/dedupd/dedupd/message"
)

// While the worker takes nothing, no fetch tells the lag; but it must go on
// rising, for that is when somebody looks at it.
func TestTheLagRisesWhileNothingIsTaken(t *testing.T) {
	onBrokers(t, func(t *testing.T, b *broker.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		w := r.start(nil)
		w.untilReady()
		r.fill(c, 0, 10)
		r.untilNext(0, 10)
		r.store.FailBefore(1000, &message.HoldError{Err: errors.New("the table is gone")})
		// More than a lane gathers, so that fetching stops.
		for range 10 {
			r.fill(c, 0, 300)
		}
		r.until("the lag counts what can't be written", func() bool { return w.lag() == 3000 })
		r.fill(c, 0, 100)
		r.until("the lag rises", func() bool { return w.lag() == 3100 })
		r.store.Heal()
		r.untilNext(0, 3110)
		r.until("the lag is gone", func() bool { return w.lag() == 0 })
	})
}
