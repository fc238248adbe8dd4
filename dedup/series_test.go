package dedup_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// series are how many there are at /metrics.
func (f *fixture) series() (n int) {
	f.t.Helper()
	families, err := f.reg.Gather()
	if err != nil {
		f.t.Fatal(err)
	}
	for _, family := range families {
		n += len(family.Metric)
	}
	return n
}

// What producers choose never becomes a label: after one message of each outcome, and
// one error of each kind, 100,000 random ids, topics and errors add no series.
func TestSeriesAreBounded(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.MaxDeadShare = 1
	random := rand.New(rand.NewPCG(1, 2))
	text := func() string { return fmt.Sprintf("%x", random.Uint64()) }
	lanes := []*ownedLane{f.acquire("kafka", "orders/0"), f.acquire("nats", "orders/0")}
	// some is one message of each outcome: new, twice, with another payload, without an
	// id, and refused by the sink; and n more.
	some := func(l *ownedLane, n int) lane.Batch {
		a := text()
		ids := []string{a, a, a + "=other", "", text() + "=check"}
		for range n {
			ids = append(ids, text()+"="+text())
		}
		b := l.batch(ids...)
		for i := range b.Messages {
			m := &b.Messages[i]
			m.Topic, m.Key = text(), []byte(text())
			m.Headers = append(m.Headers, message.Header{Key: text(), Value: []byte(text())})
		}
		return b
	}
	// fails has the sink refuse a batch, by whatever comes to an author's mind.
	fails := func(err error) {
		t.Helper()
		f.sink.fail = func(*message.Message) error { return err }
		l := lanes[0]
		at := l.at
		if f.Handle(t.Context(), []lane.Batch{l.batch(text())}) != nil {
			l.at = at
		}
		f.sink.fail = nil
	}
	classes := []string{"08", "40", "53", "55", "57", "58", "25", "XX", "42", "22", "23", "28", "P0"}
	state := func(class string) error {
		return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: class + text()[:3], Message: text()}
	}
	for _, l := range lanes {
		f.handle(some(l, 0))
	}
	for _, code := range []string{"08006", "40001", "40P01", "53100", "55P03", "55006", "57014", "57P01", "58030", "25006", "XX000"} {
		fails(&pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code})
	}
	fails(sinks.Permanent(errors.New("bad")))
	fails(fmt.Errorf("lost: %w", &pgconn.ConnectError{}))
	before := f.series()

	const messages, batch = 100_000, 2_500
	for i := range messages / batch {
		f.handle(some(lanes[i%2], batch-5))
	}
	for i := range 300 {
		fails(state(classes[i%len(classes)]))
		fails(fmt.Errorf("%s: %w", text(), state(classes[i%len(classes)])))
	}
	if after := f.series(); after != before {
		t.Errorf("there are %d series, and there were %d", after, before)
	}
	if got := f.metric("dedupd_messages_total"); got < messages {
		t.Errorf("only %v messages are counted", got)
	}
	for _, class := range []string{"no_id", "poison", "conflict"} {
		if n, err := f.Store.DeadLetters(t.Context(), dedup.DeadLetterFilter{Classes: []string{class}, Limit: 1}); err != nil || len(n) == 0 {
			t.Errorf("no dead letter of class %s, %v", class, err)
		}
	}
}
