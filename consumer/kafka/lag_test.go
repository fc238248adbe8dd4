package kafka

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/lane"
)

// While the worker takes nothing, no fetch shows the lag. It must go on rising, since
// that is when somebody looks at it.
func TestTheLagRisesWhileNothingIsTaken(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		c := r.client()
		w := r.start(nil)
		w.untilReady()
		r.fill(c, 0, 10)
		r.untilNext(0, 10)
		r.store.FailBefore(1000, &lane.HoldError{Err: errors.New("the table is gone")})
		// More than a lane may hold, so that fetching stops.
		for range 10 {
			r.fill(c, 0, 300)
		}
		r.until("the lag counts what can't be written", func() bool { return w.metric("dedupd_lag_messages") == 3000 })
		r.fill(c, 0, 100)
		r.until("the lag rises", func() bool { return w.metric("dedupd_lag_messages") == 3100 })
		r.store.Heal()
		r.untilNext(0, 3110)
		r.until("the lag is gone", func() bool { return w.metric("dedupd_lag_messages") == 0 })
	})
}

// Nor does a fetch show it whose records can't be read. After a while the source isn't
// ready, and an alert fires by that.
func TestTheLagRisesWhileNothingCanBeRead(t *testing.T) {
	t.Parallel()
	cluster := fakeCluster(t)
	r := newRig(t, kafkatest.At(cluster.ListenAddrs()[0]), 1, nil)
	c := r.client()
	w := r.start(nil)
	w.untilReady()
	r.fill(c, 0, 10)
	r.untilNext(0, 10)
	var corrupt atomic.Bool
	corrupt.Store(true)
	cluster.ControlKey(int16(kmsg.Fetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if !corrupt.Load() {
			return nil, nil, false
		}
		asked := req.(*kmsg.FetchRequest)
		res := asked.ResponseKind().(*kmsg.FetchResponse)
		for _, topic := range asked.Topics {
			answer := kmsg.NewFetchResponseTopic()
			answer.Topic, answer.TopicID = topic.Topic, topic.TopicID
			for _, p := range topic.Partitions {
				partition := kmsg.NewFetchResponseTopicPartition()
				partition.Partition, partition.ErrorCode = p.Partition, kerr.CorruptMessage.Code
				answer.Partitions = append(answer.Partitions, partition)
			}
			res.Topics = append(res.Topics, answer)
		}
		return res, nil, true
	})
	ready := func() float64 { return w.metric("dedupd_source_ready") }
	if ready() != 1 {
		t.Error("the source is not ready at first")
	}
	r.fill(c, 0, 100)
	r.until("the lag counts what can't be read", func() bool { return w.metric("dedupd_lag_messages") == 100 })
	r.fill(c, 0, 50)
	r.until("the lag rises", func() bool { return w.metric("dedupd_lag_messages") == 150 })
	r.until("the source is not ready", func() bool { return ready() == 0 })
	corrupt.Store(false)
	r.untilNext(0, 160)
	r.until("all is well again", func() bool { return w.metric("dedupd_lag_messages") == 0 && ready() == 1 })
}
