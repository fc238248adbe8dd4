package nats_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
)

// alter changes the durable as somebody would by hand.
func alter(t *testing.T, js jetstream.JetStream, stream jetstream.Stream, change func(*jetstream.ConsumerConfig)) {
	t.Helper()
	c := durable(t, js).Config
	change(&c)
	if _, err := stream.UpdateConsumer(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

// No message is applied without its payload, though the server delivers them so from
// one moment to the next.
func TestSetToHeadersOnlyWhileItIsRead(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	publish(t, js, 0, 10)
	wait(t, store, 10)
	allAcknowledged(t, js, 10) // and the durable isn't written any more
	alter(t, js, stream, func(c *jetstream.ConsumerConfig) { c.HeadersOnly = true })
	publish(t, js, 10, 10)
	wait(t, store, 20)
	for _, e := range store.Effects() {
		if string(e.Message.Value) != "value" {
			t.Errorf("%s has the value %q", e.ID, e.Message.Value)
		}
	}
	if !r.log.has("headers only") {
		t.Error("nothing was logged")
	}
}

// What a filter of somebody else's passes over is read once the filter is ours again,
// also when nobody has read meanwhile.
func TestTheFilterIsChangedByHand(t *testing.T) {
	t.Parallel()
	for name, running := range map[string]bool{"while it is read": true, "while nobody reads": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{})
			store := consumertest.NewStore()
			r := start(t, newSource(t, s), store)
			publish(t, js, 0, 14)
			wait(t, store, 14)
			allAcknowledged(t, js, 14) // and the durable isn't written any more
			if !running {
				r.stop()
			}
			alter(t, js, stream, func(c *jetstream.ConsumerConfig) { c.FilterSubject = "orders.1" })
			publish(t, js, 14, 70)
			if !running { // somebody tries what it does
				c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
				if err != nil {
					t.Fatal(err)
				}
				batch, err := c.Fetch(10)
				if err != nil {
					t.Fatal(err)
				}
				for msg := range batch.Messages() {
					if err := msg.Nak(); err != nil {
						t.Fatal(err)
					}
				}
				r = start(t, newSource(t, s), store)
			}
			wait(t, store, 84)
			if !r.log.has("changed the durable consumer's filter") {
				t.Error("nothing was logged")
			}
			if c := durable(t, js).Config; c.FilterSubject != "" || len(c.FilterSubjects) > 0 {
				t.Errorf("%+v", c)
			}
		})
	}
}

// A durable that somebody pauses looks like one that has nothing to deliver: the source
// isn't ready, the log and doctor tell why, and it goes on by itself.
func TestDurableIsPaused(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	store := consumertest.NewStore()
	source := newSource(t, s)
	r := start(t, source, store)
	publish(t, js, 0, 10)
	wait(t, store, 10)
	allAcknowledged(t, js, 10) // and the durable isn't written any more
	if _, err := stream.PauseConsumer(t.Context(), "dedupd", time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 10, 10)
	eventually(t, "unreadiness", func() bool { return r.Ready() != nil })
	if err := r.Ready(); !strings.Contains(err.Error(), "nats consumer resume ORDERS dedupd") || !r.log.has("somebody has paused durable dedupd until") {
		t.Errorf("it says %v", err)
	}
	survey, err := source.Describe(t.Context())
	if err != nil || survey.Paused == nil {
		t.Errorf("the survey says %v, %v", survey.Paused, err)
	}
	if _, err := stream.ResumeConsumer(t.Context(), "dedupd"); err != nil {
		t.Fatal(err)
	}
	wait(t, store, 20)
	eventually(t, "readiness", func() bool { return r.Ready() == nil })
	if survey, err := source.Describe(t.Context()); err != nil || survey.Paused != nil {
		t.Errorf("the survey says %v, %v", survey.Paused, err)
	}
}

// A limit of deliveries has the server pass over what it has delivered so often. What it
// has passed over is read once the limit is off again.
func TestALimitOfDeliveriesIsSetByHand(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	publish(t, js, 0, 14)
	wait(t, store, 14)
	allAcknowledged(t, js, 14) // and the durable isn't written any more
	r.stop()
	alter(t, js, stream, func(c *jetstream.ConsumerConfig) { c.MaxDeliver = 1 })
	publish(t, js, 14, 10)
	c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{10, 0} { // it looks at what is to come again when somebody asks for it
		batch, err := c.Fetch(10, jetstream.FetchMaxWait(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		came := 0
		for msg := range batch.Messages() {
			came++
			if err := msg.Nak(); err != nil {
				t.Fatal(err)
			}
		}
		if came != want {
			t.Fatalf("%d messages came, want %d", came, want)
		}
	}
	publish(t, js, 24, 60)
	r = start(t, newSource(t, s), store)
	wait(t, store, 84)
	if !r.log.has("limit of deliveries") {
		t.Error("nothing was logged")
	}
	if c := durable(t, js).Config; c.MaxDeliver != -1 {
		t.Errorf("%+v", c)
	}
}

// A stream with WorkQueue retention keeps what a durable has passed over, and has no
// position to set it back to: the durable is made anew, and delivers what is left.
func TestADurableOfAWorkQueuePassesOver(t *testing.T) {
	t.Parallel()
	for name, by := range map[string]struct {
		change func(*jetstream.ConsumerConfig)
		logged string
	}{
		"by a limit of deliveries": {func(c *jetstream.ConsumerConfig) { c.MaxDeliver = 1 }, "limit of deliveries"},
		"by a filter":              {func(c *jetstream.ConsumerConfig) { c.FilterSubject = "orders.1" }, "filter"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			js := connect(t, s)
			stream := createStream(t, js, jetstream.StreamConfig{Retention: jetstream.WorkQueuePolicy})
			store := consumertest.NewStore()
			r := start(t, newSource(t, s), store)
			publish(t, js, 0, 14)
			wait(t, store, 14)
			allAcknowledged(t, js, 14) // and the durable isn't written any more
			r.stop()
			alter(t, js, stream, by.change)
			publish(t, js, 14, 14)
			passOver(t, js)
			r = start(t, newSource(t, s), store)
			publish(t, js, 28, 14)
			read(t, js, store, 42)
			if !r.log.has("changed the durable consumer's " + by.logged) {
				t.Error("nothing was logged")
			}
			if c := durable(t, js).Config; c.MaxDeliver != -1 || c.FilterSubject != "" || len(c.FilterSubjects) > 0 {
				t.Errorf("%+v", c)
			}
		})
	}
}

// passOver fetches what the durable delivers, gives it back, and asks until the server
// has looked at all that is to come again.
func passOver(t *testing.T, js jetstream.JetStream) {
	t.Helper()
	c, err := js.Consumer(t.Context(), "ORDERS", "dedupd")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		batch, err := c.Fetch(14, jetstream.FetchMaxWait(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		for msg := range batch.Messages() {
			if err := msg.Nak(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A durable that somebody makes anew at the stream's end is set back also when one of
// its messages was delivered before anybody looked: a pull that was meant for the
// durable before goes to it.
func TestDurableMadeAnewAndPulled(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	r.stop()
	publish(t, js, 100, 100)
	if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
		t.Fatal(err)
	}
	c, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverNewPolicy})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, js, 200, 10)
	if _, err := c.Next(); err != nil {
		t.Fatal(err)
	}
	r = start(t, newSource(t, s), store)
	wait(t, store, 210)
	if !r.log.has("would skip messages") {
		t.Error("nothing was logged")
	}
}
