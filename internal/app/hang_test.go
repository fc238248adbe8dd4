package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/sinks"
)

// hanging is a sink that hangs at one message, whatever its context says.
type hanging struct {
	at   string
	hung chan struct{}
	free chan struct{}
}

func (s *hanging) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	var ids []string
	for i := range msgs {
		if msgs[i].ID == s.at {
			close(s.hung)
			<-s.free
			return ctx.Err()
		}
		ids = append(ids, msgs[i].ID)
	}
	_, err := tx.Exec(ctx, `INSERT INTO public.rows (id) SELECT unnest($1::text[])`, ids)
	return err
}

// produce sends messages to both partitions in turn, with their numbers as keys.
func produce(t *testing.T, brokers []string, messages int) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.DefaultProduceTopic("orders"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for i := range messages {
		record := &kgo.Record{Partition: int32(i % 2), Key: fmt.Append(nil, i)}
		if err := client.ProduceSync(t.Context(), record).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

// runWithSink runs a worker with that sink.
func runWithSink(t *testing.T, broker, url string, sink sinks.Sink, hangTimeout time.Duration) (drain context.CancelFunc, ended chan error) {
	t.Helper()
	registry := &sinks.Registry{}
	registry.Register("hanging", func(decode func(any) error) (sinks.Sink, error) { return sink, decode(new(struct{})) })
	cfg, _, err := config.Parse("test.yaml", fmt.Appendf(nil, `
scope: hang
sources: [{kafka: {brokers: [%q], topics: [orders]}}]
database: {url: %q}
id: {from: key}
sink: {hanging: {}}
http: {listen: "127.0.0.1:0"}
`, broker, url), config.Options{Sinks: registry})
	if err != nil {
		t.Fatal(err)
	}
	a := &App{Config: cfg, Sinks: registry, Logger: slog.New(slog.DiscardHandler), HangTimeout: hangTimeout}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	done := make(chan error, 1)
	go func() {
		_, err := a.Run(ctx)
		done <- err
	}()
	return cancel, done
}

// A worker whose sink hangs gives up its lanes and ends, except for the goroutine that
// hangs. Another worker soon has the lanes.
func TestHangingSinkIsLeftBehind(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a database")
	}
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(2, "orders"), kfake.GroupMinSessionTimeout(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	db := pgtest.New(t)
	pool := db.Pool(t)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE public.rows (id text)"); err != nil {
		t.Fatal(err)
	}
	const messages = 40
	produce(t, cluster.ListenAddrs(), messages)
	run := func(sink sinks.Sink, hangTimeout time.Duration) (context.CancelFunc, chan error) {
		return runWithSink(t, cluster.ListenAddrs()[0], db.URL, sink, hangTimeout)
	}
	sick := &hanging{at: "6", hung: make(chan struct{}), free: make(chan struct{})}
	t.Cleanup(func() { close(sick.free) })
	_, ended := run(sick, 2*time.Second)
	select {
	case <-sick.hung:
	case err := <-ended:
		t.Fatal("before it came to the message: ", err)
	case <-time.After(30 * time.Second):
		t.Fatal("the sink was given nothing")
	}
	began := time.Now()
	// A goroutine hangs here, not a process: its transaction ends only when the server
	// counts it as idle. The other worker waits for that.
	drain, drained := run(&hanging{at: "none"}, 0)
	select {
	case err := <-ended:
		var hang *consumer.HangError
		if !errors.As(err, &hang) {
			t.Fatalf("Run: %v", err)
		}
		t.Logf("ended %s after it hung: %v", time.Since(began).Round(10*time.Millisecond), err)
	case <-time.After(30 * time.Second):
		t.Fatal("the worker whose sink hangs is still there")
	}
	for n := 0; n < messages; time.Sleep(20 * time.Millisecond) {
		if err := pool.QueryRow(t.Context(), "SELECT count(DISTINCT id) FROM public.rows").Scan(&n); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > 45*time.Second {
			t.Fatalf("the other worker has landed %d of %d", n, messages)
		}
	}
	t.Logf("all had landed %s after it hung", time.Since(began).Round(10*time.Millisecond))
	drain()
	if err := <-drained; err != nil {
		t.Error("the other worker: ", err)
	}
}
