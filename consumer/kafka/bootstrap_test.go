package kafka

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/twmb/franz-go/pkg/kfake"
)

// The configured broker goes away, and the others are still found.
func TestBrokersThatAreLearnt(t *testing.T) {
	t.Parallel()
	fake := fakeCluster(t, kfake.NumBrokers(3), kfake.SeedTopics(1, "orders"))
	if err := fake.MoveTopicPartition("orders", 0, 1); err != nil {
		t.Fatal(err)
	}
	c := &Config{Name: "main", Brokers: fake.ListenAddrs()[:1], Topics: []string{"orders"}, Group: "g"}
	c.setDefaults()
	cluster := newCluster(c, nil)
	t.Cleanup(cluster.close)
	read := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := cluster.lookUpTopics(ctx); err != nil {
			return err
		}
		_, _, err := cluster.fetch(ctx, &wanted{topic: "orders", epoch: -1, maxBytes: 1}, nil)
		return err
	}
	if err := read(); err != nil {
		t.Fatal(err)
	}
	if err := fake.RemoveNode(0); err != nil {
		t.Fatal(err)
	}
	conns := cluster.conns
	conns.mu.Lock()
	for _, open := range conns.open {
		if open.address == c.Brokers[0] {
			_ = open.raw.Close()
		}
	}
	conns.mu.Unlock()
	// Until then kafka-go uses its last layout.
	deadline := time.Now().Add(time.Minute)
	for since := time.Now(); time.Since(since) < 2*cluster.transport.MetadataTTL; time.Sleep(50 * time.Millisecond) {
		if err := read(); err != nil {
			since = time.Now()
			if since.After(deadline) {
				t.Fatalf("without the broker that is configured: %v", err)
			}
		}
	}
}

// Each request reports the layout that it was sent by, which must cost nothing. Not
// parallel, since allocations are the process's.
func TestLearningTakesNoMemory(t *testing.T) {
	conns := newConnections(&Config{Brokers: []string{"a:9092"}})
	defer conns.cut()
	layout := protocol.Cluster{Brokers: map[int32]protocol.Broker{1: {Host: "a", Port: 9092}, 2: {Host: "b", Port: 9093}, 3: {Host: "::1", Port: 9094}}}
	if n := testing.AllocsPerRun(100, func() { conns.learn(layout) }); n != 0 {
		t.Errorf("%v allocations for each request", n)
	}
	conns.learn(protocol.Cluster{}) // tells of nobody
	got := conns.others()
	slices.Sort(got)
	if diff := cmp.Diff([]string{"[::1]:9094", "b:9093"}, got); diff != "" {
		t.Error(diff)
	}
}

// Where no broker answers, the error names each.
func TestNoBrokerAnswers(t *testing.T) {
	t.Parallel()
	conns := newConnections(&Config{Brokers: []string{"127.0.0.1:1", "127.0.0.1:2"}})
	t.Cleanup(conns.cut)
	_, err := conns.dial(t.Context(), bootstrapNetwork, "")
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") || !strings.Contains(err.Error(), "127.0.0.1:2") {
		t.Errorf("got %v, which doesn't name both", err)
	}
}
