package app

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// What a message may allocate between its hand-over and its commit, in groups of
// 4,000 with an eighth of copies, into a table of uuid and jsonb. Garbage collection
// per message is the worker's first cost. kafka.BenchmarkFetch measures what fetching
// allocates.
const (
	bytesBudget       = 600
	allocationsBudget = 3.5
)

// hand hands groups of new messages to a processor that is set up like a worker's.
type hand struct {
	processor *dedup.Processor
	taken     lane.Assignment
	lane      message.Lane
	at        int64
}

const handed = 4000 // messages of a group

func newHand(tb testing.TB) *hand {
	tb.Helper()
	if testing.Short() {
		tb.Skip("needs a database")
	}
	cfg, _, err := config.Parse("test.yaml", fmt.Appendf(nil, `
scope: budget
sources: [{kafka: {brokers: ["127.0.0.1:9092"], topics: [orders], group: g}}]
database: {url: %q}
id: {from: "header:id"}
sink: {table: {name: public.rows, columns: {id: id, payload: value}}}
`, pgtest.New(tb).URL), config.Options{Sinks: &sinks.Default})
	if err != nil {
		tb.Fatal(err)
	}
	pool, store, err := OpenDatabase(tb.Context(), cfg, 3, slog.New(slog.DiscardHandler))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	if _, err := pool.Exec(tb.Context(), "CREATE TABLE public.rows (id uuid NOT NULL, payload jsonb NOT NULL)"); err != nil {
		tb.Fatal(err)
	}
	if _, err := store.Schema().Migrate(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	sink, err := cfg.NewSink(&sinks.Default)
	if err != nil {
		tb.Fatal(err)
	}
	h := &hand{lane: message.Lane{Source: "main", Name: "orders/0"}}
	if h.processor, err = startProcessor(tb.Context(), cfg, store, sink, prometheus.NewRegistry()); err != nil {
		tb.Fatal(err)
	}
	if h.taken, err = store.Acquire(tb.Context(), lane.Acquire{Lane: h.lane, Ordered: true, Committed: -1}); err != nil {
		tb.Fatal(err)
	}
	return h
}

// group makes the next group. Its memory isn't counted: it is the source's.
func (h *hand) group() lane.Batch {
	b := lane.Batch{Lane: h.lane, Ordered: true, Epoch: h.taken.Epoch, From: h.at, Next: h.at + handed, BrokerPosition: -1, Lag: 0}
	var id string
	for i := range handed {
		if i%8 != 7 {
			id = fmt.Sprintf("%08x-%04x-4000-8000-%012x", rand.Uint32(), rand.Uint32N(1<<16), rand.Uint64N(1<<48))
		}
		b.Messages = append(b.Messages, message.Message{
			Topic: "orders", Key: []byte(id), Headers: []message.Header{{Key: "id", Value: []byte(id)}}, Time: time.Now(),
			Value:    fmt.Appendf(nil, `{"id":%q,"customer":"c-204117","currency":"EUR","total":129.95,"lines":[{"sku":"A-1002","quantity":2,"price":19.95}]}`, id),
			Position: message.Position{Lane: h.lane, Offset: h.at + int64(i)},
		})
	}
	h.at += handed
	return b
}

// cost is what one more group allocates per message.
func (h *hand) cost(tb testing.TB) (bytes, allocations float64) {
	tb.Helper()
	b := h.group()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := h.processor.Handle(tb.Context(), []lane.Batch{b}); err != nil {
		tb.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	return float64(after.TotalAlloc-before.TotalAlloc) / handed, float64(after.Mallocs-before.Mallocs) / handed
}

// BenchmarkHandle measures a whole transaction, per message.
func BenchmarkHandle(b *testing.B) {
	h := newHand(b)
	var bytes, allocations float64
	took := time.Duration(0)
	for range b.N {
		start := time.Now()
		more, moreOf := h.cost(b)
		took += time.Since(start)
		bytes, allocations = bytes+more, allocations+moreOf
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(bytes/float64(b.N), "B/msg")
	b.ReportMetric(allocations/float64(b.N), "allocs/msg")
	b.ReportMetric(float64(took.Nanoseconds())/float64(b.N)/handed, "ns/msg")
}

func TestAllocationBudget(t *testing.T) {
	h := newHand(t)
	h.cost(t) // connections, statements, plans
	h.cost(t)
	bytes, allocations := h.cost(t)
	for range 4 { // the least of some: other goroutines allocate, too
		b, a := h.cost(t)
		bytes, allocations = min(bytes, b), min(allocations, a)
	}
	t.Logf("%.0f bytes in %.2f allocations a message", bytes, allocations)
	if bytes > bytesBudget || allocations > allocationsBudget {
		t.Errorf("a message allocates %.0f bytes in %.2f pieces; the budget is %d in %g", bytes, allocations, bytesBudget, allocationsBudget)
	}
}
