package nats

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/dedupd/dedupd/consumer"
)

func TestBrokerRetention(t *testing.T) {
	t.Parallel()
	r := rigOn(t, startServer(t))
	source := r.source()
	if got, err := source.BrokerRetention(t.Context()); err == nil || len(got) != 0 || !strings.Contains(err.Error(), "ORDERS") {
		t.Errorf("of a missing stream: %v, %v", got, err)
	}
	r.createStream(jetstream.StreamConfig{})
	for _, age := range []time.Duration{0, 36 * time.Hour} {
		_, err := r.js.UpdateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}, MaxAge: age})
		r.check(err)
		if got, err := source.BrokerRetention(t.Context()); err != nil || !reflect.DeepEqual(got, []consumer.TopicRetention{{Name: "ORDERS", For: age}}) {
			t.Errorf("got %v, %v, want %s", got, err, age)
		}
	}
	// Acknowledged messages are gone, whatever the limit of age says.
	for _, policy := range []jetstream.RetentionPolicy{jetstream.WorkQueuePolicy, jetstream.InterestPolicy} {
		name := "ORDERS" + policy.String()
		_, err := r.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name}, Retention: policy})
		r.check(err)
		if got, err := r.source(func(c *Config) { c.Stream = name }).BrokerRetention(t.Context()); err != nil || len(got) != 0 {
			t.Errorf("of a stream with retention by %s: %v, %v, want nothing", policy, got, err)
		}
	}
	stopServer(r.server)
	begun := time.Now()
	if got, err := source.BrokerRetention(t.Context()); err == nil {
		t.Errorf("without a server: %v", got)
	}
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("without a server it took %s to say so", d)
	}
}

// Servers that take a connection and say nothing are waited for, one after the
// other, but no longer than the caller wants.
func TestBrokerRetentionEndsWithItsContext(t *testing.T) {
	t.Parallel()
	var servers []string
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		servers = append(servers, "nats://"+l.Addr().String())
	}
	source := New(Config{Name: "edge", Servers: servers, Stream: "ORDERS", Durable: "orders"})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	begun := time.Now()
	got, err := source.BrokerRetention(ctx)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, %v", got, err)
	}
	if d := time.Since(begun); d > 2*time.Second {
		t.Errorf("it ended after %s", d)
	}
}

func TestBrokerRetentionLogsIn(t *testing.T) {
	t.Parallel()
	certificate, pool := selfSigned(t)
	user, seed := keyPair(t, nkeys.CreateUser)
	s := startServer(t, func(o *server.Options) {
		o.Nkeys = []*server.NkeyUser{{Nkey: public(t, user)}}
		o.TLS, o.TLSConfig = true, &tls.Config{Certificates: []tls.Certificate{certificate}}
	})
	file, client := write(t, seed), &tls.Config{RootCAs: pool}
	option, err := natsgo.NkeyOptionFromSeed(file)
	if err != nil {
		t.Fatal(err)
	}
	r := rigOn(t, s, option, natsgo.Secure(client))
	r.createStream(jetstream.StreamConfig{})
	for name, c := range map[string]struct {
		change func(*Config)
		in     bool
	}{
		"both":   {func(c *Config) { c.TLS, c.NkeySeedFile = client, file }, true},
		"no key": {func(c *Config) { c.TLS = client }, false},
		"no TLS": {func(c *Config) { c.NkeySeedFile = file }, false},
	} {
		got, err := r.source(c.change).BrokerRetention(t.Context())
		if (len(got) == 1) != c.in || (err == nil) != c.in {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}
