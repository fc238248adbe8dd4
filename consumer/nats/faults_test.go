package nats_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// What a worker had in hand when it was killed comes again after the ack wait,
// and until then the queue isn't caught up.
func TestRedeliveryAfterAckWait(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	c, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 3 * time.Second, MaxDeliver: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	killed, err := c.Fetch(40, jetstream.FetchMaxWait(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	for range killed.Messages() {
	}

	store := consumertest.NewStore()
	source := newSource(t, s, func(c *nats.Config) { c.AckWait = 3 * time.Second })
	begun := time.Now()
	r := start(t, source, store, func(w *consumer.Worker) { w.UntilIdle = 200 * time.Millisecond })
	wait(t, store, 60)
	if d := time.Since(begun); d > 2*time.Second {
		t.Errorf("the first 60 took %s", d)
	}
	wait(t, store, 100)
	r.stop()
}

// A transaction may take longer than the ack wait, and what waits behind it even
// more so: the server is asked for more time, and delivers nothing twice.
func TestMoreTime(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 300)
	store := consumertest.NewStore()
	release := store.Hold()
	start(t, newSource(t, s, func(c *nats.Config) { c.AckWait = time.Second }), store, func(w *consumer.Worker) { w.MaxMessages = 100 })
	eventually(t, "a hand-over", func() bool { _, _, calls := store.Counts(); return calls > 0 })
	time.Sleep(4 * time.Second)
	release()
	wait(t, store, 300)
	c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
	if err != nil {
		t.Fatal(err)
	}
	if n := c.CachedInfo().Delivered.Consumer; n != 300 {
		t.Errorf("300 messages were delivered %d times while a transaction took four ack waits", n)
	}
}

// A database that went back to an earlier state has lost what the server was told
// of: all of it since the position that is sure comes again, once.
func TestTheDatabaseWentBack(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 1000)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	queue, sure := acknowledged(t, js, store)
	store.Rewind(queue, max(sure, 1401))
	publish(t, js, 1500, 100) // with which it is noticed
	wait(t, store, 1600)
	if handled, _, _ := store.Counts(); handled > 1700+1501-int(sure) {
		t.Errorf("%d messages were handed over, of which those from %d on were to come again", handled, sure)
	}
	if !r.log.has("lacks commits") {
		t.Error("nothing was logged")
	}
}

// A queue to which nothing comes notices it all the same.
func TestTheDatabaseWentBackUnderAQuietQueue(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 1000)
	store := consumertest.NewStore()
	start(t, newSource(t, s), store, func(w *consumer.Worker) { w.HeartbeatInterval = 50 * time.Millisecond })
	queue, sure := acknowledged(t, js, store)
	store.Rewind(queue, max(sure, 1401))
	wait(t, store, 1500)
}

// acknowledged reads a queue of 1500 messages, and acknowledges them. sure is
// below what position the database knows it, too.
func acknowledged(t *testing.T, js jetstream.JetStream, store *consumertest.Store) (queue message.Lane, sure int64) {
	t.Helper()
	wait(t, store, 1000)
	eventually(t, "the first thousand to be acknowledged", func() bool {
		c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
		return err == nil && c.CachedInfo().AckFloor.Stream == 1000
	})
	time.Sleep(2500 * time.Millisecond) // the floor is asked for every two seconds
	publish(t, js, 1000, 500)
	wait(t, store, 1500)
	eventually(t, "all to be acknowledged", func() bool {
		c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
		return err == nil && c.CachedInfo().AckFloor.Stream == 1500
	})
	time.Sleep(2500 * time.Millisecond)
	queue = message.Lane{Source: "edge", Name: "queue"}
	row, _ := store.Row(queue)
	if row.BrokerPosition < 1001 || row.BrokerPosition > 1501 {
		t.Fatalf("the row says that all below %d was acknowledged", row.BrokerPosition)
	}
	return queue, row.BrokerPosition
}

// Several workers notice a failover at the same moment. One that finds the durable
// gone, since another worker rewinds it, must not create it again where it was:
// what is below may be lost.
func TestADurableThatAnotherRewinds(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 1000)
	store := consumertest.NewStore()
	start(t, newSource(t, s), store)
	queue, sure := acknowledged(t, js, store)
	// The other worker: it has deleted the durable, and died.
	store.Rewind(queue, max(sure, 1401))
	row, _ := store.Row(queue)
	after := lane.Assignment{Epoch: row.Epoch, Checkpoint: lane.Checkpoint{Number: row.Checkpoint + 2}}
	if _, err := store.ConfirmRewind(t.Context(), queue, after, sure); err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 1500, 100)
	wait(t, store, 1600)
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
			s := startServer(t)
			js := connect(t, s)
			crossing.Stream = createStream(t, js, jetstream.StreamConfig{})
			publish(t, js, 0, 100)
			if err := nats.Rewind(t.Context(), js, &crossing, nats.Config{Name: "edge", Stream: "ORDERS", Durable: "dedupd"}, 51); err != nil {
				t.Fatal(err)
			}
			c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
			if err != nil {
				t.Fatal(err)
			}
			if info := c.CachedInfo(); crossing.between+crossing.stale > 0 || info.AckFloor.Stream != 50 || info.NumPending != 50 {
				t.Errorf("%+v is left; the durable is at %+v", crossing, info)
			}
		})
	}
}

// What was acknowledged to a WorkQueue is gone: that may be accepted, and the rest goes on.
func TestTheDatabaseWentBackBehindAWorkQueue(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy})
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	store.Rewind(message.Lane{Source: "edge", Name: "queue"}, 51) // of the first 50 all is durable
	publish(t, js, 100, 100)
	wait(t, store, 150)
	if !r.log.has("can't be read again") {
		t.Error("nothing was logged")
	}
}

