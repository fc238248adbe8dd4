package nats

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A server's limits are kept, whoever has made the durable.
func TestServerLimits(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Config){
		"by default":        func(*Config) {},
		"with a wish":       func(c *Config) { c.MaxAckPending = 20_000 },
		"with a modest one": func(c *Config) { c.MaxAckPending = 200 },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, jetstream.StreamConfig{}, func(o *server.Options) {
				o.JetStreamLimits = server.JSLimitOpts{MaxRequestBatch: 40, MaxAckPending: 300}
			})
			r.publish(0, 500)
			w := r.start(change)
			r.wait(500)
			w.untilReady()
			c := r.durable().Config
			if c.MaxAckPending > 300 || c.MaxAckPending < 150 || c.MaxRequestBatch != 40 {
				t.Errorf("the durable has %d pending acks and pulls of %d", c.MaxAckPending, c.MaxRequestBatch)
			}
			if modest := name == "with a modest one"; w.log.has("fewer pending acks than wanted") == modest {
				t.Errorf("logged that it gets less than it wants: %t", !modest)
			}
			w.mustLog("the durable limits what a pull may ask for")
			w.stop()
			r.start(change).untilReady() // it exists now
		})
	}
}

// An account's limit that is lowered doesn't concern durables that are there, until
// they are made anew or changed.
func TestAccountLimitLowered(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	account := r.server.GlobalAccount()
	limits := server.JetStreamAccountLimits{MaxMemory: -1, MaxStore: -1, MaxStreams: -1, MaxConsumers: -1, MaxAckPending: 60}
	r.check(account.UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": limits}))

	// It is made anew.
	r.deleteDurable()
	r.publish(100, 200)
	r.wait(300)
	w.untilReady()
	if n := r.durable().Config.MaxAckPending; n > 60 || n < 30 {
		t.Errorf("%d pending acks", n)
	}
	w.stop()

	// It is changed.
	r.publish(300, 200)
	w = r.start(func(c *Config) { c.AckWait = 20 * time.Second })
	r.wait(500)
	w.untilReady()
	if c := r.durable().Config; c.AckWait != 20*time.Second || c.MaxAckPending > 60 {
		t.Errorf("the durable is %+v", c)
	}
}

// Limits on pulls that somebody sets on the durable while it is read.
func TestLimitsSetWhileReading(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	r.publish(0, 100)
	w := r.start(nil)
	r.wait(100)
	sent := 100
	for i, limit := range []func(*jetstream.ConsumerConfig){
		func(c *jetstream.ConsumerConfig) { c.MaxRequestBatch = 3 },
		func(c *jetstream.ConsumerConfig) { c.MaxRequestBatch, c.MaxRequestMaxBytes = 0, 500 },
		func(c *jetstream.ConsumerConfig) { c.MaxRequestExpires = 50 * time.Millisecond },
		func(c *jetstream.ConsumerConfig) { c.MaxRequestBatch, c.MaxAckPending = 2, 5 },
	} {
		r.allAcknowledged(uint64(sent)) // till then the durable is written to
		r.alter(limit)
		// The pull that is open is served all the same.
		r.until("the limit to be noticed", func() bool { return w.log.count("the durable limits what a pull may ask for") == i+1 })
		r.publish(sent, 50)
		sent += 50
		r.wait(sent)
		w.untilReady()
	}
	r.publishAsync(newMsg("orders.large", "large", strings.Repeat("x", 2000))) // more than a pull may be
	r.published()
	r.wait(sent + 1)
	w.untilReady()
}

// A server that goes on refusing: the source isn't ready and says why, until it is
// served again.
func TestPullsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.StreamConfig{})
	c := r.createDurable(jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, MaxWaiting: 1})
	other, err := c.Fetch(1, jetstream.FetchMaxWait(time.Minute))
	r.check(err)
	r.until("the other's pull to wait", func() bool { return r.durable().NumWaiting == 1 })
	w := r.start(nil)
	r.until("the reason", func() bool {
		err := w.worker.Ready()
		return err != nil && strings.Contains(err.Error(), "refuses every pull of durable dedupd")
	})
	if n := w.log.count("nothing is read"); n != 1 {
		t.Errorf("the reason was logged %d times", n)
	}
	r.publish(0, 1) // which ends the other's pull
	for msg := range other.Messages() {
		if err := msg.Ack(); err != nil {
			t.Error(err)
		}
	}
	w.untilReady()
	r.publish(1, 10)
	r.wait(10)
	w.mustLog("answers pulls again")
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
	r := rigOn(t, s, natsgo.UserInfo("admin", "secret"))
	r.createStream(jetstream.StreamConfig{})
	w := r.start(func(c *Config) {
		c.Servers = []string{strings.Replace(s.ClientURL(), "://", "://worker:secret@", 1)}
	})
	r.until("the reason", func() bool {
		err := w.worker.Ready()
		return err != nil && strings.Contains(err.Error(), "MSG.NEXT")
	})
	if n := w.log.count("nothing is read"); n != 1 {
		t.Errorf("the reason was logged %d times", n)
	}
}

// limitedServer takes what is within its limits, and refuses the rest as a server
// does: one that came by its limits after the durable did.
type limitedServer struct {
	pulls, pending int
	asked          int
}

func (s *limitedServer) apply(_ context.Context, c jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	s.asked++
	refuse := func(e *server.ApiError) error {
		return &jetstream.APIError{Code: e.Code, ErrorCode: jetstream.ErrorCode(e.ErrCode), Description: e.Description}
	}
	switch {
	case c.MaxRequestBatch > s.pulls:
		return nil, refuse(server.NewJSConsumerMaxRequestBatchExceededError(s.pulls))
	case c.MaxAckPending > s.pending:
		return nil, refuse(server.NewJSConsumerMaxPendingAckExcessError(s.pending))
	case c.MaxWaiting < 0:
		return nil, refuse(server.NewJSConsumerMaxWaitingNegativeError())
	}
	return nil, nil //nolint:nilnil // nobody looks at it
}

// A durable that is beyond what the server allows by now is asked for with less, and
// any other refusal is returned.
func TestADurableBeyondTheLimits(t *testing.T) {
	for name, c := range map[string]struct {
		config jetstream.ConsumerConfig
		asked  int
		fails  bool
	}{
		"within":     {config: jetstream.ConsumerConfig{MaxRequestBatch: 20, MaxAckPending: 100}, asked: 1},
		"pulls":      {config: jetstream.ConsumerConfig{MaxRequestBatch: 21, MaxAckPending: 100}, asked: 2},
		"pending":    {config: jetstream.ConsumerConfig{MaxRequestBatch: 20, MaxAckPending: 400}, asked: 3},
		"both":       {config: jetstream.ConsumerConfig{MaxRequestBatch: 40, MaxAckPending: 101}, asked: 3},
		"wrong, too": {config: jetstream.ConsumerConfig{MaxRequestBatch: 40, MaxWaiting: -1}, asked: 2, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &limitedServer{pulls: 20, pending: 100}
			d := &durable{log: slog.New(slog.DiscardHandler)}
			if _, err := d.withinLimits(t.Context(), c.config, s.apply); (err != nil) != c.fails || s.asked != c.asked {
				t.Errorf("asked %d times, want %d: %v", s.asked, c.asked, err)
			}
		})
	}
}
