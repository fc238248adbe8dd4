package kafka

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/kafkatest"
)

func brokerRetention(t *testing.T, c Config) ([]consumer.TopicRetention, error) {
	t.Helper()
	c.Name, c.Group = "main", "group"
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return s.BrokerRetention(t.Context())
}

func TestBrokerRetention(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		var topics []string
		var want []consumer.TopicRetention
		for _, c := range []struct {
			configs map[string]string
			want    time.Duration
		}{
			{nil, 7 * 24 * time.Hour}, // the broker's default
			{map[string]string{"retention.ms": "90000"}, 90 * time.Second},
			{map[string]string{"retention.ms": "-1"}, 0},
			{map[string]string{"retention.ms": "9223372036854775807"}, 0},
			{map[string]string{"cleanup.policy": "compact", "retention.ms": "90000"}, 0},
			{map[string]string{"cleanup.policy": "compact,delete", "retention.ms": "90000"}, 90 * time.Second},
		} {
			topic := newName("topic")
			if err := b.CreateTopic(t.Context(), topic, 1, c.configs); err != nil {
				t.Fatal(err)
			}
			topics = append(topics, topic)
			want = append(want, consumer.TopicRetention{Name: topic, For: c.want})
		}
		got, err := brokerRetention(t, Config{Brokers: []string{b.Addr()}, Topics: topics})
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%v\n%s", err, diff)
		}
		missing := newName("missing")
		got, err = brokerRetention(t, Config{Brokers: []string{b.Addr()}, Topics: append([]string{missing}, topics...)})
		if diff := cmp.Diff(want, got); diff != "" || !errors.Is(err, kafkago.UnknownTopicOrPartition) || !strings.Contains(err.Error(), missing) {
			t.Errorf("of a missing topic: %v\n%s", err, diff)
		}
	})
}

func TestBrokerRetentionOfNobody(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	got, err := brokerRetention(t, Config{Brokers: []string{l.Addr().String()}, Topics: []string{"orders"}})
	if !errors.Is(err, syscall.ECONNREFUSED) || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestBrokerRetentionOverTLSAndSASL(t *testing.T) {
	t.Parallel()
	server, client := certificates(t)
	cluster := fakeCluster(t, kfake.TLS(server), kfake.EnableSASL(), kfake.Superuser("PLAIN", "dedupd", "swordfish"), kfake.SeedTopics(1, "orders"))
	login := SASL{Mechanism: "plain", Username: "dedupd", CurrentPassword: password("swordfish")}
	c := Config{Brokers: cluster.ListenAddrs(), Topics: []string{"orders"}, TLS: client, SASL: login}
	if got, err := brokerRetention(t, c); err != nil || len(got) != 1 {
		t.Errorf("%v, %v", got, err)
	}
	c.SASL.CurrentPassword = password("wrong")
	if got, err := brokerRetention(t, c); err == nil || len(got) != 0 || strings.Contains(err.Error(), "wrong") {
		t.Errorf("with a wrong password: %v, %v", got, err)
	}
}

// Settings that the brokers of these tests never have.
func TestKeptFor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		settings map[string]string
		want     time.Duration
		fails    bool
	}{
		"deleted at once":     {settings: map[string]string{"cleanup.policy": "delete", "retention.ms": "0"}, want: time.Millisecond},
		"no policy":           {settings: map[string]string{"cleanup.policy": "", "retention.ms": "5"}},
		"a policy with space": {settings: map[string]string{"cleanup.policy": "compact, delete", "retention.ms": "5"}, want: 5 * time.Millisecond},
		"policy unknown":      {settings: map[string]string{"retention.ms": "5"}, want: 5 * time.Millisecond},
		"nothing known":       {fails: true},
	} {
		if got, err := keptFor(c.settings); got != c.want || (err != nil) != c.fails {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
}
