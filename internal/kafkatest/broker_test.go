package kafkatest

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

func TestMain(m *testing.M) {
	code := m.Run()
	Stop()
	os.Exit(code)
}

// A broker that is killed comes back on its port with what was acknowledged.
func TestKillAndRestart(t *testing.T) {
	if testing.Short() {
		t.Skip("runs a Kafka broker")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	b := Own(t)
	if err := b.CreateTopic(ctx, "orders", 2, nil); err != nil {
		t.Fatal(err)
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(b.Addr()), kgo.DefaultProduceTopic("orders"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.ProduceSync(ctx, &kgo.Record{Partition: 1, Value: []byte("one")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if err := b.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := b.Restart(); err != nil {
		t.Fatal(err)
	}
	res := client.ProduceSync(ctx, &kgo.Record{Partition: 1, Value: []byte("two")})
	if r, err := res.First(); err != nil || r.Offset != 1 {
		t.Fatalf("the second record stands at %d, %v; want 1", r.Offset, err)
	}
}

func TestMissingJarsTellHowToGetThem(t *testing.T) {
	t.Setenv(LibsEnv, t.TempDir())
	_, err := Start(t.TempDir())
	if err == nil || !strings.Contains(err.Error(), "make kafka") {
		t.Fatalf("got %v, want an error that names make kafka", err)
	}
}

func TestSharedBroker(t *testing.T) {
	if testing.Short() {
		t.Skip("runs a Kafka broker")
	}
	b := Run(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.CreateTopic(ctx, "shared", 3, map[string]string{"cleanup.policy": "compact"}); err != nil {
		t.Fatal(err)
	}
	if offsets, err := b.Committed(ctx, "nobody", "shared"); err != nil || len(offsets) != 0 {
		t.Fatalf("got %v, %v; want none", offsets, err)
	}
	if err := b.SetCommitted(ctx, "somebody", "shared", 0, 7); err != nil {
		t.Fatal(err)
	}
	if offsets, err := b.Committed(ctx, "somebody", "shared"); err != nil || len(offsets) != 1 || offsets[0] != 7 {
		t.Fatalf("got %v, %v; want 7 of partition 0", offsets, err)
	}
	if Run(t) != b {
		t.Fatal("the broker is not shared")
	}
}