// A worker that stops gives back what it has not committed, at once.
func TestStopGivesBack(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 1000)
	store := consumertest.NewStore()
	release := store.Hold()
	r := start(t, newSource(t, s), store, func(w *consumer.Worker) { w.Drain, w.MaxMessages = 100*time.Millisecond, 100 })
	eventually(t, "a hand-over", func() bool { _, _, calls := store.Counts(); return calls > 0 })
	r.stop()
	release()
	begun := time.Now()
	start(t, newSource(t, s), store)
	wait(t, store, 1000)
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("the next worker got everything after %s: the ack wait is 10 s", d)
	}
}

// A database that is away for long: no storm of redeliveries, and no loss.
func TestKeepFor(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 500)
	store := consumertest.NewStore()
	store.FailBefore(1_000_000, context.DeadlineExceeded)
	start(t, newSource(t, s, func(c *nats.Config) { c.AckWait = 2 * time.Second }), store)
	time.Sleep(5 * time.Second)
	c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
	if err != nil {
		t.Fatal(err)
	}
	if n := c.CachedInfo().Delivered.Consumer; n > 500*6 {
		t.Errorf("500 messages were delivered %d times in 5 s, with an ack wait of 2 s", n)
	}
	store.Heal()
	wait(t, store, 500)
}

func TestConsumerDeleted(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	store := consumertest.NewStore()
	r := start(t, newSource(t, s, func(c *nats.Config) { c.Start = policy.QueueLatest }), store)
	r.ready()
	publish(t, js, 0, 1000)
	wait(t, store, 1000)
	eventually(t, "the ack floor to be noted", func() bool {
		c, err := stream.Consumer(t.Context(), "dedupd")
		return err == nil && c.CachedInfo().AckFloor.Stream == 1000
	})
	time.Sleep(2500 * time.Millisecond) // it is asked for every two seconds
	if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 1000, 1000)
	wait(t, store, 2000)
	if !r.log.has("consumer is gone") {
		t.Error("nothing was logged")
	}
	if handled, _, _ := store.Counts(); handled > 2100 {
		t.Errorf("%d messages were read for 2000: not from where it was", handled)
	}
}

func TestStreamCreatedAnew(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	store := consumertest.NewStore()
	r := start(t, newSource(t, s, func(c *nats.Config) { c.Start = policy.QueueLatest }), store)
	r.ready()
	publish(t, js, 0, 100)
	wait(t, store, 100)
	before, _ := store.Row(message.Lane{Source: "edge", Name: "queue"})
	if err := js.DeleteStream(t.Context(), "ORDERS"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "unreadiness", func() bool { return r.Ready() != nil })
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 100, 100)
	wait(t, store, 200)
	after, _ := store.Row(message.Lane{Source: "edge", Name: "queue"})
	if before.StreamID == after.StreamID {
		t.Errorf("the stream id is still %s", after.StreamID)
	}
}

func TestServerRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startServer(t, func(o *server.Options) { o.StoreDir = dir })
	p := port(s)
	again := func(o *server.Options) { o.StoreDir, o.Port = dir, p }
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 5000)
	store := consumertest.NewStore()
	store.Delay(5 * time.Millisecond)
	r := start(t, newSource(t, s, func(c *nats.Config) { c.AckWait = 3 * time.Second }), store, func(w *consumer.Worker) { w.MaxMessages = 100 })
	wait(t, store, 1000)
	s.Shutdown()
	s.WaitForShutdown()
	eventually(t, "unreadiness", func() bool { return r.Ready() != nil })
	time.Sleep(time.Second)
	startServer(t, again)
	r.ready()
	wait(t, store, 5000)
	eventually(t, "all to be acknowledged", func() bool {
		c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
		return err == nil && c.CachedInfo().NumAckPending == 0 && c.CachedInfo().NumPending == 0
	})
}

// A server that comes back empty, as one with its store in memory does.
func TestServerLosesEverything(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	p := port(s)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	s.Shutdown()
	s.WaitForShutdown()
	s = startServer(t, func(o *server.Options) { o.Port = p })
	js = connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 100, 50)
	wait(t, store, 150)
	r.ready()
}

// Nobody has to start things in the right order.
func TestEverythingMissingAtStart(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	p := port(s)
	source := newSource(t, s)
	s.Shutdown()
	s.WaitForShutdown()
	store := consumertest.NewStore()
	r := start(t, source, store)
	eventually(t, "a warning", func() bool { return r.log.has("trying again") })
	if r.Ready() == nil {
		t.Error("ready without a server")
	}
	s = startServer(t, func(o *server.Options) { o.Port = p })
	eventually(t, "a warning", func() bool { return r.log.has("stream not found") })
	if r.Ready() == nil {
		t.Error("ready without a stream")
	}
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 10)
	wait(t, store, 10)
	r.ready()
}

func TestThroughput(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("seconds")
	}
	const n = 200_000
	s := startServer(t)
	js := connect(t, s)
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, n)
	store := consumertest.NewStore()
	begun := time.Now()
	r := start(t, newSource(t, s), store)
	wait(t, store, n)
	d := time.Since(begun)
	handled, _, calls := store.Counts()
	t.Logf("%d messages in %s: %.0f/s, %d handled in %d transactions", n, d.Round(time.Millisecond), n/d.Seconds(), handled, calls)
	eventually(t, "all to be acknowledged", func() bool {
		c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
		return err == nil && c.CachedInfo().NumAckPending == 0
	})
	r.stop()
	if handled != n {
		t.Errorf("%d were handled", handled)
	}
}
