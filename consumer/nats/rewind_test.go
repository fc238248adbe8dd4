package nats

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
)

// rewind has the durable begin at a position, as a session does after a failover.
func (r *rig) rewind(stream jetstream.Stream, position int64) error {
	d := &durable{config: r.config(), js: r.js, log: slog.New(slog.DiscardHandler), ackPendingFloor: 1000}
	return (&binding{stream: stream, durable: d}).rewind(r.Context(), position, "metadata")
}

// A database that went back to an earlier state has lost what the server was told
// of: all of it since the position that is sure comes again, once.
func TestTheDatabaseWentBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 1000)
	w := r.start(nil)
	sure := r.acknowledge()
	r.store.Rewind(edgeQueue, max(sure, 1401))
	r.publish(1500, 100) // with which it is noticed
	r.wait(1600)
	if handled, _, _ := r.store.Counts(); handled > 1700+1501-int(sure) {
		t.Errorf("%d messages were handed over, of which those from %d on were to come again", handled, sure)
	}
	w.mustLog("lacks commits")
}

// A queue to which nothing comes notices it all the same.
func TestTheDatabaseWentBackUnderAQuietQueue(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 1000)
	r.start(nil, func(w *consumer.Worker) { w.HeartbeatInterval = 50 * time.Millisecond })
	sure := r.acknowledge()
	r.store.Rewind(edgeQueue, max(sure, 1401))
	r.wait(1500)
}

// Several workers notice a failover at the same moment. One that finds the durable
// gone, since another worker rewinds it, must not create it again where it was:
// what is below may be lost.
func TestADurableThatAnotherRewinds(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 1000)
	r.start(nil)
	sure := r.acknowledge()
	// The other worker: it has deleted the durable, and died.
	r.store.Rewind(edgeQueue, max(sure, 1401))
	row := r.row()
	after := lane.Assignment{Epoch: row.Epoch, Checkpoint: lane.Checkpoint{Number: row.Checkpoint + 2}}
	_, err := r.store.ConfirmRewind(t.Context(), edgeQueue, after, sure)
	r.check(err)
	r.deleteDurable()
	r.publish(1500, 100)
	r.wait(1600)
}

// What was acknowledged to a WorkQueue is gone: that may be accepted, and the rest goes on.
func TestTheDatabaseWentBackBehindAWorkQueue(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy})
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	r.store.Rewind(edgeQueue, 51) // of the first 50 all is durable
	r.publish(100, 100)
	r.wait(150)
	w.mustLog("can't be read again")
}

// What the stream has deleted by its limits doesn't keep the rest from being read.
func TestARewindBelowTheStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	r.purge(61)
	if err := r.rewind(r.stream, 51); err != nil {
		t.Fatal(err)
	}
	if info := r.durable(); info.AckFloor.Stream != 60 || info.NumPending != 40 {
		t.Errorf("the durable is at %+v", info)
	}
}

// crossed is a stream on which durables that are deleted and made anew come out
// otherwise than was asked for, as often as it says.
type crossed struct {
	jetstream.Stream
	between int // somebody makes one between its deletion and its creation
	stale   int // a new one has the state of the old
}

// atTheEnd is the one that somebody else makes.
var atTheEnd = jetstream.ConsumerConfig{Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 101}

func (c *crossed) DeleteConsumer(ctx context.Context, name string) error {
	err := c.Stream.DeleteConsumer(ctx, name)
	if c.between > 0 {
		c.between--
		_, other := c.Stream.CreateConsumer(ctx, atTheEnd)
		err = errors.Join(err, other)
	}
	return err
}

func (c *crossed) CreateConsumer(ctx context.Context, config jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	if c.between == 0 && c.stale > 0 {
		c.stale--
		config.OptStartSeq = atTheEnd.OptStartSeq
	}
	return c.Stream.CreateConsumer(ctx, config)
}

// Such durables are no rewound ones.
func TestARewindThatIsCrossed(t *testing.T) {
	t.Parallel()
	for name, crossing := range map[string]crossed{"somebody comes between": {between: 3}, "the old one's state": {stale: 2}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.StreamConfig{})
			crossing.Stream = r.stream
			r.publish(0, 100)
			r.check(r.rewind(&crossing, 51))
			if info := r.durable(); crossing.between+crossing.stale > 0 || info.AckFloor.Stream != 50 || info.NumPending != 50 {
				t.Errorf("%+v is left; the durable is at %+v", crossing, info)
			}
		})
	}
}
