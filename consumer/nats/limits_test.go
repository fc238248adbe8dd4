package nats_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

// A server's limits are kept, whoever has made the durable.
func TestServerLimits(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*nats.Config){
		"by default":        func(*nats.Config) {},
		"with a wish":       func(c *nats.Config) { c.MaxAckPending = 20_000 },
		"with a modest one": func(c *nats.Config) { c.MaxAckPending = 200 },
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, func(o *server.Options) {
				o.JetStreamLimits = server.JSLimitOpts{MaxRequestBatch: 40, MaxAckPending: 300}
			})
			js := connect(t, s)
			createStream(t, js, jetstream.StreamConfig{})
			publish(t, js, 0, 500)
			store := consumertest.NewStore()
			r := start(t, newSource(t, s, change), store)
			wait(t, store, 500)
			r.ready()
			c := durable(t, js).Config
			if c.MaxAckPending > 300 || c.MaxAckPending < 150 || c.MaxRequestBatch != 40 {
				t.Errorf("the durable has %d pending acks and pulls of %d", c.MaxAckPending, c.MaxRequestBatch)
			}
			if modest := name == "with a modest one"; r.log.has("fewer pending acks than wanted") == modest {
				t.Errorf("logged that it gets less than it wants: %t", !modest)
			}
			if !r.log.has("the durable limits what a pull may ask for") {
				t.Error("nothing was logged about the pulls")
			}
			r.stop()
			start(t, newSource(t, s, change), store).ready() // it exists now
		})
	}
}

// An account's limit that is lowered doesn't concern durables that are there, until
// they are made anew or changed.
func TestAccountLimitLowered(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	account := s.GlobalAccount()
	limits := server.JetStreamAccountLimits{MaxMemory: -1, MaxStore: -1, MaxStreams: -1, MaxConsumers: -1, MaxAckPending: 60}
	if err := account.UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": limits}); err != nil {
		t.Fatal(err)
	}
	t.Run("made anew", func(t *testing.T) {
		if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
			t.Fatal(err)
		}
		publish(t, js, 100, 200)
		wait(t, store, 300)
		r.ready()
		if n := durable(t, js).Config.MaxAckPending; n > 60 || n < 30 {
			t.Errorf("%d pending acks", n)
		}
		r.stop()
	})
	t.Run("changed", func(t *testing.T) {
		publish(t, js, 300, 200)
		r := start(t, newSource(t, s, func(c *nats.Config) { c.AckWait = 20 * time.Second }), store)
		wait(t, store, 500)
		r.ready()
		if c := durable(t, js).Config; c.AckWait != 20*time.Second || c.MaxAckPending > 60 {
			t.Errorf("the durable is %+v", c)
		}
	})
}

// Limits on pulls that somebody sets on the durable while it is read.
func TestLimitsSetWhileReading(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	wait(t, store, 100)
	sent := 100
	for i, limit := range []func(*jetstream.ConsumerConfig){
		func(c *jetstream.ConsumerConfig) { c.MaxRequestBatch = 3 },
		func(c *jetstream.ConsumerConfig) { c.MaxRequestBatch, c.MaxRequestMaxBytes = 0, 500 },
		func(c *jetstream.ConsumerConfig) { c.MaxRequestExpires = 50 * time.Millisecond },
		func(c *jetstream.ConsumerConfig) { c.MaxRequestBatch, c.MaxAckPending = 2, 5 },
	} {
		allAcknowledged(t, js, uint64(sent)) // till then the durable is written to
		c := durable(t, js).Config
		limit(&c)
		if _, err := stream.UpdateConsumer(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		// The pull that is open is served all the same.
		eventually(t, "the limit to be noticed", func() bool { return r.log.count("the durable limits what a pull may ask for") == i+1 })
		publish(t, js, sent, 50)
		sent += 50
		wait(t, store, sent)
		r.ready()
	}
	large := natsgo.NewMsg("orders.large") // than a pull may be
	large.Header.Set(consumertest.IDHeader, "large")
	large.Data = []byte(strings.Repeat("x", 2000))
	publishMsg(t, js, large)
	published(t, js)
	wait(t, store, sent+1)
	r.ready()
}

// A server that goes on refusing: the source isn't ready and says why, until it is
// served again.
func TestPullsRefused(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	js := connect(t, s)
	stream := createStream(t, js, jetstream.StreamConfig{})
	c, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "dedupd", AckPolicy: jetstream.AckExplicitPolicy, MaxWaiting: 1})
	if err != nil {
		t.Fatal(err)
	}
	other, err := c.Fetch(1, jetstream.FetchMaxWait(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other's pull to wait", func() bool { return durable(t, js).NumWaiting == 1 })
	store := consumertest.NewStore()
	r := start(t, newSource(t, s), store)
	eventually(t, "the reason", func() bool {
		err := r.Ready()
		return err != nil && strings.Contains(err.Error(), "refuses every pull of durable dedupd")
	})
	if n := r.log.count("nothing is read"); n != 1 {
		t.Errorf("the reason was logged %d times", n)
	}
	publish(t, js, 0, 1) // which ends the other's pull
	for msg := range other.Messages() {
		if err := msg.Ack(); err != nil {
			t.Error(err)
		}
	}
	r.ready()
	publish(t, js, 1, 10)
	wait(t, store, 10)
	if !r.log.has("answers pulls again") {
		t.Error("the end of it wasn't logged")
	}
}

// A pull that nobody answers looks like an empty stream to the library.
func TestPullsForbidden(t *testing.T) {
	t.Parallel()
	worker := &server.User{Username: "worker", Password: "secret", Permissions: &server.Permissions{
		Publish: &server.SubjectPermission{Deny: []string{"$JS.API.CONSUMER.MSG.NEXT.>"}},
	}}
	s := startServer(t, func(o *server.Options) {
		o.Users = []*server.User{{Username: "admin", Password: "secret"}, worker}
	})
	js := connect(t, s, natsgo.UserInfo("admin", "secret"))
	createStream(t, js, jetstream.StreamConfig{})
	r := start(t, newSource(t, s, func(c *nats.Config) {
		c.Servers = []string{strings.Replace(s.ClientURL(), "://", "://worker:secret@", 1)}
	}), consumertest.NewStore())
	eventually(t, "the reason", func() bool {
		err := r.Ready()
		return err != nil && strings.Contains(err.Error(), "MSG.NEXT")
	})
	if n := r.log.count("nothing is read"); n != 1 {
		t.Errorf("the reason was logged %d times", n)
	}
}
