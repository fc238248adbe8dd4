package kafka

import (
	"errors"
	"slices"
	"strings"
	"testing"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/internal/kafkatest"
)

// strict is a broker where logins have only the rights that they are granted, and that
// creates each topic that is asked for in kafka-go's way.
func strict(t *testing.T) *kafkatest.Broker {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a Kafka broker")
	}
	return kafkatest.OwnWith(t, kafkatest.Options{
		Logins:   map[string]string{"worker": "swordfish", "other": "swordfish"},
		Settings: map[string]string{"auto.create.topics.enable": "true"},
	})
}

// pair makes two topics, the rig's and another, with one partition each.
func pair(t *testing.T, b *kafkatest.Broker) (r *rig, other string) {
	t.Helper()
	r, other = newRig(t, b, 1, nil), newName("other")
	r.check(b.CreateTopic(r.ctx, other, 1, nil))
	return r, other
}

func (r *rig) allow(user string, right kmsg.ACLOperation, topics ...string) {
	r.Helper()
	r.check(r.broker.Allow(r.ctx, user, kmsg.ACLResourceTypeGroup, r.group, kmsg.ACLOperationRead))
	for _, topic := range topics {
		r.check(r.broker.Allow(r.ctx, user, kmsg.ACLResourceTypeTopic, topic, right))
	}
}

// as configures a login and these topics.
func (r *rig) as(user string, topics ...string) func(*Config) {
	return func(c *Config) {
		c.Brokers, c.Topics = []string{r.broker.Secured()}, topics
		c.SASL = SASL{Mechanism: "plain", Username: user, CurrentPassword: password("swordfish")}
	}
}

func (r *rig) putTo(topic string, value string) {
	r.Helper()
	r.check(r.client().ProduceSync(r.ctx, &kgo.Record{Topic: topic, Value: []byte(value)}).FirstErr())
}

func (r *rig) untilHandled(values ...string) {
	r.Helper()
	slices.Sort(values)
	r.until("these were handled", func() bool {
		got := r.values()
		slices.Sort(got)
		return slices.Equal(got, values)
	})
}

func TestRights(t *testing.T) {
	t.Parallel()
	b := strict(t)
	t.Run("a forbidden topic", func(t *testing.T) { forbiddenTopic(t, b) })
	t.Run("a topic that may be seen only", func(t *testing.T) { topicThatMayBeSeenOnly(t, b) })
	t.Run("the leader may not", func(t *testing.T) { leaderWithoutRights(t, b) })
	t.Run("describe", func(t *testing.T) { describeWithoutRights(t, b) })
}

// A topic that the login may not see keeps it from no other. It is read once the
// login may see it.
func forbiddenTopic(t *testing.T, b *kafkatest.Broker) {
	r, other := pair(t, b)
	r.putTo(r.topic, "one")
	r.putTo(other, "hidden")
	r.allow("worker", kmsg.ACLOperationRead, r.topic)
	w := r.start(r.as("worker", r.topic, other))
	r.untilHandled("one")
	if err := w.worker.Ready(); !errors.Is(err, kafkago.TopicAuthorizationFailed) || !strings.Contains(err.Error(), other) {
		t.Errorf("/readyz says %v", err)
	}
	r.putTo(r.topic, "two")
	r.untilHandled("one", "two")
	r.untilCommitted(0, 2)
	if n := r.log.count(other); n != 1 {
		t.Errorf("the log tells %d times of the forbidden topic", n)
	}
	r.allow("worker", kmsg.ACLOperationRead, other)
	r.untilHandled("one", "two", "hidden")
	w.untilReady()

	// A right that is taken away while the worker runs stops nothing else, either.
	r.check(b.Revoke(r.ctx, "worker", kmsg.ACLResourceTypeTopic, other, kmsg.ACLOperationRead))
	r.until("/readyz says so", func() bool { return errors.Is(w.worker.Ready(), kafkago.TopicAuthorizationFailed) })
	r.putTo(r.topic, "three")
	r.untilHandled("one", "two", "hidden", "three")
	r.untilCommitted(0, 3)
	r.allow("worker", kmsg.ACLOperationRead, other)
	r.putTo(other, "four")
	r.untilHandled("one", "two", "hidden", "three", "four")
}

