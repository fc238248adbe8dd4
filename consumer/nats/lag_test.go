package nats

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/internal/natstest"
	"github.com/dedupd/dedupd/lane"
)

// slowServer takes its time to tell a consumer's state.
type slowServer struct {
	jetstream.Consumer
	info jetstream.ConsumerInfo
}

// emptyStream has nothing to be missed.
type emptyStream struct{ jetstream.Stream }

func (emptyStream) Info(context.Context, ...jetstream.StreamInfoOpt) (*jetstream.StreamInfo, error) {
	return &jetstream.StreamInfo{}, nil
}

const slowness = 3 * time.Second

func (s *slowServer) Info(context.Context) (*jetstream.ConsumerInfo, error) {
	time.Sleep(slowness)
	return &s.info, nil
}

// inspector is a source with two slots that inspects its consumer once.
type inspector struct {
	server *slowServer
	inHand int64
	asked  time.Time
}

func (*inspector) Name() string { return "edge" }

func (k *inspector) Run(ctx context.Context, in *consumer.Session) error {
	l := edgeQueue
	got, err := in.Acquire(ctx, lane.Acquire{Lane: l, LogID: "one", Committed: -1})
	if err != nil {
		return err
	}
	x := &session{
		in: in, conn: &natsgo.Conn{}, closing: ctx,
		bound: &binding{consumer: k.server, info: &k.server.info, durable: &durable{}, stream: emptyStream{}},
		gaps:  newGaps(&jetstream.StreamInfo{}, &k.server.info),
	}
	for range 2 {
		x.slots = append(x.slots, in.Open(consumer.LaneOptions{Lane: l, Epoch: got.Epoch, Next: got.Next, Checkpoint: got.Checkpoint}))
	}
	x.unacked.Store(k.inHand)
	k.asked = time.Now()
	x.inspect()
	// The lag alone would pass: what there was may have gone to another worker.
	x.pending.Store(0)
	x.foreign.Store(0)
	x.report()
	<-ctx.Done()
	for _, slot := range x.slots {
		slot.Close(ctx)
	}
	return nil
}

// A queue is caught up when nothing of it is in anybody's hands, as of when the
// server was asked.
func TestHeartbeat(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		pending uint64
		acks    int
		inHand  int64
		want    bool
	}{
		"nothing is left":                   {want: true},
		"more to deliver":                   {pending: 1},
		"delivered to another worker":       {acks: 5},
		"perhaps to another, perhaps to us": {acks: 5, inHand: 5},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy}
				source := &inspector{inHand: c.inHand, server: &slowServer{info: jetstream.ConsumerInfo{Config: config, NumPending: c.pending, NumAckPending: c.acks}}}
				store := consumertest.NewStore()
				w := newWorker(store, source, prometheus.NewRegistry())
				w.HeartbeatInterval = time.Second
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if err := w.Run(ctx); err != nil {
					t.Error(err)
				}
				row, _ := store.Row(edgeQueue)
				if c.want && !row.Heartbeat.Equal(source.asked) {
					t.Errorf("caught up as of %s, want %s, when the server was asked", row.Heartbeat, source.asked)
				}
				if !c.want && !row.Heartbeat.IsZero() {
					t.Errorf("caught up as of %s", row.Heartbeat)
				}
			})
		})
	}
}

// A run until idle that is shorter than it takes to inspect twice reports an empty
// queue as well.
func TestHeartbeatOfAShortRun(t *testing.T) {
	t.Parallel()
	url, _ := natstest.Start(t)
	source := New(Config{Name: "edge", Servers: []string{url}, Stream: "ORDERS", Durable: "orders"})
	store := consumertest.NewStore()
	w := newWorker(store, source, prometheus.NewRegistry())
	w.UntilIdle = inspectEvery / 4
	if err := w.Run(t.Context()); err != nil {
		t.Error(err)
	}
	if row, _ := store.Row(edgeQueue); row.Heartbeat.IsZero() {
		t.Error("no heartbeat was sent of the empty queue")
	}
}