// The right to see a topic isn't the right to read it.
func topicThatMayBeSeenOnly(t *testing.T, b *kafkatest.Broker) {
	r, other := pair(t, b)
	r.putTo(r.topic, "one")
	r.putTo(other, "hidden")
	r.allow("worker", kmsg.ACLOperationRead, r.topic)
	r.allow("worker", kmsg.ACLOperationDescribe, other)
	w := r.start(r.as("worker", r.topic, other))
	r.untilHandled("one")
	r.until("the log tells", func() bool { return r.log.count("Topic Authorization Failed") > 0 })
	r.until("/readyz says so", func() bool { return w.worker.Ready() != nil })
	r.allow("worker", kmsg.ACLOperationRead, other)
	r.untilHandled("one", "hidden")
	w.untilReady()
}

// A leader of the group that may not see a topic assigns it to members that may.
func leaderWithoutRights(t *testing.T, b *kafkatest.Broker) {
	r, other := pair(t, b)
	r.putTo(r.topic, "one")
	r.putTo(other, "hidden")
	r.allow("worker", kmsg.ACLOperationRead, r.topic)
	r.allow("other", kmsg.ACLOperationRead, r.topic, other)
	first := r.start(r.as("worker", r.topic, other)) // the first to come leads
	r.untilHandled("one")
	second := r.start(r.as("other", r.topic, other))
	r.untilHandled("one", "hidden")
	second.untilReady()
	if first.worker.Ready() == nil {
		t.Error("the first is ready without a topic")
	}
}

// What doctor reports.
func describeWithoutRights(t *testing.T, b *kafkatest.Broker) {
	r, other := pair(t, b)
	missing := newName("missing")
	r.putTo(r.topic, "one") // which waits for the leaders
	r.putTo(other, "hidden")
	r.allow("worker", kmsg.ACLOperationRead, r.topic)
	r.allow("worker", kmsg.ACLOperationDescribe, other)
	forbidden := newName("forbidden")
	r.check(b.CreateTopic(r.ctx, forbidden, 1, nil))
	r.check(b.Allow(r.ctx, "worker", kmsg.ACLResourceTypeTopic, missing, kmsg.ACLOperationRead))
	c := Config{Name: "main", Group: r.group}
	r.as("worker", r.topic, missing, forbidden, other)(&c)
	s, err := New(c)
	r.check(err)
	described, err := s.Describe(r.ctx)
	if len(described.Lanes) == 0 || described.Lanes[0].Name != laneName(r.topic, 0) {
		t.Errorf("got lanes %v", described.Lanes)
	}
	for _, want := range []string{missing, forbidden, other} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("nothing of %s in: %v", want, err)
		}
	}
}

// Where the broker creates topics automatically, our requests create none.
func TestNothingIsCreated(t *testing.T) {
	t.Parallel()
	b := strict(t)
	r, gone := pair(t, b)
	missing := newName("missing")
	all := func(c *Config) { c.Topics = []string{r.topic, gone, missing} }
	first := r.start(all)
	r.putTo(r.topic, "one")
	r.putTo(gone, "two")
	r.untilHandled("one", "two")
	r.check(b.DeleteTopic(r.ctx, gone))
	r.until("/readyz says so", func() bool { return errors.Is(first.worker.Ready(), errNoTopic) })
	// Everything that asks: joining, dividing, reading, retention, doctor.
	second := r.start(all)
	r.until("the group was divided anew", func() bool { return r.log.count("lanes assigned") >= 3 })
	first.stop()
	r.putTo(r.topic, "three")
	r.untilHandled("one", "two", "three")
	c := Config{Name: "main", Brokers: []string{b.Addr()}, Group: r.group}
	all(&c)
	s, err := New(c)
	r.check(err)
	if _, err := s.Describe(r.ctx); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("of a missing topic: %v", err)
	}
	_, _ = s.BrokerRetention(r.ctx)
	second.stop()
	names, err := b.Topics(r.ctx)
	r.check(err)
	for _, topic := range []string{missing, gone} {
		if slices.Contains(names, topic) {
			t.Errorf("topic %s was created", topic)
		}
	}
}

// The library's own request creates a topic. Otherwise the test above would show nothing.
func TestTheStrictBrokerCreates(t *testing.T) {
	t.Parallel()
	b := strict(t)
	missing := newName("missing")
	conn, err := kafkago.Dial("tcp", b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = conn.ReadPartitions(missing)
	r := &rig{T: t, ctx: t.Context()}
	r.until("it is there", func() bool {
		names, err := b.Topics(t.Context())
		r.check(err)
		return slices.Contains(names, missing)
	})
}
